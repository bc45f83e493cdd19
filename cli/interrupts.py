"""Ctrl-C and SIGTERM: recorded, because an interrupted library may raise an error of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

_STOPS = (signal.SIGINT, signal.SIGTERM)
_struck: int | None = None
_way_on: Callable[[], str] | None = None


def watch() -> None:
    """Record Ctrl-C and SIGTERM from here on, unless other handlers are installed."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number, default in defaults.items():
        if signal.getsignal(number) is default:
            signal.signal(number, _strike)


def struck() -> bool:
    """Return True if Ctrl-C was pressed or SIGTERM came."""
    return _struck is not None


def check() -> None:
    """Raise Ctrl-C again where a library has swallowed it."""
    if struck():
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible(way_on: str | Callable[[], str]) -> Iterator[None]:
    """Text that a command prints when it is interrupted within the block: how to go on."""
    global _way_on
    _way_on = (lambda: way_on) if isinstance(way_on, str) else way_on
    yield
    _way_on = None  # after an error it is still needed


def settle() -> None:
    """Ignore Ctrl-C and SIGTERM from here on: what the command does and its exit code stand.

    While Python takes itself down it would answer a signal with a traceback, or end by it.
    """
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


def leave() -> NoReturn:
    """End an interrupted command: print how to go on, exit with 128 plus the signal's number.

    Further signals are ignored, so that neither the line nor the exit code is lost.
    """
    global _way_on
    settle()
    # `python -m` ends by SIGINT if Ctrl-C came within an `exec` of a text (a dataclass is made by
    # one) and no later `exec` succeeded: Python bug 1054041, `unhandled_keyboard_interrupt`.
    exec("")
    way_on, _way_on = _way_on, None
    if way_on is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            os.write(2, f"{way_on()}\n".encode(errors="replace"))
    sys.exit(128 + (_struck or signal.SIGINT))


def _strike(number: int, frame: FrameType | None) -> None:
    global _struck
    _struck = _struck or number  # the first one says why the command ends
    raise KeyboardInterrupt
