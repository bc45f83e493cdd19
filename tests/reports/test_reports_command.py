"""`slo-bench report`, mounted on an app of its own."""

import typer
from typer.testing import CliRunner

from slo_bench.cli.report import report


def invoke(*arguments):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_one_run_writes_into_its_folder(make_run):
    folder = make_run(requests=30)
    result = invoke(folder)
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").is_file()
    assert str(folder / "report.html") in result.output
    assert "Highest tested rate" in result.output


def test_several_runs_write_where_asked_or_here(make_run, tmp_path, monkeypatch):
    one, two = make_run("one", requests=30), make_run("two", requests=30)
    assert invoke(one, two, "--out", tmp_path / "both.html").exit_code == 0
    assert (tmp_path / "both.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert invoke(one, two).exit_code == 0
    assert (tmp_path / "report.html").is_file()
    assert not (one / "report.html").exists()
