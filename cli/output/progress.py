"""Progress: on a terminal a bar if the total is known, else a status line; elsewhere lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer

from ..interrupts import check

LINE_EVERY_S = 30.0
QUIET_S = 2.0  # a phase that lasts longer is named
_BAR = 16  # characters
DESCRIPTION = "{task.description}"  # the column of the text that a display changes


@contextlib.contextmanager
def display(*columns: str) -> Iterator[Callable[..., None]]:
    """Yields a function that changes `completed`, `total` and `description` of a display on stderr.

    Where stderr is no terminal a line says how far it is, every `LINE_EVERY_S` seconds at most. The
    function raises Ctrl-C that a library has swallowed.

    Args:
        columns: names of rich's column classes without `Column`, such as "Bar"; others are text.
    """
    if not sys.stderr.isatty():
        yield _Lines(columns).change
        return
    from rich import progress as shown
    from rich.table import Column

    from .console import terminal

    def column(name: str) -> shown.ProgressColumn:
        if name == "Bar":
            return shown.BarColumn(bar_width=_BAR)
        column_class = getattr(shown, f"{name}Column", None)
        if column_class is None:
            # A text that changes has the rest of the line, and is cut at its end.
            rest = 1 if name == DESCRIPTION else None
            ends = Column(ratio=rest, no_wrap=True, overflow="ellipsis")
            return shown.TextColumn(name, markup=False, table_column=ends)
        fixed: shown.ProgressColumn = column_class(table_column=Column(no_wrap=True))
        return fixed

    with shown.Progress(
        *map(column, columns), console=terminal(stderr=True), transient=True, expand=True
    ) as bar:
        task = bar.add_task("", total=None)

        def change(**changes: Any) -> None:
            check()
            bar.update(task, **changes)

        yield change


class _Lines:
    """A display without a terminal: now and then a line of what is known."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._noun = next((name for name in columns if name.isalpha() and name.islower()), "")
        self._state: dict[str, Any] = {}
        self._begin_s = self._last_s = time.monotonic()

    def change(self, **changes: Any) -> None:
        check()
        self._state |= changes
        now_s = time.monotonic()
        if now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            typer.echo(self._line(now_s - self._begin_s), err=True)

    def _line(self, passed_s: float) -> str:
        done, total = (self._state.get(name) for name in ("completed", "total"))
        parts = [self._state.get("description") or ""]
        if done is not None:
            total_text = "" if total is None else f" of {total:,}"
            parts.insert(0, f"{done:,}{total_text} {self._noun}".strip())
        parts.append(f"{passed_s:.0f} s")
        if done and total and done < total:
            parts.append(f"about {passed_s * (total - done) / done:.0f} s left")
        return ", ".join(filter(None, parts))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name on stderr what goes on once it has lasted `QUIET_S`, and then how long it took."""
    begin_s = time.monotonic()
    timer = threading.Timer(QUIET_S, lambda: typer.echo(f"{name} …", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (passed_s := time.monotonic() - begin_s) >= QUIET_S:
        typer.echo(f"{name}: {passed_s:.0f} s", err=True)


@contextlib.contextmanager
def counted(noun: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that takes the number done and the total, if known."""
    with display("Bar", "MofNComplete", noun, "TimeRemaining") as change:
        yield lambda done, total: change(completed=done, total=total)


@contextlib.contextmanager
def changing_line(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes the line to show; `first` is shown until it is called."""
    with display("Spinner", "TimeElapsed", DESCRIPTION) as change:
        change(description=first)
        yield lambda line: change(description=line)
