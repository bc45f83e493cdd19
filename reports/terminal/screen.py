"""The last screen of a command: what was tested, a table, what limits it, and the answer.

Lines end between words, at the width of the terminal or `MOST_WIDTH`. A longer word stays whole.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

MOST_WIDTH = 120
"""Characters of a line; longer ones are hard to read."""

_LONG_WORD = 12  # characters; longer ones are broken where a table has no room
_GAP = 2  # characters between two columns


@dataclass(frozen=True)
class Column:
    """A column of a screen's table, whose texts may have several lines.

    `words` stand at the left and may take several lines, but not if `whole`; numbers stand at the
    right. `optional` columns are left out, the last ones first, where the terminal has no room.
    """

    head: str
    words: bool = False
    whole: bool = False
    optional: bool = False

    @property
    def breaks(self) -> bool:
        """Whether its texts may take several lines."""
        return self.words and not self.whole


@dataclass(frozen=True)
class Group:
    """Rows of a table; a rule stands between two groups, and `head` above this one."""

    rows: Sequence[Sequence[str | Text]]
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
        for text in self.tested:
            yield from _paragraph(text, width, hanging="  ")
        if any(group.rows for group in self.groups):
            yield from _table_lines(self.columns, self.groups, options.max_width)
        for text in self.notes:
            yield from _paragraph(text, width, style="dim")
        for text in self.answer:
            yield from _paragraph(text, width, style="bold")


@dataclass(frozen=True)
class Paragraph:
    """A text whose lines end between words."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MOST_WIDTH)
        for line in self.text.plain.split("\n"):
            yield from _paragraph(line, width, style=str(self.text.style))


def _paragraph(text: str, width: int, *, hanging: str = "", style: str = "") -> Iterator[Text]:
    return (_line((line, style)) for line in wrapped(text, width, hanging=hanging))


def _line(*parts: tuple[str, str]) -> Text:
    """A line of texts and their styles."""
    line = Text.assemble(*parts, no_wrap=True, overflow="ignore")
    line.plain = line.plain.replace("\N{NO-BREAK SPACE}", " ")
    line.rstrip()
    return line


def wrapped(text: str, width: int, *, hanging: str = "") -> list[str]:
    """Lines of a text that end between words; `hanging` begins all but the first."""
    return textwrap.wrap(
        text,
        max(width, len(hanging) + 1),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent=hanging,
    ) or [""]


def _in_column(text: str, width: int) -> list[str]:
    """The lines of a cell; of 0 columns, those that the text has itself."""
    return [
        line for part in text.split("\n") for line in (_broken(part, width) if width else [part])
    ]


def _broken(text: str, width: int) -> list[str]:
    """Lines that end between words; those of a longer word after a hyphen, slash or dot."""
    lines = [""]
    for word in text.split(" "):
        pieces = [word] if cell_len(word) <= width else _pieces(word)
        for number, piece in enumerate(pieces):
            gap = " " if lines[-1] and not number else ""
            if lines[-1] and cell_len(f"{lines[-1]}{gap}{piece}") > width:
                lines.append(piece)
            else:
                lines[-1] += f"{gap}{piece}"
    return lines


def _table_lines(columns: Sequence[Column], groups: Sequence[Group], width: int) -> Iterator[Text]:
    rows = [[str(cell) for cell in row] for group in groups for row in group.rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    hidden: list[str] = []
    while (widths := _widths(columns, rows, shown, width)) is None:
        place = max(place for place in shown if columns[place].optional)
        hidden.insert(0, columns[place].head)
        shown.remove(place)
    sizes = dict(zip(shown, widths, strict=True))
    if sum(widths) + _GAP * (len(widths) - 1) > width:
        yield from _as_lists([columns[place].head for place in shown], groups, shown, width)
        return

    def line(texts: Mapping[int, str], styles: Mapping[int, str]) -> Text:
        parts = []
        for place, size in sizes.items():
            room = " " * (size - cell_len(texts[place]))
            text = texts[place] + room if columns[place].words else room + texts[place]
            parts += [(text, styles[place]), (" " * _GAP, "")]
        return _line(*parts)

    heads = {place: _broken(columns[place].head, size) for place, size in sizes.items()}
    has_heads = any(columns[place].head.strip() for place in sizes)
    height = max(map(len, heads.values())) if has_heads else 0
    for number in range(height):
        begun = {place: number - height + len(lines) for place, lines in heads.items()}
        texts = {p: heads[p][at_line] if at_line >= 0 else "" for p, at_line in begun.items()}
        yield line(texts, dict.fromkeys(sizes, "bold"))
    rule = "─" * (sum(widths) + _GAP * (len(widths) - 1))
    for number, group in enumerate(groups):
        if has_heads or number:
            yield _line((rule, "dim"))
        if group.head:
            yield from _paragraph(group.head, width, style="underline")
        for row in group.rows:
            styles = {place: _style(row[place]) for place in sizes}
            cells = {
                place: _in_column(str(row[place]), size if columns[place].breaks else 0)
                for place, size in sizes.items()
            }
            for number in range(max(map(len, cells.values()))):
                texts = {p: c[number] if number < len(c) else "" for p, c in cells.items()}
                yield line(texts, styles)
    if hidden:
        yield _line((f"not shown in {width} columns: {', '.join(hidden)}", "dim"))


def _as_lists(
    heads: Sequence[str], groups: Sequence[Group], shown: Sequence[int], width: int
) -> Iterator[Text]:
    """The rows of a table that has no room, one below the other: a cell a line, after its head."""
    indent = min(_longest(heads) + _GAP, width // 2)
    for group in groups:
        if group.head:
            yield from _paragraph(group.head, width, style="underline")
        for row in group.rows:
            yield _line(("─" * width, "dim"))
            for head, place in zip(heads, shown, strict=True):
                if cell := " ".join(str(row[place]).split("\n")):
                    text = f"{head.ljust(indent)} {cell}" if head else cell
                    yield from _paragraph(text, width, hanging="  ", style=_style(row[place]))


def _style(cell: str | Text) -> str:
    return str(cell.style) if isinstance(cell, Text) else ""


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int], width: int
) -> list[int] | None:
    """The widths of the shown columns; None where they do not fit and one can be left out.

    First heads take several lines, then words end between words, and long ones within.
    """
    room = width - _GAP * (len(shown) - 1)
    cells = [[line for row in rows for line in row[place].split("\n")] for place in shown]
    widths = [
        _longest([columns[place].head, *lines]) for place, lines in zip(shown, cells, strict=True)
    ]
    for cut in (_words, _pieces):
        least_heads = [_longest(cut(columns[place].head)) for place in shown]
        least = [max(pair) for pair in zip(least_heads, map(_longest, cells), strict=True)]
        _shrink(widths, least, room)  # heads first
        least = [
            max(head, _longest(piece for text in texts for piece in cut(text)))
            if columns[place].breaks
            else width
            for place, head, texts, width in zip(shown, least_heads, cells, widths, strict=True)
        ]
        _shrink(widths, least, room)
    droppable = any(columns[place].optional for place in shown)
    return None if sum(widths) > room and droppable else widths


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Make the widest columns narrower, none below its least width, until all fit."""
    while sum(widths) > room:
        wider = [place for place, width in enumerate(widths) if width > least[place]]
        if not wider:
            return
        widths[max(wider, key=widths.__getitem__)] -= 1


def _words(text: str) -> list[str]:
    return text.split(" ")


def _pieces(text: str) -> list[str]:
    """Words, and the parts of long ones, which end after hyphens, slashes and dots."""
    words = _words(text)
    parts = (re.split(r"(?<=[-/_.])", word) if len(word) > _LONG_WORD else [word] for word in words)
    return [piece for pieces in parts for piece in pieces]


def _longest(pieces: Iterable[str]) -> int:
    return max(map(cell_len, pieces), default=0)
