"""The comparison itself: every figure at every level that A and B share, with what is certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
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
from .results import (
    COMPARED,
    Cell,
    Clock,
    NotComparableError,
    RequestResults,
    Results,
    RunSample,
    common_clock,
    metrics_named,
    run_results,
)

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "none", "unknown"]

CONFIDENCE = 0.95
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

    @property
    def stationary(self) -> bool | None:
        """Whether the figures of both would be the same in longer runs; None: cannot be told."""
        return _all_stationary((self.stationary_a, self.stationary_b))

    @property
    def significant(self) -> bool:
        """Whether the difference is more than noise, all rows considered."""
        return self.verdict in ("better", "worse")


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
    streams = np.random.default_rng(seed).spawn(len(matched.levels))
    for done, (level, rng) in enumerate(zip(matched.levels, streams, strict=True), start=1):
        served = _served(level, clock, slo)
        shared = [seed for seed in served if seed.a is not None and seed.b is not None]
        paired = bool(shared) and all(seed.same_requests for seed in shared)
        same_bounds = not paired or all(seed.same_bounds for seed in shared)
        if not same_bounds and "slo" not in {*unlike, *allowed}:
            unlike["slo"] = f"the SLOs differ ({_ONE_SLO})"
        both_run = a.settings is not None and b.settings is not None
        if both_run and not explained and not all(seed.same_prompts for seed in shared):
            unlike["workload"] = "the workloads differ: requests of the same seed are not the same"
        if paired and len(shared) < len(served):
            lost = len(served) - len(shared)
            notes.append(f"{lost} runs whose seed the other side lacks are left out.")
            served = shared
        samples_a = [seed.a for seed in served if seed.a is not None]
        samples_b = [seed.b for seed in served if seed.b is not None]
        if not any(sample.finished for sample in (*samples_a, *samples_b)):
            unserved.append(_place(level))
            continue
        drawn = resample(samples_a, samples_b, kept, paired=paired, rng=rng, replicates=replicates)
        counts = (len(samples_a), len(samples_b), sum(seed.requests for seed in served))
        rows += _rows(level, kept, drawn, confidence, paired=paired, counts=counts)
        if progress is not None:
            progress(done, len(matched.levels))
    if unserved:
        nothing = f"no request finished on either side{''.join(unserved)}"
        if not rows:
            raise NotComparableError(f"nothing to compare: {nothing}")
        notes.append(f"left out: {nothing}.")
    if not all(row.paired for row in rows):
        notes.append(
            "unpaired: A and B did not serve the same requests, so that differences between "
            "workloads of one kind count as noise."
        )
    if min(min(row.seeds_a, row.seeds_b) for row in rows) < 2:
        notes.append(
            "one seed: how much another would differ is not seen, and intervals are too narrow "
            "where a queue builds up; run three or more."
        )
    if clock == "sent" and a.clock != b.clock:
        which = a if a.clock == "sent" else b
        notes.append(
            f"latencies count from sending on both sides, because {which.name} "
            "knows no other moment; a client that was late is not seen."
        )
    return Comparison(
        a=a,
        b=b,
        name_a=names[0],
        name_b=names[1],
        rows=_judged(rows, 1 - confidence),
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


@dataclass(frozen=True)
class _Seed:
    """Samples of A and B for one seed of a level; None if one of them lacks the seed.

    `requests` are B's, those of the warm-up too. The rest is true where either lacks the seed.
    """

    a: RunSample | None
    b: RunSample | None
    requests: int
    same_prompts: bool = True
    same_requests: bool = True  # row by row, and the same of them count
    same_bounds: bool = True


def _served(level: MatchedRuns, clock: Clock, slo: Slo | None) -> list[_Seed]:
    """All seeds of a level; of no more than one are the requests held at a time."""
    cells_a = {cell.seed: cell for cell in level.a}
    cells_b = {cell.seed: cell for cell in level.b}
    return [
        _seed(cells_a.get(seed), cells_b.get(seed), clock, slo)
        for seed in sorted({*cells_a, *cells_b})
    ]


def _seed(cell_a: Cell | None, cell_b: Cell | None, clock: Clock, slo: Slo | None) -> _Seed:
    a = None if cell_a is None else cell_a.read()
    b = None if cell_b is None else cell_b.read()
    alone = _Seed(
        a=None if a is None else a.sample(clock, slo),
        b=None if b is None else b.sample(clock, slo),
        requests=0 if b is None else len(b),
    )
    if a is None or b is None:
        return alone
    prompts = _same_prompts(a, b)
    return replace(
        alone,
        same_prompts=prompts,
        same_requests=prompts and bool(np.array_equal(a.counted, b.counted)),
        same_bounds=_same_bounds(a, b),
    )


def _same_prompts(a: RequestResults, b: RequestResults) -> bool:
    if len(a) != len(b) or not np.array_equal(a.prompt_tokens, b.prompt_tokens):
        return False
    if a.expected_output_tokens is None or b.expected_output_tokens is None:
        return True
    return bool(np.array_equal(a.expected_output_tokens, b.expected_output_tokens))


def _same_bounds(a: RequestResults, b: RequestResults) -> bool:
    if a.bounds_s is None or b.bounds_s is None:
        return a.bounds_s is b.bounds_s

    def bounds(bounds_s: Floats) -> Floats:
        return np.where(np.isnan(bounds_s), np.inf, bounds_s)  # no bound, either way

    return all(
        np.array_equal(bounds(a.bounds_s[name]), bounds(b.bounds_s[name])) for name in a.bounds_s
    )


def _rows(
    level: MatchedRuns,
    metrics: Sequence[RequestFigure],
    drawn: Differences,
    confidence: float,
    *,
    paired: bool,
    counts: tuple[int, int, int],
) -> Iterable[Row]:
    for index, metric in enumerate(metrics):
        a, b = float(drawn.a[index]), float(drawn.b[index])
        difference = b - a
        draws = drawn.drawn_b[index] - drawn.drawn_a[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = draws / drawn.drawn_a[index]
        is_finite = math.isfinite(difference)
        yield Row(
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
            seeds_a=counts[0],
            seeds_b=counts[1],
            requests=counts[2],
            paired=paired,
            stationary_a=_all_stationary(cell.stationary for cell in level.a),
            stationary_b=_all_stationary(cell.stationary for cell in level.b),
            drifting_after_s=_drifting_after_s((*level.a, *level.b)),
        )


def _drifting_after_s(cells: Iterable[Cell]) -> float:
    windows_s = [cell.window_s for cell in cells if cell.stationary is False]
    return float(np.mean(windows_s)) if windows_s else math.nan


def _all_stationary(each: Iterable[bool | None]) -> bool | None:
    flags = set(each)
    return False if False in flags else None if None in flags else True


def _judged(rows: Sequence[Row], level: float) -> list[Row]:
    """Corrected for their number, and called better, worse or neither."""
    judged = []
    for row, corrected in zip(rows, holm([row.p for row in rows]), strict=True):
        verdict: Verdict = "none"
        if math.isnan(corrected):
            verdict = "unknown"
        elif corrected < level:
            verdict = "better" if (row.difference > 0) == row.metric.higher_is_better else "worse"
        judged.append(replace(row, p_holm=corrected, verdict=verdict))
    return judged


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
