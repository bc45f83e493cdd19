"""How one server is installed and started, as data; `environments.RECIPES` has the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.policy import AnyPolicy
from ..plugin.contract import EmbedderBeside
from .server_args import check_no_secrets, stage_layers

# Variables that switch kvcached on, if it is installed in the server's environment: KV pages are
# mapped on demand, and servers on one GPU share its memory.
KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class InstallStep:
    """A call of the installer. `index` is a package index besides the configured one."""

    packages: tuple[str, ...]
    dependencies: bool = True
    index: str | None = None


def from_index(distribution: str) -> Callable[[str], Sequence[InstallStep]]:
    """Steps that install a version of one distribution as it comes."""
    return lambda version: (InstallStep((f"{distribution}=={version}",)),)


@dataclass(frozen=True)
class Build:
    """One version of a server for one kind of device.

    The tests run on `version`, and on those in `also_tested` where plugins are to fit them too.
    `steps` are made for a version; `without` are packages that come as dependencies, have no
    build that fits, and are not needed. `finish` gets the site-packages folder and the version
    and adds what the packages lack. `probe` is Python that proves the environment works and
    prints the server's version as its last line. KV blocks must hold a multiple of
    `block_size_multiple` tokens.
    """

    version: str
    steps: Callable[[str], Sequence[InstallStep]]
    probe: str
    newest_python: tuple[int, int]
    oldest_python: tuple[int, int] = (3, 11)
    without: tuple[str, ...] = ()
    finish: Callable[[Path, str], None] | None = None
    block_size_multiple: int = 1
    also_tested: tuple[str, ...] = ()


@dataclass(frozen=True)
class KvTransfer:
    """KV transfer between servers: through files in `folder`, or by NIXL at `port`. `prefills`: the
    server sends KV; otherwise it receives KV.
    """

    prefills: bool
    folder: Path | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings that all servers of a system share."""

    served_name: str | None = None  # the model's name for clients; by default its path
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    max_model_tokens: int | None = None
    num_cpu_blocks: int | None = None  # KV blocks of host memory for swapping
    server_args: tuple[str, ...] = ()
    step_log: Path | None = None
    cores: tuple[int, ...] = ()  # the only ones they may use; none: all
    kvcached: bool = False
    sleeps: bool = False  # it can be told to give its memory back, and to take it again
    embedder: EmbedderBeside | None = None  # the policy inside decides on its passes

    def settings(self) -> dict[str, Any]:
        """The settings that all servers share, by name."""
        return {setting.name: getattr(self, setting.name) for setting in fields(ServerSettings)}


@dataclass(frozen=True)
class Launch(ServerSettings):
    """One start of a server: model, address, policy and settings."""

    model: str
    port: int
    host: str = "127.0.0.1"
    system: str | None = None  # name of the policy's system; None: the server as it is, unpatched
    policy: AnyPolicy | None = None  # runs inside the server
    handshake: Path | None = None  # where hooks that are in place say so
    transfer: KvTransfer | None = None
    gpus: tuple[str, ...] = ()  # the only ones it may use, by UUID; none: all
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; none: equal shares

    def __post_init__(self) -> None:
        check_no_secrets(self.server_args)


@dataclass(frozen=True)
class Recipe:
    """Builds of a server by device, and its command line and environment.

    `argv` receives the environment's folder of executables. `own_environ` returns variables of this
    server alone.
    """

    backend: str
    builds: Mapping[str, Build]
    argv: Callable[[Path, str, Launch], Sequence[str]]  # bin folder, device, launch
    own_environ: Callable[[str, Launch], Mapping[str, str]]  # device, launch
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def environ(self, device: str, launch: Launch) -> dict[str, str]:
        """Variables that are added to the present environment; variables of the user take
        precedence, but for PYTHONPATH, which is prepended.
        """
        return {
            "HF_HUB_OFFLINE": "1" if Path(launch.model).exists() else "0",
            **stage_layers(self.backend, launch.stage_layers),
            **(KVCACHED if launch.kvcached else {}),
            **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
            **self.own_environ(device, launch),
        }
