"""Lines of progress without a terminal: phases by name, and how far a tuning is."""

import re

from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.cli.output import progress
from slo_bench.cli.output.progress import phase


def test_phase_that_lasts_is_named_with_its_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with phase("writing the report"):
        pass
    assert "writing the report: 0 s\n" in capsys.readouterr().err


def test_phase_that_is_over_soon_is_not_named(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 1e6)
    with phase("writing the report"):
        pass
    assert capsys.readouterr().err == ""


def test_tune_without_a_terminal_says_how_many_configurations_are_done(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    words = ["tune", "vllm", "--trials", "2", "--requests", "100", "--objective", "goodput"]
    more = ["--rate", "4", "--no-report", "--no-confirm", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    assert re.search(r"2 of 2 configurations, [\d,]+ requests", done.stderr)
