"""Resources of this machine: cores and open files."""

from __future__ import annotations

import contextlib
import os
import sys


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def allow_many_sockets() -> None:
    """Raise the limit of open files to the hard limit."""
    if sys.platform == "win32":  # counts them otherwise
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
