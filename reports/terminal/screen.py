"""The last screen of a command: what was tested, a table, what limits it, and the answer.

Lines end between words, at the width of the terminal or `MOST_WIDTH`. A longer word stays whole.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..pages.table import Table

MOST_WIDTH = 120
"""Characters of a line; longer ones are hard to read."""

_GAP = 2  # characters between two columns


@dataclass(frozen=True)
class Column:
    """A column of a screen's table.

    `words` stand at the left and may take several lines, numbers at the right. `optional` columns
    are left out, the last ones first, where the terminal has no room for them.
    """

    head: str
    words: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Group:
    """Rows of a table; a rule stands between two groups, and `head` above this one."""

    rows: Sequence[Sequence[str]]
    head: str = ""


@dataclass(frozen=True)
class Screen:
    """What a command found. A no-break space keeps two words in one line.

    Attributes:
        tested: what was tested, a line each.
        columns: of the table.
        groups: its rows.
        notes: what the table's words mean and what limits it.
        answer: sentences, the most important last.
    """

    tested: Sequence[str]
    columns: Sequence[Column] = ()
    groups: Sequence[Group] = ()
    notes: Sequence[str] = ()
    answer: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MOST_WIDTH)
        for line, style in self._lines(width):
            plain = line.replace("\N{NO-BREAK SPACE}", " ").rstrip()
            yield Text(plain, style, no_wrap=True, overflow="ignore")

    def _lines(self, width: int) -> Iterator[tuple[str, str]]:
        """The lines and their styles."""
        for text in self.tested:
            yield from ((line, "") for line in _wrapped(text, width, hanging="  "))
        if any(group.rows for group in self.groups):
            yield from _table_lines(self.columns, self.groups, width)
        for text in self.notes:
            yield from ((line, "dim") for line in _wrapped(text, width))
        for text in self.answer:
            yield from ((line, "bold") for line in _wrapped(text, width))


def _wrapped(text: str, width: int, *, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(hanging) + 1),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent=hanging,
    ) or [""]


def _in_column(text: str, width: int) -> list[str]:
    hyphens = _longest(text.split(" ")) > width
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=hyphens) or [""]


def _table_lines(
    columns: Sequence[Column], groups: Sequence[Group], width: int
) -> Iterator[tuple[str, str]]:
    rows = [row for group in groups for row in group.rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    hidden: list[str] = []
    while (widths := _widths(columns, rows, shown, width)) is None:
        place = max((place for place in shown if columns[place].optional), default=shown[-1])
        hidden.insert(0, columns[place].head)
        shown.remove(place)
    heads = [_wrapped(columns[place].head, size) for place, size in zip(shown, widths, strict=True)]
    height = max(map(len, heads))
    padded = [[""] * (height - len(lines)) + lines for lines in heads]
    for line in zip(*padded, strict=True):
        yield _joined(columns, shown, widths, line), "bold"
    rule = "─" * (sum(widths) + _GAP * (len(widths) - 1))
    for group in groups:
        yield rule, "dim"
        if group.head:
            yield from ((line, "underline") for line in _wrapped(group.head, width))
        for row in group.rows:
            cells = [
                _in_column(row[place], size) if columns[place].words else [row[place]]
                for place, size in zip(shown, widths, strict=True)
            ]
            for number in range(max(map(len, cells))):
                line = [lines[number] if number < len(lines) else "" for lines in cells]
                yield _joined(columns, shown, widths, line), ""
    if hidden:
        yield f"not shown in {width} columns: {', '.join(hidden)}", "dim"


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int], width: int
) -> list[int] | None:
    """The widths of the shown columns; None where they do not fit and one can be left out.

    First heads take several lines, then words end between words, and after hyphens.
    """
    room = width - _GAP * (len(shown) - 1)
    cells = [[row[place] for row in rows] for place in shown]
    texts = [[columns[place].head, *lines] for place, lines in zip(shown, cells, strict=True)]
    whole = list(map(_longest, texts))
    if sum(whole) <= room:
        return whole
    least = [_longest(columns[place].head.split(" ")) for place in shown]
    widths = [max(head, *map(cell_len, c)) for head, c in zip(least, cells, strict=True)]
    for separator in (" ", "-"):
        for position, place in enumerate(shown):
            excess = sum(widths) - room
            if excess > 0 and columns[place].words:
                words = [_longest(_pieces(text, separator)) for text in cells[position]]
                widths[position] = max(widths[position] - excess, least[position], *words)
    droppable = any(columns[place].optional for place in shown)
    return None if sum(widths) > room and droppable else widths


def _pieces(text: str, separator: str) -> list[str]:
    """What stays in one line: words, or the parts of words with hyphens."""
    return text.split(" ") if separator == " " else re.split(r" |(?<=-)", text)


def _longest(pieces: Iterable[str]) -> int:
    return max(map(cell_len, pieces), default=0)


def _joined(
    columns: Sequence[Column], shown: Sequence[int], widths: Sequence[int], cells: Sequence[str]
) -> str:
    parts = []
    for place, size, text in zip(shown, widths, cells, strict=True):
        room = " " * (size - cell_len(text))
        parts.append(text + room if columns[place].words else room + text)
    return (" " * _GAP).join(parts)


def screen_of(table: Table, title: str, *, notes: Sequence[str] = ()) -> Screen:
    """A page's table as a screen; of rows that begin alike the first alone shows the name."""
    groups = []
    for head, rows in table.groups:
        lines, last = [], ""
        for first, *rest in rows:
            lines.append(["" if str(first) == last else str(first), *map(str, rest)])
            last = str(first)
        groups.append(Group(lines, str(head) if str(head) != title else ""))
    columns = [
        Column(name, words=place in table.texts or name in table.names)
        for place, name in enumerate(table.heads)
    ]
    return Screen(tested=[title] if title else [], columns=columns, groups=groups, notes=notes)
