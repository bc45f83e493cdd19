"""Results to compare, whatever program wrote them: runs of systems, request by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...harness.results.metrics import TOLERANCE_S
from ...workloads.errors import SloBenchError
from ...workloads.request import NEVER_S, Slo
from .bootstrap import RunSample
from .metrics import Column, Metric

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

Clock = Literal["scheduled", "sent"]
"""From when latencies count: the moment a request was due, or the one it was sent at."""


class NotComparableError(SloBenchError):
    """Results between which no difference would mean anything."""


@dataclass(frozen=True)
class RequestResults:
    """What happened to every request of one run. Times are seconds, NaN where it never happened.

    `bounds_s` holds each request's SLO, None where the file has none. `sent_s` is None where only
    the scheduled arrival is known, which of a simulated client is the same. `duration_s` stands in
    for moments: where it is set, `arrival_s` is all zero and times are durations.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Floats
    prompt_tokens: Floats
    expected_output_tokens: Floats | None  # asked for; None where only those given are known
    finished: Mask
    bounds_s: Mapping[str, Floats] | None = None
    sent_s: Floats | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def counted(self) -> Mask:
        """All that did not arrive during the warm-up; what never arrived counts (as missed)."""
        counted: Mask = ~(self.arrival_s < self.warmup_s)
        return counted

    def sample(self, clock: Clock, slo: Slo | None) -> RunSample:
        """The requests that count, with latencies on that clock, held against `slo` or their own
        bounds. Whatever arrived and did not finish is a miss.
        """
        counted = self.counted
        if not counted.any():
            raise SloBenchError(f"warmup_s = {self.warmup_s:g} leaves no request to compare")
        began_s = self.arrival_s
        if clock == "sent" and self.sent_s is not None:
            began_s = self.sent_s
        with np.errstate(invalid="ignore", divide="ignore"):
            gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
            latency_s: dict[Column, Floats] = {
                "ttft": self.first_token_s - began_s,
                "tpot": (self.finish_s - self.first_token_s) / gaps,
                "e2e": self.finish_s - began_s,
            }
        met = self._met(latency_s, slo)
        return RunSample(
            latency_s={name: values[counted] for name, values in latency_s.items()},
            tokens=np.nan_to_num(self.output_tokens[counted]),
            met=None if met is None else met[counted],
            window_s=self._window_s(counted),
        )

    def _met(self, latency_s: Mapping[Column, Floats], slo: Slo | None) -> Mask | None:
        bounds: Mapping[str, Floats | float]
        if slo is not None:
            bounds = {
                "ttft": slo.ttft_s,
                "tpot": slo.tpot_s,
                "e2e": slo.e2e_s,
                "deadline": slo.deadline_s,
            }
        elif self.bounds_s is not None:
            bounds = self.bounds_s
        else:
            return None
        met = self.finished.copy()
        measured: dict[str, Floats] = {str(k): v for k, v in latency_s.items()}
        measured["deadline"] = self.finish_s
        with np.errstate(invalid="ignore"):
            for name, values in measured.items():
                # NaN (one token has no TPOT, no bound is asked) is above nothing: it is met.
                met &= ~(values > np.asarray(bounds[name]) + TOLERANCE_S)
        return met

    def _window_s(self, counted: Mask) -> float:
        """First arrival to last finish, or last arrival where that is later."""
        if self.duration_s is not None:
            return self.duration_s
        arrivals = self.arrival_s[counted]
        moments = np.concatenate([arrivals, self.finish_s[counted]])
        if not np.isfinite(arrivals).any():
            return 0.0
        return float(np.nanmax(moments) - np.nanmin(arrivals))


@dataclass(frozen=True)
class Cell:
    """One run of one system at one load with one seed; its requests are read when asked for.

    `identity` says everything else that tells cells apart, by column; "" is unknown.
    """

    name: str
    identity: Mapping[str, str]
    rate_rps: float | None  # None: closed loop, or unknown
    seed: int
    read: Callable[[], RequestResults] = field(repr=False)


@dataclass(frozen=True)
class Results:
    """All cells of a run folder or of another program's file.

    `refused` says by figure (or its family: `ttft`) why it cannot be compared with anything;
    `settings` are those of the experiment that cells do not tell, as far as known; `unfinished`
    says in words that cells are missing.
    """

    name: str
    kind: str
    cells: Sequence[Cell]
    clock: Clock = "scheduled"
    has_slo: bool = False
    notes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    simulated: bool = False
    unfinished: str = ""

    def refusal(self, metric: Metric, slo: Slo | None) -> str | None:
        """Why this figure cannot be had here, if it cannot."""
        for family in (metric.name, metric.column or ""):
            if family in self.refused:
                return f"{self.name}: {self.refused[family]}"
        if metric.needs_slo:
            if slo is None and not self.has_slo:
                return (
                    f"{self.name}: {self.kind} keeps no SLO with its requests; "
                    "say which to hold both against, as in --slo ttft=1,tpot=0.15"
                )
            for name in self._bounded(slo):
                if name in self.refused:
                    return f"{self.name}: the SLO bounds {name}, and {self.refused[name]}"
        return None

    def _bounded(self, slo: Slo | None) -> list[str]:
        if slo is None:
            return []
        bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
        return [name for name, bound_s in bounds.items() if bound_s < NEVER_S]


def common_clock(a: Results, b: Results) -> Clock:
    """The clock that both have: time from the scheduled arrival if both know it."""
    return "sent" if "sent" in (a.clock, b.clock) else "scheduled"
