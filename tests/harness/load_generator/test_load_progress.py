"""What is known of a load while it is sent."""

from array import array

import numpy as np
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.cli.output.run_output import _so_far
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions
from slo_bench.harness.load_generator.http.connection import Exchange
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.load_progress import LoadProgress, LoadWatch
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving
from slo_bench.workloads.slo import parse_slo


def exchange(row, arrival_s, *stamps, started_s, status=200, fault=RequestFault.NONE):
    record = Exchange(row, 0, arrival_s, waited_for=False)
    record.started_s, record.status, record.fault = started_s, status, fault
    record.stamps = array("d", stamps)
    return record


def test_progress_times_count_from_the_scheduled_arrival(workload):
    load = parse_slo("ttft=0.5,tpot=0.1").apply(workload(4, gap_s=1.0), np.random.default_rng(0))
    watch = LoadWatch(load)
    assert watch.progress(LoadProgress(in_flight=3)).attainment is None
    watch.ended(exchange(0, 0.0, 100.25, 100.65, started_s=100.125), 100.0)  # 5 tokens: 0.1 s each
    watch.ended(exchange(1, 1.0, 101.75, 101.75, started_s=101.0), 100.0)  # its first comes late
    progress = watch.progress(LoadProgress(in_flight=2))
    assert (progress.ended, progress.in_flight, progress.answered, progress.met) == (2, 2, 2, 1)
    assert progress.mean_ttft_s == pytest.approx(0.5)
    assert progress.mean_tpot_s == pytest.approx(0.1)  # of the first: the other's came all at once
    assert progress.send_delay_s == pytest.approx(0.125)
    watch.ended(exchange(2, 2.0, started_s=102.0, fault=RequestFault.RESET), 100.0)
    watch.ended(exchange(3, 3.0, 103.1, started_s=103.0, status=500), 100.0)
    progress = watch.progress(LoadProgress())
    assert (progress.ended, progress.answered, progress.met, progress.attainment) == (4, 2, 1, 0.25)


def test_progress_of_several_senders_adds_up():
    first = LoadProgress(4, 1, 4, 2, 2, 1.0, 1, 0.5, 0.25)
    second = LoadProgress(6, 2, 6, 1, 3, 2.0, 3, 1.5, 0.125)
    assert first + second == LoadProgress(10, 3, 10, 3, 5, 3.0, 4, 2.0, 0.25)


def test_progress_of_a_count_has_no_attainment():
    assert LoadProgress(12).attainment is None
    assert _so_far("cell", 12, LoadProgress(12)) == "cell 12"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_load_reports_progress_with_attainment_and_failures(workload, processes):
    load = parse_slo("ttft=30").apply(workload(60, gap_s=0.02), np.random.default_rng(0))
    config = MockConfig(ttft_s=0.005, itl_s=0.002, fault=InjectedFault.BROKEN, fault_every=3)
    heard = []
    options = HttpOptions(processes=processes, send_delay_limit_s=60.0)
    with serving(config) as server:
        measure(
            load,
            [Endpoint.parse(server.url)],
            options,
            progress=lambda progress, clock_s: heard.append((progress, clock_s)),
        )
    final, clock_s = heard[-1]
    assert 0 < final.met == final.answered < final.ended == final.judged <= 60
    assert clock_s > 0
    assert [progress.ended for progress, _ in heard] == sorted(
        progress.ended for progress, _ in heard
    )


def test_run_prints_progress_with_attainment(tmp_path, monkeypatch):
    monkeypatch.setattr("slo_bench.cli.output.progress.LINE_EVERY_S", 0.0)
    with serving(MockConfig(ttft_s=0.005, itl_s=0.002)) as server:
        words = ["run", "--base-url", server.url, "--workload", "synthetic", "--rates", "20"]
        words += ["--set", "prompt_tokens=8", "--set", "output_tokens=4", "--requests", "30"]
        words += ["--slo", "ttft=30", "--seeds", "1", "--no-report", "--out", str(tmp_path / "run")]
        shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "in flight, 100.0 % in SLO, late " in shown.output
    assert ", TTFT " in shown.output


@pytest.mark.slow
def test_run_prints_why_requests_failed(tmp_path):
    # The report needs a valid level, and a busy machine sends late. Of fewer than 20 requests the
    # sent rate is not judged.
    lenient = tmp_path / "lenient.toml"
    lenient.write_text("[client]\nsend_delay_limit_s = 60\n")
    with serving(MockConfig(fault=InjectedFault.TOO_LONG, fault_every=3)) as server:
        words = ["run", str(lenient), "--base-url", server.url, "--workload", "synthetic"]
        words += ["--set", "prompt_tokens=8", "--set", "output_tokens=4", "--requests", "15"]
        words += ["--rates", "20", "--slo", "ttft=30", "--seeds", "1"]
        shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    message = "5 of 15 requests failed (status: 400: the prompt is too long)"
    assert message in " ".join(shown.output.split())
    assert message in (tmp_path / "run" / "report.html").read_text()
