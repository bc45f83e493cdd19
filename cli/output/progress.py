"""Progress on an interactive terminal: a bar if the total is known, else a status line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields what to call with (done, of how many if known); silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from .console import terminal

    with Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeRemainingColumn(),
        console=terminal(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def changing_line(first: str) -> Iterator[Callable[[str], None]]:
    """Yields what to call with the line to show; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    from .console import terminal

    with Bar(
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=terminal(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda line: bar.update(task, description=line)
