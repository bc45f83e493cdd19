"""Progress on an interactive terminal: a bar if the total is known, else a status line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..interrupts import check

_BAR = 16  # characters
DESCRIPTION = "{task.description}"  # the column of the text that a display changes


@contextlib.contextmanager
def display(*columns: str) -> Iterator[Callable[..., None]]:
    """Yields a function that changes `completed`, `total` and `description` of a display on stderr.

    Where stderr is no terminal it shows nothing. It raises Ctrl-C that a library has swallowed.

    Args:
        columns: names of rich's column classes without `Column`, such as "Bar"; others are text.
    """
    if not sys.stderr.isatty():
        yield lambda **changes: check()
        return
    from rich import progress as shown
    from rich.table import Column

    from .console import terminal

    def column(name: str) -> shown.ProgressColumn:
        if name == "Bar":
            return shown.BarColumn(bar_width=_BAR)
        made = getattr(shown, f"{name}Column", None)
        if made is None:  # text is cut where the line ends
            ends = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            return shown.TextColumn(name, markup=False, table_column=ends)
        fixed: shown.ProgressColumn = made(table_column=Column(no_wrap=True))
        return fixed

    with shown.Progress(
        *map(column, columns), console=terminal(stderr=True), transient=True, expand=True
    ) as bar:
        task = bar.add_task("", total=None)

        def change(**changes: Any) -> None:
            check()
            bar.update(task, **changes)

        yield change


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that takes the number done and the total, if known."""
    with display("Bar", "MofNComplete", what, "TimeRemaining") as change:
        yield lambda done, total: change(completed=done, total=total)


@contextlib.contextmanager
def changing_line(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes the line to show; `first` is shown until it is called."""
    with display("Spinner", "TimeElapsed", DESCRIPTION) as change:
        change(description=first)
        yield lambda line: change(description=line)
