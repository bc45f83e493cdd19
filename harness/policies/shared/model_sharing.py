"""What the systems for several models share: vLLM's loop for each model, and a static placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.kv.pages import PAGE_BYTES
from ...core.multi_model_policy import MultiModelCluster, ServedModel, SharingPolicy
from ...core.policy import Policy
from ..vllm import Vllm

# For each model that a static system places on a GPU; on small GPUs a sixteenth of it.
LEAST_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class VllmSharing(SharingPolicy):
    """Models share GPUs; the engine of each is vLLM's."""

    @property
    def engine(self) -> Policy:
        return Vllm(
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs
        )


def by_load(
    models: Sequence[ServedModel], cluster: MultiModelCluster
) -> dict[int, tuple[int, ...]]:
    """Models to GPUs once and for all, so that GPUs are about equally busy.

    By falling rate × work, each where there is the least of it so far and its weights fit; parts
    on GPUs of one node. What a static system does that knows the mean rates (MuxServe's placement
    by popularity and demand, without its search of parallelism). Where a model then fits nowhere,
    the largest models first: likewise, then where they leave the least memory; of the three what
    leaves the fewest out.
    """
    by_work = sorted(models, key=lambda m: (-m.rate_rps * m.work_s, m.index))
    by_memory = sorted(models, key=lambda m: (-m.weight_pages * m.tp, -m.rate_rps * m.work_s))
    attempts = ((by_work, False), (by_memory, False), (by_memory, True))
    gpus_by_model: dict[int, tuple[int, ...]] = {}
    for in_order, tightest in attempts:
        placed = _placed(in_order, cluster, tightest=tightest)
        if len(placed) > len(gpus_by_model):
            gpus_by_model = placed
        if len(gpus_by_model) == len(models):
            break
    return gpus_by_model


def _placed(
    models: Sequence[ServedModel], cluster: MultiModelCluster, *, tightest: bool
) -> dict[int, tuple[int, ...]]:
    """Each model in turn on the least busy GPUs with room, or on those with the least room."""
    busy = [0.0] * cluster.gpus
    free = [pool.free for pool in cluster.pools]
    least_kv = min(LEAST_KV_BYTES // PAGE_BYTES, cluster.pools[0].total // 16)
    gpus_by_model: dict[int, tuple[int, ...]] = {}
    for model in models:
        best: tuple[float, tuple[int, ...]] | None = None
        for begin in range(0, cluster.gpus, cluster.node_gpus):
            node = range(begin, min(begin + cluster.node_gpus, cluster.gpus))
            fitting = [g for g in node if free[g] >= model.weight_pages + least_kv]
            cost: Sequence[float] = free if tightest else busy
            chosen = tuple(sorted(fitting, key=lambda g: (cost[g], g))[: model.tp])
            if len(chosen) == model.tp:
                worst = max(cost[g] for g in chosen)
                if best is None or worst < best[0]:
                    best = worst, chosen
        if best is None:
            continue
        gpus_by_model[model.index] = best[1]
        for g in best[1]:
            busy[g] += model.rate_rps * model.work_s
            free[g] -= model.weight_pages
    return gpus_by_model
