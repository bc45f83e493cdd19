"""`slo-bench report`, mounted on an app of its own."""

import json

import pytest
import typer
from typer.testing import CliRunner

from slo_bench import Experiment
from slo_bench.cli.commands.report import report
from slo_bench.harness.results.run_checkpoint import Checkpoint
from slo_bench.reports.compare.comparing import read_results
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import tune
from slo_bench.workloads.errors import SloBenchError


def invoke(*arguments):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_report_of_one_run_is_written_into_its_folder(make_run):
    folder = make_run(requests=30)
    result = invoke(folder)
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").is_file()
    assert str(folder / "report.html") in result.output
    assert "3 rates from 1 to 5 req/s" in " ".join(result.output.split())
    assert "TTFT p99" not in result.output
    assert "TTFT p99" in invoke(folder, "--verbose").output


@pytest.mark.slow
def test_report_of_several_runs_is_written_to_out_or_here(make_run, tmp_path, monkeypatch):
    first, second = make_run("one", requests=30), make_run("two", requests=30)
    assert invoke(first, second, "--out", tmp_path / "both.html").exit_code == 0
    assert (tmp_path / "both.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert invoke(first, second).exit_code == 0
    assert (tmp_path / "report.html").is_file()
    assert not (first / "report.html").exists()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tuning run that has ended, without its page."""
    folder = tmp_path_factory.mktemp("tuned") / "t"
    settings = TuneSettings(
        objectives=("goodput",), rate_rps=2.0, search={"max_num_seqs": "4,64"}, confirm=False
    )
    tune(Experiment(systems="vllm", requests=100, seeds=1), settings, folder)
    return folder


def test_report_of_a_tuning_run_writes_its_page_again(tuned, tmp_path):
    result = invoke(tuned, "--out", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert "Parameter importance" in result.output or "Best" in result.output
    page = (tmp_path / "r.html").read_text()
    assert "Default against tuned" in page
    assert 'origin":"simulated"' in page


def test_report_of_a_folder_that_is_no_run_names_its_kind(tuned, make_run, tmp_path):
    begun, planned = tmp_path / "begun", tmp_path / "planned"
    begun.mkdir()
    (begun / "tune.toml").touch()
    Checkpoint(planned / "plan.jsonl", "").append({"name": "one", "level": [1.0, 2.0, 3.0, 4.0]})
    for folder, hint in (
        (tuned, r"is a tuning run, .* slo-bench run .*/winner.toml"),
        (begun, "has not ended: slo-bench tune --resume --out"),
        (planned, r"is a plan, not a run: .* slo-bench run .*/experiment.toml"),
    ):
        with pytest.raises(SloBenchError, match=hint):
            read_results(folder)
    both = invoke(tuned, make_run(requests=30))
    assert "is a tuning run, not one to compare" in str(both.exception)


@pytest.mark.parametrize("damage", [{"trials": 3}, {"objectives": ["speed"]}, {"space": None}])
def test_report_of_a_damaged_tuning_run_names_the_file(tuned, tmp_path, damage):
    tuning = json.loads((tuned / "tune.json").read_text())
    (tmp_path / "tune.json").write_text(json.dumps({**tuning, **damage}))
    failed = invoke(tmp_path)
    assert isinstance(failed.exception, SloBenchError)
    assert "tune.json" in str(failed.exception)
    assert not (tmp_path / "report.html").exists()
