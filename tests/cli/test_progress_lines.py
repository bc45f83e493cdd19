"""Lines of progress without a terminal: phases by name, and how far a tuning is."""

import re
import threading

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


def test_phase_that_lasts_is_told_while_it_goes_on(monkeypatch):
    printed = threading.Event()
    monkeypatch.setattr(progress, "_TICK_S", 0.0)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress.typer, "echo", lambda line, err: printed.set())
    with phase("reading"):
        assert printed.wait(60)  # nothing changes meanwhile


def test_lines_come_more_and_more_rarely(monkeypatch, capsys):
    clock_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock_s[0])
    lines = progress._Lines(("levels",))
    for second in range(120):
        clock_s[0] = float(second)
        lines.change(completed=second, total=120)
    printed = [int(line.split()[0]) for line in capsys.readouterr().err.splitlines()]
    assert printed == [2, 10, 40, 70, 100]


def test_display_without_a_text_prints_no_line(monkeypatch, capsys):
    clock_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock_s[0])
    lines = progress._Lines(("Spinner",))
    for clock_s[0], text in ((100.0, ""), (200.0, "3 running"), (300.0, "")):
        lines.change(description=text)
    assert capsys.readouterr().err == "3 running, 200 s\n"


def test_tune_without_a_terminal_says_how_many_configurations_are_done(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    words = ["tune", "vllm", "--trials", "2", "--requests", "100", "--objective", "goodput"]
    more = ["--rate", "4", "--no-report", "--no-confirm", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    assert re.search(r"2 of 2 configurations, [\d,]+ requests", done.stderr)
