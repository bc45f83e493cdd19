"""Published results beside ours: what is averaged, how it is compared, what is refused."""

from __future__ import annotations

import pandas as pd
import pytest

from slo_bench.harness.experiments.config.experiment_file import read_toml
from slo_bench.harness.experiments.experiment import suites
from slo_bench.reports.pages.published import (
    SHIPPED,
    PublishedRow,
    figure_text,
    load_published,
    ours,
)
from slo_bench.workloads.errors import FileFormatError, UnknownNameError

CELLS = pd.DataFrame(
    {
        "system": ["a", "a", "b", "b", "a", "b"],
        "rate_rps": [1.0, 1.0, 1.0, 1.0, 2.0, 2.0],
        "seed": [0, 1, 0, 1, 0, 0],
        "cap": ["64", "64", "64", "64", "64", "64"],
        "own": [7.0, None, None, None, None, None],
        "attainment": [0.8, 0.9, 0.4, 0.6, 0.3, 0.0],
        "valid": [True] * 6,
    }
)

AT_1 = {"system": "a", "rate_rps": 1}


def row(**fields):
    return PublishedRow("what", 1.0, **{"column": "attainment", **fields})


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"where": {"system": "a", "rate_rps": 1}}, 0.85),
        ({"where": {"system": "a", "rate_rps": "knee"}, "scale": 100}, 30),
        ({"where": {"system": "a", "rate_rps": 1, "cap": 64}}, 0.85),
        ({"where": {"system": "a", "rate_rps": 1, "cap": "64"}}, 0.85),
        ({"where": {"system": "a", "rate_rps": 1}, "than": {"system": "b"}}, 1.7),
        ({"where": AT_1, "than": {"system": "b"}, "by": "reduction"}, 1 - 0.85 / 0.5),
        ({"where": AT_1, "than": {"system": "b"}, "by": "difference", "scale": 100}, 35),
        ({"where": AT_1 | {"own": 7}}, 0.8),
        ({"where": AT_1 | {"own": ""}}, 0.9),
        ({"where": {"system": "c"}}, None),
        ({"where": {"system": "a", "cap": 128}}, None),
        ({"where": {"nothing": 1}}, None),
        ({"where": {"system": "a"}, "column": "nothing"}, None),
        ({"where": {"system": "a", "rate_rps": 2}, "than": {"system": "b"}}, None),  # by zero
    ],
)  # fmt: skip
def test_ours(fields, value):
    found = ours(row(**fields), CELLS, knee=2.0)
    assert found is value if value is None else found == pytest.approx(value)


def test_invalid_cells_do_not_count():
    cells = CELLS.assign(valid=[False, True, True, True, True, True])
    assert ours(row(where={"system": "a", "rate_rps": 1}), cells, 2.0) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (51.84, "%", "51.8 %"),
        (1.234, "×", "1.23 ×"),
        ("1.9–5.0", "", "1.9–5.0"),
        ("<b>", "", "<b>"),  # the template escapes
    ],
)
def test_figures(value, unit, text):
    assert figure_text(value, unit) == text


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("*.toml")])
def test_shipped_tables(name):
    table = load_published(name)
    assert table.rows
    for one in table.rows:
        assert one.reason or one.column, one.what


def test_every_suite_names_a_table_there_is():
    named = [read_toml(path)[0].get("published") for path in suites().values()]
    assert "uellm" in named
    for name in filter(None, named):
        load_published(str(name))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = 'x'", r"needs a title and \[\[row\]\]s"),
        ("[[row]]\nwhat = 'x'\npublished = 1", "needs a title"),
        ("title = 'x'\n[[row]]\nwhat = 'y'", "row 1 needs `what` and `published`"),
        ("title = 'x'\n[[row]]\nwhat = 'y'\npublished = 1\nunits = 's'", "did you mean unit"),
        (
            "title = 'x'\n[[row]]\nwhat = 'y'\npublished = 1\nby = 'half'",
            "by must be ratio, reduction",
        ),
        ("title = ", "is not TOML"),
    ],
)
def test_bad_tables(text, problem, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=problem):
        load_published(str(path))


def test_unknown_tables():
    with pytest.raises(UnknownNameError, match="did you mean uellm"):
        load_published("uelm")


def test_the_report_shows_the_table(tmp_path):
    from slo_bench.harness.experiments.experiment import Experiment
    from slo_bench.reports.pages.run_page import write_report

    table = tmp_path / "mine.toml"
    table.write_text(
        "title = 'A paper & more'\n[[row]]\nwhat = 'Within SLO'\npublished = 51.8\nunit = '%'\n"
        "column = 'attainment'\nscale = 100\nwhere = { system = 'fifo' }\n"
        "reason = 'Load <unknown>'\n"
        "[[row]]\nwhat = 'Elsewhere'\npublished = '<9>'\nreason = 'Later'\n"
    )
    asked = Experiment(
        published=str(table), systems=["fifo"], workload="alpaca", slo="e2e=100", requests=20,
        rates=[1], seeds=1, records="csv",
    )  # fmt: skip
    result = asked.run(tmp_path / "run", jobs=1)
    page = write_report([result.folder], tmp_path / "report.html").read_text()
    assert "A paper &amp; more" in page
    assert "<td>51.8 %</td><td>100.0 %</td>" in page
    assert "Load &lt;unknown&gt;" in page
    assert "<td>&lt;9&gt;</td>" in page
    assert "not run" in page
