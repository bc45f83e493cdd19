"""Tables of a screen: heads, rules, and columns that are shown as they are."""

import io

from rich.console import Console
from rich.text import Text

from slo_bench.cli.output.console import text_table
from slo_bench.reports.terminal.screen import Column, Group, Screen


def printed(screen, width=40):
    stream = io.StringIO()
    Console(file=stream, width=width).print(screen, soft_wrap=True)
    return stream.getvalue()


def test_table_without_heads_begins_with_its_first_row():
    table = text_table(("", ""), [("gpu", "a100"), (Text("model", style="bold"), "tiny")])
    assert printed(table) == "gpu    a100\nmodel  tiny\n"


def test_second_group_without_heads_stands_below_a_rule():
    screen = Screen((), [Column("", words=True)], [Group([["a"]]), Group([["b"]])])
    assert printed(screen) == "a\n─\nb\n"


def test_unbroken_column_keeps_its_words_in_one_line():
    rows = [("a name of words", "a long text that takes several lines here")]
    lines = printed(text_table(("name", "text"), rows, unbroken=("name",)), 34).splitlines()
    assert lines[2].startswith("a name of words  a long text")
    assert all(line.startswith(" ") for line in lines[3:])


def test_screen_without_anything_prints_nothing():
    assert printed(Screen(())) == ""


def test_columns_are_as_wide_as_words_that_a_no_break_space_holds_together():
    columns = [Column("a name", words=True), Column("US$\xa0per\xa01,000 in\xa0SLO")]
    lines = printed(Screen((), columns, [Group([["words and words", "$0.1"]])]), 24).splitlines()
    assert lines[0].endswith("US$ per 1,000")
    assert max(map(len, lines)) <= 24


def test_widest_column_of_words_is_broken_first():
    columns = [Column("a", words=True), Column("b", words=True)]
    rows = [["two words", "some more words than there is room for"]]
    assert printed(Screen((), columns, [Group(rows)]), 30).splitlines()[2].startswith("two words")


def test_table_without_room_lists_its_cells_one_below_the_other():
    columns = [Column("system", words=True), *map(Column, ("in SLO", "goodput of all", ""))]
    rows = [["vllm", "90.0 %", "1,000,000,000", "a note"], ["edf", "9 %", "2", ""]]
    screen = Screen((), columns, [Group(rows)])
    assert max(map(len, printed(screen, 44).splitlines())) <= 44
    lines = printed(screen, 30).splitlines()
    assert max(map(len, lines)) <= 30
    assert lines == [
        *("─" * 30, "system          vllm", "in SLO          90.0 %"),
        *("goodput of all  1,000,000,000", "a note"),
        *("─" * 30, "system          edf", "in SLO          9 %", "goodput of all  2"),
    ]
