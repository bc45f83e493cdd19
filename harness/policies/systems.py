"""The named systems: a policy, and the router that several of its instances stand behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ...workloads import trust
from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.file_cache import depends_on
from ..core.cluster_policy import ClusterPolicy, OnServers
from ..core.counters import COUNT
from ..core.module_moves import ModulePolicy
from ..core.multi_model_policy import SharingPolicy
from ..core.policy import AnyPolicy, Bounds, Parameters, Policy, StaticPolicy
from .policy_faults import add_module, hold_to_interface, load_fault_text, watched
from .stock import ENTRY_POINT_GROUP, STOCK, StockSystem, first_sentence

# Most tokens and sequences of a step: fields of a placement, and the parameters that limit them.
STEP_LIMITS = {
    "batched_tokens": ("max_num_batched_tokens", "chunked_prefill_tokens", "chunk_tokens"),
    "sampled_sequences": ("max_num_seqs", "max_running_requests"),
}
DEFAULT_SYSTEM = "vllm"  # where one is needed and none is named
USER_MODULE = "slo_bench_user_"  # how the names of modules from policy files begin


@dataclass(frozen=True)
class System:
    """What `--system NAME` stands for.

    `cluster` decides across instances in place of the router, and which instances there are.
    `sharing` serves several models on shared GPUs; `policy` is then that of their engines.
    `residuals_engine` is the engine of `predictors.bands` whose prediction errors give its bands;
    by default that of the server of its name, else vLLM's.
    """

    name: str
    policy: AnyPolicy
    router: str = "round-robin"
    prefix_cache: bool = False
    source: str = field(default="", compare=False)  # paper or project
    cluster: ClusterPolicy | None = None
    sharing: SharingPolicy | None = None
    residuals_engine: str = ""

    @property
    def description(self) -> str:
        """First sentence of the docstring of the policy's module; of its class if the module has no
        docstring or holds several policies.
        """
        kind = type(self.sharing or self.cluster or self.policy)
        module = sys.modules[kind.__module__]
        mates = [
            c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Parameters)
        ]
        alone = [c for c in mates if c.__module__ == kind.__module__] == [kind]
        return first_sentence((alone and module.__doc__) or inspect.getdoc(kind) or self.name)

    @property
    def on_servers(self) -> OnServers | None:
        """How it runs on several real servers; None: as any system behind a router, or not."""
        return None if self.cluster is None else self.cluster.on_servers(self.policy)

    @property
    def _deciding(self) -> Sequence[Parameters]:
        """What has parameters; of two with one of the same name the last counts."""
        if self.sharing is not None:
            return (self.sharing,)
        return (self.policy,) if self.cluster is None else (self.policy, self.cluster)

    def parameters(self) -> dict[str, Any]:
        """Name to present value of everything that can be set."""
        return {name: getattr(part, name) for part in self._deciding for name in part.bounds()}

    def bounds(self) -> dict[str, Bounds]:
        """Name to bounds of everything that can be set."""
        return {name: limit for part in self._deciding for name, limit in part.bounds().items()}

    def counters(self) -> dict[str, str]:
        """By column of cells.csv (`count_NAME`), what each mechanism counts as parameters are."""
        parts = (self.policy, self.cluster, self.sharing)
        return {
            COUNT + name: text
            for part in parts
            if part is not None
            for name, text in part.mechanisms().items()
        }

    def known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `values` that are parameters of the system."""
        names = self.parameters()
        return {name: value for name, value in values.items() if name in names}

    @property
    def step_limits(self) -> dict[str, int]:
        """Its most tokens and sequences of a step, as fields of a placement; a 0 limits nothing."""
        values = self.parameters()
        return {
            limit: values[name]
            for limit, names in STEP_LIMITS.items()
            for name in names
            if values.get(name)
        }

    @property
    def drop_rule(self) -> str:
        """Requests that it drops or rejects although they could be served; empty: none."""
        across = self.sharing or self.cluster
        return (across.drop_rule if across is not None else "") or self.policy.drop_rule

    @property
    def least_instances(self) -> int:
        """Smallest number of instances that the system accepts."""
        return 1 if self.cluster is None else self.cluster.least_instances

    def with_parameters(self, **values: Any) -> System:
        """The same system with other parameters.

        Raises:
            SloBenchError: an unknown parameter, a wrong type or a value out of bounds.
        """
        if self.sharing is not None:
            return _shared(self.name, self.sharing.with_parameters(**values), self.source)
        cluster = self.cluster
        if cluster is not None:
            across = {name: values.pop(name) for name in cluster.bounds() if name in values}
            strangers = [name for name in values if name not in self.policy.bounds()]
            if strangers:
                raise UnknownNameError(f"parameter of {self.name}", strangers[0], self.parameters())
            cluster = cluster.with_parameters(**across)
        policy = self.policy.with_parameters(**values)
        return dataclasses.replace(self, policy=policy, cluster=cluster)


def _shared(name: str, sharing: SharingPolicy, source: str) -> System:
    return System(name, sharing.engine, source=source, sharing=sharing)


def _stock_system(name: str, stock: StockSystem) -> System:
    if stock.sharing:
        return _shared(name, _member(stock.policy), stock.source)
    parts = {"policy": _member(stock.policy)}
    parts["cluster"] = _member(stock.cluster) if stock.cluster else None
    return System(**{**vars(stock), **parts, "sharing": None}, name=name)


def _member(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(f".{module}", __package__), name)()


class _Registry(Mapping[str, System]):
    """Maps a name to its system; each is made on first use."""

    def __init__(self) -> None:
        self._made: dict[str, System] = {}

    def __getitem__(self, name: str) -> System:
        if name not in self._made:
            self._made[name] = _stock_system(name, STOCK[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in STOCK

    def __iter__(self) -> Iterator[str]:
        return iter(STOCK)

    def __len__(self) -> int:
        return len(STOCK)


SYSTEMS: Mapping[str, System] = _Registry()


def several_models(*, on_servers: bool = False) -> list[str]:
    """Names of the systems that serve several models; `on_servers`: those real servers can have."""
    several = {name: SYSTEMS[name].sharing for name, stock in STOCK.items() if stock.sharing}
    return [
        name
        for name, sharing in several.items()
        if sharing and (sharing.on_servers or not on_servers)
    ]


def module_policy(parameters: Mapping[str, float]) -> ModulePolicy:
    """The policy that moves modules between the processes of a real engine.

    Raises:
        SloBenchError: it has no such parameter, or not that value.
    """
    from .banaserve.banaserve_controller import moving_rule

    return moving_rule(parameters)


def system(name: str) -> System:
    """A system by name: stock, installed by an entry point, or `FILE.py[:CLASS]`.

    Raises:
        UnknownNameError: nothing of that name.
        SloBenchError: the file or the entry point holds no policy.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    path, _, attribute = name.partition(":")
    if path.endswith(".py"):
        return _from_file(name, Path(path), attribute)
    installed = _installed()
    if name in installed:
        value = installed[name].value
        definition = _as_system(name, _load_installed(installed[name]), value)
        if definition.name != name.lower().replace("_", "-"):
            raise SloBenchError(f"{value} is the system {definition.name}, not {name}")
        return definition
    raise UnknownNameError("system", name, [*SYSTEMS, *installed])


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def installed_systems() -> list[System]:
    """Systems that other packages add, but for those that cannot be loaded."""
    systems = []
    for name in _installed():
        if name not in SYSTEMS:
            with suppress(SloBenchError):
                systems.append(system(name))
    return systems


def _instantiated(policy: type[AnyPolicy], where: str) -> AnyPolicy:
    """The policy with its default parameters."""
    undeclared = [k for k, v in vars(policy).items() if isinstance(v, dataclasses.Field)]
    if undeclared:
        raise SloBenchError(
            f"{undeclared[0]} of {policy.__name__} ({where}) is no parameter yet: put "
            "@dataclass(frozen=True) above the class and give the parameter a type"
        )
    try:
        return policy()
    except TypeError as error:
        raise SloBenchError(f"{where}: every parameter needs a default ({error})") from error


def _from_file(name: str, path: Path, attribute: str) -> System:
    if not path.is_file():
        raise SloBenchError(f"no file {path}; --system takes a name or FILE.py[:CLASS]")
    depends_on(path)
    module = _load(path)
    if attribute:
        if not hasattr(module, attribute):
            raise SloBenchError(f"{path} has no {attribute}")
        return _as_system(attribute, getattr(module, attribute), name)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy | StaticPolicy)
        and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(c.__name__ for c in classes) or "none"
        raise SloBenchError(
            f"{path} must define one subclass of Policy or StaticPolicy (found: {names}); "
            f"name it as {path}:CLASS"
        )
    return _as_system(path.stem, classes[0], name)


def _load(path: Path) -> ModuleType:
    name = f"{USER_MODULE}{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    trust.check(str(path.absolute()), f"{path} is a policy file that runs with your rights")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SloBenchError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    add_module(name)
    try:
        with watched():
            spec.loader.exec_module(module)
        hold_to_interface(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SloBenchError | KeyboardInterrupt):
            raise
        raise SloBenchError(f"{path} cannot be loaded: {load_fault_text(error)}") from error
    return module


def _load_installed(entry: EntryPoint) -> Any:
    add_module(entry.module)
    try:
        with watched():
            definition = entry.load()
    except (Exception, SystemExit) as error:
        raise SloBenchError(
            f"system {entry.name} ({entry.value}) cannot be loaded: {load_fault_text(error)}"
        ) from error
    hold_to_interface(sys.modules[entry.module])
    return definition


def _as_system(name: str, definition: Any, where: str) -> System:
    if isinstance(definition, System):
        return definition
    if isinstance(definition, type) and issubclass(definition, Policy | StaticPolicy):
        definition = _instantiated(definition, where)
    if isinstance(definition, Policy | StaticPolicy):
        return System(name.lower().replace("_", "-"), definition, source=where)
    raise SloBenchError(f"{where} is neither a System nor a Policy but {definition!r}")
