"""Terminal output with rich; names are escaped, so that they cannot control the terminal.

Names come from servers, traces and run folders that are not trusted. Control characters could set
colours, the title or the clipboard, so they are replaced, as are those that turn the direction of
text. Rich prints no colours where the output is no terminal, or where NO_COLOR is set.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as Renderables
from rich.segment import Segment
from rich.text import Text

from ...reports.terminal.screen import Column, Group, Paragraph, Screen, wrapped

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)

_MOST_WIDTH = 1000  # a COLUMNS of millions would fill lines with millions of spaces


def harmless(text: str) -> str:
    """Replace the control characters of a text, except line ends and tabs."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Replace control characters in the text; rich passes its own styles and controls
        separately.
        """
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else harmless(text), style, control)


def terminal(**options: Any) -> Console:
    """Standard output, or with `stderr=True` standard error; of at most `_MOST_WIDTH` columns."""
    console = _Console(**options)
    console.width = min(console.width, _MOST_WIDTH)
    return console


def print_lines(*lines: object) -> None:
    """Print lines as they are: without markup or highlighting; None is left out.

    On a terminal they end between words. They are written at once: reading the first ones alone
    ends no command.
    """
    _write(terminal(), lines)


def _write(console: Console, lines: Iterable[object]) -> None:
    with console:
        for line in lines:
            if line is not None:
                text = for_terminal(str(line)) if console.is_terminal else str(line)
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def tell(text: str) -> None:
    """Print a line on standard error; on a terminal in lines that end between words."""
    typer.echo(for_terminal(text) if sys.stderr.isatty() else text, err=True)


def for_terminal(text: str) -> str:
    """The text in lines that end between words; a command stays whole, to be copied, where it does
    not fit in a line of its own.
    """
    width = min(shutil.get_terminal_size().columns, _MOST_WIDTH)
    words, name, rest = text.partition("slo-bench ")
    if name and len(text) <= width:
        return text
    lines = [line for part in words.split("\n") for line in wrapped(part, width)]
    return "\n".join([*filter(None, lines), name + rest] if name else lines)


def print_result(shown: RenderableType, *lines: object) -> None:
    """Print a screen, a table or text, or several, and lines as `print_lines` does."""
    console = terminal()
    with console:
        for part in shown.renderables if isinstance(shown, Renderables) else (shown,):
            whole_words = Paragraph(part) if isinstance(part, Text) else part
            console.print(whole_words, soft_wrap=isinstance(whole_words, Screen | Paragraph))
        _write(console, lines)


def text_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Collection[str] = (),
    unbroken: Collection[str] = (),
    title: str = "",
) -> Screen:
    """A table of texts that are shown as they are; without heads where all are empty.

    Args:
        heads: of the columns.
        rows: values or rich's texts.
        numbers: heads of the columns that end at their right.
        unbroken: heads of the columns whose texts are never broken.
        title: line above the table.
    """
    columns = [Column(head, head not in numbers, head in unbroken) for head in heads]
    lines = [[cell if isinstance(cell, Text) else str(cell) for cell in row] for row in rows]
    return Screen([title] if title else [], columns, [Group(lines)])


def result_line(folder: Path, page: Path | None) -> str:
    """The line that names the report, or the folder if there is no report."""
    return f"results: {folder}" if page is None else f"report: {page}"
