"""The comparison itself: every figure at every level that A and B share, with what is certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from ...workloads.request import Slo
from .bootstrap import REPLICATES, Differences, resample
from .matching import Level, Matched, match
from .metrics import COMPARED, METRICS, Metric
from .results import Clock, NotComparableError, Requests, Results, common_clock
from .run_results import run_results
from .verdict import NOWHERE, Interval, holm, interval, p_value

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "none", "unknown"]

CONFIDENCE = 0.95
DEFAULT_METRICS = tuple(METRICS[name] for name in COMPARED)


@dataclass(frozen=True)
class Row:
    """One figure at one level: that of A, that of B, and B less A with its interval.

    `relative` is the difference as a share of A's value. `p` speaks of this row alone, `p_holm`
    takes into account how many rows there are. `verdict` is B's, `unknown` where nothing could be
    said (a figure is missing on one side).
    """

    label: str
    rate_rps: float | None
    metric: Metric
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
    blocks: int

    @property
    def significant(self) -> bool:
        """Whether the difference is more than noise, all rows considered."""
        return self.verdict in ("better", "worse")


@dataclass(frozen=True)
class Comparison:
    """B against A. `refused` says of figures that were asked for why they are not there."""

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
    notes: tuple[str, ...]

    def count(self, verdict: Verdict) -> int:
        """How many rows have it."""
        return sum(row.verdict == verdict for row in self.rows)


Progress = Callable[[int, int], None]  # levels done, of how many


def read_results(path: Path) -> Results:
    """A run folder, or a result file of another load generator.

    Raises:
        SloBenchError: it is neither, or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "cells.csv").is_file() and (path / "profile_export.jsonl").is_file():
            path = path / "profile_export.jsonl"
        else:
            return run_results(path)
    if not path.exists():
        raise SloBenchError(f"there is no {path}; give a run folder or a result file")
    from .external import external_results

    return external_results(path)


def compare(
    a: Results,
    b: Results,
    *,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    systems: tuple[str, str] | None = None,
    rates: Iterable[float] | None = None,
    slo: Slo | None = None,
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
        confidence: of intervals, and 1 less the level of significance.
        replicates: how often everything is drawn again.
        seed: of those draws.
        progress: called after each level.

    Raises:
        NotComparableError: they have nothing in common that could be compared.
        SloBenchError: an argument is out of range, or records cannot be read.
    """
    if not 0.5 <= confidence < 1:
        raise SloBenchError(f"confidence must be from 0.5 to 1 but is {confidence}")
    matched = match(a, b, systems=systems, rates=rates)
    clock = common_clock(a, b)
    refused = _refused(a, b, metrics, slo)
    kept = [metric for metric in metrics if metric.name not in refused]
    if not kept:
        raise NotComparableError("; ".join(dict.fromkeys(refused.values())))
    rows: list[Row] = []
    obstacles = list(matched.obstacles)
    notes = [*a.notes, *b.notes, *matched.notes]
    streams = np.random.default_rng(seed).spawn(len(matched.levels))
    for done, (level, rng) in enumerate(zip(matched.levels, streams, strict=True), start=1):
        runs_a = {cell.seed: cell.read() for cell in level.a}
        runs_b = {cell.seed: cell.read() for cell in level.b}
        pairs = _pairs(runs_a, runs_b)
        if slo is None and pairs and not all(_same_bounds(*pair) for pair in pairs):
            obstacles.append("the SLOs differ; hold both against the same with --slo")
        if a.settings and b.settings and not _same_where_seeds_are(runs_a, runs_b):
            obstacles.append("the workloads differ: requests of the same seed are not the same")
        paired = bool(pairs)
        if paired:
            requests_a, requests_b = [p[0] for p in pairs], [p[1] for p in pairs]
            lost = len(runs_a) + len(runs_b) - 2 * len(pairs)
            if lost:
                notes.append(f"{lost} runs whose seed the other side lacks are left out.")
        else:
            requests_a, requests_b = list(runs_a.values()), list(runs_b.values())
        drawn = resample(
            [requests.sample(clock, slo) for requests in requests_a],
            [requests.sample(clock, slo) for requests in requests_b],
            kept,
            paired=paired,
            rng=rng,
            replicates=replicates,
        )
        counts = (len(requests_a), len(requests_b), sum(map(len, requests_b)))
        rows += _rows(level, kept, drawn, confidence, paired=paired, counts=counts)
        if progress is not None:
            progress(done, len(matched.levels))
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
        notes.append(
            f"latencies count from sending on both sides, because {_of_clock(a, b, 'sent').name} "
            "knows no other moment; a client that was late is not seen."
        )
    names = _names(a, b, matched)
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
        obstacles=tuple(dict.fromkeys(obstacles)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _names(a: Results, b: Results, matched: Matched) -> tuple[str, str]:
    """What A and B are called: by what differs, where one of them is compared with itself."""
    if a.name != b.name:
        return a.name, b.name
    told = list(matched.differs.values()) or [("A", "B")]
    return " ".join(t[0] for t in told), " ".join(t[1] for t in told)


def _of_clock(a: Results, b: Results, clock: Clock) -> Results:
    return a if a.clock == clock else b


def _refused(a: Results, b: Results, metrics: Sequence[Metric], slo: Slo | None) -> dict[str, str]:
    refused = {}
    for metric in metrics:
        for results in (a, b):
            why = results.refusal(metric, slo)
            if why is not None:
                refused[metric.name] = why
                break
    return refused


def _pairs(
    runs_a: dict[int, Requests], runs_b: dict[int, Requests]
) -> list[tuple[Requests, Requests]]:
    """Runs of A and B with the same seed and, row by row, the same requests; all or none."""
    pairs = [(runs_a[seed], runs_b[seed]) for seed in runs_a if seed in runs_b]
    return pairs if pairs and all(_same_requests(*pair) for pair in pairs) else []


def _same_requests(a: Requests, b: Requests) -> bool:
    """Whether they are alike row by row, and the same of them count."""
    return _same_prompts(a, b) and bool(np.array_equal(a.counted, b.counted))


def _same_prompts(a: Requests, b: Requests) -> bool:
    if len(a) != len(b) or not np.array_equal(a.prompt_tokens, b.prompt_tokens):
        return False
    if a.output_tokens is None or b.output_tokens is None:
        return True
    return bool(np.array_equal(a.output_tokens, b.output_tokens))


def _same_where_seeds_are(runs_a: dict[int, Requests], runs_b: dict[int, Requests]) -> bool:
    return all(_same_prompts(runs_a[seed], runs_b[seed]) for seed in runs_a if seed in runs_b)


def _same_bounds(a: Requests, b: Requests) -> bool:
    if a.bounds_s is None or b.bounds_s is None:
        return a.bounds_s is b.bounds_s

    def bounds(of: Floats) -> Floats:
        return np.where(np.isnan(of), np.inf, of)  # no bound, either way

    return all(
        np.array_equal(bounds(a.bounds_s[name]), bounds(b.bounds_s[name])) for name in a.bounds_s
    )


def _rows(
    level: Level,
    metrics: Sequence[Metric],
    drawn: Differences,
    confidence: float,
    *,
    paired: bool,
    counts: tuple[int, int, int],
) -> Iterable[Row]:
    for at, metric in enumerate(metrics):
        a, b = float(drawn.a[at]), float(drawn.b[at])
        difference = b - a
        draws = drawn.drawn_b[at] - drawn.drawn_a[at]
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = draws / drawn.drawn_a[at]
        known = math.isfinite(difference)
        yield Row(
            label=level.label,
            rate_rps=level.rate_rps,
            metric=metric,
            a=a,
            b=b,
            difference=difference,
            bounds=interval(draws, confidence) if known else NOWHERE,
            relative=difference / a if a else math.nan,
            relative_bounds=interval(shares, confidence) if known and a else NOWHERE,
            p=p_value(difference, draws),
            p_holm=math.nan,
            verdict="unknown",
            seeds_a=counts[0],
            seeds_b=counts[1],
            requests=counts[2],
            paired=paired,
            blocks=drawn.blocks,
        )


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
