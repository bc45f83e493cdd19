"""Cells to curves: which rows form one series, and what its seeds say at every offered rate."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from ...harness.experiments.execution import refinement
from ...harness.results.read_run import RunResults
from ...harness.results.run_columns import LEAD_COLUMNS
from ...workloads.parsing import parse_toml
from .facets import with_facets
from .figure import percent_text, rate_text, seconds_text

Load = Literal["several rates", "one rate", "at once"]

TARGETS = refinement.TARGETS
"""The attainments whose highest rate every summary names."""


@dataclass(frozen=True)
class HighestRate:
    """The highest tested rate up to which every tested rate reaches a target: a mean attainment
    over seeds.

    `rate_rps` is None where the lowest tested rate does not reach it. `at_end` says that all do, so
    that the system may carry more; `lowest_rps` and `top_rps` are the ends of what was tested.
    `again_rps` are the rates above the first failure that reach the target again.
    """

    rate_rps: float | None
    at_end: bool
    lowest_rps: float
    top_rps: float
    failed_rps: float | None = None  # the lowest rate that does not reach the target
    failed_attainment: float = math.nan
    again_rps: tuple[float, ...] = ()


def highest_rate(cells: pd.DataFrame, target: float) -> HighestRate:
    """Highest rate of one system; `cells` are its rows, of which invalid ones do not count."""
    valid = cells[cells["valid"]]
    if valid.empty:
        return HighestRate(None, False, 0.0, 0.0)
    means = valid.groupby(level_rates(valid))["attainment"].mean()
    low, top = float(means.index.min()), float(means.index.max())
    passing = reaches(means, target)
    carried = passing.cummin()
    if carried.all():
        return HighestRate(top, True, low, top)
    failed = float(means.index[~carried].min())
    rate = float(means.index[carried].max()) if carried.any() else None
    again = tuple(map(float, means.index[passing & ~carried]))
    return HighestRate(rate, False, low, top, failed, float(means[failed]), again)


def highest_range(cells: pd.DataFrame, target: float) -> tuple[HighestRate, HighestRate]:
    """The highest rates of one system at the ends of what `range_text` names."""
    low, high = (cells.assign(attainment=ends) for ends in _attainment_ends(cells))
    return highest_rate(low, target), highest_rate(high, target)


def _attainment_ends(cells: pd.DataFrame) -> tuple[pd.Series[float], pd.Series[float]]:
    if _banded(cells):
        return cells["band_low_attainment"], cells["band_high_attainment"]
    valid = cells[cells["valid"]]
    levels_of_seeds = valid.groupby(level_rates(valid))["attainment"]
    return (levels_of_seeds.transform("min"), levels_of_seeds.transform("max"))


def _banded(cells: pd.DataFrame) -> bool:
    """Whether every valid cell has a prediction band of its attainment."""
    ends = ["band_low_attainment", "band_high_attainment"]
    valid = cells[cells["valid"]]
    return set(ends) <= {*cells.columns} and bool(valid[ends].notna().to_numpy().all())


def range_text(cells: pd.DataFrame) -> str:
    """What ranges of the page's first table are: of predictions where all have one, else of seeds;
    empty where there is neither.
    """
    if _banded(cells):
        return "90\xa0% prediction band"
    return "lowest to highest seed" if cells["seed"].nunique() > 1 else ""


def measure_range(level: pd.Series[Any], column: str) -> tuple[float, float]:
    """The ends of a column of `levels`: of its prediction band, else over the seeds."""
    low, high = (float(level.get(f"band_{end}_{column}", math.nan)) for end in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return float(level[f"{column}_lo"]), float(level[f"{column}_hi"])
    return low, high


def reaches(attainment: pd.Series[float], target: float) -> pd.Series[bool]:
    """Which attainments reach the target; a mean of three 0.9 is a hair below 0.9 in binary."""
    return attainment >= target - 1e-12


def crossing_back(cells: pd.DataFrame, target: float) -> list[str]:
    """For each series whose attainment falls below `target` and reaches it again at higher rates, a
    sentence without its full stop.
    """
    sentences = []
    for (facet, name), rows in cells.groupby(["facet", "series"], sort=False):
        rate = highest_rate(rows, target)
        if rate.again_rps and rate.failed_rps is not None:
            again = ", ".join(map(rate_text, rate.again_rps))
            sentences.append(
                f"{', '.join(filter(None, (str(facet), str(name))))} has "
                f"{percent_text(rate.failed_attainment)} in SLO at {rate_text(rate.failed_rps)} "
                f"req/s and {100 * target:g} % again at {again}: only rates below the first "
                "failure count"
            )
    return sentences


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


def with_series(cells: pd.DataFrame) -> pd.DataFrame:
    """`cells` with the columns `facet`, `series` and `level_rps`."""
    cells = with_facets(cells)
    columns = [name for name in ("rate_rps", "seed", "level_rps") if name in cells.columns]
    of_series = cells.groupby(["facet", "series"], sort=False)[columns]
    rates = [level_rates(rows) for _, rows in of_series]
    return cells.assign(level_rps=pd.concat(rates).reindex(cells.index))


def combine(runs: Sequence[RunResults]) -> pd.DataFrame:
    """The cells of all runs, with the columns run (its name), folder (its place in `runs`), facet,
    series and level_rps.
    """
    axes = list(dict.fromkeys(axis for run in runs for axis in run.axes))
    frames = [
        run.cells.assign(**_slo(run), run=run.name, folder=index) for index, run in enumerate(runs)
    ]
    cells = pd.concat(frames, ignore_index=True)
    for axis in axes:
        cells[axis] = cells[axis].where(cells[axis].notna(), "")
    lead = [c for c in cells.columns if c in LEAD_COLUMNS]
    rest = [c for c in cells.columns if c not in (*lead, *axes)]
    return with_series(cells[[*lead, *axes, *rest]])


def _slo(run: RunResults) -> dict[str, str]:
    """The SLO that all cells of a run had, as a column; none where it is an axis."""
    if "slo" in run.axes:
        return {}
    try:
        return {"slo": str(parse_toml(run.experiment_toml).get("slo", "unknown"))}
    except tomllib.TOMLDecodeError:
        return {"slo": "unknown"}  # the report shows the file as it is


def has_slo(cells: pd.DataFrame) -> bool:
    """Whether requests had anything to meet but to finish."""
    if "slo" in cells.columns and (cells["slo"] != "").any():
        return True
    finished = cells["finished"] if "finished" in cells.columns else cells["requests"]
    return bool((cells["attainment"] * cells["requests"] < finished - 0.5).any())


def series_names(cells: pd.DataFrame) -> list[str]:
    """The series, best first: by their mean place in the facets that they are in."""
    places: dict[str, list[int]] = {}
    for _, of_facet in cells.groupby("facet", sort=False):
        for place, name in enumerate(_by_merit(of_facet)):
            places.setdefault(name, []).append(place)
    return sorted(places, key=lambda name: sum(places[name]) / len(places[name]))


def _by_merit(cells: pd.DataFrame) -> list[str]:
    """The series of one facet: by the highest rate at 90 %, then at 99 %, then mean attainment;
    by finished requests per second where all requests arrive at once.
    """
    at_once = offered(cells) == "at once"

    def merit(item: tuple[int, str]) -> tuple[float, ...]:
        place, name = item
        rows = cells[cells["series"] == name]
        carried = [highest_rate(rows, target).rate_rps or 0.0 for target in TARGETS]
        column = "throughput_rps" if at_once else "attainment"
        return (*(-rate for rate in carried), -float(rows[column].mean()), place)

    in_order = list(dict.fromkeys(cells["series"]))
    return [name for _, name in sorted(enumerate(in_order), key=merit)]


def offered(cells: pd.DataFrame) -> Load:
    """Kind of load: several rates, one rate for each series, or all requests at once."""
    if (cells["level_rps"] == 0).all():
        return "at once"
    rates = cells.groupby(["facet", "series"])["level_rps"].nunique()
    return "several rates" if rates.max() > 1 else "one rate"


def levels(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per facet, series and rate, over the valid seeds.

    Columns `facet`, `series`, `rate_rps`, `seeds`, `drifting` (whether a seed is not stationary),
    and of each number column its mean under its own name, its lowest and its highest value as
    `<name>_lo` and `<name>_hi`.
    """
    valid = cells[cells["valid"]]
    keys = [valid["facet"], valid["series"], valid["level_rps"].rename("rate_rps")]
    dropped = {"rate_rps", "level_rps", "seed", "folder", "valid", "replay_speed", "load_factor"}
    numbers = [c for c in valid.select_dtypes("number").columns if c not in dropped]
    grouped = valid[numbers].groupby(keys, sort=True)
    parts = [
        grouped.size().rename("seeds").to_frame(),
        drifting(valid).groupby(keys).any().rename("drifting").to_frame(),
        grouped.mean(),
        grouped.min().add_suffix("_lo"),
        grouped.max().add_suffix("_hi"),
    ]
    return pd.concat(parts, axis=1).copy().reset_index()  # one block, not one a part


def drifting(cells: pd.DataFrame) -> pd.Series[bool]:
    """Which cells are known not to be stationary."""
    if "stationary" not in cells:
        return pd.Series(False, cells.index)
    return cells["stationary"].map(lambda is_stationary: is_stationary is False).astype(bool)


def after_text(level: pd.Series[Any]) -> str:
    """`after 540 s`: the arrivals after which a level that drifts was measured; else empty."""
    if not level["drifting"]:
        return ""
    return window_text(float(level.get("arrival_window_s", math.nan))) or "yes"


def window_text(window_s: float) -> str:
    """`after 540 s`, of a window of arrivals; empty where it is not known."""
    return f"after {rate_text(window_s)} s" if window_s > 0 else ""


def knee_rps(level_rows: pd.DataFrame) -> float:
    """The lowest rate at which the median system is under 90 %; the highest where none is."""
    medians = level_rows.groupby("rate_rps")["attainment"].median()
    under = medians[medians < TARGETS[0]]
    return float(under.index.min() if len(under) else medians.index.max())


def origin(cells: pd.DataFrame) -> str:
    """`simulated`, `measured`, or both: where the numbers come from."""
    simulated = cells["backend"] == "simulated"
    if simulated.all():
        return "simulated"
    return "simulated and measured" if simulated.any() else "measured"


def highest_text(highest: HighestRate) -> str:
    """`6`, `≥ 6` where every rate tested reaches the target, `< 1` where the lowest does not; a
    dash where no rate was offered, or no cell is valid.
    """
    if not highest.top_rps:
        return "–"
    if highest.rate_rps is None:
        return f"< {rate_text(highest.lowest_rps)}"
    return f"≥ {rate_text(highest.rate_rps)}" if highest.at_end else rate_text(highest.rate_rps)


@dataclass(frozen=True)
class Measure:
    """A column of the rows of `levels` as a column of a table."""

    head: str
    column: str
    text: Callable[[float], str]
    more_is_better: bool

    def best(self, rows: pd.DataFrame) -> str:
        """Text of the best value of the rows; empty if all values read the same."""
        values = rows[self.column].dropna()
        texts = {self.text(float(value)) for value in values}
        if len(texts) < 2:
            return ""
        return self.text(float(values.max() if self.more_is_better else values.min()))


IN_SLO = Measure("in SLO", "attainment", percent_text, True)
GOODPUT = Measure("goodput", "goodput_rps", rate_text, True)
FINISHED = Measure("finished req/s", "throughput_rps", rate_text, True)
MAKESPAN = Measure("makespan", "makespan_s", seconds_text, False)
LATENCY = Measure("mean latency", "e2e_mean_s", seconds_text, False)
TURNAROUND = Measure("weighted turnaround", "weighted_turnaround", rate_text, False)
TTFT = Measure("TTFT p99", "ttft_p99_s", seconds_text, False)
TPOT = Measure("TPOT p99", "tpot_p99_s", seconds_text, False)

AT_A_RATE = (IN_SLO, GOODPUT, TTFT, TPOT)
AT_ONCE = (FINISHED, MAKESPAN, LATENCY, TURNAROUND, IN_SLO)


def measures(cells: pd.DataFrame) -> tuple[Measure, ...]:
    """Measures shown for each series, the most important first; attainment only with an SLO."""
    shown = AT_ONCE if offered(cells) == "at once" else AT_A_RATE
    slo_is_set = has_slo(cells)
    return tuple(m for m in shown if m.column in cells.columns and (slo_is_set or m is not IN_SLO))


GOODPUT_DIVISOR = (
    "Goodput divides by the window of arrivals (where no rate is offered: by the makespan)"
)


def divisor_text(cells: pd.DataFrame) -> str:
    """A sentence on what the rates of a table divide by."""
    if "arrival_window_s" not in cells or cells["arrival_window_s"].isna().any():
        return (
            "Goodput divides by the makespan, which includes the drain, in runs without the column "
            "arrival_window_s; in later runs by the window of arrivals."
        )
    return (
        f"{GOODPUT_DIVISOR}, finished requests and tokens per second by the makespan, which "
        "includes the drain."
    )


def load_text(cells: pd.DataFrame) -> str:
    """The load where every series has one level: `at 4 req/s`, or `all requests at once`."""
    if offered(cells) == "at once":
        return "all requests at once"
    rates = cells["level_rps"]
    low, high = rate_text(float(rates.min())), rate_text(float(rates.max()))
    return f"at {low} req/s" if low == high else f"at {low} to {high} req/s"
