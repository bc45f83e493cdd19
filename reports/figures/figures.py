"""The report's figures, one small function each."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from .details import CAUSES, PHASES, Distribution, LevelDetail, SloRange
from .facets import by_series, full_names, with_facets
from .figure import ONLY, Axis, Figure, View, curve, rate_key, rate_text, seconds_text
from .levels import TARGETS, knee_rps, reaches

RATE = Axis("offered rate, req/s", "rate")
_NAMES = Axis("", "number")  # of bars: they are named at their side
BAND = "Line: mean over seeds; band: lowest to highest seed."


Metric = Literal["ttft", "tpot"]
Latency = Literal["ttft", "tpot", "e2e"]
State = Literal["waiting", "running", "kv_cache_usage"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot")
STATES: tuple[State, ...] = ("waiting", "running", "kv_cache_usage")
LATENCIES: Mapping[Latency, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
}


def latency(
    rows: pd.DataFrame, names: Sequence[str], metric: Metric, bound: SloRange | None
) -> Figure:
    """A percentile of TTFT or TPOT against offered rate, the percentile to be picked."""
    options = [["p50", "p50"], ["p90", "p90"], ["p99", "p99"], ["mean", "mean"]]
    views = {
        key: {"series": _curves(rows, names, f"{metric}_{key}_s"), "lines": _bound("y", bound)}
        for key, _ in options
    }
    return Figure(
        id=f"{metric}-rate",
        title=f"{LATENCIES[metric]} against load",
        note=f"Of the requests that got that far. {BAND}",
        x=RATE,
        y=Axis(metric.upper(), "seconds", scale="log"),
        views=views,
        picker="local",
        options=options,
    )


def bar_figure(**fields: Any) -> Figure:
    """A figure with one horizontal bar for each series."""
    return Figure(kind="bars", y=_NAMES, **fields)


def curves_at_a_rate(**fields: Any) -> Figure:
    """Curves without marks, at the rate that is chosen on the page."""
    return Figure(picker="rate", hover="interpolate", markers=False, **fields)


# Columns of level rows, with title, note and axis of their figures.
COMPARED = {
    "throughput_rps": (
        "Finished requests",
        "Over the makespan, whether they met an SLO or not.",
        Axis("finished requests, per s", "rate"),
    ),
    "makespan_s": (
        "Makespan",
        "From the first arrival to the last finish; less is better.",
        Axis("makespan", "seconds"),
    ),
    "weighted_turnaround": (
        "Weighted turnaround",
        "Mean over finished requests of time in the system ÷ time from the first batch on; 1 if no "
        "request waits, less is better.",
        Axis("weighted turnaround", "number"),
    ),
    "attainment": (
        "Requests that met their SLO",
        "Share of all requests that arrived.",
        Axis("requests in SLO", "percent", top=1.0),
    ),
    "goodput_rps": (
        "Goodput",
        "Requests that met their SLO ÷ window of arrivals.",
        Axis("requests in SLO, per s", "rate"),
    ),
}

_SEEDS = "Bar: mean over seeds; line: lowest to highest seed."


def against_rate(rows: pd.DataFrame, names: Sequence[str], column: str) -> Figure:
    """Attainment, with lines at 90 % and 99 %, or goodput, with the line where all are in SLO,
    against offered rate.
    """
    title, note, axis = COMPARED[column]
    lines = [_line("y", 0.9, "90 %"), _line("y", 0.99, "99 %")]
    if column == "goodput_rps":
        top = float(rows["rate_rps"].max())
        lines = [{"axis": "diagonal", "value": top, "label": "all in SLO"}]
    return Figure(
        id=_id(column),
        title=title,
        note=f"{note} {BAND}",
        x=RATE,
        y=axis,
        views={ONLY: {"series": _curves(rows, names, column), "lines": lines}},
    )


def _id(column: str) -> str:
    return column.rpartition("_")[0] or column


def compared(rows: pd.DataFrame, names: Sequence[str], column: str) -> Figure:
    """One of `COMPARED`, a bar for each series, where each has one level."""
    title, note, axis = COMPARED[column]
    return bar_figure(
        id=_id(column),
        title=title,
        note=f"{note} {_SEEDS}",
        x=axis,
        views={ONLY: {"series": _bars(rows, names, column), "lines": []}},
    )


def latency_compared(
    rows: pd.DataFrame, names: Sequence[str], metric: Latency, bound: SloRange | None
) -> Figure:
    """A percentile of a latency, a bar for each series, where each has one level."""
    options = [[key, key] for key in ("p50", "p90", "p99", "mean") if _column(metric, key) in rows]
    views = {
        key: {"series": _bars(rows, names, _column(metric, key)), "lines": _bound("x", bound)}
        for key, _ in options
    }
    return bar_figure(
        id=f"{metric}-compared",
        title=LATENCIES[metric],
        note=f"Of the requests that got that far; less is better. {_SEEDS}",
        x=Axis(metric.upper() if metric != "e2e" else "end to end", "seconds"),
        views=views,
        picker="local",
        options=options,
    )


def _column(metric: str, key: str) -> str:
    return f"{metric}_{key}_s"


def _bars(rows: pd.DataFrame, names: Sequence[str], column: str) -> list[View]:
    bars: list[View] = []
    for place, _, series_rows in by_series(rows[rows[column].notna()], names):
        row = series_rows.iloc[0]
        value, low, high = (float(row[f"{column}{end}"]) for end in ("", "_lo", "_hi"))
        bars.append({"s": place, "parts": [value], "lo": low, "hi": high})
    return bars


def latency_distribution(
    details: Iterable[LevelDetail], names: Sequence[str], metric: Metric
) -> Figure:
    """The share of requests served within a TTFT or TPOT, at one rate."""

    def draw(detail: LevelDetail, place: int) -> View | None:
        distribution: Distribution = getattr(detail, metric)
        if not len(distribution.value_s):
            return None
        return curve(place, distribution.value_s, distribution.share)

    whole = "requests that generate" if metric == "ttft" else "requests of more than one token"
    return curves_at_a_rate(
        id=f"{metric}-distribution",
        title=f"{LATENCIES[metric]}, distribution",
        note=f"All seeds together, over all {whole}; a curve that ends below 100 % never "
        "served the rest.",
        x=Axis(metric.upper(), "seconds", scale="log"),
        y=Axis(f"{whole.split()[0]} within", "percent", top=1.0),
        views=_by_rate(details, names, draw, lambda d: _bound("x", d.bounds.get(metric))),
    )


def causes(details: Iterable[LevelDetail], names: Sequence[str]) -> Figure:
    """Which bound was missed, or what else became of the requests, at one rate."""

    def bar(detail: LevelDetail, place: int) -> View | None:
        if not detail.requests:
            return None
        return {"s": place, "parts": [detail.missed[c] / detail.requests for c in CAUSES]}

    return bar_figure(
        id="causes",
        title="Why requests missed their SLO",
        note="Share of all requests; every miss is counted once. 'TTFT' and 'TPOT' also hold those "
        "that broke the end-to-end bound or the deadline as well.",
        x=Axis("requests that missed", "percent"),
        views=_by_rate(details, names, bar),
        picker="rate",
        categories=list(CAUSES),
        palette="cause",
    )


def phases(
    details: Iterable[LevelDetail], names: Sequence[str], *, until: Literal["first", "last"]
) -> Figure:
    """Mean time by phase until the first or last token of finished requests that missed."""
    shown = PHASES if until == "last" else PHASES[:2]

    def bar(detail: LevelDetail, place: int) -> View | None:
        parts = [detail.missed_phase_s[p] for p in shown]
        return None if any(math.isnan(p) for p in parts) else {"s": place, "parts": parts}

    return bar_figure(
        id=f"{until}-token",
        title=f"Missed requests: time until the {until} token",
        note="Mean over requests that finished but missed. Waiting: from arrival to the first "
        "batch; prefill: to the first token, in a static batch to its return; transfer: between "
        "instances; decode: to the last. Preemptions count where they fell. A far longer bar is "
        "cut.",
        x=Axis("mean time per missed request", "seconds"),
        views=_by_rate(details, names, bar),
        picker="rate",
        categories=list(shown),
        palette="phase",
    )


def attainment_over_time(details: Iterable[LevelDetail], names: Sequence[str]) -> Figure:
    """Attainment by the time at which requests arrived, at one rate."""

    def draw(detail: LevelDetail, place: int) -> View | None:
        attainment = detail.attainment
        return curve(place, attainment.time_s, attainment.share) if len(attainment.time_s) else None

    return curves_at_a_rate(
        id="time-attainment",
        title="Requests that met their SLO, over time",
        note="Share of the requests that arrived in each span of time, all seeds together. Where a "
        "system is overloaded it changes with the time for which load lasts.",
        x=Axis("time since the start of arrivals", "duration"),
        y=Axis("requests in SLO", "percent", top=1.0),
        views=_by_rate(details, names, draw),
    )


def over_time(
    details: Iterable[LevelDetail],
    names: Sequence[str],
    column: State,
) -> Figure:
    """Queue, batch or KV use over time, first seed, at one rate."""
    title, axis = {
        "waiting": ("Queue over time", Axis("requests waiting", "number")),
        "running": ("Batch over time", Axis("requests running", "number")),
        "kv_cache_usage": ("KV cache over time", Axis("KV blocks in use", "percent", top=1.0)),
    }[column]

    def draw(detail: LevelDetail, place: int) -> View:
        return curve(place, detail.timeline.time_s, getattr(detail.timeline, column))

    views = _by_rate(details, names, draw)
    for view in views.values():
        _cut_late(view["series"])
    return curves_at_a_rate(
        id=f"time-{column.replace('_', '-')}",
        title=title,
        note="All instances together, one seed; means over equal spans of time. Cut at twice the "
        "time that the median system took.",
        x=Axis("time since start", "duration"),
        y=axis,
        views=views,
    )


def _cut_late(curves: list[View]) -> None:
    """Cut curves at twice the median end, so that one slow system does not compress the others."""
    if curves:
        end = 2 * statistics.median(drawn["x"][-1] for drawn in curves if drawn["x"])
        for drawn in curves:
            kept = bisect.bisect_right(drawn["x"], end)
            drawn["x"], drawn["y"] = drawn["x"][:kept], drawn["y"][:kept]


def efficiency(rows: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Tokens/s per GPU against tokens/s per user (1 / median TPOT), a point per rate."""
    curves: list[View] = []
    for place, _, series_rows in by_series(rows[rows["tpot_p50_s"] > 0], names):
        labels = [f"{rate_text(rate)} req/s" for rate in series_rows["rate_rps"]]
        per_gpu = series_rows["output_tokens_per_s"] / series_rows["gpus"]
        short = (series_rows["attainment"] < TARGETS[0]).tolist()
        per_user = 1 / series_rows["tpot_p50_s"]
        curves.append(curve(place, per_user, per_gpu, labels=labels, hollow=short))
    return Figure(
        id="efficiency",
        title="Throughput per GPU against speed per user",
        note="Output tokens ÷ makespan; speed per user is 1 / median TPOT. A point per rate, "
        "hollow where under 90 % met their SLO, ringed where no other beats it in both.",
        x=Axis("tokens/s per user", "number"),
        y=Axis("tokens/s per GPU", "number"),
        views={ONLY: {"series": curves, "frontier": True}},
        hover="point",
    )


def cost(details: Sequence[LevelDetail], names: Sequence[str], *, compared: bool) -> Figure | None:
    """Dollars per million output tokens of requests in SLO, against the rate or, `compared`, a bar
    for each series, where each has one level; None where no price is known.
    """
    series: list[View] = []
    for place, name in enumerate(names):
        priced = [d for d in details if d.series == name and math.isfinite(d.cost)]
        costs = [(d.cost, d.cost_low, d.cost_high) for d in priced]
        if priced and compared:
            cost, low, high = costs[-1]
            series.append({"s": place, "parts": [cost], "lo": low, "hi": high})
        elif priced:
            each, lows, highs = map(list, zip(*costs, strict=True))
            series.append(curve(place, [d.rate_rps for d in priced], each, lo=lows, hi=highs))
    if not series:
        return None
    marks = ("Bar", "line") if compared else ("Line", "band")
    dollars = Axis("US$ per million tokens", "dollars", scale="linear" if compared else "log")
    return Figure(
        id="cost",
        kind="bars" if compared else "lines",
        title="Cost of a million output tokens in SLO",
        note="Price of all GPUs over the makespan, per output token of requests that met their "
        f"SLO. {marks[0]}: all seeds together; {marks[1]}: lowest to highest seed.",
        x=dollars if compared else RATE,
        y=_NAMES if compared else dollars,
        views={ONLY: {"series": series, "lines": []}},
    )


_BY_CLASS = {
    "attainment_": (
        "classes",
        "Attainment by class, model or adapter",
        "Share of each class's requests that met their SLO",
        Axis("requests in SLO", "percent", top=1.0),
    ),
    "ttft_p99_s_": (
        "classes-ttft",
        "TTFT by class, model or adapter",
        "99th percentile of each class's requests",
        Axis("TTFT p99", "seconds"),
    ),
    "tpot_p99_s_": (
        "classes-tpot",
        "TPOT by class, model or adapter",
        "99th percentile of each class's requests",
        Axis("TPOT p99", "seconds"),
    ),
}


def classes(rows: pd.DataFrame, names: Sequence[str], prefix: str) -> Figure | None:
    """A column of every request class (`prefix` of `_BY_CLASS`) and its spread at one rate; None
    without classes.
    """
    called, title, note, axis = _BY_CLASS[prefix]
    class_names = [c.removeprefix(prefix) for c in rows.columns if c.startswith(prefix)]
    class_names = [k for k in class_names if f"{prefix}{k}_lo" in rows.columns and k != "spread"]
    if not class_names:
        return None
    views: dict[str, View] = {}
    for place, _, series_rows in by_series(rows, names):
        for _, row in series_rows.iterrows():
            values = [float(row[prefix + k]) for k in class_names]
            if any(math.isfinite(v) for v in values):
                view = views.setdefault(rate_key(float(row["rate_rps"])), {"series": []})
                view["series"].append({"s": place, "x": values})
    if not views:
        return None
    return Figure(
        id=called,
        kind="spread",
        title=title,
        note=f"{note}, mean over seeds; the bar spans the classes, its length is their spread.",
        x=axis,
        y=_NAMES,
        views=views,
        picker="rate",
        categories=class_names,
    )


def all_classes(rows: pd.DataFrame, names: Sequence[str], *, slo: bool) -> list[Figure]:
    """The figures by class that the rows have values for; attainment only with an SLO."""
    prefixes = [prefix for prefix in _BY_CLASS if slo or prefix != "attainment_"]
    drawn = (classes(rows, names, prefix) for prefix in prefixes)
    return [figure for figure in drawn if figure is not None]


def _curves(rows: pd.DataFrame, names: Sequence[str], column: str) -> list[View]:
    curves = []
    for place, _, series_rows in by_series(rows[rows[column].notna()], names):
        low, high = (series_rows[f"{column}{end}"].tolist() for end in ("_lo", "_hi"))
        curves.append(curve(place, series_rows["rate_rps"], series_rows[column], lo=low, hi=high))
    return curves


def _by_rate(
    details: Iterable[LevelDetail],
    names: Sequence[str],
    draw: Callable[[LevelDetail, int], View | None],
    lines: Callable[[LevelDetail], list[View]] = lambda _: [],
) -> dict[str, View]:
    place = {name: position for position, name in enumerate(names)}
    views: dict[str, View] = {}
    for detail in sorted(details, key=lambda d: place[d.series]):
        view = views.setdefault(rate_key(detail.rate_rps), {"series": [], "lines": []})
        drawn = draw(detail, place[detail.series])
        if drawn is not None:
            view["series"].append(drawn)
            view["lines"] = view["lines"] or lines(detail)
    return views


def _line(along: Literal["x", "y"], value: float, label: str) -> View:
    return {"axis": along, "value": value, "label": label}


def _bound(along: Literal["x", "y"], bound: SloRange | None) -> list[View]:
    """A line at an SLO that all requests share; none where it differs between requests."""
    if bound is None or bound.low_s != bound.high_s:
        return []
    return [_line(along, bound.low_s, f"SLO {seconds_text(bound.low_s)}")]


_SWEPT = {"gpus": "GPUs", "slo_scale": "SLO scale"}
_MOST_CURVES = 16
_TARGET = 0.99


def sweeps(cells: pd.DataFrame, rows: pd.DataFrame) -> list[Figure]:
    """A figure for each such setting with several values; a view for each rate, the knee first."""
    return [figure for axis in _SWEPT if (figure := _sweep(axis, cells, rows)) is not None]


def _sweep(axis: str, cells: pd.DataFrame, rows: pd.DataFrame) -> Figure | None:
    if axis not in cells or cells[axis].nunique() < 2:
        return None
    valid = cells[cells["valid"]]
    plain = valid.drop(columns=["facet", "series"])
    alike = with_facets(plain.assign(swept=pd.to_numeric(plain[axis]), **{axis: 0}))
    swept = pd.DataFrame(
        {
            "series": full_names(alike).to_numpy(),
            "x": alike["swept"].to_numpy(),
            "rate": alike["level_rps"].to_numpy(),
            "attainment": alike["attainment"].to_numpy(),
        }
    )
    varied = swept.groupby("series")["x"].nunique()
    names = [n for n in dict.fromkeys(swept["series"]) if varied[n] > 1][:_MOST_CURVES]
    if not names:
        return None
    swept = swept[swept["series"].isin(names)]
    knee = knee_rps(rows)
    rates = sorted(set(swept["rate"]), key=lambda rate: (rate != knee, rate))
    views = {rate_key(rate): _swept_view(swept[swept["rate"] == rate], names) for rate in rates}
    several = len(rates) > 1
    word = _SWEPT[axis]
    return Figure(
        id=f"sweep-{axis.replace('_', '-')}",
        title=f"Requests in SLO against {word}",
        note=f"Mean over seeds; band: lowest to highest seed. {_fewest(swept, names, word, rates)}",
        x=Axis(word, "number"),
        y=Axis("requests in SLO", "percent", top=1.0),
        views=views if several else {ONLY: views[rate_key(rates[0])]},
        picker="local" if several else "none",
        options=[[rate_key(r), f"{rate_text(r)} req/s"] for r in rates] if several else [],
    )


def _swept_view(swept: pd.DataFrame, names: Sequence[str]) -> View:
    curves = []
    for place, _, series_rows in by_series(swept, names):
        shares = series_rows.groupby("x")["attainment"].agg(["mean", "min", "max"])
        low, high = shares["min"].tolist(), shares["max"].tolist()
        curves.append(curve(place, shares.index, shares["mean"], lo=low, hi=high))
    lines = [_line("y", _TARGET, "99 %")]
    return {"names": list(names), "series": curves, "lines": lines}


def _fewest(swept: pd.DataFrame, names: Sequence[str], word: str, rates: Sequence[float]) -> str:
    """A note on the smallest setting that reaches 99 % at the first rate."""
    texts = []
    for _, name, series_rows in by_series(swept[swept["rate"] == rates[0]], names):
        means = series_rows.groupby("x")["attainment"].mean()
        enough = means[reaches(means, _TARGET)]
        texts.append(f"{name}: {enough.index.min():g}" if len(enough) else f"{name}: none")
    return f"Least {word} at 99 %, {rate_text(rates[0])} req/s: {'; '.join(texts)}."
