"""SLO-ODBS: static batches of requests with like SLOs and like predicted answers.

Source: UELLM (see docs/papers.md), Algorithm 3-1, Eq. 3-2 to 3-5, §3.3.3.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from ...core.policy import StaticPolicy, knob
from ...core.state import RequestState
from ...core.view import View
from .length_monitor import LengthMonitor
from .odbs_rule import BatchRule, OpenBatch


@dataclass(frozen=True, slots=True)
class Profile:
    """Eq. 3-2: what the batcher knows of a request (its input plays no part in Alg. 3-1)."""

    request: RequestState
    output_tokens: int  # predicted
    slo_s: float  # as stated, infinite where nothing is asked
    due_s: float  # on the clock
    order: float  # requests are sorted by this
    began_anew: int  # how often, when this was noted: the prediction then changes


class Profiled:
    """What one instance has learnt of lengths, and the profiles of those who wait."""

    def __init__(self) -> None:
        self.lengths = LengthMonitor()
        self.mispredicted = self.lengths.mispredicted
        self.profiles: dict[int, Profile] = {}  # by request: noted once, sorted many times


@dataclass(frozen=True)
class SloOdbs(BatchRule, StaticPolicy):
    """Algorithm 3-1, with the closing rule of `BatchRule`.

    Where the text contradicts itself or is silent:

    - `sort_by`: `slo` is line 1; `weighted` is the authors' code, w1·SLO + w2·length.
    - `slo_term`: the SLO as `stated`, or the `time-left` of it when the batch is formed.
    - `batch_order`: phase three, "sort all batches", has no code. `tightest-slo` lets the batch go
      first that has the tightest SLO in it, `built` the one built first.
    - `lengths`: a predictor that tells a distribution is not sure to the token, and answers of one
      bucket count as `alike`; `told` compares what it expects to the token.
    - `overdue`: requests whose SLO has passed go on as the tight ones they are; `last` lets them
      wait for all others. Not in the thesis.

    The engine asks when it is idle, on all that wait, and commits the first batch only. Requests
    without an SLO come last and add nothing to T_l. An SLO is e2e, a deadline, or TTFT with TPOT.
    """

    continuous: ClassVar[str] = "slo-odbs-continuous"
    reads_lengths: ClassVar[bool] = True

    sort_by: str = knob("slo", choices=("slo", "weighted"))
    slo_term: str = knob("stated", choices=("stated", "time-left"))
    batch_order: str = knob("tightest-slo", choices=("tightest-slo", "built"))
    lengths: str = knob("alike", choices=("alike", "told"))
    overdue: str = knob("first", choices=("first", "last"))

    def new_state(self) -> Profiled:
        return Profiled()

    def finished(self, r: RequestState, view: View) -> None:
        view.state.lengths.observe(r, view)
        view.state.profiles.pop(r.id, None)

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        tokens: int = view.state.lengths.reserve_tokens(r, view)
        return tokens

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        known, now_s = view.state.profiles, view.now_s
        profiles: list[Profile] = [
            p
            if (p := known.get(r.id)) is not None and p.began_anew == r.recomputes
            else self._profile(r, view)
            for r in waiting
        ]
        key: Callable[[Profile], Any] = attrgetter("order")
        if self.overdue == "last":
            key = lambda p: (p.due_s < now_s, p.order)  # noqa: E731
        if self.sort_by == "slo" or self.batch_order == "built":
            # Sorted by SLO the first batch built is the tightest, and no others can be in it.
            first = heapq.nsmallest(self.max_batch, profiles, key=key)
            return [p.request for p in next(self._batches(first, now_s))]
        batches = self._batches(sorted(profiles, key=key), now_s)
        tightest = min(batches, key=lambda b: min(self._tightness(p, now_s) for p in b))
        return [p.request for p in tightest]

    def _profile(self, r: RequestState, view: View) -> Profile:
        known: LengthMonitor = view.state.lengths
        alike = self.lengths == "alike"
        output_tokens = known.alike_tokens(r, view) if alike else known.expected_tokens(r, view)
        slo_s = stated_slo_s(r, output_tokens)
        due_s = r.arrival_s + slo_s
        # Time left is the moment due less now, which is the same for all and sorts nobody.
        order = slo_s if self.slo_term == "stated" else due_s
        if self.sort_by == "weighted":
            order = self.slo_weight * order if self.slo_weight else 0.0
            order += self.output_weight * output_tokens
        found = Profile(r, output_tokens, slo_s, due_s, order, r.recomputes)
        view.state.profiles[r.id] = found
        return found

    def _slo_s(self, p: Profile, now_s: float) -> float:
        """The SLO that Algorithm 3-1 reckons with."""
        return p.slo_s if self.slo_term == "stated" else max(0.0, p.due_s - now_s)

    def _tightness(self, p: Profile, now_s: float) -> tuple[bool, float]:
        return self.overdue == "last" and p.due_s < now_s, self._slo_s(p, now_s)

    def _batches(self, profiles: Sequence[Profile], now_s: float) -> Iterator[list[Profile]]:
        """Lines 4 to 24."""
        batch: list[Profile] = []
        opened = OpenBatch(self)
        for p in profiles:
            slo_s = self._slo_s(p, now_s)
            if batch and not opened.takes(p.output_tokens, slo_s):
                yield batch
                batch, opened = [], OpenBatch(self)
            batch.append(p)
            opened.add(p.output_tokens, slo_s)
        if batch:
            yield batch


def stated_slo_s(r: RequestState, output_tokens: int) -> float:
    """Seconds from arrival by which the last of `output_tokens` must be out; infinite if never."""
    slo = r.slo
    bounds = [slo.e2e_s, slo.deadline_s - r.arrival_s]
    if math.isfinite(slo.tpot_s) and math.isfinite(slo.ttft_s):
        bounds.append(slo.ttft_s + slo.tpot_s * (output_tokens - 1))
    return min(bounds)
