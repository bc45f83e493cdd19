"""Which series lead, and which leads are within the error of sampling: grouped seed by seed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pandas as pd

from ..figures.levels import TARGETS, Measure
from ..pages.verdicts import LEAST_SEEDS, interval_over_seeds

BySeed = Mapping[int, float]


def values_by_seed(cells: pd.DataFrame, measure: Measure | None) -> dict[str, dict[int, float]]:
    """What the series of one facet are compared by: greater is better.

    Without a measure the rate at which attainment falls below 90 %, in req/s, by linear
    interpolation; otherwise the measure, negative where less of it is better.
    """
    valid = cells[cells["valid"]]
    values: dict[str, dict[int, float]] = {}
    for (series, seed), rows in valid.groupby(["series", "seed"], sort=False):
        if measure is None:
            attainment = rows.groupby("level_rps")["attainment"].mean()
            rates = map(float, attainment.index)
            by_rate = dict(zip(rates, map(float, attainment), strict=True))
            value = crossing_rps(by_rate, TARGETS[0])
        else:
            mean = float(rows[measure.column].mean())
            value = mean if measure.more_is_better else -mean
        values.setdefault(str(series), {})[int(float(str(seed)))] = value
    return values


def crossing_rps(attainment_by_rate: Mapping[float, float], target: float) -> float:
    """The rate at which attainment first falls below `target`, linear between rates and from 100 %
    at none; the highest rate where it never does.
    """
    points = [(0.0, 1.0), *sorted(attainment_by_rate.items())]
    for (rate, share), (next_rate, next_share) in itertools.pairwise(points):
        if next_share < target - 1e-12:
            return rate + (next_rate - rate) * (share - target) / (share - next_share)
    return points[-1][0]


def groups_of_leads(values: Mapping[str, BySeed]) -> list[list[str]]:
    """The series, best first, in groups: each with all whose difference to the group's first has a
    95 % interval over seeds that holds 0. Of too few seeds, with all of the same value.
    """
    means = {name: sum(by_seed.values()) / len(by_seed) for name, by_seed in values.items()}
    rest = sorted(means, key=lambda name: -means[name])
    groups = []
    while rest:
        first, *others = rest
        group = [first, *(n for n in others if _is_level(values[first], values[n]))]
        groups.append(group)
        rest = [name for name in others if name not in group]
    return groups


def error_is_known(values: Mapping[str, BySeed]) -> bool:
    """Whether every series has enough seeds for an interval."""
    return all(len(by_seed) >= LEAST_SEEDS for by_seed in values.values())


def _is_level(a: BySeed, b: BySeed) -> bool:
    seeds: Sequence[int] = sorted(set(a) & set(b))
    differences = [a[seed] - b[seed] for seed in seeds]
    if len(seeds) < LEAST_SEEDS:
        return bool(seeds) and not any(differences)
    interval = interval_over_seeds(differences)
    return interval.low <= 0 <= interval.high
