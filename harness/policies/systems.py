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

ENTRY_POINT_GROUP = "slo_bench.systems"
DEFAULT_SYSTEM = "vllm"  # where one is needed and none is named
USER_MODULE = "slo_bench_user_"  # how the names of modules from policy files begin


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, on one line."""
    first = " ".join(docstring.strip().partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".") + "."


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


@dataclass(frozen=True)
class _Stock:
    """An entry of the registry. Policies are named as `module:Class` and imported on first use.
    `sharing`: the policy serves several models.
    """

    policy: str
    source: str  # paper or project
    router: str = "round-robin"
    prefix_cache: bool = False
    cluster: str = ""
    sharing: bool = False

    def system(self, name: str) -> System:
        if self.sharing:
            return _shared(name, _member(self.policy), self.source)
        parts = {"policy": _member(self.policy)}
        parts["cluster"] = _member(self.cluster) if self.cluster else None
        return System(**{**vars(self), **parts, "sharing": None}, name=name)


def _member(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(f".{module}", __package__), name)()


class _Registry(Mapping[str, System]):
    """Maps a name to its system; each is made on first use."""

    def __init__(self) -> None:
        self._made: dict[str, System] = {}

    def __getitem__(self, name: str) -> System:
        if name not in self._made:
            self._made[name] = _STOCK[name].system(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in _STOCK

    def __iter__(self) -> Iterator[str]:
        return iter(_STOCK)

    def __len__(self) -> int:
        return len(_STOCK)


def _vllm(cluster: str, source: str, **options: Any) -> _Stock:
    """A policy across instances that schedule as vLLM does."""
    return _Stock("vllm:Vllm", source, prefix_cache=True, cluster=cluster, **options)


def _layerwise(cluster: str, source: str, **options: Any) -> _Stock:
    """A policy across instances of vLLM that load and store KV layer by layer."""
    policy = "vllm_layerwise:LayerwiseVllm"
    return _Stock(policy, source, prefix_cache=True, cluster=cluster, **options)


def _collocated(policy: str, place: str) -> _Stock:
    """A policy for a language model and an embedder on one GPU, and its place in the paper."""
    return _Stock(f"collocation.{policy}", f"LLM-embedding collocation, {place}")


_STOCK = {
    "vllm": _Stock("vllm:Vllm", "Kwon et al., SOSP 2023; vLLM V1", prefix_cache=True),
    "vllm-v0": _Stock("vllm_v0:VllmV0", "Kwon et al., SOSP 2023; vLLM 0.2"),
    "vllm-swap": _Stock("vllm_swap:VllmSwap", "Kwon et al., SOSP 2023; vLLM 0.2"),
    "sarathi": _Stock("sarathi:Sarathi", "Agrawal et al., OSDI 2024"),
    "vllm-drop": _Stock("shared.timeouts:VllmDrop", "as in Ascendra, §8.6", prefix_cache=True),
    "vllm-v0-drop": _Stock("shared.timeouts:VllmV0Drop", "as in Ascendra, §8.6"),
    "sarathi-drop": _Stock("shared.timeouts:SarathiDrop", "as in Ascendra, §8.6"),
    "edf": _Stock("edf:EarliestDeadlineFirst", "Liu & Layland, J. ACM 1973"),
    "edf-drop": _Stock("edf_drop:EdfDrop", "Gujarati et al., OSDI 2020, §4.4"),
    "orca": _Stock("orca:Orca", "Yu et al., OSDI 2022"),
    "fastertransformer": _Stock("fastertransformer:FasterTransformer", "as in Orca, OSDI 2022"),
    "fastserve": _Stock("fastserve:FastServe", "Wu et al., arXiv 2305.05920"),
    "fifo": _Stock("fifo:Fifo", "UELLM, §3.5"),
    "sjf": _Stock("sjf:ShortestJobFirst", "UELLM, §3.5"),
    "ljf": _Stock("ljf:LongestJobFirst", "UELLM, §3.5"),
    "s3": _Stock("uellm.s3:S3", "Jin et al., NeurIPS 2023; UELLM, Eq. 2-2"),
    "slo-odbs": _Stock("uellm.slo_odbs:SloOdbs", "UELLM, Algorithm 3-1"),
    "slo-odbs-continuous": _Stock(
        "uellm.slo_odbs_continuous:SloOdbsContinuous", "UELLM, Algorithm 3-1"
    ),
    "slo-dbs": _Stock("uellm.slo_odbs:SloDbs", "UELLM, §3.4.3"),
    "odbs": _Stock("uellm.slo_odbs:Odbs", "UELLM, §3.4.3"),
    "sglang": _Stock(
        "sglang:Sglang",
        "Zheng et al., NeurIPS 2024",
        router="prefix-aware",
        prefix_cache=True,
    ),
    "adaptivellm": _Stock("adaptivellm:AdaptiveLlm", "AdaptiveLLM, Algorithms 1 and 2"),
    "adaptivellm-deadlines": _Stock("adaptivellm:AdaptiveLlmDeadlines", "AdaptiveLLM, §6 (1)"),
    "collocation": _collocated("collocation_policy:Collocation", "Algorithms 1 to 3"),
    "collocation-lru": _collocated("ablations:CollocationLru", "§3.4"),
    "collocation-open": _collocated("ablations:CollocationOpen", "§5.4"),
    "static-split": _collocated("collocation_baselines:StaticSplit", "§3.3"),
    "collocated-fcfs": _collocated("collocation_baselines:CollocatedFcfs", "§3.4"),
    "merged-batches": _collocated("collocation_baselines:MergedBatches", "§5.4"),
    "static-split-drop": _collocated("collocation_baselines:StaticSplitDrop", "§3.3"),
    "collocated-fcfs-drop": _collocated("collocation_baselines:CollocatedFcfsDrop", "§3.4"),
    "merged-batches-drop": _collocated("collocation_baselines:MergedBatchesDrop", "§5.4"),
    "ascendra": _Stock(
        "ascendra.low_priority:AscendraLp",
        "Ascendra, §4 to §6",
        cluster="ascendra.ascendra_controller:Ascendra",
    ),
    "ascendra-lp": _Stock("ascendra.low_priority:AscendraLp", "Ascendra, Algorithm 1"),
    "prism-queue": _Stock(
        "prism.prism_local:PrismLocal", "Prism, Algorithm 2; Moore, Management Science 1968"
    ),
    "autoscaled": _vllm("autoscaled:Autoscaled", "Kubernetes' horizontal pod autoscaler"),
    "mixed-gpus": _vllm("mixed_gpus:MixedGpus", "slo-bench"),
    "hedged": _vllm("hedged:Hedged", "Dean and Barroso, CACM 2013"),
    "multi-site": _vllm("multi_site:MultiSite", "slo-bench"),
    "prism": _Stock(
        "prism.prism_controller:PrismGlobal", "Prism, Algorithms 1 and 2", sharing=True
    ),
    "muxserve": _Stock("muxserve:MuxServe", "Duan et al., ICML 2024; Prism, §7.1", sharing=True),
    "qlm": _Stock("qlm:Qlm", "Patke et al., SoCC 2024; Prism, §7.1", sharing=True),
    "static-partition": _Stock("static_partition:StaticPartition", "Prism, §7.1", sharing=True),
    "distserve": _vllm("distserve:DistServe", "Zhong et al., OSDI 2024", router="least-loaded"),
    "splitwise": _vllm("splitwise:Splitwise", "Patel et al., ISCA 2024"),
    "mooncake": _layerwise("mooncake:Mooncake", "Qin et al., FAST 2025"),
    "memserve": _layerwise("memserve:MemServe", "Hu et al., 2024"),
    "llumnix": _vllm("llumnix:Llumnix", "Sun et al., OSDI 2024"),
    "banaserve": _layerwise(
        "banaserve.banaserve_controller:BanaServe",
        "BanaServe, Algorithms 4-1 and 4-2",
        router="load-aware",
    ),
    "banaserve-forecast": _layerwise("banaserve.forecast:BanaServeForecast", "BanaServe, outlook"),
}
SYSTEMS: Mapping[str, System] = _Registry()


def several_models(*, on_servers: bool = False) -> list[str]:
    """Names of the systems that serve several models; `on_servers`: those real servers can have."""
    several = {name: SYSTEMS[name].sharing for name, stock in _STOCK.items() if stock.sharing}
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
