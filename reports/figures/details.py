"""Request files to a few hundred numbers per level; one cell's requests are held at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...harness.core.records.judging import late
from ...harness.core.records.request_records import time_per_output_token_s
from ...harness.results.read_run import RunResults, read_requests, read_timeline, read_timeseries
from ...harness.results.run_columns import REQUEST_TYPE_COLUMN

Floats = NDArray[np.float64]

CAUSES = (
    "rejected",
    "dropped",
    "unfinished",
    "TTFT",
    "TTFT and TPOT",
    "TPOT",
    "end to end or deadline",
)
"""Why a request missed; every miss has exactly one. A finished request that broke the TTFT or the
TPOT bound counts there, whatever else it broke; `unfinished` holds failed and cancelled too."""

PHASES = ("waiting", "prefill", "transfer", "decode")
"""Arrival to first batch, to first token, between two instances, to last token; preemptions lie in
prefill and decode."""

SHARES: Floats = np.concatenate(
    [np.linspace(0.0, 0.9, 46), np.linspace(0.9, 0.99, 19)[1:], [0.992, 0.994, 0.996, 0.998, 0.999]]
)
"""The shares at which a distribution is kept."""

TIMELINE_POINTS = 96


@dataclass(frozen=True)
class Distribution:
    """`share[i]` of all requests took at most `value_s[i]`; it ends where no more ever came."""

    value_s: Floats
    share: Floats


SPANS = 24
"""Most spans of time in which attainment is shown."""

_SPAN_REQUESTS = 20  # least, on average, for a share of a span


@dataclass(frozen=True)
class AttainmentOverTime:
    """Share of the requests that met their SLO, in equal spans of the time of their arrival."""

    time_s: Floats  # middle of each span, from the start of arrivals
    share: Floats


@dataclass(frozen=True)
class SloRange:
    """The finite SLO bounds that requests carried, in seconds; equal where all have the same."""

    low_s: float
    high_s: float


@dataclass(frozen=True)
class TimelineMeans:
    """State over time in at most `TIMELINE_POINTS` equal spans, each the mean of its samples."""

    time_s: Floats
    waiting: Floats
    running: Floats
    kv_cache_usage: Floats


_POINTS = 96
_MOVES = ("layers", "heads", "taught")
_SERIES = (
    *("load", "requests", "waiting", "compute", "kv_cache_usage"),
    *("kv_gib", "acts", "lengths"),
)


@dataclass(frozen=True)
class Mechanism:
    """Mechanism of one cell.

    Attributes:
        apart: times in seconds and values by metric and then by instance or model.
        moved_s: times of module migrations, in seconds.
        activation_s: durations of model activations, in seconds.
    """

    apart: Mapping[str, Mapping[str, tuple[Floats, Floats]]] = field(default_factory=dict)
    moved_s: tuple[float, ...] = ()
    activation_s: tuple[float, ...] = ()


def mechanism(timeseries: pd.DataFrame | None) -> Mechanism:
    """Values of a cell's timeseries file, averaged over at most 96 equal spans of time.

    Empty without a file (`timeseries` is None).
    """
    if timeseries is None:
        return Mechanism()
    end_s = float(timeseries["time_s"].max()) or 1.0
    apart: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for metric in _SERIES:
        metric_rows = timeseries[timeseries["metric"] == metric]
        if not metric_rows.empty:
            apart[metric] = {
                str(entity): _means(rows, end_s)
                for entity, rows in metric_rows.groupby("entity", observed=True)
            }
    moved = timeseries.loc[timeseries["metric"].isin(_MOVES), "time_s"]
    activations = timeseries.loc[timeseries["metric"] == "activation", "value"]
    return Mechanism(apart, tuple(moved.tolist()), tuple(activations.tolist()))


def _means(rows: pd.DataFrame, end_s: float) -> tuple[Floats, Floats]:
    """Means over equal spans. A value holds until the next sample, also over whole spans."""
    edges = np.linspace(0.0, end_s, _POINTS + 1)
    time_s, value = rows["time_s"].to_numpy(), rows["value"].to_numpy()
    grid = np.unique(np.concatenate([time_s, edges]))
    held = np.concatenate([[0.0], value])[np.searchsorted(time_s, grid[:-1], side="right")]
    area = np.concatenate([[0.0], np.cumsum(held * np.diff(grid))])
    at_edges = np.interp(edges, grid, area)
    return (edges[:-1] + edges[1:]) / 2, np.diff(at_edges) / np.diff(edges)


@dataclass(frozen=True)
class LevelDetail:
    """All seeds of one series of a facet at one rate; `cost_*` in dollars per million tokens.

    Where a run kept no records of its requests, `requests` is 0 and only `timeline` says anything.
    """

    facet: str
    series: str
    rate_rps: float
    requests: int
    ttft: Distribution
    tpot: Distribution
    missed: dict[str, int]  # by CAUSES
    missed_phase_s: dict[str, float]  # by PHASES: mean over finished requests that missed
    bounds: dict[str, SloRange]  # by ttft, tpot, e2e; absent where no request has one
    cost: float
    cost_low: float
    cost_high: float
    timeline: TimelineMeans
    attainment: AttainmentOverTime
    waits: dict[str, Distribution] = field(default_factory=dict)  # until the first batch, by role
    mechanism: Mechanism = field(default_factory=Mechanism)


@dataclass
class _PointTotals:
    """Sums and samples over the seeds of a level."""

    requests: int = 0
    ttft_s: list[Floats] = field(default_factory=list)
    tpot_s: list[Floats] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    missed_phases_s: list[Floats] = field(default_factory=list)  # rows of PHASES
    bounds: dict[str, SloRange] = field(default_factory=dict)
    dollars: list[float] = field(default_factory=list)
    tokens_in_slo: list[float] = field(default_factory=list)
    wait_s: dict[str, list[Floats]] = field(default_factory=dict)
    arrival_s: list[Floats] = field(default_factory=list)
    met: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, requests: pd.DataFrame, hours: float, dollars_per_hour: float) -> None:
        met = requests["slo_met"].to_numpy() == 1
        finished = (requests["outcome"] == "finished").to_numpy()
        ttft_s, tpot_s = latencies_s(requests)
        self.requests += len(requests)
        self.arrival_s.append(requests["arrival_s"].to_numpy())
        self.met.append(met)
        generates = requests[REQUEST_TYPE_COLUMN].to_numpy() != 1
        self.ttft_s.append(ttft_s[generates])
        known_s = np.where(np.isinf(tpot_s), np.nan, tpot_s)
        self.tpot_s.append(known_s[generates & ~(finished & np.isnan(tpot_s))])
        for cause, missed in missed_by(requests, ttft_s, tpot_s).items():
            self.missed[cause] += int(missed.sum())
        queued_s = requests["queued_s"].fillna(requests["arrival_s"])
        wait_s = (requests["first_scheduled_s"] - queued_s).to_numpy()
        for role in sorted(requests["role"].unique()):
            of_role = (requests["role"] == role).to_numpy() & generates
            self.wait_s.setdefault(str(role), []).append(wait_s[of_role])
        phases = phases_s(requests[finished & ~met])
        self.missed_phases_s.append(phases[~np.isnan(phases).any(axis=1)])
        for name in ("ttft", "tpot", "e2e"):
            self._widen(name, requests[f"{name}_slo_s"].to_numpy())
        self.dollars.append(hours * dollars_per_hour)
        self.tokens_in_slo.append(float(np.nansum(requests["output_tokens"].to_numpy()[met])))

    def _widen(self, name: str, bound_s: Floats) -> None:
        finite = bound_s[np.isfinite(bound_s)]
        if len(finite):
            old = self.bounds.get(name, SloRange(np.inf, -np.inf))
            self.bounds[name] = SloRange(
                min(old.low_s, float(finite.min())), max(old.high_s, float(finite.max()))
            )


def level_details(runs: Sequence[RunResults], cells: pd.DataFrame) -> Iterator[LevelDetail]:
    """One detail per facet, series and rate of the valid `cells` (as from `levels.combine`)."""
    valid = cells[cells["valid"]]
    for (facet, series, rate), rows in valid.groupby(["facet", "series", "level_rps"]):
        level = _PointTotals()
        rows = rows.sort_values("seed", kind="stable")
        for _, row in rows.iterrows():
            run = runs[int(row["folder"])]
            if run.keeps_requests:
                requests = counted(read_requests(run.path, str(row["cell"])), int(row["requests"]))
                hours = float(row["makespan_s"]) / 3600
                level.add(requests, hours, float(row["cost_usd_per_hour"]))
        first = rows.iloc[0]
        folder, cell = runs[int(first["folder"])].path, str(first["cell"])
        per_cell = list(map(dollars_per_million, level.dollars, level.tokens_in_slo))
        missed_s = np.concatenate([*level.missed_phases_s, np.empty((0, len(PHASES)))])
        means_s = missed_s.mean(axis=0) if len(missed_s) else np.full(len(PHASES), np.nan)
        yield LevelDetail(
            facet=str(facet),
            series=str(series),
            rate_rps=float(str(rate)),
            requests=level.requests,
            ttft=distribution(np.concatenate([*level.ttft_s, np.empty(0)])),
            tpot=distribution(np.concatenate([*level.tpot_s, np.empty(0)])),
            missed=level.missed,
            missed_phase_s=dict(zip(PHASES, means_s.tolist(), strict=True)),
            bounds=level.bounds,
            cost=dollars_per_million(sum(level.dollars), sum(level.tokens_in_slo)),
            cost_low=min(per_cell, default=float("inf")),
            cost_high=max(per_cell, default=float("inf")),
            attainment=attainment_over_time(
                np.concatenate([*level.arrival_s, np.empty(0)]),
                np.concatenate([*level.met, np.empty(0, dtype=np.bool_)]),
            ),
            timeline=timeline_means(read_timeline(folder, cell)),
            waits={
                role: distribution(np.concatenate(waits_s))
                for role, waits_s in level.wait_s.items()
            },
            mechanism=mechanism(read_timeseries(folder, cell)),
        )


def dollars_per_million(dollars: float, tokens: float) -> float:
    """Dollars per million tokens; infinite where money bought no token in SLO."""
    return dollars / tokens * 1e6 if tokens else float("inf")


def distribution(values_s: Floats) -> Distribution:
    """The empirical distribution at `SHARES` and at its end; NaN is a value that never came."""
    came = np.sort(values_s[~np.isnan(values_s)])
    if not len(came):
        return Distribution(np.empty(0), np.empty(0))
    total = len(values_s)
    end = len(came) / total
    below_end = np.less(SHARES, end - 1e-12)
    shares = np.append(SHARES[below_end], end)
    places = np.clip(np.ceil(shares * total - 1e-9).astype(int) - 1, 0, len(came) - 1)
    return Distribution(came[places], shares)


def attainment_over_time(arrival_s: Floats, met: NDArray[np.bool_]) -> AttainmentOverTime:
    """Attainment by time of arrival; requests that never arrived (NaN) have no place in it."""
    arrived = np.isfinite(arrival_s)
    arrival_s, met = arrival_s[arrived], met[arrived]
    spans = min(SPANS, len(arrival_s) // _SPAN_REQUESTS)
    if spans < 2 or arrival_s.min() == arrival_s.max():
        return AttainmentOverTime(np.empty(0), np.empty(0))
    count, edges = np.histogram(arrival_s, spans)
    in_slo, _ = np.histogram(arrival_s[met], edges)
    there = count > 0
    middle_s = (edges[:-1] + edges[1:]) / 2
    return AttainmentOverTime(middle_s[there], in_slo[there] / count[there])


def timeline_means(timeline: pd.DataFrame) -> TimelineMeans:
    """At most `TIMELINE_POINTS` means over equal spans of time."""
    time_s = timeline["time_s"].to_numpy()
    if len(time_s) > TIMELINE_POINTS:
        start, end = float(time_s.min()), float(time_s.max())
        width = (end - start) / TIMELINE_POINTS or 1.0
        span = np.minimum((time_s - start) // width, TIMELINE_POINTS - 1)
        timeline = timeline.groupby(span).mean()
    columns = (
        timeline[c].to_numpy(dtype=np.float64) for c in ("waiting", "running", "kv_cache_usage")
    )
    return TimelineMeans(timeline["time_s"].to_numpy(dtype=np.float64), *columns)


def counted(requests: pd.DataFrame, count: int) -> pd.DataFrame:
    """The `count` requests that the cell's figures speak of: all but the earliest, its warm-up."""
    if len(requests) <= count:
        return requests
    latest_first = requests["arrival_s"].sort_values(
        ascending=False, kind="stable", na_position="first"
    )
    return requests.loc[latest_first.index[:count]]


def latencies_s(requests: pd.DataFrame) -> tuple[Floats, Floats]:
    """TTFT from the scheduled arrival, and TPOT of finished requests."""
    first_s = requests["first_token_s"].to_numpy()
    names = "finish_s", "output_tokens", "untimed_tokens"
    each_s = time_per_output_token_s(first_s, *(requests[name].to_numpy() for name in names))
    each_s = np.where(requests["outcome"] == "finished", each_s, np.nan)
    return first_s - requests["arrival_s"].to_numpy(), each_s


def missed_by(
    requests: pd.DataFrame, ttft_s: Floats, tpot_s: Floats
) -> dict[str, NDArray[np.bool_]]:
    """Which requests missed, by `CAUSES`."""
    missed = requests["slo_met"].to_numpy() != 1
    outcome = requests["outcome"]
    rejected, dropped, finished = (
        (outcome == name).to_numpy() for name in ("rejected", "dropped", "finished")
    )
    # Times are rounded to microseconds on disk; of a request that missed, a bound that was all
    # but reached is the one that it broke.
    late_first = late(ttft_s, requests["ttft_slo_s"].to_numpy(), -2e-6)
    slow = late(tpot_s, requests["tpot_slo_s"].to_numpy(), -2e-6)
    masks = {
        "rejected": rejected,
        "dropped": dropped,
        "unfinished": ~(finished | rejected | dropped),
        "TTFT": finished & late_first & ~slow,
        "TTFT and TPOT": finished & late_first & slow,
        "TPOT": finished & ~late_first & slow,
        "end to end or deadline": finished & ~late_first & ~slow,
    }
    return {cause: masks[cause] & missed for cause in CAUSES}


def phases_s(requests: pd.DataFrame) -> Floats:
    """Seconds of each request (rows) by `PHASES`; NaN where it never came so far."""
    marks = [
        requests[c].to_numpy()
        for c in ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
    ]
    waiting, prefill, rest = np.diff(np.column_stack(marks), axis=1).T
    transfer = requests["transfer_s"].to_numpy()
    return np.column_stack([waiting, prefill, transfer, rest - transfer])
