"""The stock systems: where their policies are, known without importing any of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pkgutil import get_data
from typing import Any

ENTRY_POINT_GROUP = "slo_bench.systems"  # of packages that add systems


@dataclass(frozen=True)
class StockSystem:
    """An entry of the registry. Policies are named as `module:Class` and imported on first use.
    `sharing`: the policy serves several models.
    """

    policy: str
    source: str  # paper or project
    router: str = "round-robin"
    prefix_cache: bool = False
    cluster: str = ""
    sharing: bool = False

    @property
    def deciding(self) -> str:
        """The policy that names the system: across instances, if it has such a one."""
        return self.cluster or self.policy

    @property
    def description(self) -> str:
        """`System.description`, read from the source of the policy's module.

        Raises:
            OSError: the package has no sources, but bytecode alone.
        """
        module, _, name = self.deciding.partition(":")
        path = f"{module.replace('.', '/')}.py"
        tree = ast.parse(get_data(__package__, path) or "")  # also within a zip file
        mates = {s.deciding for s in STOCK.values() if s.deciding.partition(":")[0] == module}
        texts = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.ClassDef)}
        text = ast.get_docstring(tree) if len(mates) == 1 else texts[name]
        return first_sentence(text or "")


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, in one line."""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".") + "."


def _vllm(cluster: str, source: str, **options: Any) -> StockSystem:
    """A policy across instances that schedule as vLLM does."""
    return StockSystem("vllm:Vllm", source, prefix_cache=True, cluster=cluster, **options)


def _layerwise(cluster: str, source: str, **options: Any) -> StockSystem:
    """A policy across instances of vLLM that load and store KV layer by layer."""
    policy = "vllm_layerwise:LayerwiseVllm"
    return StockSystem(policy, source, prefix_cache=True, cluster=cluster, **options)


def _collocated(policy: str, place: str) -> StockSystem:
    """A policy for a language model and an embedder on one GPU, and its place in the paper."""
    return StockSystem(f"collocation.{policy}", f"LLM-embedding collocation, {place}")


STOCK = {
    "vllm": StockSystem("vllm:Vllm", "Kwon et al., SOSP 2023; vLLM V1", prefix_cache=True),
    "vllm-v0": StockSystem("vllm_v0:VllmV0", "Kwon et al., SOSP 2023; vLLM 0.2"),
    "vllm-swap": StockSystem("vllm_swap:VllmSwap", "Kwon et al., SOSP 2023; vLLM 0.2"),
    "sarathi": StockSystem("sarathi:Sarathi", "Agrawal et al., OSDI 2024"),
    "vllm-drop": StockSystem("shared.timeouts:VllmDrop", "as in Ascendra, §8.6", prefix_cache=True),
    "vllm-v0-drop": StockSystem("shared.timeouts:VllmV0Drop", "as in Ascendra, §8.6"),
    "sarathi-drop": StockSystem("shared.timeouts:SarathiDrop", "as in Ascendra, §8.6"),
    "edf": StockSystem("edf:EarliestDeadlineFirst", "Liu & Layland, J. ACM 1973"),
    "edf-drop": StockSystem("edf_drop:EdfDrop", "Gujarati et al., OSDI 2020, §4.4"),
    "orca": StockSystem("orca:Orca", "Yu et al., OSDI 2022"),
    "fastertransformer": StockSystem(
        "fastertransformer:FasterTransformer", "as in Orca, OSDI 2022"
    ),
    "fastserve": StockSystem("fastserve:FastServe", "Wu et al., arXiv 2305.05920"),
    "fifo": StockSystem("fifo:Fifo", "UELLM, §3.5"),
    "sjf": StockSystem("sjf:ShortestJobFirst", "UELLM, §3.5"),
    "ljf": StockSystem("ljf:LongestJobFirst", "UELLM, §3.5"),
    "s3": StockSystem("uellm.s3:S3", "Jin et al., NeurIPS 2023; UELLM, Eq. 2-2"),
    "slo-odbs": StockSystem("uellm.slo_odbs:SloOdbs", "UELLM, Algorithm 3-1"),
    "slo-odbs-continuous": StockSystem(
        "uellm.slo_odbs_continuous:SloOdbsContinuous", "UELLM, Algorithm 3-1"
    ),
    "slo-dbs": StockSystem("uellm.slo_odbs:SloDbs", "UELLM, §3.4.3"),
    "odbs": StockSystem("uellm.slo_odbs:Odbs", "UELLM, §3.4.3"),
    "sglang": StockSystem(
        "sglang:Sglang",
        "Zheng et al., NeurIPS 2024",
        router="prefix-aware",
        prefix_cache=True,
    ),
    "adaptivellm": StockSystem("adaptivellm:AdaptiveLlm", "AdaptiveLLM, Algorithms 1 and 2"),
    "adaptivellm-deadlines": StockSystem("adaptivellm:AdaptiveLlmDeadlines", "AdaptiveLLM, §6 (1)"),
    "collocation": _collocated("collocation_policy:Collocation", "Algorithms 1 to 3"),
    "collocation-lru": _collocated("ablations:CollocationLru", "§3.4"),
    "collocation-open": _collocated("ablations:CollocationOpen", "§5.4"),
    "static-split": _collocated("collocation_baselines:StaticSplit", "§3.3"),
    "collocated-fcfs": _collocated("collocation_baselines:CollocatedFcfs", "§3.4"),
    "merged-batches": _collocated("collocation_baselines:MergedBatches", "§5.4"),
    "static-split-drop": _collocated("collocation_baselines:StaticSplitDrop", "§3.3"),
    "collocated-fcfs-drop": _collocated("collocation_baselines:CollocatedFcfsDrop", "§3.4"),
    "merged-batches-drop": _collocated("collocation_baselines:MergedBatchesDrop", "§5.4"),
    "ascendra": StockSystem(
        "ascendra.low_priority:AscendraLp",
        "Ascendra, §4 to §6",
        cluster="ascendra.ascendra_controller:Ascendra",
    ),
    "ascendra-lp": StockSystem("ascendra.low_priority:AscendraLp", "Ascendra, Algorithm 1"),
    "prism-queue": StockSystem(
        "prism.prism_local:PrismLocal", "Prism, Algorithm 2; Moore, Management Science 1968"
    ),
    "autoscaled": _vllm("autoscaled:Autoscaled", "Kubernetes' horizontal pod autoscaler"),
    "mixed-gpus": _vllm("mixed_gpus:MixedGpus", "slo-bench"),
    "hedged": _vllm("hedged:Hedged", "Dean and Barroso, CACM 2013"),
    "multi-site": _vllm("multi_site:MultiSite", "slo-bench"),
    "prism": StockSystem(
        "prism.prism_controller:PrismGlobal", "Prism, Algorithms 1 and 2", sharing=True
    ),
    "muxserve": StockSystem(
        "muxserve:MuxServe", "Duan et al., ICML 2024; Prism, §7.1", sharing=True
    ),
    "qlm": StockSystem("qlm:Qlm", "Patke et al., SoCC 2024; Prism, §7.1", sharing=True),
    "static-partition": StockSystem(
        "static_partition:StaticPartition", "Prism, §7.1", sharing=True
    ),
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
