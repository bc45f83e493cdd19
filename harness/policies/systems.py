"""The named systems: a policy, and the router that several of its instances stand behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ...workloads.errors import SloBenchError, UnknownNameError
from ..core.cluster_policy import ClusterPolicy, OnServers
from ..core.multi_model_policy import SharingPolicy
from ..core.policy import AnyPolicy, Bounds, Knobs, Policy, StaticPolicy
from .adaptivellm import AdaptiveLlm, AdaptiveLlmDeadlines
from .ascendra.controller import Ascendra
from .ascendra.low_priority import AscendraLp
from .banaserve.controller import BanaServe
from .collocation.fcfs import CollocatedFcfs
from .collocation.lru import CollocationLru
from .collocation.merged_batches import MergedBatches
from .collocation.open_admission import CollocationOpen
from .collocation.policy import Collocation
from .collocation.static_split import StaticSplit
from .distserve import DistServe
from .edf import EarliestDeadlineFirst
from .edf_drop import EdfDrop
from .fastertransformer import FasterTransformer
from .fifo import Fifo
from .ljf import LongestJobFirst
from .llumnix import Llumnix
from .memserve import MemServe
from .mooncake import Mooncake
from .muxserve import MuxServe
from .orca import Orca
from .prism.controller import Prism
from .prism.queue import Prism as PrismQueue
from .qlm import Qlm
from .sarathi import Sarathi
from .sglang import Sglang
from .shared.dropping import SarathiDrop, VllmDrop, VllmV0Drop
from .sjf import ShortestJobFirst
from .splitwise import Splitwise
from .static_partition import StaticPartition
from .uellm.odbs import Odbs
from .uellm.s3 import S3
from .uellm.slo_dbs import SloDbs
from .uellm.slo_odbs import SloOdbs
from .uellm.slo_odbs_continuous import SloOdbsContinuous
from .vllm import Vllm
from .vllm_layerwise import LayerwiseVllm
from .vllm_swap import VllmSwap
from .vllm_v0 import VllmV0

ENTRY_POINT_GROUP = "slo_bench.systems"


@dataclass(frozen=True)
class System:
    """What `--system NAME` stands for.

    `cluster` decides across instances in place of the router, and which instances there are.
    `sharing` serves several models on shared GPUs; `policy` is then that of their engines.
    """

    name: str
    policy: AnyPolicy
    router: str = "round-robin"
    prefix_cache: bool = False
    source: str = field(default="", compare=False)  # paper or project
    cluster: ClusterPolicy | None = None
    sharing: SharingPolicy | None = None

    @property
    def description(self) -> str:
        """The first line of the docstring of the policy's module, or of its class where the module
        has no docstring or holds several.
        """
        kind = type(self.sharing or self.cluster or self.policy)
        module = sys.modules[kind.__module__]
        mates = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Knobs)]
        alone = [c for c in mates if c.__module__ == kind.__module__] == [kind]
        text = (alone and module.__doc__) or inspect.getdoc(kind) or self.name
        return text.strip().splitlines()[0]

    @property
    def on_servers(self) -> OnServers | None:
        """How it runs on several real servers; None: as any system behind a router, or not."""
        return None if self.cluster is None else self.cluster.on_servers(self.policy)

    def knobs(self) -> dict[str, Any]:
        """Name to present value of everything that can be set."""
        if self.sharing is not None:
            return {name: getattr(self.sharing, name) for name in self.sharing.bounds()}
        found = {name: getattr(self.policy, name) for name in self.policy.bounds()}
        if self.cluster is not None:
            found |= {name: getattr(self.cluster, name) for name in self.cluster.bounds()}
        return found

    def bounds(self) -> dict[str, Bounds]:
        """Name to bounds of everything that can be set."""
        if self.sharing is not None:
            return self.sharing.bounds()
        return self.policy.bounds() | (self.cluster.bounds() if self.cluster is not None else {})

    @property
    def least_instances(self) -> int:
        """With how many instances it runs where nobody says how many."""
        return 1 if self.cluster is None else self.cluster.least_instances

    def with_knobs(self, **values: Any) -> System:
        """The same system with other knobs.

        Raises:
            SloBenchError: an unknown knob, a wrong type or a value out of bounds.
        """
        if self.sharing is not None:
            return _shared(self.name, self.sharing.with_knobs(**values), self.source)
        cluster = self.cluster
        if cluster is not None:
            across = {name: values.pop(name) for name in cluster.bounds() if name in values}
            strangers = [name for name in values if name not in self.policy.bounds()]
            if strangers:
                raise UnknownNameError(f"knob of {self.name}", strangers[0], self.knobs())
            cluster = cluster.with_knobs(**across)
        policy = self.policy.with_knobs(**values)
        return dataclasses.replace(self, policy=policy, cluster=cluster)


def _shared(name: str, sharing: SharingPolicy, source: str) -> System:
    return System(name, sharing.engine, source=source, sharing=sharing)


_STOCK = (
    System("vllm", Vllm(), prefix_cache=True, source="Kwon et al., SOSP 2023; vLLM V1"),
    System("vllm-v0", VllmV0(), source="Kwon et al., SOSP 2023; vLLM 0.2"),
    System("vllm-swap", VllmSwap(), source="Kwon et al., SOSP 2023; vLLM 0.2"),
    System("sarathi", Sarathi(), source="Agrawal et al., OSDI 2024"),
    System("vllm-drop", VllmDrop(), prefix_cache=True, source="as in Ascendra, §8.6"),
    System("vllm-v0-drop", VllmV0Drop(), source="as in Ascendra, §8.6"),
    System("sarathi-drop", SarathiDrop(), source="as in Ascendra, §8.6"),
    System("edf", EarliestDeadlineFirst(), source="Liu & Layland, J. ACM 1973"),
    System("edf-drop", EdfDrop(), source="Gujarati et al., OSDI 2020, §4.4"),
    System("orca", Orca(), source="Yu et al., OSDI 2022"),
    System("fastertransformer", FasterTransformer(), source="as in Orca, OSDI 2022"),
    System("fifo", Fifo(), source="UELLM, §3.5"),
    System("sjf", ShortestJobFirst(), source="UELLM, §3.5"),
    System("ljf", LongestJobFirst(), source="UELLM, §3.5"),
    System("s3", S3(), source="Jin et al., NeurIPS 2023; UELLM, Eq. 2-2"),
    System("slo-odbs", SloOdbs(), source="UELLM, Algorithm 3-1"),
    System("slo-odbs-continuous", SloOdbsContinuous(), source="UELLM, Algorithm 3-1"),
    System("slo-dbs", SloDbs(), source="UELLM, §3.4.3"),
    System("odbs", Odbs(), source="UELLM, §3.4.3"),
    System(
        "sglang",
        Sglang(),
        router="prefix-aware",
        prefix_cache=True,
        source="Zheng et al., NeurIPS 2024",
    ),
    System("adaptivellm", AdaptiveLlm(), source="AdaptiveLLM, Algorithms 1 and 2"),
    System("adaptivellm-deadlines", AdaptiveLlmDeadlines(), source="AdaptiveLLM, §6 (1)"),
    System("collocation", Collocation(), source="LLM-embedding collocation, Algorithms 1 to 3"),
    System("collocation-lru", CollocationLru(), source="LLM-embedding collocation, §3.4"),
    System("collocation-open", CollocationOpen(), source="LLM-embedding collocation, §5.4"),
    System("static-split", StaticSplit(), source="LLM-embedding collocation, §3.3"),
    System("collocated-fcfs", CollocatedFcfs(), source="LLM-embedding collocation, §3.4"),
    System("merged-batches", MergedBatches(), source="LLM-embedding collocation, §5.4"),
    System("ascendra", AscendraLp(), source="Ascendra, §4 to §6", cluster=Ascendra()),
    System("ascendra-lp", AscendraLp(), source="Ascendra, Algorithm 1"),
    System(
        "prism-queue",
        PrismQueue(),
        source="Prism, Algorithm 2; Moore, Management Science 1968",
    ),
    _shared("prism", Prism(), "Prism, Algorithms 1 and 2"),
    _shared("muxserve", MuxServe(), "Duan et al., ICML 2024; Prism, §7.1"),
    _shared("qlm", Qlm(), "Patke et al., SoCC 2024; Prism, §7.1"),
    _shared("static-partition", StaticPartition(), "Prism, §7.1"),
    System(
        "distserve",
        Vllm(),
        router="least-loaded",
        prefix_cache=True,
        source="Zhong et al., OSDI 2024",
        cluster=DistServe(),
    ),
    System(
        "splitwise",
        Vllm(),
        prefix_cache=True,
        source="Patel et al., ISCA 2024",
        cluster=Splitwise(),
    ),
    System(
        "mooncake",
        LayerwiseVllm(),
        prefix_cache=True,
        source="Qin et al., FAST 2025",
        cluster=Mooncake(),
    ),
    System(
        "memserve",
        LayerwiseVllm(),
        prefix_cache=True,
        source="Hu et al., 2024",
        cluster=MemServe(),
    ),
    System(
        "llumnix",
        Vllm(),
        prefix_cache=True,
        source="Sun et al., OSDI 2024",
        cluster=Llumnix(),
    ),
    System(
        "banaserve",
        LayerwiseVllm(),
        prefix_cache=True,
        source="BanaServe, Algorithms 4-1 and 4-2",
        cluster=BanaServe(),
    ),
)
SYSTEMS: dict[str, System] = {s.name: s for s in _STOCK}


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


def _made(policy: type[AnyPolicy], where: str) -> AnyPolicy:
    """The policy with its default knobs."""
    undeclared = [k for k, v in vars(policy).items() if isinstance(v, dataclasses.Field)]
    if undeclared:
        raise SloBenchError(
            f"{undeclared[0]} of {policy.__name__} ({where}) is no knob yet: put "
            "@dataclass(frozen=True) above the class and give the knob a type"
        )
    try:
        return policy()
    except TypeError as error:
        raise SloBenchError(f"{where}: every knob needs a default ({error})") from error


def _from_file(name: str, path: Path, attribute: str) -> System:
    if not path.is_file():
        raise SloBenchError(f"no file {path}; --system takes a name or FILE.py[:CLASS]")
    module = _load(path)
    if attribute:
        if not hasattr(module, attribute):
            raise SloBenchError(f"{path} has no {attribute}")
        return _as_system(attribute, getattr(module, attribute), name)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy | StaticPolicy)
        and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        found = ", ".join(c.__name__ for c in own) or "none"
        raise SloBenchError(
            f"{path} must define one subclass of Policy or StaticPolicy (found: {found}); "
            f"name it as {path}:CLASS"
        )
    return _as_system(path.stem, own[0], name)


def _load(path: Path) -> ModuleType:
    name = f"slo_bench_user_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
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


def _as_system(name: str, found: Any, where: str) -> System:
    if isinstance(found, System):
        return found
    if isinstance(found, type) and issubclass(found, Policy | StaticPolicy):
        found = _made(found, where)
    if isinstance(found, Policy | StaticPolicy):
        return System(name.lower().replace("_", "-"), found, source=where)
    raise SloBenchError(f"{where} is neither a System nor a Policy but {found!r}")
