"""Python's garbage collector, kept away from what is measured.

A full collection over the modules of torch takes half a second, in the midst of a step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collections_off() -> Iterator[None]:
    """No collection in the block. What forms no cycles goes all the same."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def heap_frozen() -> Iterator[None]:
    """What lives now is left out of the collections in the block; what is dead goes first."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
