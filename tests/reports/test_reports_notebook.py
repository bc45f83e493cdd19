"""The curves as plotly figures."""

from __future__ import annotations

import pytest

from slo_bench import plotly_figures
from slo_bench.workloads.errors import SloBenchError


def test_plotly_figures_show_the_means_over_seeds(make_run, tmp_path):
    folder = make_run(tmp_path / "run")
    drawn = plotly_figures([folder])
    assert list(drawn) == ["attainment", "goodput", "ttft", "tpot", "efficiency"]
    import pandas as pd

    cells = pd.read_csv(folder / "cells.csv")
    means = cells.groupby(["system", "rate_rps"])["goodput_rps"].mean()
    curves = [t for t in drawn["goodput"].data if t.mode == "lines+markers"]
    assert {c.name for c in curves} == set(cells["system"])
    for curve in curves:
        for rate, goodput in zip(curve.x, curve.y, strict=True):
            assert goodput == pytest.approx(means[curve.name, rate], rel=1e-3)
    assert drawn["goodput"].layout.title.subtitle.text == "simulated"


def test_plotly_figures_refuse_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(SloBenchError, match="not a run folder"):
        plotly_figures([tmp_path / "nothing"])
