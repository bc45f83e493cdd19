"""A table defined once: its columns and rows, drawn on a terminal by `screen`, on a page by
`templates/macros.html`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ..terminal.screen import Column, Group, Screen


@dataclass(frozen=True)
class Cell:
    """A cell that is more than its text."""

    text: str
    style: str = ""  # rich's, on a terminal
    css: str = ""  # class on a page
    best: bool = False  # of its column
    series: int | None = None  # place among the page's series, whose mark stands before the text
    before: str = ""  # what stands dim before it
    bar: float | None = None  # length below the text, in percent
    bar_of: int = 0  # the series whose colour the bar has
    bar_range: tuple[float, float] | None = None  # ends of a line over the bar, in percent
    after: str = ""  # the range that stands below it, on a page only

    def __str__(self) -> str:
        return self.text


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under heads, in groups that may have a head of their own.

    A terminal shows the first cell of rows in a group once where it is the same.
    """

    label: str
    heads: Sequence[str]
    groups: Sequence[tuple[str | Cell, Sequence[Row]]]
    texts: Collection[int] = (0,)  # places of the columns of words; the others hold numbers
    names: Collection[str] = ()  # heads that are names: broken where long, never capitalised
    caption: str = ""
    note: str = ""  # line below the table, on a page only
    badge: str = ""
    css: str = ""
    optional: Collection[str] = ()  # heads that a terminal without room leaves out, the last first

    def rich(self, title: str = "", *, notes: Sequence[str] = ()) -> Screen:
        """The table for a terminal, with notes below it."""
        groups = []
        for head, rows in self.groups:
            lines, last = [], ""
            for first, *rest in rows:
                lines.append(["" if str(first) == last else _text(first), *map(_text, rest)])
                last = str(first)
            groups.append(Group(lines, str(head) if str(head) != title else ""))
        columns = [
            Column(name, words=place in self.texts, optional=name in self.optional)
            for place, name in enumerate(self.heads)
        ]
        return Screen([title] if title else [], columns, groups, notes)


def one_group(label: str, heads: Sequence[str], rows: Sequence[Row], **more: Any) -> Table:
    """A table without groups; none without rows."""
    return Table(label, heads, [("", rows)] if rows else [], **more)


def _text(cell: str | Cell) -> str | Text:
    return Text(cell.text, style=cell.style) if isinstance(cell, Cell) else cell
