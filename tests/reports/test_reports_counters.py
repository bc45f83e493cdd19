"""What the mechanisms did, which never acted, and systems that gave equal results."""

import pytest

from slo_bench import Experiment
from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.levels import combine, levels, series_names
from slo_bench.reports.pages.mechanisms_page import equal_results, notes, silent, table


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    Experiment(
        systems=["slo-odbs", "slo-dbs", "ljf", "vllm"],
        rates=[40.0, 80.0],
        requests=150,
        seeds=1,
        slo="e2e=20",
        output_tokens="uniform(20, 60)",
    ).run(folder)
    return combine(read_runs([folder]))


def test_equal_results_names_systems_with_equal_rows(cells):
    assert (cells.loc[cells["system"] == "slo-odbs", "count_closed_by_threshold"] == 0).all()
    [line] = equal_results(cells)
    assert line.startswith("slo-odbs and slo-dbs gave equal results in every cell (2 each)")


def test_equal_results_is_empty_if_one_value_differs(cells):
    cells = cells.copy()
    row = cells.index[cells["system"] == "slo-dbs"][0]
    cells.loc[row, "ttft_p50_s"] += 1e-6
    assert equal_results(cells) == []


def test_silent_names_mechanisms_that_never_acted(cells):
    lines = silent(cells)
    assert any(line.startswith("slo-odbs never did here: closed by thr") for line in lines)
    assert not any(line.startswith("vllm") for line in lines)


def test_report_shows_counters_in_notes_and_table(cells):
    sizes = cells.loc[cells["system"] == "slo-odbs", "count_closed_by_size"]
    assert any(f"closed by size {sizes.mean():g}" in line for line in notes(cells))
    names = series_names(cells)
    shown = table(cells, levels(cells), names, "simulated")
    assert {str(head) for head, _ in shown.groups} == {"slo-odbs", "slo-dbs", "ljf"}
    [(_, rows)] = [group for group in shown.groups if str(group[0]) == "slo-odbs"]
    assert [str(rate) for rate, _ in rows] == ["40", "80"]
    assert all("closed by threshold 0" in str(counts) for _, counts in rows)
