"""SLO-ODBS: static batches of requests with like SLOs and like predicted answers; its variants.

Source: UELLM (see docs/papers.md), Algorithm 3-1, Eq. 3-2 to 3-5, §3.3.3. The variants are those of
§3.4.3, which swaps their names; they are used here as the abbreviations read.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from ...core.counters import CLOSED_BY_MEMORY
from ...core.policy import StaticPolicy, parameter
from ...core.state import RequestState
from ...core.view import View
from .length_monitor import MISPREDICTIONS, LengthMonitor
from .odbs_rule import CLOSINGS, BatchRule, OpenBatch


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """Eq. 3-2: what the batcher knows of a request (its input plays no part in Alg. 3-1)."""

    request: RequestState
    output_tokens: int  # predicted
    slo_s: float  # as stated; infinite without an SLO
    due_s: float  # on the clock
    order: float  # requests are sorted by this
    began_anew: int  # how often, when this was noted: the prediction then changes


class Profiled:
    """Learnt output lengths of one instance, and the profiles of waiting requests."""

    def __init__(self) -> None:
        self.lengths = LengthMonitor()
        self.mispredicted = self.lengths.mispredicted
        self.profiles: dict[int, RequestProfile] = {}  # by request: noted once, sorted many times


@dataclass(frozen=True)
class SloOdbs(BatchRule, StaticPolicy):
    """SLO-ODBS: static batches of requests with like SLOs and like predicted answers.

    Algorithm 3-1, with the closing rule of `BatchRule`.

    Where the text contradicts itself or is silent:

    - `sort_by`: `slo` is line 1; `weighted` is the authors' code, w1·SLO + w2·length.
    - `slo_term`: the SLO as `stated`, or the `time-left` of it when the batch is formed.
    - `batch_order`: phase three, "sort all batches", has no code. `tightest-slo` runs the batch
      with the tightest SLO first, `built` the batch built first.
    - `lengths`: a predictor of distributions is not exact to the token, and lengths of one bucket
      count as equal (`bucket`); `predicted` compares the expected tokens.
    - `overdue`: requests whose SLO has passed keep their place as the tightest; `last` puts them
      behind all others. Not in the thesis.

    The engine forms batches when it is idle, from all waiting requests, and runs the first batch
    only. Requests without an SLO come last and add nothing to T_l. An SLO is e2e, a deadline, or
    TTFT with TPOT.
    """

    continuous: ClassVar[str] = "slo-odbs-continuous"
    uses_predicted_lengths: ClassVar[bool] = True

    sort_by: str = parameter("slo", choices=("slo", "weighted"))
    slo_term: str = parameter("stated", choices=("stated", "time-left"))
    batch_order: str = parameter("tightest-slo", choices=("tightest-slo", "built"))
    lengths: str = parameter("bucket", choices=("bucket", "predicted"))
    overdue: str = parameter("first", choices=("first", "last"))

    def new_state(self) -> Profiled:
        return Profiled()

    def mechanisms(self) -> dict[str, str]:
        return {**CLOSINGS, CLOSED_BY_MEMORY: "batches cut to what fits", **MISPREDICTIONS}

    def on_finished(self, r: RequestState, view: View) -> None:
        view.policy_state.lengths.observe(r, view)
        view.policy_state.profiles.pop(r.id, None)

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        tokens: int = view.policy_state.lengths.reserve_tokens(r, view)
        return tokens

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        known, now_s = view.policy_state.profiles, view.now_s
        profiles: list[RequestProfile] = [
            p
            if (p := known.get(r.id)) is not None and p.began_anew == r.recomputes
            else self._profile(r, view)
            for r in waiting
        ]
        key: Callable[[RequestProfile], Any] = attrgetter("order")
        if self.overdue == "last":
            key = lambda p: (p.due_s < now_s, p.order)  # noqa: E731
        if self.sort_by == "slo" or self.batch_order == "built":
            # Sorted by SLO the first batch built is the tightest, and no others can be in it.
            first = heapq.nsmallest(self.max_batch + 1, profiles, key=key)
            chosen, closed_by = next(self._batches(first, now_s))
        else:
            batches = self._batches(sorted(profiles, key=key), now_s)
            chosen, closed_by = min(
                batches, key=lambda b: min(self._tightness(p, now_s) for p in b[0])
            )
        if closed_by:
            view.counters.add(closed_by)
        return [p.request for p in chosen]

    def _profile(self, r: RequestState, view: View) -> RequestProfile:
        known: LengthMonitor = view.policy_state.lengths
        alike = self.lengths == "bucket"
        output_tokens = known.alike_tokens(r, view) if alike else known.expected_tokens(r, view)
        slo_s = stated_slo_s(r, output_tokens)
        due_s = r.arrival_s + slo_s
        # Time left is the due time less now, which is the same for all and changes no order.
        order = slo_s if self.slo_term == "stated" else due_s
        if self.sort_by == "weighted":
            order = self.slo_weight * order if self.slo_weight else 0.0
            order += self.output_weight * output_tokens
        found = RequestProfile(r, output_tokens, slo_s, due_s, order, r.recomputes)
        view.policy_state.profiles[r.id] = found
        return found

    def _slo_s(self, p: RequestProfile, now_s: float) -> float:
        """The SLO that Algorithm 3-1 reckons with."""
        return p.slo_s if self.slo_term == "stated" else max(0.0, p.due_s - now_s)

    def _tightness(self, p: RequestProfile, now_s: float) -> tuple[bool, float]:
        return self.overdue == "last" and p.due_s < now_s, self._slo_s(p, now_s)

    def _batches(
        self, profiles: Sequence[RequestProfile], now_s: float
    ) -> Iterator[tuple[list[RequestProfile], str]]:
        """Build the batches (lines 4 to 24), each with the counter of what closed it."""
        batch: list[RequestProfile] = []
        opened = OpenBatch(self)
        for p in profiles:
            slo_s = self._slo_s(p, now_s)
            if closed_by := opened.closed_by(p.output_tokens, slo_s):
                yield batch, closed_by
                batch, opened = [], OpenBatch(self)
            batch.append(p)
            opened.add(p.output_tokens, slo_s)
        if batch:
            yield batch, ""


def stated_slo_s(r: RequestState, output_tokens: int) -> float:
    """Seconds from arrival by which the last of `output_tokens` must be out; infinite if never."""
    slo = r.slo
    bounds = [slo.e2e_s, slo.deadline_s - r.arrival_s]
    if math.isfinite(slo.tpot_s) and math.isfinite(slo.ttft_s):
        bounds.append(slo.ttft_s + slo.tpot_s * (output_tokens - 1))
    return min(bounds)


@dataclass(frozen=True)
class SloDbs(SloOdbs):
    """SLO-DBS: the variant of SLO-ODBS that looks at SLOs only (w2 = 0).

    Algorithm 3-1 with the term T_l alone.
    """

    output_weight: float = parameter(0.0, choices=(0.0,))


@dataclass(frozen=True)
class Odbs(SloOdbs):
    """ODBS: the variant of SLO-ODBS that looks at predicted answers only (w1 = 0).

    Algorithm 3-1 with T_o alone, on requests sorted by predicted answer.

    Line 1 would sort by SLO here too, which groups no lengths: the authors' code sorts by the
    weighted sum, which is the length where w1 = 0. The batch built first, of the shortest answers,
    goes first.
    """

    slo_weight: float = parameter(0.0, choices=(0.0,))
    sort_by: str = parameter("weighted", choices=("weighted", "slo"))
    batch_order: str = parameter("built", choices=("built", "tightest-slo"))
