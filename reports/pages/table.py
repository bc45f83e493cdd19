"""A table defined once: its columns and rows, drawn on a terminal by rich, on a page by
`templates/macros.html`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich import table as on_terminal
from rich.text import Text

_LONG_WORD = 24  # characters; longer ones may be broken on a terminal


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

    def _least_width(self, place: int) -> int:
        """Characters of the longest word of a column, so that names are not broken."""
        cells = (row[place] for _, rows in self.groups for row in rows if place < len(row))
        words = (word for cell in cells for word in str(cell).split())
        return max((min(len(word), _LONG_WORD) for word in words), default=1)

    def rich(
        self, title: str = "", *, widths: Sequence[int] = (), **options: Any
    ) -> on_terminal.Table:
        """The table for a terminal, as a rich table."""
        table = on_terminal.Table(
            title=Text(title) if title else None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            **options,
        )
        for place, name in enumerate(self.heads):
            words = place in self.texts
            table.add_column(
                Text(name, overflow="fold"),
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=not words and name not in self.names,
                width=widths[place] if widths else None,
                min_width=None if widths else self._least_width(place),
            )
        for head, rows in self.groups:
            if table.row_count:
                table.add_section()
            if str(head) not in ("", title):
                table.add_row(Text(str(head), style="underline"))
            last = ""
            for first, *rest in rows:
                table.add_row(*map(_text, ("" if str(first) == last else first, *rest)))
                last = str(first)
        return table


def one_group(label: str, heads: Sequence[str], rows: Sequence[Row], **more: Any) -> Table:
    """A table without groups; none without rows."""
    return Table(label, heads, [("", rows)] if rows else [], **more)


def _text(cell: str | Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else Text(cell.text, style=cell.style)
