"""A record of Ctrl-C, because an interrupted library may raise an error of its own instead."""

from __future__ import annotations

import signal
from types import FrameType

_struck = False


def watch() -> None:
    """Record Ctrl-C from here on, unless another handler is installed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _strike)


def struck() -> bool:
    """Return True if Ctrl-C was pressed."""
    return _struck


def _strike(number: int, frame: FrameType | None) -> None:
    global _struck
    _struck = True
    signal.default_int_handler(number, frame)
