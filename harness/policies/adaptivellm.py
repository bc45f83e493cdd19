"""AdaptiveLLM: swap or recompute by predicted cost, and fairness between requests.

Source: AdaptiveLLM (see docs/papers.md), Algorithm 1 (which memory optimisation a victim gets),
Algorithm 2 (which group enters), §3.5 (priority).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...predictors.costs.grid import read_cost_grid
from ..core.decisions import Line, PreemptBy, Refill
from ..core.policy import Key, knob
from ..core.state import RequestState
from ..core.view import View
from .vllm_v0 import VllmV0


@dataclass(frozen=True)
class AdaptiveLlm(VllmV0):
    """vLLM 0.2 with cost-aware preemption (Algorithm 1) and fair order (Algorithm 2).

    Priority = time since first queued / sequence length; the request with the lowest is preempted
    (the text; the printed pseudo-code pops the highest), the one with the highest enters first.

    `groups`: `swapped-first` lets the swapped back before anybody is prefilled. `mean-priority` is
    Algorithm 2 to the letter: the group with the higher mean priority enters, which lets fresh
    short requests starve the swapped ones.
    `cost_grid`: a file of `slo-bench profile fit --like adaptivellm`, whose learned costs Algorithm
    1 then compares; without it those of the engine's own predictions (the simulator's are exact).
    `fair` off keeps vLLM's order and shows what the memory decisions alone are worth.
    """

    order: ClassVar[Literal["entry", "cache", "time"]] = "time"

    groups: str = knob("swapped-first", choices=("swapped-first", "mean-priority"))
    fair: bool = knob(True, choices=(True, False))
    adaptive: bool = knob(True, choices=(True, False))  # off: always recompute
    cost_grid: str = knob("", file=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost_grid:
            read_cost_grid(self.cost_grid)  # refuse it now, not in the middle of a run

    def priority(self, r: RequestState, view: View) -> float:
        """§3.5: seconds since it was first queued, per token of its sequence."""
        return (view.now_s - r.arrival_s) / (r.prompt_tokens + view.emitted_tokens(r))

    def urgency(self, r: RequestState, view: View) -> Key:
        return self.urgency_line(r, view).at(view.now_s)

    def urgency_line(self, r: RequestState, view: View) -> Line:
        if not self.fair:
            return Line(0.0, r.arrival_s, 0.0)
        return Line(r.arrival_s, 0.0, -1 / (r.prompt_tokens + view.emitted_tokens(r)))

    def keep(self, r: RequestState, view: View) -> Key:
        return self.priority(r, view) if self.fair else -r.arrival_s

    def preempt_by(self, r: RequestState, view: View) -> PreemptBy:
        blocks = view.held_blocks(r)
        if not self.adaptive or blocks > view.host_free_blocks:
            return PreemptBy.RECOMPUTE
        swap_s, recompute_s = self._costs_s(r, blocks, view)
        return PreemptBy.SWAP if swap_s < recompute_s else PreemptBy.RECOMPUTE

    def _costs_s(self, r: RequestState, blocks: int, view: View) -> tuple[float, float]:
        """Out to host memory and in again (Eq. 2), and the prefill that recomputes it."""
        tokens = view.kv_tokens(r) + 1
        if self.cost_grid:
            grid = read_cost_grid(self.cost_grid)
            return grid.swap_s(blocks * view.block_tokens), grid.recompute_s(tokens)
        return 2 * view.predict.swap_s(blocks), view.predict.step_s(0, 0, ((0, tokens),))

    def refill(self, view: View) -> Refill:
        if self.groups == "swapped-first":
            return Refill.RESIDENT if view.n_resident else Refill.WAITING
        swapped = view.would_enter(Refill.RESIDENT)
        waiting = view.would_enter(Refill.WAITING)
        if not swapped and not waiting:
            return Refill.NEITHER
        if self._mean_priority(waiting, view) <= self._mean_priority(swapped, view):
            return Refill.RESIDENT
        return Refill.WAITING

    def _mean_priority(self, group: Sequence[RequestState], view: View) -> float:
        if not group:
            return -1.0
        return sum(self.priority(r, view) for r in group) / len(group)
