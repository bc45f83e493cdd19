"""Summary tables of a run, for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ...harness.core.counters import ANSWERS_CUT, COUNT
from ...harness.results.run_columns import REASON_COLUMN
from ..figures.details import LevelDetail
from ..figures.facets import by_facet, by_series, facets_of
from ..figures.figure import percent_text, rate_text, seconds_text
from ..figures.levels import (
    AT_A_RATE,
    IN_SLO,
    TARGETS,
    HighestRate,
    Measure,
    after_text,
    divisor_text,
    has_slo,
    highest_range,
    highest_rate,
    highest_text,
    load_text,
    measure_range,
    measures,
    offered,
    range_text,
)
from . import answers_page
from .answer import best_goodput, winners
from .answers_page import counted_text
from .table import Cell, Row, Table

_HIGHEST = ("system", *(f"≥ {target:.0%} in SLO" for target in TARGETS))


# What the first requests of a closed loop change, and the end of the columns without them.
_STARTING = {"attainment": percent_text, "ttft_p99_s": seconds_text}
_LATER = "_after_start"
_LEAST_GAIN = 0.01  # of attainment without them
_LEAST_RATIO = 1.1  # of TTFT with them to that without
STARTED_TOGETHER = ". --warmup leaves them out."


def overload_heads(rows: pd.DataFrame) -> tuple[str, ...]:
    """The head of the column that says when levels were measured; none where all are stationary."""
    return (OVERLOADED,) if rows["drifting"].any() else ()


def careful_lines(cells: pd.DataFrame) -> list[str]:
    """Sentences on what may make the results others than they seem; none where nothing does."""
    invalid = cells[~cells["valid"]]
    left_out = f"{len(invalid)} of {len(cells)}" if len(invalid) else ""
    too_long = "Too long for the context or the KV cache, and missed: "
    # Of each a beginning, what is empty where there is nothing to say, and the end.
    facts = [
        ("", answers_page.failed_text(cells), "."),
        ("unfitted: step times of ", unfitted_pairs(cells), " are an analytic estimate."),
        ("", left_out, f" cells are invalid and left out: {invalid_reason(invalid)}."),
        ("", few_requests_text(cells), f": {FEW}."),
        (too_long, oversize_text(cells), "."),
        ("Models on no GPU, all their requests missed: ", unplaced_text(cells), "."),
        ("", cut_answers_text(cells), CUT),
        *(("", text, ".") for text in answers_page.sentences(cells)),
        ("Closed loop: ", started_together_text(cells), STARTED_TOGETHER),
        ("Served with fewer tokens than the workload has: ", truncated_text(cells), "."),
    ]
    return [f"{begin}{text}{end}" for begin, text, end in facts if text]


def started_together_text(cells: pd.DataFrame) -> str:
    """`without the first 64 requests, which start together, vllm has 95.8 % in SLO (82.2 % with
    them), TTFT p99 1.45 s (10.9 s)`: of the level for which that matters most; "" if for none.
    """
    if "started_together" not in cells:
        return ""
    started = cells[cells["valid"] & cells["started_together"].notna()]
    places = ["facet", "series", "level_rps"]
    figures = ["started_together", *(f"{name}{end}" for name in _STARTING for end in ("", _LATER))]
    levels = started.groupby(places, sort=False)[figures].mean().reset_index()
    gain = (levels[f"attainment{_LATER}"] - levels["attainment"]).abs()
    ratio = levels["ttft_p99_s"] / levels[f"ttft_p99_s{_LATER}"]
    levels = levels.assign(gain=gain, ratio=ratio)[(gain >= _LEAST_GAIN) | (ratio >= _LEAST_RATIO)]
    if levels.empty:
        return ""
    level = levels.sort_values(["gain", "ratio"]).iloc[-1]
    name = ", ".join(filter(None, (str(level["facet"]), str(level["series"]))))
    later, all_requests = (
        [text(float(level[f"{figure}{end}"])) for figure, text in _STARTING.items()]
        for end in (_LATER, "")
    )
    share = f"{later[0]} in SLO ({all_requests[0]} with them), " * has_slo(cells)
    return (
        f"without the first {level['started_together']:.0f} requests, which start together, {name} "
        f"has {share}TTFT p99 {later[1]} ({all_requests[1]}{'' if share else ' with them'})"
    )


def few_requests_text(cells: pd.DataFrame) -> str:
    """`3 requests at a rate`, the fewest of a system; empty where they can tell what carries 90 %,
    or where nothing is said of that.
    """
    valid = cells[cells["valid"]]
    if valid.empty or not has_slo(cells) or offered(cells) != "several rates":
        return ""
    fewest = int(valid.groupby(["facet", "series", "level_rps"])["requests"].sum().min())
    return f"{fewest} request{'s' * (fewest > 1)} at a rate" if fewest < _TELLING else ""


def energy_text(rows: pd.DataFrame) -> str:
    """Each system's joules per output token at its lowest and its highest rate; "" if unknown."""
    texts = {}
    for name, series_rows in _powered(rows).groupby("series", sort=False):
        ends = dict.fromkeys(f"{float(series_rows[_JOULES].iloc[end]):.3g}" for end in (0, -1))
        texts[str(name)] = " and ".join(ends)
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def invalid_reason(invalid: pd.DataFrame) -> str:
    """Why the first of these cells is invalid; empty without cells."""
    if invalid.empty:
        return ""
    return str(invalid[REASON_COLUMN].iloc[0]) if REASON_COLUMN in invalid else "late client"


# Of so many requests all are in SLO with a chance below 5 % where 90 % are on average.
_TELLING = 29
FEW = f"too few to tell 90\xa0% in SLO from all, which takes {_TELLING}"
CUT = ": its throughput and latency are not those of whole answers."
OVERLOADED = "overloaded"
OVERLOADED_NOTE = (
    "The queue grows for as long as load lasts, or attainment drifts: the figures hold after that "
    "time of arrivals and change with a longer run."
)


def overloaded_levels_text(rows: pd.DataFrame) -> str:
    """`vllm at 8, 12 req/s after 540 s`: the levels with an overloaded cell."""
    drifting_rows = rows[rows["drifting"]]
    points: dict[tuple[str, ...], list[str]] = {}
    for _, row in drifting_rows.iterrows():
        name = ", ".join(filter(None, (str(row["facet"]), str(row["series"]))))
        points.setdefault((name, after_text(row)), []).append(rate_text(float(row["rate_rps"])))
    return "; ".join(
        f"{name} at {', '.join(rates)} req/s {after}".removesuffix(" yes")
        for (name, after), rates in points.items()
    )


def unfitted_pairs(cells: pd.DataFrame) -> str:
    """The models and GPUs whose step times are an estimate."""
    unfitted = cells[cells["step_time"] == "unfitted"]
    return ", ".join(sorted(set(unfitted["model"] + " on " + unfitted["gpu"])))


def oversize_text(cells: pd.DataFrame) -> str:
    """`12 of 3,000 requests (overlong)`; empty where all fit."""
    return counted_text(cells, "overlong", "requests (overlong)")


def shared_cores_text(cells: pd.DataFrame) -> str:
    """On which cores of one machine servers and load generator ran; empty where it is not known."""
    if "server_cores" not in cells or cells["server_cores"].isna().all():
        return ""
    core_counts = cells.dropna(subset=["server_cores"])[["server_cores", "client_cores"]]
    return "; ".join(
        f"Servers and load generator shared a machine: cores of the servers {int(servers)}, left "
        f"to the load generator {int(client)}"
        for servers, client in core_counts.drop_duplicates().itertuples(index=False)
    )


def unplaced_text(cells: pd.DataFrame) -> str:
    """`muxserve at 1 req/s: 4 models`: where models with requests stood on no GPU."""
    if "models_unplaced" not in cells:
        return ""
    without = cells[cells["models_unplaced"] > 0].sort_values("models_unplaced", ascending=False)
    texts = []
    for _, row in without.drop_duplicates(["series", "level_rps"]).sort_index().iterrows():
        models = f"{row['models_unplaced']:.0f} model{'s' * (row['models_unplaced'] > 1)}"
        texts.append(f"{row['series']} at {rate_text(float(row['level_rps']))} req/s: {models}")
    return "; ".join(texts)


def truncated_text(cells: pd.DataFrame) -> str:
    """`12 of 3,000 requests (truncated)`; empty where none was."""
    return counted_text(cells, "overlong_truncated", "requests (truncated)")


def cut_answers_text(cells: pd.DataFrame) -> str:
    """`slo-odbs cut 24 of 100 answers`: how many each system, or variant of an experiment, ended
    early; empty where none did.
    """
    named = "variant" if "variant" in cells else "system"
    cut = {
        str(name): counted_text(named_cells, COUNT + ANSWERS_CUT, "answers")
        for name, named_cells in cells.groupby(named, sort=False)
    }
    return ", ".join(f"{name} cut {text}" for name, text in cut.items() if text)


def best_table(
    cells: pd.DataFrame,
    rows: pd.DataFrame,
    details: Sequence[LevelDetail],
    names: Sequence[str],
    badge: str,
) -> Table:
    """A row per series, under its facet: what it carries, or did at its one level; its cost."""
    facets = facets_of(cells)
    price = "US$ per million tokens" + (" in SLO" if has_slo(cells) else "")
    groups: list[tuple[str | Cell, Sequence[Row]]]
    if offered(cells) == "several rates":
        kind, caption = "rates", "Highest tested rate and best goodput, req/s, mean over seeds"
        heads = [*_HIGHEST, "best goodput", f"{price}, at 90\xa0%"]
        groups = [
            (facet, list(_rates(facet_cells, rows[rows["facet"] == facet], details, names)))
            for facet, facet_cells in by_facet(cells, facets).items()
        ]
    else:
        kind, caption = "", f"Means over seeds, {load_text(cells)}"
        shown, drifting = measures(cells), overload_heads(rows)
        heads = ["system", *(m.head for m in shown), *drifting, price]
        groups = [
            (
                facet,
                [
                    (
                        Cell(name, series=names.index(name)),
                        *figures,
                        _cost(details, facet, name, rate),
                    )
                    for name, rate, figures in each_level(of_facet, names, shown, drifting)
                ],
            )
            for facet, of_facet in by_facet(rows, facets).items()
        ]
    css = " ".join(["summary", *kind.split(), *["grouped"] * (len(groups) > 1)])
    if below := range_text(cells):
        caption += f"; below, and as a line over the bar: {below}"
    note = divisor_text(cells)
    return Table("Summary", heads, groups, (0,), (), caption, note, badge, css)


def _rates(
    cells: pd.DataFrame, rows: pd.DataFrame, details: Sequence[LevelDetail], names: Sequence[str]
) -> Iterator[Row]:
    """Table rows of one facet: highest rates, best goodput and cost of each series."""
    top = float(cells["level_rps"].max())
    goodput = best_goodput(rows, names)
    best = set(winners(goodput, names, rate_text))
    for place, name, series_cells in by_series(cells, names):
        highest = [highest_rate(series_cells, target) for target in TARGETS]
        ranges = [highest_range(series_cells, target) for target in TARGETS]
        yield (
            Cell(name, series=place),
            *(
                _rate_cell(rate, ends, top, place)
                for rate, ends in zip(highest, ranges, strict=True)
            ),
            Cell(rate_text(goodput.get(name, math.nan)), best=name in best < goodput.keys()),
            _cost(details, str(series_cells["facet"].iloc[0]), name, highest[0].rate_rps),
        )


def _rate_cell(
    highest: HighestRate, ends: tuple[HighestRate, HighestRate], top: float, place: int
) -> Cell:
    """The highest rate of the series at `place`, with its range; `top` is the longest bar's."""
    low, high = (highest_text(end) for end in ends)
    low_rps, high_rps = (end.rate_rps or 0.0 for end in ends)
    return Cell(
        highest_text(highest),
        css="" if highest.rate_rps is not None else "dim",
        bar=_share(highest.rate_rps or 0.0, top),
        bar_of=place,
        bar_range=None if low == high else (_share(low_rps, top), _share(high_rps, top)),
        after="" if low == high else f"{low} to {high}",
    )


def each_level(
    rows: pd.DataFrame,
    names: Sequence[str],
    shown: Sequence[Measure] = AT_A_RATE,
    drifting: Sequence[str] = (),
) -> Iterator[tuple[str, float, list[Cell]]]:
    """Name, rate and cells of the measures, for each series of one facet at each of its rates, and
    a cell for the column `drifting`.
    """
    best = {measure: measure.best(rows) for measure in shown}
    top = 1.0 if shown[0] is IN_SLO else float(rows[shown[0].column].max())
    for place, name, series_rows in by_series(rows, names):
        for _, row in series_rows.iterrows():
            values = [float(row[measure.column]) for measure in shown]
            texts = [measure.text(value) for measure, value in zip(shown, values, strict=True)]
            yield (
                name,
                float(row["rate_rps"]),
                [
                    Cell(
                        text,
                        style=_style(value) if measure is IN_SLO else "",
                        best=text == best[measure],
                        bar=_share(value, top) if measure is shown[0] else None,
                        bar_of=place,
                        **_range(row, measure, top if measure is shown[0] else None),
                    )
                    for measure, value, text in zip(shown, values, texts, strict=True)
                ]
                + [Cell(after_text(row)) for _ in drifting],
            )


def _range(level: pd.Series[Any], measure: Measure, top: float | None) -> dict[str, Any]:
    """Of a cell the range of its measure, and its ends on the bar where that ends at `top`."""
    ends = measure_range(level, measure.column)
    low, high = map(measure.text, ends)
    if low == high or not all(map(math.isfinite, ends)):
        return {}
    on_bar = None if top is None else (_share(ends[0], top), min(100.0, _share(ends[1], top)))
    return {"after": f"{low} to {high}", "bar_range": on_bar}


def _style(attainment: float) -> str:
    return "green" if attainment >= TARGETS[0] else "yellow" if attainment >= 0.5 else "red"


def _share(value: float, top: float) -> float:
    return 100 * value / top if top and math.isfinite(value) else 0.0


def _cost(details: Sequence[LevelDetail], facet: str, name: str, rate: float | None) -> str:
    costs = [d.cost for d in details if (d.facet, d.series, d.rate_rps) == (facet, name, rate)]
    return f"${rate_text(costs[0])}" if costs and math.isfinite(costs[0]) else "–"


_JOULES = "joules_per_output_token"

LEVEL_HEADS = (
    "Offered req/s",
    "In SLO",
    "Lowest – highest",
    "Goodput req/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "Tokens/s",
    "KV peak",
    "Preemptions",
    "Overloaded",
)


def level_table(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """Every system at every rate, by facet."""
    groups = []
    powered = bool(len(_powered(rows)))
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        for place, name, series_rows in by_series(of_facet, names):
            lines = [_level_row(row, powered=powered) for _, row in series_rows.iterrows()]
            groups.append((Cell(name, series=place, before=facet), lines))
    caption = "Means over seeds, with the lowest and highest attainment of a seed"
    note, label = divisor_text(cells), "All systems at all rates"
    heads = (*LEVEL_HEADS[:-1], "J/token", LEVEL_HEADS[-1]) if powered else LEVEL_HEADS
    return Table(label, heads, groups, caption=caption, note=note, badge=badge)


def _level_row(row: pd.Series[Any], *, powered: bool) -> Row:
    share, low, high = (float(row[f"attainment{end}"]) for end in ("", "_lo", "_hi"))
    preempted = sum(float(row.get(f"preemptions_{way}", 0.0)) for way in ("swap", "recompute"))
    return [
        rate_text(float(row["rate_rps"])),
        Cell(percent_text(share), css="" if share >= TARGETS[0] else "short"),
        Cell(f"{percent_text(low)} – {percent_text(high)}", css="range"),
        rate_text(float(row["goodput_rps"])),
        *(seconds_text(float(row[f"{m}_{p}_s"])) for m in ("ttft", "tpot") for p in ("p50", "p99")),
        f"{float(row['output_tokens_per_s']):,.0f}",
        percent_text(float(row.get("kv_cache_usage_peak", math.nan))),
        rate_text(preempted),
        *([_joules(row)] if powered else []),
        after_text(row),
    ]


def _powered(rows: pd.DataFrame) -> pd.DataFrame:
    """The levels of which energy is known."""
    return rows[rows[_JOULES].notna()] if _JOULES in rows else rows[:0]


def _joules(row: pd.Series[Any]) -> str:
    joules = float(row[_JOULES])
    return f"{joules:.3g}" if math.isfinite(joules) else "–"
