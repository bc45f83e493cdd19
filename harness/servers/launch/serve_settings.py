"""Settings of servers to start, their checks, and their start."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....predictors.device_map import DeviceMap
from ....workloads.errors import SloBenchError
from ....workloads.parsing import read_json_object
from ...core.cluster_policy import ClusterPolicy, OnServers
from ...core.policy import AnyPolicy, Policy, overrides
from ...policies.systems import System
from ...policies.systems import system as system_by_name
from ..gateway.running_gateway import GatewayPlan
from ..gateway.split import KvTransferMode
from ..server_kinds import LAUNCHED
from .compatibility import check
from .environments import Environment, environment, server_of
from .gpus import gpus_each, shares, visible_gpus
from .server_kind import KvTransfer, Launch, ServerKind, ServerSettings
from .server_process import READY_S, ServerProcess, free_low_port, free_port, serving

NUM_CPU_BLOCKS = 1024  # for swapping, where nothing is said


@dataclass(frozen=True)
class _Part:
    """One of the servers of a system.

    `name` is appended to file names, `role` is its role in the system, and `policy` is the policy
    inside if it differs from the system's own.
    """

    name: str
    role: str = ""
    policy: AnyPolicy | None = None


# Importing it would ask for a GPU.
_HAS_KVCACHED = "import importlib.util as u, sys; sys.exit(u.find_spec('kvcached') is None)"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Serve(ServerSettings):
    """A server with a policy inside.

    Without `system`, or with the system of the server's own name, the server is unpatched:
    parameters are its own options, and a step log is written by a plugin that decides nothing. A
    system that splits prefill and decode also runs unpatched servers, with KV transfer by
    `transfer`. A system with a controller names the policy inside each of its instances.

    Raises:
        SloBenchError: on `check`: the server is not installed, the system is unknown, or it cannot
            run in this server; the message gives the reason.
    """

    backend: str
    model: str
    system: str | None = None
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    startup_timeout_s: float = READY_S
    transfer: KvTransferMode = KvTransferMode.FILES
    device_map: DeviceMap | None = None  # its stages are those of a pipeline
    own_gpus: tuple[str, ...] = ()  # the only ones it may use, by UUID; none: as many as it needs

    @property
    def label(self) -> str:
        """The system's name in file names."""
        name = Path(self.system).stem if self.system else self.backend
        return re.sub(r"[^\w.-]+", "-", name)

    @property
    def patched(self) -> bool:
        """Whether a policy of this package runs inside."""
        own_scheduler = self.system is None or self.system == server_of(self.backend)
        return not own_scheduler and self._split is None

    @property
    def _on_servers(self) -> OnServers | None:
        return None if self.system is None else self.resolved_system().on_servers

    @property
    def _split(self) -> tuple[int, int] | None:
        """Numbers of prefill and decode servers; None without a split."""
        on_servers = self._on_servers
        if on_servers is None or not on_servers.splits:
            return None
        prefill, decode = on_servers.roles
        return prefill.servers, decode.servers

    @property
    def controller(self) -> ClusterPolicy | None:
        """The cluster policy that replaces the router; None for a system with a router."""
        on_servers = self._on_servers
        if on_servers is None or on_servers.splits:
            return None
        return self.resolved_system().cluster

    @property
    def values_field(self) -> str | None:
        """Request field from which the server reads a policy's inputs; None: it reads none."""
        return environment(self.backend).kind.values_field

    @property
    def gateway(self) -> bool:
        """Whether the system needs more than a router before its servers."""
        return self._on_servers is not None

    @property
    def router(self) -> str:
        """Name of the system's own router."""
        return "round-robin" if self.system is None else self.resolved_system().router

    def check(self, instances: int = 1) -> None:
        """Raise SloBenchError for settings that cannot be started, before any server is started."""
        self.check_system(instances)
        installation = environment(self.backend)
        kind = installation.kind
        multiple = kind.builds[installation.device].block_size_multiple
        if self.block_size is not None and self.block_size % multiple:
            raise SloBenchError(
                f"{kind.name} on {installation.device} needs a block_size that is a multiple of "
                f"{multiple}, but it is {self.block_size}"
            )
        if self._split is not None and self.transfer is KvTransferMode.NIXL:
            _check_nixl(installation)
        if self.kvcached:
            self._check_kvcached(installation)
        if not self.patched:
            self._own_options(kind)
        if self.step_log is not None and kind.plugin is None:
            raise SloBenchError(f"{kind.title} has no plugin that logs its steps")
        if self.device_map is not None:
            self._check_map(self.device_map, instances)
        for setting in ("num_gpu_blocks", "block_size", "max_model_tokens"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise SloBenchError(f"{setting} must be at least 1 but is {value}")

    def check_system(self, instances: int = 1) -> None:
        """Raise SloBenchError where no server can run the system: to install one would not help."""
        self._parts(instances)
        server = server_of(self.backend)
        if server in LAUNCHED and (self.patched or self._split is not None):
            check(self.resolved_system(), server)

    def _check_map(self, placed: DeviceMap, instances: int) -> None:
        """Raise SloBenchError if the servers cannot be started on these stages."""
        if self._on_servers is not None or instances > 1:
            raise SloBenchError("a device map is for one server; leave instances out")
        if len(placed.stages) == 1:
            return
        installation = environment(self.backend)
        kind, inside = installation.kind, self.system if self.patched else None
        if not kind.stages_option:
            raise SloBenchError(f"{kind.title} has no pipeline stages here")
        if reason := kind.stages_refusal(installation.device, inside, len(placed.stages)):
            raise SloBenchError(reason)
        config = Path(self.model) / "config.json"
        model_config = read_json_object(config) if config.is_file() else {}
        layers = model_config.get("num_hidden_layers", sum(placed.layers))
        if layers != sum(placed.layers):
            raise SloBenchError(
                f"the device map has {sum(placed.layers)} layers, but {self.model} has {layers}"
            )

    def start(
        self,
        stack: ExitStack,
        log: Path,
        *,
        instances: int = 1,
        port: int | None = None,
        say: Say = lambda line: None,
    ) -> list[ServerProcess]:
        """Start the servers and wait until all are ready; closing `stack` stops them.

        They start side by side, but one after the other where they may share GPUs: a server
        measures the free memory of its GPU while it starts.

        With several, `-1`, `-2`, … (with roles `-prefill-1`, …) is added to the name of the log.
        `port` applies to a single server.

        Raises:
            SloBenchError: `check` refuses the settings, or a server does not start.
        """
        self.check(instances)
        parts = self._parts(instances)
        transfers = self._transfers(stack, instances)
        step_logs: Sequence[Path | None] = self.step_logs(instances) or [None] * len(parts)
        own_gpus = self._gpus(len(parts))
        installation = environment(self.backend)
        side_by_side = installation.device != "cuda" or all(own_gpus)
        servers: list[ServerProcess] = []
        for part, transfer, step_log, gpus in zip(
            parts, transfers, step_logs, own_gpus, strict=True
        ):
            own_log = log.with_stem(f"{log.stem}{part.name}")
            launch = self._launch(free_port() if port is None else port, step_log)
            policy = part.policy or launch.policy
            launch = replace(launch, transfer=transfer, policy=policy, gpus=gpus)
            where = "" if self.private else f" at port {launch.port}"
            say(f"starting {self.label} on {self.backend}: {launch.model}{where}")
            server = serving(installation.kind, installation, launch, log=own_log)
            servers.append(stack.enter_context(server))
            if not side_by_side:
                servers[-1].wait_until_ready(self.startup_timeout_s, say)
        if side_by_side:
            for started in servers:
                started.wait_until_ready(self.startup_timeout_s, say)
        if self._split is not None and self.transfer is KvTransferMode.NIXL:
            introduce = pkgutil.resolve_name(installation.kind.introduce)
            model = self.served_name or self.model
            prefills, _ = self._split
            for prefill in servers[:prefills]:
                for decode in servers[prefills:]:
                    introduce(prefill, decode, model, self.startup_timeout_s, say)
        return servers

    def _gpus(self, servers: int) -> Sequence[tuple[str, ...]]:
        """GPUs of each server; empty where a single server may use all."""
        if self.own_gpus:
            return [self.own_gpus] * servers
        installation = environment(self.backend)
        if self.device_map is not None and installation.device == "cuda":
            return [self.device_map.cuda_devices] * servers
        visible = [gpu.uuid for gpu in visible_gpus()]
        if servers == 1 or not visible or installation.device != "cuda":
            return [()] * servers
        return shares(servers, gpus_each(installation.kind, self.server_args), visible)

    def step_logs(self, instances: int = 1) -> list[Path]:
        """Step logs of the servers of `start`, in order; empty without a step log."""
        log = self.step_log
        if log is None:
            return []
        return [log.with_stem(f"{log.stem}{part.name}") for part in self._parts(instances)]

    def _parts(self, instances: int) -> list[_Part]:
        """Servers of the system, in order of start."""
        on_servers = self._on_servers
        if on_servers is None:
            names = [f"-{k + 1}" for k in range(instances)] if instances > 1 else [""]
            return [_Part(name) for name in names]
        if instances > 1:
            raise SloBenchError(
                f"{self.system} says itself how many instances there are: leave instances out, "
                f"and set its parameters {on_servers.counts[0]} and {on_servers.counts[1]}"
            )
        return [
            _Part(f"-{role.name}-{k + 1}", role.name, role.policy)
            for role in on_servers.roles
            for k in range(role.servers)
        ]

    def _transfers(self, stack: ExitStack, instances: int) -> Sequence[KvTransfer | None]:
        """KV transfer of each server; None without a split."""
        split = self._split
        if split is None:
            return [None] * len(self._parts(instances))
        prefills = [True] * split[0] + [False] * split[1]
        if self.transfer is KvTransferMode.NIXL:
            return [KvTransfer(is_prefill, port=free_low_port()) for is_prefill in prefills]
        temporary = tempfile.TemporaryDirectory(prefix="slo-bench-kv-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        return [KvTransfer(is_prefill, folder=folder) for is_prefill in prefills]

    def behind(self, servers: Sequence[ServerProcess], router: str | None = None) -> GatewayPlan:
        """Plan of a gateway before the servers of `start`; the default router is the system's."""
        endpoints = [server.endpoint for server in servers]
        health_path = environment(self.backend).kind.health_path
        if self.controller is not None:
            roles = [part.role for part in self._parts(1)]
            return GatewayPlan(
                endpoints, health_path=health_path, controller=self.controller, roles=roles
            )
        prefills = 0 if self._split is None else self._split[0]
        return GatewayPlan(
            endpoints[prefills:],
            router or self.router,
            prefill=endpoints[:prefills],
            transfer=self.transfer,
            health_path=health_path,
        )

    def stand_ins(self, servers: Sequence[ServerProcess]) -> list[Sequence[ServerProcess]]:
        """Servers grouped by role: those of one group can replace each other."""
        prefills = 0 if self._split is None else self._split[0]
        return [group for group in (servers[:prefills], servers[prefills:]) if group]

    def _check_kvcached(self, installation: Environment) -> None:
        """Raise SloBenchError if the servers cannot use kvcached."""
        if installation.device != "cuda":
            raise SloBenchError(
                f"kvcached maps the memory of GPUs: it needs a CUDA build, and "
                f"{installation.name} is for {installation.device}"
            )
        if self.patched or self._split is not None:
            raise SloBenchError(
                "kvcached replaces the KV blocks that our policies count and our connectors move: "
                "use it with the server as it is (the system of its own name, or one for several "
                "models)"
            )
        if self.num_gpu_blocks is not None:
            raise SloBenchError("kvcached has as many KV blocks as memory holds: leave them out")
        done = subprocess.run(
            [installation.python, "-c", _HAS_KVCACHED], capture_output=True, check=False
        )
        if done.returncode:
            raise SloBenchError(
                f"kvcached is not installed in {installation.name}; add it with: "
                f"{installation.python} -m pip install kvcached --no-build-isolation"
            )

    def resolved_system(self) -> System:
        """The system with its parameters."""
        assert self.system is not None
        return system_by_name(self.system).with_parameters(**self.parameters)

    def _own_options(self, kind: ServerKind) -> tuple[str, ...]:
        """Parameters of the unpatched server as command-line options."""
        if self.system is not None:
            self.resolved_system()  # checks names and bounds
        options = kind.own_options
        on_servers = self._on_servers
        system_parameters = (
            (*on_servers.counts, *on_servers.settled) if on_servers is not None else ()
        )
        parameters = {
            name: value for name, value in self.parameters.items() if name not in system_parameters
        }
        strangers = set(parameters) - set(options)
        if strangers:
            raise SloBenchError(f"{min(strangers)} is no option of an unpatched {kind.name}")
        return tuple(word for k, v in parameters.items() for word in (options[k], str(v)))

    def _all_args(self) -> tuple[str, ...]:
        if self.device_map is None:
            return self.server_args
        stages = environment(self.backend).kind.parallel_args(pp=len(self.device_map.stages))
        return (*stages, *self.server_args)

    def _launch(self, port: int, step_log: Path | None) -> Launch:
        layers = () if self.device_map is None else self.device_map.layers
        settings = self.settings() | {"step_log": step_log, "server_args": self._all_args()}
        if not self.patched:
            options = self._own_options(environment(self.backend).kind)
            settings["server_args"] = (*options, *settings["server_args"])
            settings |= {"num_cpu_blocks": None, "embedder": None}
            return Launch(self.model, port, stage_layers=layers, **settings)
        policy = self.resolved_system().policy
        if not (isinstance(policy, Policy) and overrides(policy, "preemption_mode")):
            settings["num_cpu_blocks"] = None
        elif self.num_cpu_blocks is None:
            settings["num_cpu_blocks"] = NUM_CPU_BLOCKS
        return Launch(
            self.model, port, system=self.system, policy=policy, stage_layers=layers, **settings
        )


def _check_nixl(installation: Environment) -> None:
    """Raise SloBenchError if the server's environment has no NIXL."""
    done = subprocess.run(
        [installation.python, "-c", "import nixl"], capture_output=True, check=False
    )
    if done.returncode:
        cpu = " --cpu" if installation.device == "cpu" else ""
        raise SloBenchError(
            f"NIXL is not installed in {installation.name}; add it with: slo-bench backends "
            f"install {installation.backend}{cpu} --version {installation.version} --with nixl "
            "(or let KV go through files)"
        )
