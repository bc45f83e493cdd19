"""SLO-ODBS: static batches of requests with like SLOs and like predicted answers; its variants.

Source: UELLM (see docs/papers.md), Algorithm 3-1, Eq. 3-2 to 3-5, §3.3.3. The variants are those of
§3.4.3, which swaps their names; they are used here as the abbreviations read.
When a batch closes is in `BatchRule` and `OpenBatch`: lines 5 to 12 and 20, Eq. 3-3 to 3-5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from ...core.counters import ANSWERS_CUT, CLOSED_BY_MEMORY
from ...core.policy import StaticPolicy, parameter
from ...core.state import RequestState
from ...core.view import View
from .length_monitor import MISPREDICTIONS, LengthMonitor

CLOSED_BY_SIZE, CLOSED_BY_CM = "closed_by_size", "closed_by_cm"
CLOSED_BY_THRESHOLD = "closed_by_threshold"
NO_CAP_TOKENS = 1_000_000
CLOSINGS = {
    CLOSED_BY_THRESHOLD: "batches that Total (Eq. 3-5) closed while requests waited",
    CLOSED_BY_CM: "batches that CM (line 20) closed below max_batch while requests waited",
    CLOSED_BY_SIZE: "batches of max_batch requests while others waited",
}


@dataclass(frozen=True)
class BatchRule:
    """A batch closes when Total = w1·T_l + w2·T_o (Eq. 3-5) would pass a threshold.

    T_l = (SLO + L_CM)·(n + 1)·L1 (Eq. 3-3) and T_o = (length ∓ O_CM)·(n + 1)·L2 (Eq. 3-4) for the
    request that would be the (n + 1)-th; L_CM and O_CM are the largest SLO (s) and predicted
    answer (tokens) of the batch. `slo_weight` is w1, `output_weight` w2, `slo_factor` L1,
    `output_factor` L2. Weights, factors and threshold default to the authors' public code.

    Where the text contradicts itself or is silent:

    - `length_term`: `signed` is line 6 (length - O_CM, negative for an answer shorter than the
      batch's, so that the batch never closes), `sum` is Eq. 3-4, `absolute` the padding that either
      adds.
    - `cm_weights`: `mended` is w1·SLO + w2·length as in line 7, `printed` is line 12, which swaps
      the weights. Line 20 ("adjust the batch size by CM") is: no more than
      max_batch · min(1, `cm_limit` / CM) requests, and at least one.
    """

    slo_weight: float = parameter(1.0, 0.0, 100.0)
    output_weight: float = parameter(0.5, 0.0, 100.0)
    slo_factor: float = parameter(1.2, 0.01, 100.0, log=True)
    output_factor: float = parameter(1.2, 0.01, 100.0, log=True)
    threshold: float = parameter(15_000.0, 1.0, 1e9, log=True)
    max_batch: int = parameter(32, 1, 4096, log=True)
    cm_limit: float = parameter(1_000.0, 1.0, 1e9, log=True)
    length_term: str = parameter("absolute", choices=("absolute", "signed", "sum"))
    cm_weights: str = parameter("mended", choices=("mended", "printed"))

    def total(
        self, length: int, slo_s: float, n: int, longest_slo_s: float, longest_output: int
    ) -> float:
        """Eq. 3-5's left side, lines 5 to 7."""
        if self.length_term == "absolute":
            term = abs(length - longest_output)
        else:
            signed = self.length_term == "signed"
            term = length - longest_output if signed else length + longest_output
        total_latency = (slo_s + longest_slo_s) * (n + 1) * self.slo_factor
        total_output = term * (n + 1) * self.output_factor
        return self.slo_weight * total_latency + self.output_weight * total_output

    def cm(self, length: int, slo_s: float) -> float:
        """Cost measure of the batch (line 12)."""
        if self.cm_weights == "printed":
            return self.slo_weight * length + self.output_weight * slo_s
        return self.slo_weight * slo_s + self.output_weight * length

    def most(self, cm: float) -> int:
        """Most requests of the batch (line 20)."""
        if cm <= self.cm_limit:
            return self.max_batch
        return max(1, int(self.max_batch * self.cm_limit / cm))


class OpenBatch:
    """A batch while it is being built. SLOs in seconds from arrival, infinite where none is."""

    __slots__ = ("_cm", "_longest_output", "_longest_slo_s", "_rule", "size")

    def __init__(self, rule: BatchRule) -> None:
        self._rule = rule
        self.size = 0
        self._longest_slo_s, self._longest_output, self._cm = 0.0, 0, 0.0

    def closed_by(self, output_tokens: int, slo_s: float) -> str:
        """The counter of what closes the batch before this request; empty if it stays open."""
        rule = self._rule
        if not self.size:
            return ""
        if self.size >= rule.max_batch:
            return CLOSED_BY_SIZE
        if self.size >= rule.most(self._cm):
            return CLOSED_BY_CM
        slo_s = slo_s if math.isfinite(slo_s) else 0.0
        longest = self._longest_slo_s, self._longest_output
        total = rule.total(output_tokens, slo_s, self.size, *longest)
        return CLOSED_BY_THRESHOLD if total > rule.threshold else ""

    def add(self, output_tokens: int, slo_s: float) -> None:
        """Add a request to the batch."""
        slo_s = slo_s if math.isfinite(slo_s) else 0.0
        self.size += 1
        self._longest_slo_s = max(self._longest_slo_s, slo_s)
        self._longest_output = max(self._longest_output, output_tokens)
        self._cm = max(self._cm, self._rule.cm(output_tokens, slo_s))


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
      count as equal (`bucket`); `predicted` compares the expected tokens, `p90` what nine in ten
      such answers do not exceed (outlook of the thesis, §5.2.3: batches that know tails).
    - `overdue`: requests whose SLO has passed keep their place as the tightest; `last` puts them
      behind all others. Not in the thesis.
    - `output_cap`: answers end that many tokens beyond the longest predicted answer of their batch;
      the default ends none. The authors' code does this, the thesis does not say so. Throughput
      and latency of cut answers are not those of whole ones, so no tuning searches it unasked.

    The engine forms batches when it is idle, from all waiting requests, and runs the first batch
    only. Requests without an SLO come last and add nothing to T_l. An SLO is e2e, a deadline, or
    TTFT with TPOT.
    """

    continuous: ClassVar[str] = "slo-odbs-continuous"
    uses_predicted_lengths: ClassVar[bool] = True

    sort_by: str = parameter("slo", choices=("slo", "weighted"))
    slo_term: str = parameter("stated", choices=("stated", "time-left"))
    batch_order: str = parameter("tightest-slo", choices=("tightest-slo", "built"))
    lengths: str = parameter("bucket", choices=("bucket", "predicted", "p90"))
    overdue: str = parameter("first", choices=("first", "last"))
    output_cap: int = parameter(NO_CAP_TOKENS, 0, NO_CAP_TOKENS, environment=True)

    def new_state(self) -> Profiled:
        return Profiled()

    def mechanisms(self) -> dict[str, str]:
        cut = {ANSWERS_CUT: "answers that ended at `output_cap` tokens beyond the prediction"}
        return {
            **CLOSINGS,
            CLOSED_BY_MEMORY: "batches cut to what fits",
            **MISPREDICTIONS,
            **(cut if self.output_cap < NO_CAP_TOKENS else {}),
        }

    def on_finished(self, r: RequestState, view: View) -> None:
        view.policy_state.lengths.observe(r, view)
        view.policy_state.profiles.pop(r.id, None)

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        tokens: int = view.policy_state.lengths.reserve_tokens(r, view)
        return tokens

    def output_cap_tokens(self, batch: Sequence[RequestState], view: View) -> int | None:
        if self.output_cap == NO_CAP_TOKENS:
            return None
        monitor: LengthMonitor = view.policy_state.lengths
        return max(monitor.expected_tokens(r, view) for r in batch) + self.output_cap

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        profile_of, now_s = view.policy_state.profiles, view.now_s
        profiles: list[RequestProfile] = [
            p
            if (p := profile_of.get(r.id)) is not None and p.began_anew == r.recomputes
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
        monitor: LengthMonitor = view.policy_state.lengths
        alike = self.lengths == "bucket"
        output_tokens = monitor.alike_tokens(r, view) if alike else monitor.expected_tokens(r, view)
        slo_s = stated_slo_s(r, output_tokens)
        if self.lengths == "p90":
            output_tokens = max(output_tokens, view.predict.output_tokens_p90(r))
        due_s = r.arrival_s + slo_s
        # Time left is the due time less now, which is the same for all and changes no order.
        order = slo_s if self.slo_term == "stated" else due_s
        if self.sort_by == "weighted":
            order = self.slo_weight * order if self.slo_weight else 0.0
            order += self.output_weight * output_tokens
        profile = RequestProfile(r, output_tokens, slo_s, due_s, order, r.recomputes)
        view.policy_state.profiles[r.id] = profile
        return profile

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
