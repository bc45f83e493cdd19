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

LINE_EVERY_S = 30.0  # at most, without a terminal; the first lines come sooner
QUIET_S = 2.0  # what lasts longer is told
_RARER = 4  # times as long until the next line
_TICK_S = 0.5  # at least, between two looks whether a line is due
_BAR = 16  # characters
DESCRIPTION = "{task.description}"  # the column of the text that a display changes


@contextlib.contextmanager
def display(*columns: str) -> Iterator[Callable[..., None]]:
    """Yields a function that changes `completed`, `total` and `description` of a display on stderr.

    Where stderr is no terminal a line says how far it is, after `QUIET_S`, then more rarely, and at
    last every `LINE_EVERY_S`. The function raises Ctrl-C that a library has swallowed.

    Args:
        columns: names of rich's column classes without `Column`, such as "Bar"; others are text.
    """
    if not sys.stderr.isatty():
        with _Lines(columns).ticking() as change:
            yield change
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
        self._begin_s = time.monotonic()
        self._pause_s = min(QUIET_S, LINE_EVERY_S)
        self._next_s = self._begin_s + self._pause_s
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def ticking(self) -> Iterator[Callable[..., None]]:
        """Yields `change`; lines come also where nothing changes."""
        done = threading.Event()

        def tick() -> None:
            while not done.wait(max(_TICK_S, self._next_s - time.monotonic())):
                self._tell()

        threading.Thread(target=tick, daemon=True).start()
        try:
            yield self.change
        finally:
            done.set()

    def change(self, **changes: Any) -> None:
        check()
        self._state |= changes
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            nothing = self._state.get("description") == "" and "completed" not in self._state
            if now_s < self._next_s or nothing:
                return
            typer.echo(self._line(now_s - self._begin_s), err=True)
            self._pause_s = min(_RARER * self._pause_s, LINE_EVERY_S)
            self._next_s = now_s + self._pause_s

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
    """Name on stderr what goes on, with its time, and then how long it took if over `QUIET_S`."""
    begin_s = time.monotonic()
    with changing_line(name):
        yield
    if (passed_s := time.monotonic() - begin_s) >= QUIET_S:
        typer.echo(f"{name}: {passed_s:.0f} s", err=True)


@contextlib.contextmanager
def counted(noun: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that takes the number done and the total, if known."""
    with display("Bar", "MofNComplete", noun, "TimeRemaining") as change:
        yield lambda done, total: change(completed=done, total=total)


@contextlib.contextmanager
def counted_line(
    first: str,
) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Yields two functions: one takes the line to show, the other the number done and the total."""
    with display("Spinner", "TimeElapsed", "TimeRemaining", DESCRIPTION) as change:
        change(description=first)
        yield (
            lambda line: change(description=line),
            lambda done, total: change(completed=done, total=total),
        )


@contextlib.contextmanager
def changing_line(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes the line to show; `first` is shown until it is called."""
    with display("Spinner", "TimeElapsed", DESCRIPTION) as change:
        change(description=first)
        yield lambda line: change(description=line)
