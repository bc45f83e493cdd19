"""SLO-ODBS on a server that batches continuously: its order, and the size of its batch.

Source: UELLM (see docs/papers.md), Algorithm 3-1, on iterations of vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...core.counters import OVERTAKES
from ...core.decisions import Limits
from ...core.policy import Key, parameter
from ...core.state import WAITING, RequestState
from ...core.view import View
from ..vllm import Vllm
from .length_monitor import MISPREDICTIONS, UNDERESTIMATES, LengthMonitor
from .slo_odbs import (
    CLOSED_BY_CM,
    CLOSED_BY_SIZE,
    CLOSED_BY_THRESHOLD,
    BatchRule,
    OpenBatch,
    stated_slo_s,
)

_Place = tuple[float, int, int, RequestState]  # order, seq, how often it began anew


class SloOdbsState:
    """Learnt output lengths of one instance, profiles of its requests, and its waiting requests."""

    def __init__(self) -> None:
        self.lengths = LengthMonitor()
        self.mispredicted = self.lengths.mispredicted
        self.profiles: dict[int, tuple[int, int, float]] = {}  # recomputed, answer, SLO (s)
        self.line: list[_Place] = []


@dataclass(frozen=True)
class SloOdbsContinuous(BatchRule, Vllm):
    """Requests enter in the order of Algorithm 3-1 while its batch, the running requests, stays
    open.

    When a running request ends, the rule is applied again to the others, and no request waits for
    the longest answer. No answer is padded, and KV is not reserved by predicted lengths. No batch
    waits for its turn, so that phase three, the order of batches, does not apply. SLOs count as
    stated.

    With `output_weight` 0 it is SLO-DBS; with `slo_weight` 0 and `sort_by` weighted it is ODBS.
    """

    dynamic_limits: ClassVar[bool] = True
    uses_predicted_lengths: ClassVar[bool] = True

    sort_by: str = parameter("slo", choices=("slo", "weighted"))

    def new_state(self) -> SloOdbsState:
        return SloOdbsState()

    def mechanisms(self) -> dict[str, str]:
        return {
            CLOSED_BY_THRESHOLD: "decisions in which Total (Eq. 3-5) kept a request out",
            CLOSED_BY_CM: "decisions in which CM (line 20) kept a request out",
            CLOSED_BY_SIZE: "decisions in which max_batch kept a request out",
            UNDERESTIMATES: MISPREDICTIONS[UNDERESTIMATES],
            OVERTAKES: "requests that began before older ones",
        }

    def limits(self, view: View) -> Limits:
        limits = super().limits(view)
        batch_size = self._size(view) if view.n_waiting else self.max_batch
        return dataclasses.replace(limits, max_seqs=min(limits.max_seqs, batch_size))

    def _size(self, view: View) -> int:
        """Size of the running batch with all requests that may join it now."""
        batch = OpenBatch(self)
        for r in view.running():
            batch.add(*self._profile(r, view))
        for r in self._in_line(view):
            profile = self._profile(r, view)
            if closed_by := batch.closed_by(*profile):
                view.counters.add(closed_by)
                break
            batch.add(*profile)
        return max(1, batch.size)

    def _in_line(self, view: View) -> Iterator[RequestState]:
        """Waiting requests in order; kept sorted, since requests leave at the front."""
        line: list[_Place] = view.policy_state.line
        entered = 0
        for _, _, recomputed, r in line:
            if r.phase is WAITING and r.recomputes == recomputed:
                break
            entered += 1
        del line[:entered]
        if len(line) != view.n_waiting:  # a request left from the middle, or is not sorted in yet
            line[:] = sorted((self._place(r, view) for r in view.waiting()), key=_first)
        return (place[3] for place in line)

    def _place(self, r: RequestState, view: View) -> _Place:
        return self._order(*self._profile(r, view)), r.seq, r.recomputes, r

    def queue_key(self, r: RequestState, view: View) -> Key:
        state: SloOdbsState = view.policy_state
        noted = state.profiles.get(r.id)
        place = self._place(r, view)
        if noted is None or noted[0] != r.recomputes:
            insort(state.line, place, key=_first)
        return place[0]

    def _order(self, output_tokens: int, slo_s: float) -> float:
        """Line 1, or as the authors' code sorts."""
        if self.sort_by == "slo":
            return slo_s
        return (self.slo_weight * slo_s if self.slo_weight else 0.0) + (
            self.output_weight * output_tokens
        )

    def _profile(self, r: RequestState, view: View) -> tuple[int, float]:
        """Predicted answer (tokens) and SLO (s), noted when `r` comes or begins anew."""
        state: SloOdbsState = view.policy_state
        noted = state.profiles.get(r.id)
        if noted is None or noted[0] != r.recomputes:
            tokens = state.lengths.expected_tokens(r, view)
            noted = r.recomputes, tokens, stated_slo_s(r, tokens)
            state.profiles[r.id] = noted
        return noted[1], noted[2]

    def on_finished(self, r: RequestState, view: View) -> None:
        view.policy_state.lengths.observe(r, view)
        view.policy_state.profiles.pop(r.id, None)


def _first(place: _Place) -> tuple[float, int]:
    return place[0], place[1]
