"""Which series lead, and which leads are within the error of sampling, or of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd

from ...harness.results.read_run import RunResults
from ...harness.results.request_figures import RequestFigure
from ..compare.comparing import DEFAULT_METRICS, judged, level_rows
from ..compare.matching import MatchedRuns
from ..compare.model_error import HOLDS, INSIDE, crossings_rps
from ..compare.pairing import samples_of
from ..compare.rate_lead import CONFIDENCE, deciding_levels, drawn_attainment, rate_lead
from ..compare.results import Cell, comparable, run_cells
from ..figures.levels import TARGETS, Measure
from ..pages.verdicts import LEAST_SEEDS, interval_over_seeds

BySeed = Mapping[int, float]
_MOST_CELLS = 128  # whose requests are held
_MOST_NAMED = 4  # systems in a sentence; more are counted


@dataclass(frozen=True)
class Lead:
    """What is known of a difference: whether sampling may explain it, and whether it is larger than
    the model's error (None: not known).
    """

    is_level: bool
    in_reality: bool | None = None


class LeadJudge:
    """Judges pairs of series as `compare` does, by the same requests; by seeds where there are no
    records. By the highest rate at 90 % in SLO, or by the measure of a single level.
    """

    def __init__(
        self, runs: Sequence[RunResults], cells: pd.DataFrame, measure: Measure | None
    ) -> None:
        self._measure = measure
        self._cells: dict[tuple[str, str], list[Cell]] = {}
        if not all(run.keeps_requests for run in runs):
            return
        for folder, run in enumerate(runs):
            rows = cells[(cells["folder"] == folder) & cells["valid"]]
            for cell in run_cells(run, rows):
                place = str(cell.row["facet"]), str(cell.row["series"])
                read = lru_cache(maxsize=1)(cell.read) if len(cells) <= _MOST_CELLS else cell.read
                self._cells.setdefault(place, []).append(replace(cell, read=read))

    def lead(self, facet: str, a: str, b: str) -> Lead | None:
        """What is known of the lead of A over B; None where records do not tell."""
        if self._measure is None:
            return self._rate_lead(self._levels(facet, a, b))
        figure = next((f for f in comparable().values() if f.name == self._measure.column), None)
        return None if figure is None else self._level_lead(facet, a, b, figure)

    def _rate_lead(self, levels: Sequence[MatchedRuns]) -> Lead | None:
        drawn = {}
        for level in deciding_levels(levels):
            samples = samples_of(level, "scheduled", None)
            if samples.finished and level.rate_rps is not None:
                drawn[level.rate_rps] = drawn_attainment(samples)
        lead = rate_lead(drawn, levels)
        return None if lead is None else Lead(lead.verdict == "none", lead.in_reality)

    def _level_lead(self, facet: str, a: str, b: str, figure: RequestFigure) -> Lead | None:
        """By the rows of a comparison of A and B in all facets, whose number counts."""
        metrics = DEFAULT_METRICS if figure in DEFAULT_METRICS else (figure,)
        facets = dict.fromkeys(place[0] for place in self._cells)
        levels = [level for name in facets for level in self._levels(name, a, b)]
        rows = []
        for level, rng in zip(levels, np.random.default_rng(0).spawn(len(levels)), strict=True):
            samples = samples_of(level, "scheduled", None)
            if samples.finished:
                rows += level_rows(level, samples, metrics, CONFIDENCE, rng)
        for row in judged(rows, 1 - CONFIDENCE):
            if row.label == facet and row.metric == figure and row.verdict != "unknown":
                return Lead(not row.significant, row.in_reality)
        return None

    def _levels(self, facet: str, a: str, b: str) -> list[MatchedRuns]:
        """The rates that both have, ascending."""
        by_rate: list[dict[float | None, list[Cell]]] = [{}, {}]
        for series, side in zip((a, b), by_rate, strict=True):
            for cell in self._cells.get((facet, series), ()):
                side.setdefault(cell.rate_rps, []).append(cell)
        rates = sorted(by_rate[0].keys() & by_rate[1].keys(), key=lambda rate: rate or 0.0)
        return [MatchedRuns(facet, rate, by_rate[0][rate], by_rate[1][rate]) for rate in rates]


def values_by_seed(cells: pd.DataFrame, measure: Measure | None) -> dict[str, dict[int, float]]:
    """What the series of one facet are ordered by: greater is better.

    Without a measure the rate at which attainment falls below 90 %, in req/s, by linear
    interpolation; otherwise the measure, negative where less of it is better.
    """
    valid = cells[cells["valid"]]
    values: dict[str, dict[int, float]] = {}
    for (series, seed), rows in valid.groupby(["series", "seed"], sort=False):
        if measure is None:
            shares = rows.groupby("level_rps")["attainment"].mean()
            (value,) = crossings_rps(list(shares.index), shares.to_numpy()[:, None], TARGETS[0])
        else:
            mean = float(rows[measure.column].mean())
            value = mean if measure.more_is_better else -mean
        values.setdefault(str(series), {})[int(float(str(seed)))] = float(value)
    return values


def groups_of_leads(
    values: Mapping[str, BySeed], is_level: Callable[[str, str], bool]
) -> list[list[str]]:
    """The series, best first, in groups: each with all that are level with the group's first."""
    means = {name: sum(by_seed.values()) / len(by_seed) for name, by_seed in values.items()}
    rest = sorted(means, key=lambda name: -means[name])
    groups = []
    while rest:
        first, *others = rest
        group = [first, *(name for name in others if is_level(first, name))]
        groups.append(group)
        rest = [name for name in rest if name not in group]
    return groups


def error_is_known(values: Mapping[str, BySeed]) -> bool:
    """Whether every series has enough seeds for an interval."""
    return all(len(by_seed) >= LEAST_SEEDS for by_seed in values.values())


def lead_over_seeds(a: BySeed, b: BySeed) -> Lead:
    """By the 95 % interval over seeds of the difference; of too few, level if all are equal."""
    seeds: Sequence[int] = sorted(set(a) & set(b))
    differences = [a[seed] - b[seed] for seed in seeds]
    if len(seeds) < LEAST_SEEDS:
        return Lead(bool(seeds) and not any(differences))
    interval = interval_over_seeds(differences)
    return Lead(interval.low <= 0 <= interval.high)


def reality_text(in_reality: Mapping[str, bool | None], n_others: int) -> str:
    """Sentences on which leads over others hold in reality; empty where that is not known."""
    held = [name for name, verdict in in_reality.items() if verdict]
    inside = [name for name, verdict in in_reality.items() if verdict is False]
    if held and len(held) == n_others:
        return f" The lead {HOLDS}."
    texts = [f"over {listed(held)} {HOLDS}"] if held else []
    texts += [f"over {listed(inside)} is {INSIDE}"] if inside else []
    return f" The lead {', that '.join(texts)}." if texts else ""


def listed(names: Iterable[str]) -> str:
    """`a, b and c`; of many, how many."""
    *some, last = names
    if len(some) >= _MOST_NAMED:
        return f"{len(some) + 1} systems"
    return f"{', '.join(some)} and {last}" if some else last
