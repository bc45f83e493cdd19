"""numpy's linear algebra in one thread: matrices here are small, and threads cost a start-up."""

from __future__ import annotations

import os

_THREADS = "OPENBLAS_NUM_THREADS"  # OpenBLAS reads it once, when it is loaded
_GIVEN = (_THREADS, "OMP_NUM_THREADS", "GOTO_NUM_THREADS")  # what else it reads


def import_numpy() -> None:
    """Import numpy with one thread, unless the environment gives a number.

    The environment is as before when this returns, since servers are started with it.
    """
    if any(name in os.environ for name in _GIVEN):
        return
    os.environ[_THREADS] = "1"
    try:
        import numpy as np  # noqa: F401
    finally:
        del os.environ[_THREADS]
