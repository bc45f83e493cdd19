"""What `slo-bench` alone, `--help` and `--help-all` show."""

from __future__ import annotations

import inspect
import re

import pytest
from typer.main import get_command

from slo_bench.cli.lazy_group import LazyCommands, help_text
from slo_bench.cli.main import app
from slo_bench.cli.short_help import ShortHelp
from slo_bench.harness.results.metrics import objectives
from slo_bench.reports.compare.results import comparable

CLI = get_command(app)
SHORT = [
    (*path, name)
    for path, group in (((), CLI), (("tune",), CLI.commands["tune"]))
    for name, command in group.commands.items()
    if isinstance(command, ShortHelp)
]
MANY = 25


def _command(words):
    command = CLI
    for word in words:
        command = command.commands[word]
    return command


def test_command_without_arguments_prints_a_short_introduction(slo_bench):
    code, out, _ = slo_bench()
    assert code == 0
    assert out.count("\n  slo-bench ") == 3
    assert "slo-bench --help" in out
    assert "Usage" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_commands_with_many_options_have_a_short_help():
    for name, command in CLI.commands.items():
        many = len(getattr(command, "params", [])) > MANY
        assert isinstance(command, ShortHelp) == many, name
    assert ("run",) in SHORT


@pytest.mark.parametrize("words", SHORT, ids=" ".join)
def test_short_help_shows_a_part_and_help_all_every_option(slo_bench, words):
    command = _command(words)
    names = {option.opts[0] for option in command.params if option.param_type_name == "option"}
    assert command.shown - {"--help-all"} <= names
    assert len(command.shown) <= 14
    code, short, _ = slo_bench(*words, "--help")
    assert code == 0
    [footer] = [line for line in short.splitlines() if "more options" in line]
    assert footer.startswith(f" {len(names) - len(command.shown)} more options: ")
    assert footer.endswith(f"slo-bench {' '.join(words)} --help-all")
    hidden = sorted(names - command.shown)[0]
    assert f"│ {hidden} " not in short
    code, long, _ = slo_bench(*words, "--help-all")
    assert code == 0
    assert f"│ {hidden} " in long
    assert long.count("\n") > short.count("\n")
    assert slo_bench(*words, "--help")[1] == short  # what was hidden is shown again


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("compare", comparable()),
        ("gate", comparable()),
        ("sensitivity", [name for name, figure in objectives().items() if figure.is_column]),
    ],
)
def test_help_of_metric_names_every_figure_that_it_takes(name, metrics):
    [metric] = [option for option in CLI.commands[name].params if option.name == "metric"]
    words = set(re.findall(r"[a-z_0-9]+", metric.help))
    for figure in metrics:
        family, _, kind = figure.partition("_")
        assert figure in words or {f"{family}_", kind} <= words, figure


@pytest.mark.parametrize("name", CLI.commands)
def test_text_of_each_command_in_the_list_is_that_of_the_command(name):
    assert inspect.cleandoc(LazyCommands({name: None})[name].help) == help_text(name)
