"""The named systems: a policy, and the router that several of its instances stand behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
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
from ..core.module_moves import ModulePolicy
from ..core.multi_model_policy import SharingPolicy
from ..core.policy import AnyPolicy, Bounds, Parameters, Policy, StaticPolicy

ENTRY_POINT_GROUP = "slo_bench.systems"
DEFAULT_SYSTEM = "vllm"  # where one is needed and none is named


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
        text = (alone and module.__doc__) or inspect.getdoc(kind) or self.name
        first = " ".join(text.strip().partition("\n\n")[0].split())
        return first.partition(". ")[0].rstrip(".") + "."

    @property
    def on_servers(self) -> OnServers | None:
        """How it runs on several real servers; None: as any system behind a router, or not."""
        return None if self.cluster is None else self.cluster.on_servers(self.policy)

    def parameters(self) -> dict[str, Any]:
        """Name to present value of everything that can be set."""
        if self.sharing is not None:
            return {name: getattr(self.sharing, name) for name in self.sharing.bounds()}
        values = {name: getattr(self.policy, name) for name in self.policy.bounds()}
        if self.cluster is not None:
            values |= {name: getattr(self.cluster, name) for name in self.cluster.bounds()}
        return values

    def bounds(self) -> dict[str, Bounds]:
        """Name to bounds of everything that can be set."""
        if self.sharing is not None:
            return self.sharing.bounds()
        return self.policy.bounds() | (self.cluster.bounds() if self.cluster is not None else {})

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
        cluster = _member(self.cluster) if self.cluster else None
        policy = _member(self.policy)
        return System(
            name,
            policy,
            self.router,
            self.prefix_cache,
            self.source,
            cluster,
        )


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
    "collocation": _Stock(
        "collocation.collocation_policy:Collocation", "LLM-embedding collocation, Algorithms 1 to 3"
    ),
    "collocation-lru": _Stock(
        "collocation.ablations:CollocationLru", "LLM-embedding collocation, §3.4"
    ),
    "collocation-open": _Stock(
        "collocation.ablations:CollocationOpen", "LLM-embedding collocation, §5.4"
    ),
    "static-split": _Stock(
        "collocation.collocation_baselines:StaticSplit", "LLM-embedding collocation, §3.3"
    ),
    "collocated-fcfs": _Stock(
        "collocation.collocation_baselines:CollocatedFcfs", "LLM-embedding collocation, §3.4"
    ),
    "merged-batches": _Stock(
        "collocation.collocation_baselines:MergedBatches", "LLM-embedding collocation, §5.4"
    ),
    "static-split-drop": _Stock(
        "collocation.collocation_baselines:StaticSplitDrop", "LLM-embedding collocation, §3.3"
    ),
    "collocated-fcfs-drop": _Stock(
        "collocation.collocation_baselines:CollocatedFcfsDrop", "LLM-embedding collocation, §3.4"
    ),
    "merged-batches-drop": _Stock(
        "collocation.collocation_baselines:MergedBatchesDrop", "LLM-embedding collocation, §5.4"
    ),
    "ascendra": _Stock(
        "ascendra.low_priority:AscendraLp",
        "Ascendra, §4 to §6",
        cluster="ascendra.ascendra_controller:Ascendra",
    ),
    "ascendra-lp": _Stock("ascendra.low_priority:AscendraLp", "Ascendra, Algorithm 1"),
    "prism-queue": _Stock(
        "prism.prism_local:PrismLocal", "Prism, Algorithm 2; Moore, Management Science 1968"
    ),
    "autoscaled": _Stock(
        "vllm:Vllm",
        "Kubernetes' horizontal pod autoscaler",
        prefix_cache=True,
        cluster="autoscaled:Autoscaled",
    ),
    "mixed-gpus": _Stock(
        "vllm:Vllm", "slo-bench", prefix_cache=True, cluster="mixed_gpus:MixedGpus"
    ),
    "multi-site": _Stock(
        "vllm:Vllm", "slo-bench", prefix_cache=True, cluster="multi_site:MultiSite"
    ),
    "prism": _Stock(
        "prism.prism_controller:PrismGlobal", "Prism, Algorithms 1 and 2", sharing=True
    ),
    "muxserve": _Stock("muxserve:MuxServe", "Duan et al., ICML 2024; Prism, §7.1", sharing=True),
    "qlm": _Stock("qlm:Qlm", "Patke et al., SoCC 2024; Prism, §7.1", sharing=True),
    "static-partition": _Stock("static_partition:StaticPartition", "Prism, §7.1", sharing=True),
    "distserve": _Stock(
        "vllm:Vllm",
        "Zhong et al., OSDI 2024",
        router="least-loaded",
        prefix_cache=True,
        cluster="distserve:DistServe",
    ),
    "splitwise": _Stock(
        "vllm:Vllm", "Patel et al., ISCA 2024", prefix_cache=True, cluster="splitwise:Splitwise"
    ),
    "mooncake": _Stock(
        "vllm_layerwise:LayerwiseVllm",
        "Qin et al., FAST 2025",
        prefix_cache=True,
        cluster="mooncake:Mooncake",
    ),
    "memserve": _Stock(
        "vllm_layerwise:LayerwiseVllm",
        "Hu et al., 2024",
        prefix_cache=True,
        cluster="memserve:MemServe",
    ),
    "llumnix": _Stock(
        "vllm:Vllm", "Sun et al., OSDI 2024", prefix_cache=True, cluster="llumnix:Llumnix"
    ),
    "banaserve": _Stock(
        "vllm_layerwise:LayerwiseVllm",
        "BanaServe, Algorithms 4-1 and 4-2",
        router="load-aware",
        prefix_cache=True,
        cluster="banaserve.banaserve_controller:BanaServe",
    ),
    "banaserve-forecast": _Stock(
        "vllm_layerwise:LayerwiseVllm",
        "BanaServe, outlook",
        prefix_cache=True,
        cluster="banaserve.forecast:BanaServeForecast",
    ),
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
    installed = {e.name: e for e in entry_points(group=ENTRY_POINT_GROUP)}
    if name in installed:
        return _as_system(name, _load_installed(installed[name]), installed[name].value)
    raise UnknownNameError("system", name, [*SYSTEMS, *installed])


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
    name = f"slo_bench_user_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    trust.check(str(path.absolute()), f"{path} is a policy file that runs with your rights")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SloBenchError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SloBenchError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _load_installed(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise SloBenchError(
            f"system {entry.name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _as_system(name: str, definition: Any, where: str) -> System:
    if isinstance(definition, System):
        return definition
    if isinstance(definition, type) and issubclass(definition, Policy | StaticPolicy):
        definition = _instantiated(definition, where)
    if isinstance(definition, Policy | StaticPolicy):
        return System(name.lower().replace("_", "-"), definition, source=where)
    raise SloBenchError(f"{where} is neither a System nor a Policy but {definition!r}")
