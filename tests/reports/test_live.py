"""The live report: what is served before, while and after cells finish."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request

import pytest

from slo_bench.cli.output import progress
from slo_bench.harness.servers.mock.running_mock import serving
from slo_bench.reports import live
from slo_bench.reports.live import LiveStatus, live_report


def fetched(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def refused(url, data=None):
    """The status with which it is refused."""
    with pytest.raises(urllib.error.HTTPError) as problem:
        urllib.request.urlopen(url, data=data, timeout=60)
    problem.value.close()
    return problem.value.code


def test_live_report_refuses_the_name_of_a_web_page(tmp_path):
    with live_report(tmp_path, names=("bench.example",)) as url:
        asked = urllib.request.Request(f"{url}/state", headers={"host": "evil.example"})
        assert refused(asked) == 403
        asked = urllib.request.Request(f"{url}/state", headers={"host": "bench.example:80"})
        assert "no cell" in fetched(asked)


def state(url):
    return json.loads(fetched(f"{url}/state"))


def test_live_report_follows_the_finished_cells(make_run, tmp_path):
    done = make_run("done", environment={"planned_cells": 20})
    folder = tmp_path / "live"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("cells.csv"))
    with live_report(folder) as url:
        assert '<iframe id="report"' in fetched(f"{url}/")
        first = state(url)
        assert first["text"].endswith("no cell is finished yet")
        assert fetched(f"{url}/metrics").endswith("\nslo_bench_cells_finished 0\n")
        assert "Waiting for results" in fetched(f"{url}/report")
        shutil.copy(done / "cells.csv", folder / "cells.csv")
        second = state(url)
        assert second["version"] != first["version"]
        assert second["text"] == f"{folder}: 12 of 20 cells finished"
        page = fetched(f"{url}/report")
        assert "<svg" in page or "report-data" in page
        assert state(url) == second
        metrics = fetched(f"{url}/metrics").splitlines()
        assert metrics[:2] == [
            "# TYPE slo_bench_cells_finished gauge",
            "slo_bench_cells_finished 12",
        ]
        [first_cell] = [
            line for line in metrics if line.startswith('slo_bench_cell_requests{cell="000')
        ]
        assert 'system="vllm"' in first_cell
        assert first_cell.endswith("} 120.0")
        for path in ("/nothing", "/report/../cells.csv"):
            assert refused(f"{url}{path}") == 404
        assert refused(f"{url}/", data=b"x") == 405
    assert not list(folder.glob("report.html"))


def test_live_report_says_why_finished_cells_are_invalid(make_run):
    late = "requests were sent late: 440.5 ms at p99, 10 ms is the limit"
    folder = make_run("late", systems=["vllm"], seeds=1, valid=False, invalid_because=late)
    text = live.LiveReport(folder).text()
    assert text.endswith(f"3 cells finished, 3 of them invalid: {late}")


def test_live_report_shows_the_phases_and_what_runs_before_a_cell_is_finished(tmp_path):
    status = LiveStatus()
    with live_report(tmp_path, status) as url:
        first = state(url)
        assert [(phase["phase"], phase["end_s"]) for phase in first["phases"]] == [
            ("preparing", None)
        ]
        status.begin("starting vllm (5 s)")
        status.begin("starting vllm (10 s)")
        status.begin("the cells run")
        status.begin("the cells run")
        status.running = ["12 ended, 3 in flight, vllm_rate-1"]
        later = state(url)
    assert [phase["phase"] for phase in later["phases"]] == [
        "preparing",
        "starting vllm",
        "the cells run",
    ]
    assert [phase["end_s"] is None for phase in later["phases"]] == [False, False, True]
    assert later["running"] == status.running
    assert later["version"] == first["version"]  # the report is not loaded again for it
    assert later["passed_s"] >= later["phases"][-1]["begin_s"]


def test_live_option_shows_the_phases_of_a_real_run(slo_bench, monkeypatch):
    status = LiveStatus()
    monkeypatch.setattr(live, "LiveStatus", lambda: status)
    words = ["--workload", "synthetic", "--prompt-tokens", "9", "--output-tokens", "3"]
    with serving() as server:
        code, _, _ = slo_bench(
            *("run", "--base-url", server.url, "--rates", "20", "--requests", "5", *words),
            *("--no-report", "--live", "--out", "real"),
        )
    assert code == 0
    phases = [phase["phase"] for phase in status.plain()["phases"]]
    assert phases[0] == "preparing"
    assert f"asking {server.url} for models" in phases
    assert "sending a first request" in phases


@pytest.mark.browser
def test_live_page_shows_phases_as_text(tmp_path, browser):
    status = LiveStatus()
    with live_report(tmp_path, status) as url:
        page = browser.open(url, width=390)
        status.begin("starting <b>vllm</b>")
        status.running = ["3 in flight, <i>cell</i>"]
        wait_for(page, "document.getElementById('phases').innerText.includes('<b>vllm</b>')")
        wait_for(page, "document.getElementById('running').innerText.includes('<i>cell</i>')")


def test_live_report_shows_a_folder_that_cannot_be_read(tmp_path):
    folder = tmp_path / "<b>"
    folder.mkdir()
    (folder / "cells.csv").write_text("a,b\n1,2\n")
    with live_report(folder) as url:
        page = fetched(f"{url}/report")
    assert "&lt;b&gt;/experiment.toml is missing" in page
    assert "<b>" not in page


def test_live_option_prints_the_address(slo_bench, tmp_path):
    small = ["--system", "vllm", "--requests", "20", "--seeds", "1", "--no-report", "--live"]
    code, _, err = slo_bench("run", *small, "--rates", "1", "--out", "a")
    assert code == 0
    assert "live report: http://127.0.0.1:" in err
    code, _, err = slo_bench("watch", "none")
    assert code == 2
    assert "there is no folder none" in err


def test_progress_without_a_terminal_prints_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.display("Bar", "MofNComplete", "cells", progress.DESCRIPTION) as change:
        change(completed=3, total=1200, description="vllm 40")
        change(completed=4)
        change(completed=1200)  # nothing is said of the time that repetitions still take
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("3 of 1,200 cells, vllm 40, 0 s, about ")
    assert second.startswith("4 of 1,200 cells, vllm 40, ")
    assert third.startswith("1,200 of 1,200 cells, ")
    assert "left" not in third
    with progress.changing_line("begins") as say:
        say("2 of 5: sarathi")
    assert "2 of 5: sarathi, 0 s" in capsys.readouterr().err
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1e9)
    with progress.counted("steps") as count:
        count(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.browser
def test_live_page_reloads_and_keeps_its_scroll_position(make_run, tmp_path, browser):
    done = make_run("done", environment={"planned_cells": 20})
    folder = tmp_path / "live"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("cells.csv"))
    with live_report(folder) as url:
        page = browser.open(url, width=1100)
        # While the frame is loaded anew it has no body.
        frame = "document.getElementById('report').contentDocument"
        inside = f"({frame}?.body?.innerText ?? '')"
        wait_for(page, f"{inside}.includes('Waiting')")
        shutil.copy(done / "cells.csv", folder / "cells.csv")
        wait_for(page, f"{inside}.includes('Goodput')")
        assert "12 of 20 cells" in page.run("document.getElementById('state').innerText")
    wait_for(page, "document.getElementById('state').innerText.includes('has ended')")
    assert page.run(f"{inside}.includes('Goodput')")


def wait_for(page, condition):
    for _ in range(600):
        if page.run(condition):
            return
        time.sleep(0.1)
    raise AssertionError(condition)
