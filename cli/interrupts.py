"""Ctrl-C, remembered: a library that is struck may take it for an error of its own."""

from __future__ import annotations

import signal
from types import FrameType

_struck = False


def watch() -> None:
    """Remember from here on, unless somebody has other plans for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _strike)


def struck() -> bool:
    """Has it been pressed?"""
    return _struck


def _strike(number: int, frame: FrameType | None) -> None:
    global _struck
    _struck = True
    signal.default_int_handler(number, frame)
