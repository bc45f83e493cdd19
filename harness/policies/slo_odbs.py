"""SLO-ODBS: static batches of requests with like SLOs and like predicted answers.

Source: UELLM (see docs/papers.md), Algorithm 3-1, Eq. 3-2 to 3-5, §3.3.3.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..core.policy import StaticPolicy, knob
from ..core.state import RequestState
from ..core.view import View
from .length_monitor import LengthMonitor


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
        self.profiles: dict[int, Profile] = {}  # by request: noted once, sorted many times


@dataclass(frozen=True)
class SloOdbs(StaticPolicy):
    """Algorithm 3-1. A batch closes when Total = w1·T_l + w2·T_o (Eq. 3-5) passes a threshold.

    T_l = (SLO + L_CM)·(n + 1)·L1 (Eq. 3-3) and T_o = (length ∓ O_CM)·(n + 1)·L2 (Eq. 3-4) for the
    request that would be the (n + 1)-th; L_CM and O_CM are the largest SLO (s) and predicted
    answer (tokens) of the batch. `slo_weight` is w1, `output_weight` w2, `slo_factor` L1,
    `output_factor` L2. Weights, factors and threshold default to the authors' public code.

    Where the text contradicts itself or is silent:

    - `length_term`: `signed` is line 6 (length - O_CM, negative for an answer shorter than the
      batch's, so that the batch never closes), `sum` is Eq. 3-4, `absolute` the padding that either
      adds.
    - `sort_by`: `slo` is line 1; `weighted` is the authors' code, w1·SLO + w2·length.
    - `slo_term`: the SLO as `stated`, or the `time-left` of it when the batch is formed.
    - `cm_weights`: `mended` is w1·SLO + w2·length as in line 7, `printed` is line 12, which swaps
      the weights. Line 20 ("adjust the batch size by CM") is: no more than
      max_batch · min(1, `cm_limit` / CM) requests, and at least one.
    - `batch_order`: phase three, "sort all batches", has no code. `tightest-slo` lets the batch go
      first that has the tightest SLO in it, `built` the one built first.
    - `overdue`: requests whose SLO has passed go on as the tight ones they are; `last` lets them
      wait for all others. Not in the thesis.

    The engine asks when it is idle, on all that wait, and commits the first batch only. Requests
    without an SLO come last and add nothing to T_l. An SLO is e2e, a deadline, or TTFT with TPOT.
    """

    slo_weight: float = knob(1.0, 0.0, 100.0)
    output_weight: float = knob(0.5, 0.0, 100.0)
    slo_factor: float = knob(1.2, 0.01, 100.0, log=True)
    output_factor: float = knob(1.2, 0.01, 100.0, log=True)
    threshold: float = knob(15_000.0, 1.0, 1e9, log=True)
    max_batch: int = knob(32, 1, 4096, log=True)
    cm_limit: float = knob(1_000.0, 1.0, 1e9, log=True)
    length_term: str = knob("absolute", choices=("absolute", "signed", "sum"))
    sort_by: str = knob("slo", choices=("slo", "weighted"))
    slo_term: str = knob("stated", choices=("stated", "time-left"))
    cm_weights: str = knob("mended", choices=("mended", "printed"))
    batch_order: str = knob("tightest-slo", choices=("tightest-slo", "built"))
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
        output_tokens: int = view.state.lengths.expected_tokens(r, view)
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
        longest_slo_s, longest_output, cm = 0.0, 0, 0.0
        for p in profiles:
            slo_s = self._slo_s(p, now_s)
            slo_s = slo_s if math.isfinite(slo_s) else 0.0
            if batch and not (
                len(batch) < self._most(cm)
                and self._total(p.output_tokens, slo_s, len(batch), longest_slo_s, longest_output)
                <= self.threshold
            ):
                yield batch
                batch = []
                longest_slo_s, longest_output, cm = 0.0, 0, 0.0
            batch.append(p)
            longest_slo_s = max(longest_slo_s, slo_s)
            longest_output = max(longest_output, p.output_tokens)
            cm = max(cm, self._cm(p.output_tokens, slo_s))
        if batch:
            yield batch

    def _total(
        self, length: int, slo_s: float, n: int, longest_slo_s: float, longest_output: int
    ) -> float:
        """Eq. 3-5's left side, lines 5 to 7."""
        term = {
            "absolute": abs(length - longest_output),
            "signed": length - longest_output,
            "sum": length + longest_output,
        }[self.length_term]
        total_latency = (slo_s + longest_slo_s) * (n + 1) * self.slo_factor
        total_output = term * (n + 1) * self.output_factor
        return self.slo_weight * total_latency + self.output_weight * total_output

    def _cm(self, length: int, slo_s: float) -> float:
        """Line 12."""
        if self.cm_weights == "printed":
            return self.slo_weight * length + self.output_weight * slo_s
        return self.slo_weight * slo_s + self.output_weight * length

    def _most(self, cm: float) -> int:
        """Line 20."""
        if cm <= self.cm_limit:
            return self.max_batch
        return max(1, int(self.max_batch * self.cm_limit / cm))


def stated_slo_s(r: RequestState, output_tokens: int) -> float:
    """Seconds from arrival by which the last of `output_tokens` must be out; infinite if never."""
    slo = r.slo
    bounds = [slo.e2e_s, slo.deadline_s - r.arrival_s]
    if math.isfinite(slo.tpot_s) and math.isfinite(slo.ttft_s):
        bounds.append(slo.ttft_s + slo.tpot_s * (output_tokens - 1))
    return min(bounds)
