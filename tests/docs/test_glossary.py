"""Options, help texts, columns, error messages and public names keep to the glossary."""

import ast
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import slo_bench
import slo_bench.policy
from slo_bench import Experiment
from slo_bench.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def table_rows(text):
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not set(cells[0]) <= {"-"}:
            yield cells


def words_of(heading):
    """The words of one list at the end of the glossary: `word → what to say · word → …`."""
    section = GLOSSARY.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {pair.split()[-1] for pair in section.split(" →")[:-1]}


WORDS = words_of("Words that are not used")
NAMES = WORDS | words_of("Names that are not used")


def found_in(text, listed):
    """Listed words in a text, as whole words; `_` in a word also stands for `-`."""
    return {
        word
        for word in listed
        if re.search(
            rf"(?<![\w-]){re.escape(word).replace('_', '[_-]')}(?![\w-])",
            text,
            flags=re.IGNORECASE,
        )
    }


def old_names(name):
    """Listed words in `PreemptionMode`, `preemption_mode` or `--preemption-mode`."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name.lstrip("-"))
    return found_in(spaced, NAMES) | found_in(name.lstrip("-"), NAMES)


def commands():
    """Every command with its path, options and help."""

    def walk(command, path):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))

    yield from walk(typer.main.get_command(app), ("slo-bench",))


def test_glossary_word_lists_are_parsed():
    assert len(WORDS) > 30
    assert found_in("the knob of a resident", WORDS) == {"knob", "resident"}
    assert old_names("told_tokens") == {"told"}


def test_options_and_help_texts_use_no_retired_words():
    wrong = {}
    for path, command in commands():
        texts = [command.help or ""]
        retired = set().union(*map(old_names, path[1:]))
        for parameter in command.params:
            texts += [getattr(parameter, "help", "") or "", str(parameter.metavar or "")]
            retired |= set().union(*map(old_names, parameter.opts))
        if retired := retired | set().union(*(found_in(text, WORDS) for text in texts)):
            wrong[" ".join(path)] = retired
    assert not wrong


def error_texts(path):
    """The constant parts of what is raised in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@pytest.mark.slow
@pytest.mark.parametrize("folder", PACKAGE)
def test_error_messages_use_no_retired_words(folder):
    wrong = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        if retired := set().union(*(found_in(text, WORDS) for text in error_texts(path))):
            wrong[str(path.relative_to(ROOT))] = retired
    assert not wrong


def public_names():
    for module in (slo_bench, slo_bench.policy):
        for name in module.__all__:
            yield name
            inner = getattr(module, name)
            if isinstance(inner, type):
                yield from (n for n in vars(inner) if not n.startswith("_"))
    yield from Experiment.model_fields


def test_public_names_use_no_retired_words():
    assert not {name: retired for name in public_names() if (retired := old_names(name))}


def columns(folder):
    with (folder / "cells.csv").open(encoding="utf-8") as file:
        yield from file.readline().strip().split(",")


def test_columns_of_cells_csv_are_defined_in_metrics_page(tmp_path):
    arguments = ["run", "--requests", "20", "--rates", "4", "--seeds", "1", "--no-report"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    defined = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8")))
    defined |= set(re.findall(r"`([a-z0-9_]+)`", GLOSSARY))
    names = set(columns(tmp_path / "o"))
    assert not {name for name in names if old_names(name)}
    bands = {re.sub("^band_(low|high)_", "", name) for name in names}
    assert not bands - defined


def test_glossary_terms_are_distinct():
    before = GLOSSARY.split("## Words that are not used")[0]
    terms = [row[0] for row in table_rows(before) if row[0] not in ("term",)]
    assert len(terms) == len(set(terms))
