"""Ctrl-C and SIGTERM that wait for the end of a step, so that it is kept whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_signals(keep: Callable[[], None]) -> Iterator[None]:
    """Hold the first Ctrl-C or SIGTERM back until the block has ended, then `keep` and let it act.

    A second one acts at once, and nothing is kept. In threads other than the main one, which get no
    signals, the block simply runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _HELD}
    waiting: list[int] = []

    def release() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting:
            release()
            signal.raise_signal(number)
        waiting.append(number)

    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):  # None: of a library in C
            signal.signal(number, hold)
    try:
        yield
    except BaseException:
        release()
        raise
    if waiting:
        keep()
    release()
    if waiting:
        signal.raise_signal(waiting[0])
