"""The comparison itself: every figure at every level that A and B share, with what is certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...harness.results.request_figures import RequestFigure
from ...workloads.errors import SloBenchError
from ...workloads.request import Slo
from ..figures.figure import rate_text
from .bootstrap import (
    NOWHERE,
    REPLICATES,
    Differences,
    Interval,
    holm,
    interval,
    p_value,
    resample,
)
from .conditions import SLO, changes_requests, check_allowed
from .matching import Matched, MatchedRuns, match
from .model_error import difference_band, holds
from .pairing import LevelSamples, samples_of
from .rate_lead import (
    ATTAINMENT,
    CONFIDENCE,
    RateLead,
    deciding_levels,
    drawn_attainment,
    draws_of,
    rate_lead,
)
from .results import (
    COMPARED,
    Cell,
    Clock,
    NotComparableError,
    Results,
    common_clock,
    metrics_named,
    run_results,
)

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "none", "unknown"]

_ROUNDED = 1e-9  # of a figure; what clocks that began elsewhere round alone
_ONE_SLO = "--slo holds both against the same"
DEFAULT_METRICS = metrics_named(",".join(COMPARED))


@dataclass(frozen=True)
class Row:
    """One figure at one level: that of A, that of B, and B less A with its interval.

    `relative` is the difference as a share of A's value. `p` speaks of this row alone, `p_holm`
    takes into account how many rows there are. `verdict` is B's, `unknown` where nothing could be
    said (a figure is missing on one side).
    """

    label: str
    rate_rps: float | None
    metric: RequestFigure
    a: float
    b: float
    difference: float
    bounds: Interval
    relative: float
    relative_bounds: Interval
    p: float
    p_holm: float
    verdict: Verdict
    seeds_a: int
    seeds_b: int
    requests: int
    paired: bool
    stationary_a: bool | None = None
    stationary_b: bool | None = None
    drifting_after_s: float = math.nan  # arrivals of the cells that are not stationary, mean
    model_band: Interval | None = None  # of the difference, by the model's error; None: not known

    @property
    def stationary(self) -> bool | None:
        """Whether the figures of both would be the same in longer runs; None: cannot be told."""
        return _all_stationary((self.stationary_a, self.stationary_b))

    @property
    def significant(self) -> bool:
        """Whether the difference is more than noise, all rows considered."""
        return self.verdict in ("better", "worse")

    @property
    def in_reality(self) -> bool | None:
        """Whether the model's error leaves the difference its sign; None: not known."""
        return holds(self.difference, self.model_band)


@dataclass(frozen=True)
class Comparison:
    """B against A. `refused` says of figures that were asked for why they are not there;
    `obstacles` why B can hardly be judged by A, and `unlike` names the conditions among them.
    """

    a: Results
    b: Results
    name_a: str
    name_b: str
    rows: Sequence[Row]
    leads: Mapping[str, RateLead]  # by label, where there are several rates
    matched: Matched
    clock: Clock
    confidence: float
    refused: dict[str, str]
    obstacles: tuple[str, ...]
    unlike: tuple[str, ...]
    notes: tuple[str, ...]

    def count(self, verdict: Verdict) -> int:
        """Number of rows with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)


Progress = Callable[[int, int], None]  # levels done, of how many


# Of a folder that is no run folder: aiperf's, inference-perf's, guidellm's and evalscope's.
_RESULT_FILES = (
    *("profile_export.jsonl", "per_request_lifecycle_metrics.json"),
    *("benchmarks.json", "benchmark_data.db"),
)


def read_results(path: Path) -> Results:
    """A run folder, or a result file of another load generator.

    Raises:
        SloBenchError: it is neither, or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in _RESULT_FILES if (path / name).is_file()]
        if (path / "cells.csv").is_file() or not files:
            return run_results(path)
        path = files[0]
    if not path.exists():
        raise SloBenchError(f"there is no {path}; give a run folder or a result file")
    from .external import external_results

    return external_results(path)


def compare(
    a: Results,
    b: Results,
    *,
    metrics: Sequence[RequestFigure] = DEFAULT_METRICS,
    systems: tuple[str, str] | None = None,
    rates: Iterable[float] | None = None,
    slo: Slo | None = None,
    allow_different: Collection[str] = (),
    confidence: float = CONFIDENCE,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Hold B against A; the same arguments give the same numbers.

    Args:
        a: the one, or the baseline.
        b: the other; with `systems` it may be the same results.
        metrics: the figures.
        systems: this system of A against that of B.
        rates: only these rates, req/s.
        slo: hold all requests against this instead of their own bounds.
        allow_different: conditions (settings of the experiment) that may differ.
        confidence: of intervals, and 1 less the level of significance.
        replicates: how often everything is drawn again.
        seed: of those draws.
        progress: called after each level.

    Raises:
        NotComparableError: they have nothing in common that could be compared.
        SloBenchError: an argument is out of range, or records cannot be read.
    """
    check_allowed(allow_different)
    if slo is not None:  # bands of attainment are by the bounds that runs had
        a, b = (replace(n, cells=[replace(cell, row={}) for cell in n.cells]) for n in (a, b))
    allowed = {*allow_different, *(SLO if slo is not None else ())}
    if not 0.5 <= confidence < 1:
        raise SloBenchError(f"confidence must be from 0.5 to 1 but is {confidence}")
    matched = match(a, b, systems=systems, rates=rates, allowed=allowed)
    clock = common_clock(a, b)
    refused = _refused(a, b, metrics, slo)
    kept = [metric for metric in metrics if metric.short not in refused]
    if not kept:
        raise NotComparableError("; ".join(dict.fromkeys(refused.values())))
    rows: list[Row] = []
    names = _names(a, b, matched)
    unlike = {
        name: f"{name} differs: {pair[0]} in {names[0]}, {pair[1]} in {names[1]}"
        for name, pair in matched.unlike.items()
    }
    if "slo" in unlike:
        unlike["slo"] += f" ({_ONE_SLO})"
    explained = "workload" in allowed or changes_requests((*matched.unlike, *matched.differs))
    notes = [*a.notes, *b.notes, *matched.notes]
    unserved: list[str] = []
    drawn: dict[str, dict[float, Differences]] = {}  # attainment by label and rate
    by_label: dict[str, list[MatchedRuns]] = {}
    for level in matched.levels:
        by_label.setdefault(level.label, []).append(level)
    deciding = {id(level) for levels in by_label.values() for level in deciding_levels(levels)}
    streams = np.random.default_rng(seed).spawn(len(matched.levels))
    for done, (level, rng) in enumerate(zip(matched.levels, streams, strict=True), start=1):
        samples = samples_of(level, clock, slo)
        shared = samples.shared
        same_bounds = not samples.paired or all(seed.same_bounds for seed in shared)
        if not same_bounds and "slo" not in {*unlike, *allowed}:
            unlike["slo"] = f"the SLOs differ ({_ONE_SLO})"
        both_run = a.settings is not None and b.settings is not None
        if both_run and not explained and not all(seed.same_prompts for seed in shared):
            unlike["workload"] = "the workloads differ: requests of the same seed are not the same"
        if samples.lost:
            notes.append(f"{samples.lost} runs whose seed the other side lacks are left out.")
        if not samples.finished:
            unserved.append(_place(level))
            continue
        rows += level_rows(level, samples, kept, confidence, rng, replicates)
        by_rate = drawn.setdefault(level.label, {})
        if ATTAINMENT in kept and level.rate_rps is not None and id(level) in deciding:
            by_rate[level.rate_rps] = drawn_attainment(samples, replicates)
        if progress is not None:
            progress(done, len(matched.levels))
    if unserved:
        nothing = f"no request finished on either side{''.join(unserved)}"
        if not rows:
            raise NotComparableError(f"nothing to compare: {nothing}")
        notes.append(f"left out: {nothing}.")
    for name in sorted(a.made_by.keys() & b.made_by.keys()):
        if (made_a := a.made_by[name]) != (made_b := b.made_by[name]):
            notes.append(f"{name} differs, so that results may: {made_a}; then {made_b}.")
    if not all(row.paired for row in rows):
        notes.append(
            "unpaired: A and B did not serve the same requests, so that differences between "
            "workloads of one kind count as noise."
        )
    if min(min(row.seeds_a, row.seeds_b) for row in rows) < 2:
        notes.append("one seed: how much another would differ is not seen; run three or more.")
    if clock == "sent" and a.clock != b.clock:
        which = a if a.clock == "sent" else b
        notes.append(
            f"latencies count from sending on both sides, because {which.name} "
            "knows no other moment; a client that was late is not seen."
        )
    leads = {
        label: rate_lead(by_rate, by_label[label], confidence) for label, by_rate in drawn.items()
    }
    return Comparison(
        a=a,
        b=b,
        name_a=names[0],
        name_b=names[1],
        rows=judged(rows, 1 - confidence),
        leads={label: lead for label, lead in leads.items() if lead is not None},
        matched=matched,
        clock=clock,
        confidence=confidence,
        refused=refused,
        obstacles=(*matched.obstacles, *unlike.values()),
        unlike=tuple(unlike),
        notes=tuple(dict.fromkeys(notes)),
    )


def _names(a: Results, b: Results, matched: Matched) -> tuple[str, str]:
    """Names of A and B; systems compared with themselves are named by the settings that differ."""
    if a.name != b.name:
        return a.name, b.name
    pairs = [*matched.differs.values(), *matched.unlike.values()] or [("A", "B")]
    return " ".join(pair[0] for pair in pairs), " ".join(pair[1] for pair in pairs)


def _place(level: MatchedRuns | Row) -> str:
    """` (vllm, 4 req/s)`; empty where nothing tells levels apart."""
    rate = "" if level.rate_rps is None else f"{rate_text(level.rate_rps)} req/s"
    description = ", ".join(filter(None, (level.label, rate)))
    return f" ({description})" if description else ""


def _refused(
    a: Results, b: Results, metrics: Sequence[RequestFigure], slo: Slo | None
) -> dict[str, str]:
    refusals = {m.short: a.refusal(m, slo) or b.refusal(m, slo) for m in metrics}
    return {name: why for name, why in refusals.items() if why is not None}


def level_rows(
    level: MatchedRuns,
    samples: LevelSamples,
    metrics: Sequence[RequestFigure],
    confidence: float,
    rng: np.random.Generator,
    replicates: int = REPLICATES,
) -> list[Row]:
    """A row for each metric at one level, not yet judged."""
    drawn = resample(
        samples.a, samples.b, metrics, paired=samples.paired, rng=rng, replicates=replicates
    )
    rows = []
    for index, metric in enumerate(metrics):
        a, b = float(drawn.a[index]), float(drawn.b[index])
        difference = 0.0 if math.isclose(a, b, rel_tol=_ROUNDED) else b - a
        draws = drawn.drawn_b[index] - drawn.drawn_a[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = draws / drawn.drawn_a[index]
        is_finite = math.isfinite(difference)
        row = Row(
            label=level.label,
            rate_rps=level.rate_rps,
            metric=metric,
            a=a,
            b=b,
            difference=difference,
            bounds=interval(draws, confidence) if is_finite else NOWHERE,
            relative=difference / a if a else math.nan,
            relative_bounds=interval(shares, confidence) if is_finite and a else NOWHERE,
            p=p_value(difference, draws),
            p_holm=math.nan,
            verdict="unknown",
            seeds_a=len(samples.a),
            seeds_b=len(samples.b),
            requests=sum(seed.requests for seed in samples.seeds),
            paired=samples.paired,
            stationary_a=_all_stationary(cell.stationary for cell in level.a),
            stationary_b=_all_stationary(cell.stationary for cell in level.b),
            drifting_after_s=_drifting_after_s((*level.a, *level.b)),
            model_band=difference_band(draws_of(level.a, metric), draws_of(level.b, metric)),
        )
        rows.append(row)
    return rows


def _drifting_after_s(cells: Iterable[Cell]) -> float:
    windows_s = [cell.window_s for cell in cells if cell.stationary is False]
    return float(np.mean(windows_s)) if windows_s else math.nan


def _all_stationary(each: Iterable[bool | None]) -> bool | None:
    flags = set(each)
    return False if False in flags else None if None in flags else True


def judged(rows: Sequence[Row], level: float) -> list[Row]:
    """Corrected for their number, and called better, worse or neither."""
    judged_rows = []
    for row, corrected in zip(rows, holm([row.p for row in rows]), strict=True):
        verdict: Verdict = "none"
        if math.isnan(corrected):
            verdict = "unknown"
        elif corrected < level:
            verdict = "better" if (row.difference > 0) == row.metric.higher_is_better else "worse"
        judged_rows.append(replace(row, p_holm=corrected, verdict=verdict))
    return judged_rows


@dataclass(frozen=True)
class Regression:
    """A row in which the candidate is worse than may be. `size` is a share of the baseline, or a
    difference of shares; `low` is its end nearest to no regression.
    """

    row: Row
    size: float
    low: float


@dataclass(frozen=True)
class Judgement:
    """Result of the gate. `open_rows` are worse by more than the bound, but undecided: not
    significantly, or against a baseline that is not stationary, so that the size of the difference
    depends on the length of the runs.
    """

    max_regression: float
    regressions: Sequence[Regression]
    open_rows: Sequence[Regression]

    @property
    def passed(self) -> bool:
        """Whether nothing got significantly worse by more than the bound."""
        return not self.regressions


def judge_comparison(comparison: Comparison, max_regression: float) -> Judgement:
    """Fail what is significantly worse (all rows considered, see `Row.p_holm`) and by more than the
    bound: in percent of the baseline, or in points where the figure is a share of requests.

    Raises:
        NotComparableError: baseline and candidate did not do the same, or the candidate lacks a
            figure that the baseline has and fails in no other.
    """
    if comparison.obstacles:
        insist = " ".join(f"--allow-different {name}" for name in comparison.unlike)
        hint = f"; to compare them all the same: {insist}" if insist else ""
        raise NotComparableError("; ".join(comparison.obstacles) + hint)
    unknown = [row for row in comparison.rows if row.verdict == "unknown"]
    if len(unknown) == len(comparison.rows):
        raise NotComparableError("no figure is known on both sides")
    beyond = [
        regression
        for row in comparison.rows
        if row.verdict != "unknown" and (regression := _regression(row)).size > max_regression
    ]
    decided = [r.row.verdict == "worse" and r.row.stationary_a is not False for r in beyond]
    lost = [row for row in unknown if math.isfinite(row.a) and not math.isfinite(row.b)]
    if lost and not any(decided):
        figures = ", ".join(f"{row.metric.short}{_place(row)}" for row in lost)
        raise NotComparableError(f"{comparison.name_b} has no value of {figures}")
    return Judgement(
        max_regression=max_regression,
        regressions=[r for r, sure in zip(beyond, decided, strict=True) if sure],
        open_rows=[r for r, sure in zip(beyond, decided, strict=True) if not sure],
    )


def _regression(row: Row) -> Regression:
    """Size of the regression of B; negative if B is better."""
    points = row.metric.form == "share"
    change, bounds = (row.difference, row.bounds) if points else (row.relative, row.relative_bounds)
    if math.isnan(change):  # the baseline is zero: any change is beyond measure
        worse = (row.difference < 0) == row.metric.higher_is_better and row.difference != 0
        return Regression(row, math.inf if worse else 0.0, math.nan)
    if row.metric.higher_is_better:
        return Regression(row, -change, -bounds.high)
    return Regression(row, change, bounds.low)


def parse_regression(text: str) -> float:
    """`5%` or `0.05`. A number above 1 without `%` is refused: 5 most likely means 5 %.

    Raises:
        SloBenchError: it is no such share.
    """
    body = text.strip()
    percent = body.endswith("%")
    try:
        value = float(body[:-1]) / 100 if percent else float(body)
    except ValueError:
        raise SloBenchError(f"cannot read --max-regression {text!r}; write 5% or 0.05") from None
    if not 0 <= value < math.inf or (value > 1 and not percent):
        raise SloBenchError(f"--max-regression {text} is no share; 5 % is written 5% or 0.05")
    return value
