"""What a system decides that serves several models on shared GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...predictors.activation import Loader, NaiveStart
from ...predictors.placement import OVERHEAD_BYTES, Placement
from ...predictors.step_time import StepTime
from ..engine.loop.loop import INF
from ..engine.simulator.shared_gpu import Backlog, Tenant
from ..policies.vllm import Vllm
from .pages import PAGE_BYTES, pages_of
from .policy import Knobs, Policy, knob
from .state import RequestState

if TYPE_CHECKING:
    from ..engine.cluster.multi_model import Fleet

LEAST_KV_BYTES = 1 << 30  # beside each model that a static system places on a GPU


@dataclass(frozen=True)
class Hosted:
    """A model that is served: its number in the workload, its shape on `placement.tp` GPUs, its
    step times, and what is known of its requests beforehand.

    `slo_s` is the mean of its finite TTFT SLOs, or infinite.
    """

    index: int
    name: str
    placement: Placement
    step_time: StepTime
    rate_rps: float
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    slo_s: float = INF

    @property
    def tp(self) -> int:
        """GPUs that it stands on."""
        return self.placement.tp

    @property
    def weight_pages(self) -> int:
        """Pages of weights, and of what its engine works in, on each GPU."""
        place = self.placement
        return pages_of(place.weight_bytes_per_gpu + place.reserve_bytes_per_gpu - OVERHEAD_BYTES)

    @property
    def weighed_slo_s(self) -> float:
        """The SLO that placements weigh by; the same for all models without one."""
        return self.slo_s if self.slo_s < INF else 1.0

    def prefill_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Prism's e = p / c: c is the speed of prefill by chunks of that size."""
        chunk_s = self.step_time.step_s(0, 0, ((0, chunk_tokens),))
        return prompt_tokens * chunk_s / chunk_tokens

    @property
    def work_s(self) -> float:
        """Seconds of its GPUs that a request takes: prefill, and its part of a batch of eight."""
        step_s = self.step_time.step_s
        kv_tokens = int(self.prompt_tokens + self.output_tokens / 2)
        prefill_s = step_s(0, 0, ((0, max(1, int(self.prompt_tokens))),))
        return prefill_s + self.output_tokens * step_s(8, 8 * kv_tokens, ()) / 8

    @property
    def kv_demand(self) -> float:
        """Bytes of KV on one GPU that its requests need at a time (Little's law), roughly."""
        tokens = self.prompt_tokens + self.output_tokens / 2
        place = self.placement
        held_s = self.work_s * 2
        return self.rate_rps * held_s * tokens * place.kv_bytes_per_token / place.tp


@dataclass(frozen=True)
class SharingPolicy(Knobs):
    """Decides for a `Fleet`: which model stands where, and where requests wait.

    `engine` is what serves each model: vLLM's loop, with these two limits.
    """

    max_num_batched_tokens: int = knob(2048, 16, 131072, log=True)
    max_num_seqs: int = knob(256, 1, 8192, log=True)

    @property
    def engine(self) -> Policy:
        """The policy of every model's engine."""
        return Vllm(
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs
        )

    @property
    def starts(self) -> Loader | NaiveStart:
        """How long a model takes to come."""
        return NaiveStart()

    @property
    def review_s(self) -> float:
        """Seconds between two calls of `review`."""
        return 5.0

    def new_state(self) -> Any:
        """What it keeps in one run, empty (`Fleet.state`)."""
        return None

    def begin(self, fleet: Fleet) -> None:
        """Before the first request: who stands where at the start, already loaded."""
        raise NotImplementedError

    def backlog(self, fleet: Fleet) -> Backlog | None:
        """Where requests wait before they get to an engine; None: they do not."""
        return None

    def arrived(self, r: RequestState, model: int, fleet: Fleet) -> None:
        """Send `r` on, hold it, or reject it."""
        raise NotImplementedError

    def moved(self, old: Tenant, new: Tenant, fleet: Fleet) -> None:
        """A model has been loaded elsewhere and gets its requests there from now on."""

    def review(self, fleet: Fleet) -> None:
        """At regular times."""


def by_load(models: Sequence[Hosted], fleet: Fleet) -> dict[int, tuple[int, ...]]:
    """Models to GPUs once and for all, so that GPUs are about equally busy.

    By falling rate × work, each where there is the least of it so far and its weights fit; parts
    on GPUs of one node. What a static system does that knows the mean rates (MuxServe's placement
    by popularity and demand, without its search of parallelism).
    """
    busy = [0.0] * fleet.gpus
    free = [pool.free for pool in fleet.pools]
    least_kv = LEAST_KV_BYTES // PAGE_BYTES
    found: dict[int, tuple[int, ...]] = {}
    for model in sorted(models, key=lambda m: (-m.rate_rps * m.work_s, m.index)):
        best: tuple[float, tuple[int, ...]] | None = None
        for begin in range(0, fleet.gpus, fleet.node_gpus):
            node = range(begin, min(begin + fleet.node_gpus, fleet.gpus))
            fitting = [g for g in node if free[g] >= model.weight_pages + least_kv]
            chosen = tuple(sorted(fitting, key=lambda g: (busy[g], g))[: model.tp])
            if len(chosen) == model.tp:
                worst = max(busy[g] for g in chosen)
                if best is None or worst < best[0]:
                    best = worst, chosen
        if best is None:
            continue
        found[model.index] = best[1]
        for g in best[1]:
            busy[g] += model.rate_rps * model.work_s
            free[g] -= model.weight_pages
    return found
