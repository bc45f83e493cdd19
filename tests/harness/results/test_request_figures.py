"""A figure is declared once and is then everywhere that figures are."""

import csv
import re

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.core.records.quantile_sketch import RELATIVE_ERROR
from slo_bench.harness.engine.cluster import recorder
from slo_bench.harness.experiments.execution import cells
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.results.metrics import FIGURES, figure_of, objectives
from slo_bench.harness.results.request_figures import Kept, RequestFigure, Sketched, Sums
from slo_bench.reports.compare.comparing import compare, read_results
from slo_bench.reports.compare.results import metrics_named
from slo_bench.reports.pages.run_page import write_report
from slo_bench.tuner.search.settings import tuning_objectives
from slo_bench.tuner.sensitivity.study import Ranked
from slo_bench.workloads import base

SETTINGS = {
    "workload": "azure-conv",
    "model": "llama-3-8b",
    "gpu": "a100-80g",
    "rates": [6.0],
    "requests": 1_500,
}


def wait_s(requests):
    return requests.records.first_scheduled_s - requests.records.arrival_s


EXTRA = (
    RequestFigure("wait_p90_s", "s", "wait for a batch", wait_s, "p90", higher_is_better=False),
    RequestFigure("wait_sum_s", "s", "all waits", wait_s, higher_is_better=False),
    RequestFigure(
        "late_start_rps",
        "req/s",
        "requests that waited over 50 ms / makespan",
        lambda requests: wait_s(requests) > 0.05,
        per="makespan_s",
        higher_is_better=False,
    ),
)


@pytest.fixture
def extra_figures(monkeypatch):
    for figure in EXTRA:
        monkeypatch.setitem(FIGURES, figure.name, figure)


@pytest.fixture
def run_folder(extra_figures, tmp_path):
    folder = tmp_path / "run"
    Experiment(**SETTINGS, systems=["vllm", "sarathi"], seeds=2).run(folder, jobs=1)
    return folder


def test_declared_figure_is_in_cells_report_and_comparison(run_folder, tmp_path):
    with (run_folder / "cells.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert all(float(row["wait_p90_s"]) > 0 for row in rows)
    assert all(float(row["late_start_rps"]) > 0 for row in rows)

    page = write_report([run_folder], tmp_path / "report.html").read_text("utf-8")
    table = page[page.index('aria-label="All figures"') :]
    heads = re.findall(r"<th scope=\"col\">(\w+)</th>", table[: table.index("</thead>")])
    assert {figure.name for figure in EXTRA} <= set(heads)
    assert "<dt>wait_p90_s</dt><dd>wait for a batch (s)</dd>" in page

    results = read_results(run_folder)
    metrics = metrics_named("wait_p90,wait_sum_s,late_start_rps")
    comparison = compare(results, results, systems=("vllm", "sarathi"), metrics=metrics)
    means = {
        (system, figure.name): np.mean(
            [float(row[figure.name]) for row in rows if row["system"] == system]
        )
        for system in ("vllm", "sarathi")
        for figure in EXTRA
    }
    for row in comparison.rows:
        assert row.a == pytest.approx(means["vllm", row.metric.name], rel=1e-4)
        assert row.b == pytest.approx(means["sarathi", row.metric.name], rel=1e-4)
        assert np.isfinite(row.bounds.low)
        assert not row.metric.higher_is_better
    assert len(comparison.rows) == len(EXTRA)


def test_declared_figure_is_an_objective_and_ranks_systems(extra_figures):
    objective = tuning_objectives()["wait_p90"]
    assert (objective.column, objective.maximise) == ("wait_p90_s", False)
    assert objective.label == "wait p90, s"
    assert Ranked("late_start").figure.name == "late_start_rps"


def test_declared_figure_of_blocks_equals_that_of_all_requests(
    extra_figures, monkeypatch, tmp_path
):
    [spec] = plan(Experiment(**SETTINGS, systems=["vllm"], seeds=1, warmup_s=20.0)).cells
    exact = cells.run_cell(spec, tmp_path / "exact", records="csv")
    monkeypatch.setattr(cells, "EXACT_REQUESTS", 1000)
    monkeypatch.setattr(base, "BLOCK_ROWS", 400)
    monkeypatch.setattr(recorder, "BLOCK_ROWS", 400)
    blockwise = cells.run_cell(spec, tmp_path / "blockwise", records="none")
    assert blockwise["quantile_error"] == RELATIVE_ERROR
    assert blockwise["wait_p90_s"] == pytest.approx(exact["wait_p90_s"], rel=RELATIVE_ERROR)
    for name in ("wait_sum_s", "late_start_rps"):
        assert blockwise[name] == pytest.approx(exact[name], rel=1e-9)


@pytest.mark.parametrize("statistics", [Sums, Kept, Sketched])
def test_statistics_of_blocks_leave_out_what_is_not_known(statistics):
    blocks = statistics()
    for values in ([1.0, np.nan], [], [3.0, 5.0]):
        blocks.add(np.array(values))
    of_all = blocks.statistics()
    assert (of_all["count"], of_all["sum"], of_all["mean"]) == (3, 9.0, 3.0)
    assert of_all.get("p50", 3.0) == pytest.approx(3.0)
    assert np.isnan(statistics().statistics()["mean"])


def test_sums_of_whole_numbers_and_masks_stay_whole():
    blocks = Sums()
    blocks.add(np.array([True, False, True]))
    blocks.add(np.array([40, 0]))
    assert blocks.statistics() == {"count": 5, "sum": 42, "mean": 8.4}
    assert type(blocks.statistics()["sum"]) is int


def test_columns_of_families_are_described():
    assert figure_of("wait_mean_s_prefill") is FIGURES["wait_mean_s_ROLE"]
    assert figure_of("count_overtakes") is FIGURES["count_NAME"]
    assert figure_of("attainment_spread") is FIGURES["attainment_spread"]
    assert figure_of("attainment_chat") is FIGURES["attainment_CLASS"]
    assert figure_of("sent_rps") is None


def test_every_figure_has_a_meaning_and_short_names_are_distinct():
    assert all(figure.help for figure in FIGURES.values())
    shorts = [figure.short for figure in FIGURES.values() if figure.higher_is_better is not None]
    assert sorted(shorts) == sorted(objectives())
