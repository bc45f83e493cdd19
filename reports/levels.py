"""Cells to curves: which rows form one series, and what its seeds say at every offered rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from .read import LEAD_COLUMNS, RunFolder

IDENTITY = ("backend", "workload", "model", "gpu", "gpus")
"""What, besides the system and the sweep axes, makes a row belong to another series."""

TARGETS = (0.9, 0.99)
"""The attainments whose highest rate every summary names."""


@dataclass(frozen=True)
class HighestRate:
    """The highest tested rate whose mean attainment over seeds is at least `target`.

    `rate_rps` and `attainment` are None where no tested rate reaches the target. `at_end` says
    that the highest tested rate still reaches it, so that the system may carry more; `lowest_rps`
    and `top_rps` are the ends of what was tested.
    """

    target: float
    rate_rps: float | None
    attainment: float | None
    at_end: bool
    lowest_rps: float
    top_rps: float


def highest_rate(cells: pd.DataFrame, target: float) -> HighestRate:
    """What one system carries; `cells` are its rows, of which invalid ones do not count."""
    valid = cells[cells["valid"]]
    if valid.empty:
        rates = cells["rate_rps"]
        low, top = (float(rates.min()), float(rates.max())) if len(rates) else (0.0, 0.0)
        return HighestRate(target, None, None, False, low, top)
    means = valid.groupby(level_rates(valid))["attainment"].mean()
    low, top = float(means.index.min()), float(means.index.max())
    # A mean of three 0.9 is a hair below 0.9 in binary.
    passing = means[means >= target - 1e-12]
    if passing.empty:
        return HighestRate(target, None, None, False, low, top)
    rate = float(passing.index.max())
    return HighestRate(target, rate, float(passing.loc[rate]), rate == top, low, top)


def level_rates(cells: pd.DataFrame) -> pd.Series[float]:
    """The rate of every row's level: `cells` of one series, or with `level_rps` from before.

    Rates equal to four significant digits are one level. Where no two seeds share a rate, as in a
    closed loop, whose rate is only known afterwards, the lowest rates of all seeds are one level,
    the next lowest another, at their mean, as long as they are alike.
    """
    if "level_rps" in cells.columns:
        return cells["level_rps"]
    rates = cells["rate_rps"].map(_four_digits)
    seeds = cells["seed"]
    if seeds.nunique() < 2 or (seeds.groupby(rates).nunique() > 1).any():
        return rates
    levels_of_seeds = rates.groupby(rates.groupby(seeds).rank("dense"))
    alike = levels_of_seeds.max() <= 1.25 * levels_of_seeds.min()
    return levels_of_seeds.transform("mean").map(_four_digits) if alike.all() else rates


def _four_digits(rate_rps: float) -> float:
    return float(f"{rate_rps:.4g}")


def axes_of(cells: pd.DataFrame) -> tuple[str, ...]:
    """The sweep axes of a cells frame: the columns before `requests` that are not always there."""
    names = list(cells.columns)
    before = names[: names.index("requests")]
    return tuple(c for c in before if c not in LEAD_COLUMNS)


def with_series(cells: pd.DataFrame, axes: Sequence[str] | None = None) -> pd.DataFrame:
    """`cells` with their `series`, the system's name and whatever else differs between rows, and
    their `level_rps` (see `level_rates`).
    """
    axes = axes_of(cells) if axes is None else axes
    labels = cells["system"].astype("str")
    for column in [c for c in (*IDENTITY, *axes) if c in cells.columns]:
        if cells[column].nunique(dropna=False) < 2:
            continue
        named = column in IDENTITY and column != "gpus"
        labels = labels + cells[column].map(lambda v, c=column, n=named: _part(c, v, bare=n))
    if "run" in cells.columns and _shared_between_runs(cells, labels):
        labels = labels + cells["run"].map(lambda v: f" · {v}")
    cells = cells.assign(series=labels)
    rates = [level_rates(rows) for _, rows in cells.groupby("series", sort=False)]
    return cells.assign(level_rps=pd.concat(rates).reindex(cells.index))


def _part(column: str, value: object, *, bare: bool) -> str:
    if value is None or value == "" or value != value:
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f" · {text}" if bare else f" · {column} {text}"


def _shared_between_runs(cells: pd.DataFrame, labels: pd.Series[str]) -> bool:
    return bool((cells["run"].groupby(labels).nunique() > 1).any())


def combine(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """The cells of all runs, with `run` (name), `folder` (its place in `runs`) and `series`."""
    axes = list(dict.fromkeys(axis for run in runs for axis in run.axes))
    frames = [run.cells.assign(run=run.name, folder=at) for at, run in enumerate(runs)]
    cells = pd.concat(frames, ignore_index=True)
    for axis in axes:
        cells[axis] = cells[axis].where(cells[axis].notna(), "")
    return with_series(cells, axes)


def series_names(cells: pd.DataFrame) -> list[str]:
    """The series, best first: by the highest rate at 90 %, then at 99 %, then mean attainment."""

    def merit(item: tuple[int, str]) -> tuple[float, ...]:
        place, name = item
        rows = cells[cells["series"] == name]
        carried = [highest_rate(rows, target).rate_rps or 0.0 for target in TARGETS]
        return (*(-rate for rate in carried), -float(rows["attainment"].mean()), place)

    in_order = list(dict.fromkeys(cells["series"]))
    return [name for _, name in sorted(enumerate(in_order), key=merit)]


def levels(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per series and rate, over the valid seeds.

    Columns `series`, `rate_rps`, `seeds`, and of each number column its mean under its own name,
    its lowest and its highest value as `<name>_lo` and `<name>_hi`.
    """
    valid = cells[cells["valid"]]
    keys = {"series": valid["series"], "rate_rps": valid["level_rps"].rename("rate_rps")}
    dropped = {"rate_rps", "level_rps", "seed", "folder", "valid", "speed", "load"}
    numbers = [c for c in valid.select_dtypes("number").columns if c not in dropped]
    grouped = valid[numbers].groupby([keys["series"], keys["rate_rps"]], sort=True)
    parts = [
        grouped.size().rename("seeds").to_frame(),
        grouped.mean(),
        grouped.min().add_suffix("_lo"),
        grouped.max().add_suffix("_hi"),
    ]
    return pd.concat(parts, axis=1).reset_index()


def knee_rps(level_rows: pd.DataFrame) -> float:
    """The lowest rate at which the median system is under 90 %; the highest where none is."""
    medians = level_rows.groupby("rate_rps")["attainment"].median()
    under = medians[medians < TARGETS[0]]
    return float(under.index.min() if len(under) else medians.index.max())
