"""AdaptiveLLM: swap or recompute by predicted cost, and fairness between requests.

Source: Liang et al., "AdaptiveLLM" (efficient LLM inference by adaptive tensor swapping and
re-computation).

Idea. When KV memory runs out, a victim is swapped to host memory or recomputed later. Neither is
always cheaper: a swap costs by length over the host link, a recomputation by length on the GPU and
by what is prefilled with it. Two predictors estimate both costs, and the order of requests is fair:
by waiting time per token.

Which part answers what:

- Algorithm 1 (victims from the lowest priority up; the cheaper of swap and recompute for each):
  `AdaptiveLlm.victim_key` and `AdaptiveLlm.preemption_mode`; Eq. 2 (cost of a swap):
  `AdaptiveLlm._costs_s`.
- Algorithm 2 (the swapped or the waiting requests enter next): `AdaptiveLlm.next_queue`.
- §3.5 (priority: time since first queued / sequence length): `AdaptiveLlm.priority`, and as the key
  of the queue `AdaptiveLlm.queue_key_line`.
- §6 (1), future work (deadlines): `AdaptiveLlmDeadlines`; system `adaptivellm-deadlines`.
- §6 (2), future work (copies beside computation, recomputation in chunks): parameters
  `overlap_swap` and `chunk_tokens`.

In other folders:

- §3.2, §3.3 (learned costs of recomputation and swaps): `predictors/costs/`.
- Eq. 5 (weighted turnaround): `harness/results/metrics.py`.
- Baselines vLLM and vLLM_s: `vllm_v0.py` (recomputes) and `vllm_swap.py` (swaps).

Errata, Tables 3 and 4 and commands: docs/papers/adaptivellm.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...predictors.costs.grid import read_cost_grid
from ..core.counters import OVERTAKES
from ..core.decisions import Limits, Line, NextQueue, PreemptionMode, ReleaseReason, Timeout
from ..core.policy import Key, parameter
from ..core.state import RequestState
from ..core.view import View
from .shared.timeouts import DROPPING
from .vllm_v0 import VllmV0


@dataclass(frozen=True)
class AdaptiveLlm(VllmV0):
    """AdaptiveLLM: swap or recompute by predicted cost, and fairness between requests.

    vLLM 0.2 with cost-aware preemption (Algorithm 1) and fair order (Algorithm 2).

    Priority = time since first queued / sequence length; the request with the lowest is preempted
    (the text; `victim = "highest"` is the printed pseudo-code), the request with the highest enters
    first.

    `groups`: `swapped-first` lets swapped requests back before any prefill. `mean-priority` is
    Algorithm 2 to the letter: the group with the higher mean priority enters, which lets fresh
    short requests starve the swapped ones. `cost_grid`: a file of `slo-bench profile fit --like
    adaptivellm`, whose learned costs Algorithm 1 then compares; without it those of the engine's
    own predictions (the simulator's are exact). `overlap_swap`, `chunk_tokens`: the paper's future
    work (§6 (2)). Copies run in parallel to a step's computation, layer by layer, and only what
    exceeds it counts; recomputed (and new) prompts join decode steps, in chunks that fill them up
    to `chunk_tokens` tokens (0: alone, as published). The costs that Algorithm 1 compares are then
    what either adds to the present step. `fair` off keeps vLLM's order and shows what the memory
    decisions alone are worth.
    """

    queue_order: ClassVar[Literal["static", "linear-in-time"]] = "linear-in-time"

    groups: str = parameter("swapped-first", choices=("swapped-first", "mean-priority"))
    fair: bool = parameter(True, choices=(True, False))
    adaptive: bool = parameter(True, choices=(True, False))  # off: always recompute
    cost_grid: str = parameter("", file=True)
    overlap_swap: bool = parameter(False)
    chunk_tokens: int = parameter(0, 0, 131072)
    victim: str = parameter("lowest", choices=("lowest", "highest"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost_grid:
            read_cost_grid(self.cost_grid)  # refuse it now, not in the middle of a run

    def mechanisms(self) -> dict[str, str]:
        descriptions = {}
        if self.adaptive:
            descriptions["swaps_chosen"] = "preemptions for which a swap was to cost less"
            descriptions["recomputes_chosen"] = "preemptions for which recomputing was to cost less"
            descriptions["recomputes_host_full"] = "preemptions for which host memory had no room"
        if self.groups == "mean-priority":
            descriptions["waiting_first"] = "decisions that let waiting before swapped requests"
        if self.fair:
            descriptions[OVERTAKES] = "requests that began before older ones"
        return descriptions

    def limits(self, view: View) -> Limits:
        limits = dataclasses.replace(super().limits(view), overlap_swap=self.overlap_swap)
        if not self.chunk_tokens:
            return limits
        return dataclasses.replace(
            limits, token_budget=self.chunk_tokens, mixed_batches=True, chunked=True
        )

    def priority(self, r: RequestState, view: View) -> float:
        """§3.5: seconds since it was first queued, per token of its sequence."""
        return (view.now_s - r.arrival_s) / (r.prompt_tokens + view.emitted_tokens(r))

    def queue_key(self, r: RequestState, view: View) -> Key:
        return self.queue_key_line(r, view).at(view.now_s)

    def queue_key_line(self, r: RequestState, view: View) -> Line:
        if not self.fair:
            return Line(0.0, r.arrival_s, 0.0)
        return Line(r.arrival_s, 0.0, -1 / (r.prompt_tokens + view.emitted_tokens(r)))

    def victim_key(self, r: RequestState, view: View) -> Key:
        if not self.fair:
            return -r.arrival_s
        return self.priority(r, view) if self.victim == "lowest" else -self.priority(r, view)

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        blocks = view.held_blocks(r)
        if not self.adaptive:
            return PreemptionMode.RECOMPUTE
        if blocks > view.host_free_blocks:
            view.counters.add("recomputes_host_full", r)
            return PreemptionMode.RECOMPUTE
        swap_s, recompute_s = self._costs_s(r, blocks, view)
        if swap_s < recompute_s:
            view.counters.add("swaps_chosen", r)
            return PreemptionMode.SWAP
        view.counters.add("recomputes_chosen", r)
        return PreemptionMode.RECOMPUTE

    def _costs_s(self, r: RequestState, blocks: int, view: View) -> tuple[float, float]:
        """What swapping `r` out and in again (Eq. 2) and recomputing it add to the run time."""
        if self.cost_grid:
            grid, tokens = read_cost_grid(self.cost_grid), blocks * view.block_size
            ways_s = [grid.swap_out.seconds(tokens), grid.swap_in.seconds(tokens)]
        else:
            ways_s = [view.predict.swap_s(blocks)] * 2
        if self.overlap_swap:
            step_s = self._step_s(view, view.n_decoding, view.decode_kv_tokens)
            ways_s = [max(0.0, way_s - step_s) for way_s in ways_s]
        again = view.kv_tokens(r) + 1
        if not self.chunk_tokens:
            return sum(ways_s), self._step_s(view, 0, 0, again)
        beside = (view.n_decoding, view.decode_kv_tokens)
        return sum(ways_s), self._step_s(view, *beside, again) - self._step_s(view, *beside)

    def _step_s(self, view: View, seqs: int, kv_tokens: int, prefill: int = 0) -> float:
        """Seconds of a step with `seqs` decodes of `kv_tokens` in all and `prefill` new tokens."""
        if self.cost_grid:
            return read_cost_grid(self.cost_grid).step_seconds(prefill, seqs, kv_tokens)
        return view.predict.step_s(seqs, kv_tokens, ((0, prefill),) if prefill else ())

    def next_queue(self, view: View) -> NextQueue:
        if self.groups == "swapped-first":
            return NextQueue.SWAPPED if view.n_swapped else NextQueue.WAITING
        swapped = view.admissible(NextQueue.SWAPPED)
        waiting = view.admissible(NextQueue.WAITING)
        if not swapped and not waiting:
            return NextQueue.NONE
        if self._mean_priority(waiting, view) <= self._mean_priority(swapped, view):
            return NextQueue.SWAPPED
        if swapped:
            view.counters.add("waiting_first")
        return NextQueue.WAITING

    def _mean_priority(self, group: Sequence[RequestState], view: View) -> float:
        if not group:
            return -1.0
        return sum(self.priority(r, view) for r in group) / len(group)


@dataclass(frozen=True)
class AdaptiveLlmDeadlines(AdaptiveLlm):
    """AdaptiveLLM towards deadlines: the nearest goes first, what cannot meet its own is let go.

    AdaptiveLLM's memory decisions (Algorithm 1) with deadlines for priorities.

    A request is due when its SLO says that its last token must be out (`e2e` after its arrival, or
    its `deadline`); the nearer, the higher its priority. One that has not begun is let go as soon
    as it could not be done in time even by itself. Without such an SLO requests go in the order in
    which they came.
    """

    queue_order = "static"
    uses_predicted_lengths: ClassVar[bool] = True

    def mechanisms(self) -> dict[str, str]:
        return super().mechanisms() | DROPPING

    def due_s(self, r: RequestState) -> float:
        """When the last token must be out; infinite without a latency bound or deadline."""
        return min(r.arrival_s + r.slo.e2e_s, r.slo.deadline_s)

    def priority(self, r: RequestState, view: View) -> float:
        """For the mean of a group (Algorithm 2): it grows as the deadline comes near."""
        return 1 / max(1e-3, self.due_s(r) - view.now_s)

    def queue_key(self, r: RequestState, view: View) -> Key:
        return (self.due_s(r), r.arrival_s) if self.fair else r.arrival_s

    def victim_key(self, r: RequestState, view: View) -> Key:
        return (-self.due_s(r), -r.arrival_s) if self.fair else -r.arrival_s

    @property
    def drop_rule(self) -> str:
        return "it can no longer end by its deadline, not even alone"

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        due_s = self.due_s(r)
        if due_s == float("inf"):
            return None
        decodes = view.predict.output_tokens(r) - 1
        least_s = self._step_s(view, 0, 0, r.prompt_tokens)
        if decodes:
            least_s += decodes * self._step_s(view, 1, r.prompt_tokens)
        return Timeout(due_s - least_s, ReleaseReason.DROP)
