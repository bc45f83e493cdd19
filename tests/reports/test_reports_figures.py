"""Figures as data, by hand-made levels and details."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from slo_bench.reports.figures import figures
from slo_bench.reports.figures.details import (
    CAUSES,
    PHASES,
    LevelDetail,
    SloRange,
    TimelineMeans,
    attainment_over_time,
    distribution,
)
from slo_bench.reports.figures.drawing import page_data, plots
from slo_bench.reports.figures.figure import ONLY, Axis, Figure
from slo_bench.reports.pages.validation import scatter_of, scatter_view

NAMES = ["a", "b"]


def detail(series="a", rate_rps=2.0, end_s=10.0, **changes):
    """Four requests, of which one was dropped and one missed its TTFT."""
    time_s = np.linspace(0.0, end_s, 11)
    plain = {
        "requests": 4,
        "ttft": distribution(np.array([0.1, 0.2, 2.0, np.nan])),
        "tpot": distribution(np.array([0.01, 0.02, 0.03, np.nan])),
        "missed": {**dict.fromkeys(CAUSES, 0), "dropped": 1, "TTFT": 1},
        "missed_phase_s": {"waiting": 1.5, "prefill": 0.5, "transfer": 0.25, "decode": 3.0},
        "bounds": {"ttft": SloRange(1.0, 1.0)},
        "cost": 2.0,
        "cost_low": 1.0,
        "cost_high": 3.0,
        "attainment": attainment_over_time(np.arange(100.0), np.arange(100) < 50),
        "timeline": TimelineMeans(time_s, time_s * 2, time_s * 3, time_s / 100),
    }
    return LevelDetail(facet="", series=series, rate_rps=rate_rps, **(plain | changes))


def test_attainment_over_time_falls_where_requests_miss():
    (curve,) = figures.attainment_over_time([detail()], NAMES).views["2"]["series"]
    assert curve["y"] == [1.0, 1.0, 0.5, 0.0, 0.0]  # of 20 requests each; those from 50 s on miss
    assert curve["x"] == pytest.approx([9.9, 29.7, 49.5, 69.3, 89.1])
    few = detail(attainment=attainment_over_time(np.arange(30.0), np.ones(30, dtype=bool)))
    assert figures.attainment_over_time([few], NAMES).views["2"]["series"] == []


def test_causes_figure_shows_shares_of_all_requests():
    (bar,) = figures.causes([detail()], NAMES).views["2"]["series"]
    assert dict(zip(CAUSES, bar["parts"], strict=True))["dropped"] == 0.25
    assert sum(bar["parts"]) == 0.5


def test_phases_figure_ends_with_the_chosen_token():
    first = figures.phases([detail()], NAMES, until="first").views["2"]["series"]
    last = figures.phases([detail()], NAMES, until="last").views["2"]["series"]
    assert (first[0]["parts"], last[0]["parts"]) == ([1.5, 0.5], [1.5, 0.5, 0.25, 3.0])
    nothing = detail(missed_phase_s=dict.fromkeys(PHASES, math.nan))
    assert figures.phases([nothing], NAMES, until="last").views["2"]["series"] == []


def test_distribution_figure_has_the_slo_line_and_stops_at_finished():
    view = figures.latency_distribution([detail()], NAMES, "ttft").views["2"]
    assert view["series"][0]["y"][-1] == 0.75
    assert view["lines"] == [{"axis": "x", "value": 1.0, "label": "SLO 1 s"}]
    differing = detail(bounds={"ttft": SloRange(0.5, 1.0)})
    assert figures.latency_distribution([differing], NAMES, "ttft").views["2"]["lines"] == []


def test_time_axis_is_cut_at_twice_the_median_system():
    rows = [detail("a", end_s=10.0), detail("b", end_s=10.0), detail("c", end_s=100.0)]
    view = figures.over_time(rows, ["a", "b", "c"], "waiting").views["2"]
    assert [curve["x"][-1] for curve in view["series"]] == [10.0, 10.0, 20.0]
    assert all(len(curve["x"]) == len(curve["y"]) for curve in view["series"])


def test_efficiency_figure_is_per_gpu_and_per_user():
    rows = pd.DataFrame(
        {
            "series": "b",
            "rate_rps": [1.0, 2.0],
            "tpot_p50_s": [0.02, 0.05],
            "output_tokens_per_s": [800.0, 1600.0],
            "gpus": 4.0,
            "attainment": [0.95, 0.5],
        }
    )
    (curve,) = figures.efficiency(rows, NAMES).views["only"]["series"]
    assert (curve["s"], curve["x"], curve["y"]) == (1, [50.0, 20.0], [200.0, 400.0])
    assert curve["hollow"] == [False, True]


def test_cost_figure_leaves_out_infinite_cost():
    free = detail("b", cost=math.inf)
    figure = figures.cost([detail(), free], NAMES, compared=False)
    assert [curve["s"] for curve in figure.views["only"]["series"]] == [0]
    assert figures.cost([free], NAMES, compared=False) is None


def test_classes_figure_exists_only_with_classes():
    rows = pd.DataFrame({"series": ["a"], "rate_rps": [2.0], "attainment": [0.5]})
    assert figures.classes(rows, NAMES, "attainment_") is None
    for name in ("chat", "code", "spread"):
        rows[f"attainment_{name}"] = rows[f"attainment_{name}_lo"] = 0.4
        rows[f"attainment_{name}_hi"] = 0.4
    figure = figures.classes(rows, NAMES, "attainment_")
    assert figure.categories == ["chat", "code"]
    assert figure.views["2"]["series"] == [{"s": 0, "x": [0.4, 0.4]}]
    for name in ("lo", "hi", "chat", "chat_lo", "chat_hi"):
        rows[f"tpot_p99_s_{name}"] = 0.03
    of_latency = figures.all_classes(rows, NAMES, slo=False)
    assert [(f.id, f.categories) for f in of_latency] == [("classes-tpot", ["chat"])]


def test_figures_json_is_finite_and_shares_values(opened):
    drawn = [figures.over_time([detail()], NAMES, column) for column in figures.STATES]
    data = page_data(NAMES, "simulated", drawn)
    json.dumps(data, allow_nan=False)
    texts = [json.dumps(value) for value in data["shared"]]
    assert len(set(texts)) == len(texts)
    for figure in drawn:
        plot = opened(data["figures"][figure.id]["views"][0]["2"], data)
        assert plot == plots(figure, NAMES, "simulated")["2"]
        assert plot["data"][0]["x"] == pytest.approx(np.linspace(0, 10, 11).tolist())
    broken = detail(
        missed_phase_s={"waiting": math.inf, "prefill": 0.0, "transfer": 0.0, "decode": 1 / 3}
    )
    plot = plots(figures.phases([broken], NAMES, until="last"), NAMES, "")["2"]
    assert [t["x"] for t in plot["data"] if t["type"] == "bar"] == [[333.3]]
    assert plot["layout"]["xaxis"]["ticksuffix"] == " ms"


def test_shared_values_are_in_the_order_of_the_curves():
    """Not in that of a set: the same run gives the same page."""
    drawn = [figures.over_time([detail()], NAMES, "waiting")]
    data = page_data(NAMES, "simulated", drawn)
    assert data == page_data(NAMES, "simulated", drawn)


def line(y, *, format="percent", scale="linear", **more):  # noqa: A002
    """A figure of one curve."""
    curve = {"s": 0, "x": [float(n) for n in range(len(y))], "y": y, **more}
    return Figure(
        id="f", kind="lines", title="t", note="", x=Axis("x", "number"),
        y=Axis("y", format, scale), views={ONLY: {"series": [curve], "lines": []}},
    )  # fmt: skip


def test_percentage_is_truncated():
    (trace,) = plots(line([0.8999, 0.9, 0.99996, 1.0, math.nan]), NAMES, "")[ONLY]["data"]
    assert trace["y"] == [89.9, 90.0, 99.9, 100.0, None]
    assert trace["hovertemplate"].endswith(" %")


@pytest.mark.parametrize(
    ("format", "values", "shown", "suffix"),
    [
        ("seconds", [0.02, 0.3], [20.0, 300.0], " ms"),
        ("seconds", [0.02, 3.0], [0.02, 3.0], " s"),
        ("duration", [40.0, 120.0], [40.0, 120.0], " s"),
        ("duration", [40.0, 1500.0], [0.6667, 25.0], " min"),
        ("duration", [0.0, 86_400.0], [0.0, 24.0], " h"),
        ("number", [12_345.0], [12_340.0], ""),
    ],
)
def test_axis_unit_follows_its_values(format, values, shown, suffix):  # noqa: A002
    plot = plots(line(values, format=format), NAMES, "")[ONLY]
    assert plot["data"][0]["y"] == shown
    assert plot["layout"]["yaxis"]["ticksuffix"] == suffix


def test_band_on_a_logarithmic_axis_stays_positive():
    figure = line([1.0, 2.0], format="number", scale="log", lo=[0.0, 1.0], hi=[3.0, math.inf])
    band, curve = plots(figure, NAMES, "")[ONLY]["data"]
    assert band["x"] == [0.0, 1.0, 1.0, 0.0]
    assert band["y"] == [3.0, 2.0, 1.0, 1.0]
    assert curve["customdata"] == [[0.0, 3.0], [1.0, None]]


@pytest.mark.parametrize(
    ("y", "scale", "end"),
    [
        ([0.1, 0.2, 0.9, 1.0], "linear", "start"),  # the curve ends at the level
        ([1.0, 0.9, 0.2, 0.1], "linear", "end"),
        ([0.5, 0.6, 0.5], "linear", "end"),  # as far from both
        ([0.1, 0.1, 5.0], "linear", "end"),
        ([0.1, 0.1, 5.0], "log", "start"),  # a factor of 10 against one of 5
        ([math.nan, None], "linear", "end"),
    ],
)
def test_level_label_is_placed_away_from_curves(y, scale, end):
    figure = line(y, format="number", scale=scale)
    level = {"axis": "y", "value": 1.0, "label": "SLO"}
    figure.views[ONLY]["lines"].append(level)
    (shape,) = plots(figure, NAMES, "")[ONLY]["layout"]["shapes"]
    assert shape["label"]["textposition"] == end
    assert shape["label"]["xanchor"] == {"start": "left", "end": "right"}[end]


def test_names_are_escaped_for_plotly():
    name = "<a href='javascript:x'>&</a>"
    plot = plots(line([1.0]), [name], "")[ONLY]
    assert plot["data"][0]["name"] == "&lt;a href='javascript:x'&gt;&amp;&lt;/a&gt;"


def test_plotly_accepts_every_attribute_of_every_figure():
    """Its classes refuse what they do not know."""
    import plotly.graph_objects as go

    rows = pd.DataFrame({"series": ["a", "a"], "rate_rps": [2.0, 3.0], "attainment": [0.5, 0.9]})
    numbers = ("attainment", "tpot_p50_s", "tpot_p99_s", "ttft_p99_s", "attainment_x")
    for column in (*numbers, "output_tokens_per_s", "gpus", "attainment_y"):
        rows[column] = [0.5, 0.9]
        rows[f"{column}_lo"], rows[f"{column}_hi"] = [0.4, 0.8], [0.6, 1.0]
    details = [detail(), detail("b")]
    drawn = [
        figures.against_rate(rows, NAMES, "attainment"),
        figures.compared(rows, NAMES, "attainment"),
        figures.latency_distribution(details, NAMES, "ttft"),
        figures.causes(details, NAMES),
        figures.phases(details, NAMES, until="last"),
        figures.over_time(details, NAMES, "waiting"),
        figures.efficiency(rows, NAMES),
        figures.cost(details, NAMES, compared=False),
        figures.classes(rows, NAMES, "attainment_"),
        scatter_of("ttft", {ONLY: scatter_view(np.ones(3), np.ones(3), 0)}, []),
    ]
    for figure in drawn:
        for plot in plots(figure, NAMES, "simulated").values():
            plotly_figure = go.Figure(data=plot["data"], layout=plot["layout"])
            assert len(plotly_figure.data), figure.id
