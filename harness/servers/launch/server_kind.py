"""What generic code asks about a server, as data; `server_kinds` has the servers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ....workloads.errors import SloBenchError
from ...core.policy import AnyPolicy
from ...load_generator.server_metrics import MetricNames
from ..plugin.contract import EmbedderBeside
from .server_args import check_no_secrets
from .server_flags import Flag, ServerCommand

if TYPE_CHECKING:
    from ....predictors.speculation import Speculation

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
    private: bool = False  # other users of the machine cannot reach it

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


def _not_started(programs: Path, device: str, launch: Launch) -> Sequence[str]:
    raise AssertionError("a server that runs in this process has no command line")


def _on_one_gpu(tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1) -> Sequence[str]:
    if tp * pp * ep * dp > 1:
        raise SloBenchError("this server has one GPU: leave tp, pp, ep and dp out")
    return ()


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """All that generic code asks about a server. What it lacks keeps its default.

    Installation and start:
        name: for commands and files, and of the system that the unpatched server is.
        title: its name in texts.
        builds: by device; none: the server runs in this process, and is not started.
        distributions: names of its package; the first that is installed counts.
        argv: command line for the folder of executables, the device and the launch.
        own_environ: variables of this server alone, for device and launch.
        health_path: answers with status 200 when the server is ready, without load on it.
        command: starts it with the model `$MODEL`, in a shell script.
        programs: words with which its command line begins; the model or options follow.
        images: names of its container images; the first is written.
        flags: options besides those of the fields below, and other spellings.
        settle: makes settings of those of `flags` that belong together.

    Options:
        limits: of an iteration, by vLLM's names for them: the parameter of its system, the option.
        memory_option: share of GPU memory.
        weight_options: words for number formats that a 16-bit checkpoint can be served in.
        kv_options: words for number formats of the KV cache.
        no_prefix_cache_args: words with which no prefixes are kept.
        parallel_args: words for `tp`, `pp`, `ep` and `dp`, of which `tp` counts the GPUs of a
            data-parallel rank; raises SloBenchError if it cannot be spread so.
        speculative_args: words for speculative decoding; None: it has none here.
        kv_offload_args: words for GiB of host memory, and the number of GPUs that share them.
        lora_args: words for a number of slots for adapters, and their rank.
        gpu_options: options whose values, multiplied, are its number of GPUs.
        stages_option: number of pipeline stages; empty: it has none here.
        stage_layers_variable: environment variable with the layers of each.
        stages_refusal: reason why it has none on a device, for the name of the system inside (None:
            unpatched) and the number of stages; empty if it has.

    Policies:
        policy_refusal: reason why a policy cannot run inside; empty if it can.
        policy_limitation: what of a policy that can run does not happen; empty if nothing.
        executes_controllers: the server carries out what a controller over several instances
            decides, where the controller allows; else the controller stands before its servers.
        values_field: request field with a policy's inputs.
        plugin: entry point by which the server loads the plugin.
        hooks: module with the functions of the server that the plugin uses (`TARGETS`, `moved`,
            `server_version`).
        introduce: module:function that lets servers meet which transfer KV by NIXL; empty: prefill
            and decode are not split.
        loads_folders: a model is a folder, or a name on a hub.
        embedder_beside: a policy inside can decide on an embedder beside the server.
        several_models: servers of it come and go behind one gateway, for systems of several models.
        sleeping_devices: on which it can give its memory back, and take it again.
        sleep_path, wake_path: where the POST requests for that go.
        socket_option: it listens at the Unix socket that this option names, in place of a port.
        config_option: it reads options from the file of YAML that this option names, `api-key`
            among them, which all requests but those for its health must then have.
        preempting_systems: those with which a profile times swaps and recomputations.

    What it tells:
        metrics: names of its metrics; None: none are read.
        placeholder_blocks: KV blocks that it counts, and that hold nothing.
        version_field: a further field for its version in the `meta.json` of a cell.
        residuals_engine: engine of `predictors.bands` whose prediction errors give the bands of
            its system; empty: the default engine.
    """

    name: str
    title: str
    builds: Mapping[str, Build] = field(default_factory=dict)
    distributions: tuple[str, ...] = ()
    argv: Callable[[Path, str, Launch], Sequence[str]] = _not_started
    own_environ: Callable[[str, Launch], Mapping[str, str]] = lambda device, launch: {}
    health_path: str = "/health"
    metrics_path: str = "/metrics"
    command: str = ""
    programs: tuple[tuple[str, ...], ...] = ()
    images: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    settle: Callable[[ServerCommand], ServerCommand] = lambda command: command

    limits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    memory_option: str = ""
    weight_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kv_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    no_prefix_cache_args: Sequence[str] = ()
    parallel_args: Callable[..., Sequence[str]] = _on_one_gpu
    speculative_args: Callable[[Speculation], Sequence[str]] | None = None
    kv_offload_args: Callable[[float, int], Sequence[str]] | None = None
    lora_args: Callable[[int, int], Sequence[str]] | None = None
    gpu_options: tuple[str, ...] = ()
    stages_option: str = ""
    stage_layers_variable: str = ""
    stages_refusal: Callable[[str, str | None, int], str] = lambda device, system, stages: ""

    policy_refusal: Callable[[AnyPolicy], str] = lambda policy: (
        "no policy runs inside it; the system of the server's own name is the server as it is"
    )
    policy_limitation: Callable[[AnyPolicy], str] = lambda policy: ""
    executes_controllers: bool = False
    values_field: str | None = None
    plugin: EntryPoint | None = None
    hooks: ModuleType | None = None
    introduce: str = ""
    loads_folders: bool = False
    embedder_beside: bool = False
    several_models: bool = False
    sleeping_devices: tuple[str, ...] = ()
    sleep_path: str = ""
    wake_path: str = ""
    socket_option: str = ""
    config_option: str = ""
    preempting_systems: tuple[str, ...] = ()

    metrics: MetricNames | None = None
    placeholder_blocks: int = 0
    version_field: str = ""
    residuals_engine: str = ""

    @property
    def own_options(self) -> Mapping[str, str]:
        """Parameters of the system of its name that are options of the unpatched server."""
        return dict(self.limits.values())

    def stage_layers(self, layers: Sequence[int]) -> dict[str, str]:
        """Environment of a server whose pipeline stages have so many layers each; empty: equal
        shares.
        """
        if len(layers) < 2:
            return {}
        return {self.stage_layers_variable: ",".join(map(str, layers))}

    def environ(self, device: str, launch: Launch) -> dict[str, str]:
        """Variables that are added to the present environment; variables of the user take
        precedence, but for PYTHONPATH, which is prepended.
        """
        return {
            "HF_HUB_OFFLINE": "1" if Path(launch.model).exists() else "0",
            **self.stage_layers(launch.stage_layers),
            **(KVCACHED if launch.kvcached else {}),
            **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
            **self.own_environ(device, launch),
        }
