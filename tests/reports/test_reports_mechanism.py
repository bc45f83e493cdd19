"""Instances and models apart, waits by role, sweeps of GPUs: what is drawn, and what is not."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures import mechanism as of_mechanism
from slo_bench.reports.figures.details import Mechanism, level_details, mechanism
from slo_bench.reports.figures.figures import sweeps
from slo_bench.reports.figures.levels import combine, levels, series_names
from slo_bench.reports.figures.mechanism import MOST_CURVES
from slo_bench.reports.pages.run_page import write_report


def timeseries(*rows: tuple[float, str, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["time_s", "metric", "entity", "value"])


def test_timeline_value_holds_until_the_next():
    mechanics = mechanism(
        timeseries((0.0, "load", "a", 1.0), (48.0, "load", "a", 3.0), (96.0, "load", "a", 0.0))
    )
    time_s, value = mechanics.apart["load"]["a"]
    assert len(time_s) == 96
    assert np.diff(time_s) == pytest.approx(1.0)
    assert value[:48] == pytest.approx(1.0)
    assert value[48:] == pytest.approx(3.0)


def test_mechanism_of_module_moves_and_activations():
    mechanics = mechanism(
        timeseries(
            (1.0, "layers", "prefill 0 to decode 1", 7.0),
            (2.0, "heads", "decode 1 to prefill 0", 2.0),
            (3.0, "activation", "m#1", 0.7),
        )
    )
    assert mechanics.moved_s == (1.0, 2.0)
    assert mechanics.activation_s == (0.7,)
    assert not mechanics.apart
    assert mechanism(None) == Mechanism()


@pytest.fixture
def cluster_run(make_run):
    """Two systems; the first has roles and instances apart, the second has neither."""
    folder = make_run(systems=("ascendra", "vllm"), rates=(1.0, 3.0), seeds=1)
    (folder / "timeseries").mkdir()
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": str})
    for cell in cells.loc[cells["system"] == "ascendra", "cell"]:
        path = folder / f"requests/{cell}.csv.gz"
        requests = pd.read_csv(path)
        requests.assign(role=np.where(requests["id"] % 3, "lp", "hp")).to_csv(path, index=False)
        rows = [
            (float(t), "requests", f"lp {k}", float(k)) for k in range(10) for t in range(0, 50, 5)
        ]
        timeseries(*rows, (7.0, "layers", "a to b", 3.0)).to_csv(
            folder / f"timeseries/{cell}.csv.gz", index=False
        )
    return folder


def test_mechanism_figures_of_a_cluster_run(cluster_run, tmp_path):
    runs = read_runs([cluster_run])
    cells = combine(runs)
    names = series_names(cells)
    details = list(level_details(runs, cells))
    by_id = {figure.id: figure for figure in of_mechanism.figures(details, names)}
    assert set(by_id) == {f"each-requests-{names.index('ascendra')}", "waits"}
    each = by_id[f"each-requests-{names.index('ascendra')}"]
    assert set(each.views) == {"1", "3"}
    view = each.views["1"]
    assert len(view["series"]) == len(view["names"]) == MOST_CURVES
    assert "lp 9" in view["names"]
    assert "lp 0" not in view["names"]
    assert [line["value"] for line in view["lines"]] == [7.0]
    waits = by_id["waits"].views["1"]
    assert waits["names"] == (
        ["ascendra: hp", "ascendra: lp", "vllm"]
        if names.index("ascendra") < names.index("vllm")
        else ["vllm", "ascendra: hp", "ascendra: lp"]
    )
    page = write_report([cluster_run], tmp_path / "out.html").read_text()
    assert "Waiting time by role" in page


def test_mechanism_figures_without_roles_are_empty(make_run):
    runs = read_runs([make_run()])
    cells = combine(runs)
    assert of_mechanism.figures(list(level_details(runs, cells)), series_names(cells)) == []
    assert sweeps(cells, levels(cells)) == []


def test_sweep_figure_of_a_numeric_axis(make_run):
    folder = make_run(rates=(4.0,), axes={"slo_scale": ["5", "10", "20"]})
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": str})
    scale = cells["slo_scale"].astype(float)
    cells["attainment"] = np.where(cells["system"] == "orca", 0.5, 0.9 + scale / 200)
    cells.to_csv(folder / "cells.csv", index=False)
    shown = combine(read_runs([folder]))
    (figure,) = sweeps(shown, levels(shown))
    assert figure.id == "sweep-slo-scale"
    view = figure.views["only"]
    by_name = {view["names"][curve["s"]]: curve for curve in view["series"]}
    assert by_name["vllm"]["x"] == [5.0, 10.0, 20.0]
    assert by_name["vllm"]["y"] == pytest.approx([0.925, 0.95, 1.0])
    assert "vllm: 20" in figure.note
    assert "orca: none" in figure.note
