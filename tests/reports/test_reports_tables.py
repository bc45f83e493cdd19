"""The terminal summary: what it says, in 80 columns and without colour."""

import io
import math

import pandas as pd
import pytest
from rich.console import Console

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.figure import percent_text, rate_text, seconds_text
from slo_bench.reports.figures.levels import combine, levels, series_names
from slo_bench.reports.pages import bands_page as bands
from slo_bench.reports.pages.answer import answer
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.summary_page import (
    careful_lines,
    level_table,
    started_together_text,
)
from slo_bench.reports.terminal.run_answer import run_screen
from slo_bench.reports.terminal.run_details import MOST_LINES, run_details


def printed(cells, *, width=80, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=width, **options)
    for screen in run_details(cells):
        console.print(screen, soft_wrap=True)
    return stream.getvalue()


def test_summary_fits_eighty_columns_and_has_no_colour_off_a_terminal(make_run):
    folder = make_run(systems=["vllm", "a-system-with-a-rather-long-name-" * 2], requests=60)
    text = printed(combine(read_runs([folder])))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "simulated" in text
    assert "TTFT" in text
    assert "Goodput divides by the window of arrivals" in text


def answered(runs, cells):
    stream = io.StringIO()
    Console(file=stream, width=80).print(run_screen(runs, cells), soft_wrap=True)
    return stream.getvalue()


def test_a_system_that_fails_at_a_lower_rate_is_not_said_to_carry_the_higher(make_run):
    folder = make_run(systems=["vllm", "orca"], rates=[2.0, 4.0], requests=60, attainment=0.95)
    runs = read_runs([folder])
    cells = combine(runs)
    fails = (cells["system"] == "orca") & (cells["level_rps"] == 2)
    cells["attainment"] = cells["attainment"].mask(fails, 0.776)
    sentence = "orca has 77.6 % in SLO at 2 req/s and 90 % again at 4: only rates below the first"
    text = answered(runs, cells)
    assert sentence in " ".join(text.split())
    (row, *_) = [line.split() for line in text.splitlines() if line.startswith("orca ")]
    assert row[:5] == ["orca", "<", "2", "<", "2"]
    names = series_names(cells)
    headline = answer(cells, levels(cells), names)
    assert headline.startswith("<strong>vllm</strong> carries <strong>4 req/s</strong>")
    assert sentence in headline
    banded = cells.assign(band_basis="fitted")
    assert [line.partition(":")[0] for line in bands.notes(banded)] == [
        "vllm at 4 req/s",
        "orca at 2 req/s",
    ]


def test_summary_honours_no_color_on_a_terminal(make_run, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(combine(read_runs([make_run(requests=60)])), force_terminal=True)
    assert "\x1b[3" not in text.replace("\x1b[3m", "")


def test_summary_of_a_bare_cells_frame(make_run):
    cells = read_runs([make_run(requests=60)])[0].cells
    assert "orca" in printed(cells)
    older = cells.drop(columns="arrival_window_s")
    assert "Goodput divides by the makespan" in printed(older)


def test_summary_overloaded_levels_have_their_duration(make_run):
    cells = read_runs([make_run(systems=["vllm", "orca"], rates=[2.0, 6.0], requests=60)])[0].cells
    assert "overloaded" not in printed(cells)
    drifts = (cells["system"] == "vllm") & (cells["rate_rps"] == 6)
    stationarity = [False if drifting else None for drifting in drifts]
    cells = cells.assign(stationary=pd.Series(stationarity, cells.index, dtype=object))
    cells = cells.assign(arrival_window_s=540.0)
    lines = printed(cells).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.rstrip().endswith("  after 540 s")]
    assert row.split()[0] == "6"
    assert "overloaded: vllm at 6 req/s after 540 s." in " ".join(" ".join(lines).split())
    full = combine(read_runs([make_run(name="full", rates=[2.0, 6.0], requests=60)]))
    full = full.assign(stationary=pd.Series([False] * len(full), full.index, dtype=object))
    shown = level_table(full, levels(full), series_names(full), "simulated")
    assert all(str(row[-1]).startswith("after ") for _, rows in shown.groups for row in rows)


LONG = [f"mix(chat=synthetic(prompt=uniform({n},500)):1,code=azure-code:9)" for n in (1, 2, 3)]


@pytest.mark.slow
def test_summary_lists_facets_under_their_labels(make_run):
    text = printed(combine(read_runs([make_run(axes={"workload": LONG}, requests=30)])))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    headings = [f"chat prompt uniform({n},500)" for n in (1, 2, 3)]
    assert [line for line in lines if line in headings] == headings
    assert "synthetic" not in text
    assert text.count("TTFT p99") == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 200])
def test_summary_of_facets_keeps_every_column_in_any_width(make_run, width):
    axes = {"model": ["x", "y"], "vllm.long_parameter": ["a-long-value-of-a-parameter" * 2, "2"]}
    cells = combine(read_runs([make_run(axes=axes, systems=["vllm", "orca"], requests=30)]))
    lines = printed(cells, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert "TPOT" in "\n".join(lines)
    assert sum(line.startswith("system ") for line in lines) == 1  # one head for all facets


def test_summary_explains_letter_labels(make_run):
    long = ["x" * 99, "y" * 99]
    text = printed(combine(read_runs([make_run(axes={"workload": long}, requests=30)])))
    assert "workload A: xxx" in " ".join(text.split())


@pytest.mark.slow
def test_summary_leaves_a_long_rate_table_to_the_report(make_run):
    rates = [1.0 + n for n in range(MOST_LINES // 2 + 1)]
    text = printed(combine(read_runs([make_run(rates=rates, seeds=1, requests=5)])))
    assert "TTFT p99" not in text
    assert f"{2 * len(rates)} lines: cells.csv and report" in text


def test_summary_at_once_shows_finished_requests_not_capacity(make_run):
    run = make_run(rates=[4.0], requests=40, rate_rps="", toml='slo = ""\n', attainment=1.0)
    text = printed(combine(read_runs([run])))
    assert "all requests at once" in text
    assert "finished req/s" in text
    assert "makespan" in text
    assert "≥" not in text
    assert "in SLO" not in text
    one_rate = printed(combine(read_runs([make_run("one", rates=[4.0], requests=40)])))
    assert "at 4 req/s" in one_rate
    assert "in SLO" in one_rate
    assert "≥" not in one_rate


def test_summary_prints_markup_in_names_verbatim(make_run):
    text = printed(combine(read_runs([make_run(systems=["[red]x[/red]"], requests=60)])))
    assert "[red]x[/red]" in text


def closed_loop_line(make_run, name, **later):
    figures = {"attainment": 0.8, "ttft_p99_s": 2.0, "started_together": 8}
    folder = make_run(name, requests=60, **figures, **later)
    lines = careful_lines(combine(read_runs([folder])))
    return next((line for line in lines if line.startswith("Closed loop")), "")


def test_a_closed_loop_tells_figures_without_requests_that_start_together(make_run):
    later = {"attainment_after_start": 0.95, "ttft_p99_s_after_start": 0.5}
    line = closed_loop_line(make_run, "burst", **later)
    assert "without the first 8 requests, which start together, " in line
    shares = f"has {percent_text(0.95)} in SLO ({percent_text(0.8)} with them)"
    assert f"{shares}, TTFT p99 {seconds_text(0.5)} ({seconds_text(2.0)})" in line
    later = {"attainment_after_start": 0.805, "ttft_p99_s_after_start": 1.9}
    assert closed_loop_line(make_run, "alike", **later) == ""


def test_the_page_of_a_closed_loop_tells_those_figures_too(make_run, tmp_path):
    figures = {"attainment": 0.8, "ttft_p99_s": 2.0, "started_together": 8}
    later = {"attainment_after_start": 0.95, "ttft_p99_s_after_start": 0.5}
    folder = make_run("page", requests=60, **figures, **later)
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "without the first 8 requests, which start together" in page


def test_seeds_of_a_closed_loop_are_one_level_whatever_number_starts_together(make_run):
    figures = {"attainment": 0.8, "ttft_p99_s": 2.0}
    later = {"attainment_after_start": 0.9, "ttft_p99_s_after_start": 0.5}
    run = make_run("seeds", requests=60, seeds=2, started_together=8, **figures, **later)
    cells = combine(read_runs([run]))
    cells.loc[cells["seed"] == 1, ["started_together", "attainment_after_start"]] = [10, 1.0]
    text = started_together_text(cells)
    assert "without the first 9 requests" in text
    assert f"has {percent_text(0.95)} in SLO" in text


def test_careful_lines_name_unfitted_and_invalid_cells(make_run):
    (line,) = careful_lines(combine(read_runs([make_run("u", requests=60, step_time="unfitted")])))
    assert "unfitted: step times of llama-3.1-8b on a100-80g" in line
    (line,) = careful_lines(combine(read_runs([make_run("v", requests=60, valid=False)])))
    assert "12 of 12 cells are invalid" in line


@pytest.mark.parametrize(("requests", "seeds"), [(3, 1), (28, 1), (14, 2), (29, 1), (15, 2)])
def test_rates_of_few_requests_are_told(make_run, requests, seeds):
    cells = combine(read_runs([make_run("few", requests=requests, seeds=seeds)]))
    too_few = f"{requests * seeds} requests at a rate: too few to tell 90\xa0% in SLO from all"
    assert any(line.startswith(too_few) for line in careful_lines(cells)) == (requests * seeds < 29)


def test_summary_says_measured_of_a_real_server(make_run):
    text = printed(combine(read_runs([make_run("m", requests=60, backend="vllm 0.32")])))
    assert "simulated" not in text
    assert "measured" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (210.4, "210 s"),
        (0.0, "0 ms"),
        (math.nan, "–"),
        (math.inf, "∞"),
    ],
)
def test_seconds_text_of_each_magnitude(seconds, text):
    assert seconds_text(seconds) == text


def test_rate_text_and_percent_text():
    texts = [rate_text(r) for r in (0.0, 0.25, 6.0, 6.45, 12.3456, 1234.5, math.nan)]
    assert texts == ["0", "0.25", "6", "6.45", "12.3", "1,234", "–"]
    assert percent_text(0.89999) == "89.9 %"
    assert percent_text(0.9) == "90.0 %"
    assert percent_text(0.29) == "29.0 %"


def test_answer_of_a_run_without_a_valid_cell_names_no_rate(make_run):
    runs = read_runs([make_run(requests=10, seeds=1, valid=False)])
    cells = combine(runs)
    headline = answer(cells, levels(cells), series_names(cells))
    assert headline == "No cell is valid: nothing was measured."
    text = answered(runs, cells)
    assert "cells are invalid and left out" in text
    assert "<" not in text.replace("<1", "")
