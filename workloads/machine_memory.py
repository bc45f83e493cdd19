"""Memory that this process may still take, and an error before something larger is allocated."""

from __future__ import annotations

import sys
from pathlib import Path

from .errors import SloBenchError

if sys.platform != "win32":
    import resource

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN_BYTES = 8 << 30  # where the system does not tell


def available_bytes() -> int:
    """Bytes that this process may still take: of the machine, its control group and `ulimit -v`."""
    limits_bytes = [_of_machine() or _UNKNOWN_BYTES]
    group, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if group is not None and used is not None:
        limits_bytes.append(group - used)
    if sys.platform != "win32":
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            taken_pages = _number(Path("/proc/self/statm")) or 0  # of the address space
            limits_bytes.append(limit - taken_pages * resource.getpagesize())
    return max(0, min(limits_bytes))


def check_memory(needed_bytes: float, task: str) -> None:
    """Raise SloBenchError if `task` needs more memory than is available."""
    there = available_bytes()
    if needed_bytes > there:
        raise SloBenchError(
            f"{task} needs about {gib(needed_bytes)} of memory, {gib(there)} are available; ask "
            "for fewer"
        )


def gib(size_bytes: float) -> str:
    """A size as text, such as `3.2 GiB` or `190 MiB`."""
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:,.3g} MiB"
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes < 2**60 else f"{size_bytes:.1e} bytes"


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def _number(path: Path) -> int | None:
    """The first number in a file; None if there is none."""
    try:
        word = path.read_text("utf-8").split()[0]
    except (OSError, IndexError):
        return None
    return int(word) if word.isdigit() else None
