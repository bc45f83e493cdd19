"""Runs a server and stops all its processes when the process that started it ends.

    python guard.py GRACE_S COMMAND [ARGUMENT...]

The server gets a process group of its own. When standard input ends (the starter closed it, or
died, however) or on SIGTERM, the group gets SIGTERM, after GRACE_S seconds SIGKILL, and what had
left the group and stayed behind is killed too. Ends with the server's exit code, or 128 + signal.

Run as a script: standard library only, nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.1


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    grace_s, command = float(arguments[0]), arguments[1:]
    stop = False

    def on_term(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become ours
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
    )
    while not stop and server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            stop = True
    if server.poll() is None:
        _signal_group(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
    _signal_group(server.pid, signal.SIGKILL)
    code = server.wait()
    _kill_descendants()
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    # Ignored signals are inherited: the server must see Ctrl-C and hang-ups as it expects to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _kill_descendants() -> None:
    """Kill processes that the server started in other groups or sessions, and reap dead ones."""
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _children(os.getpid())
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _children(parent: int) -> list[int]:
    """Child processes of `parent`; when these die, their own children are re-parented to this
    process.
    """
    try:
        lists = Path(f"/proc/{parent}/task").glob("*/children")
        return [int(word) for path in lists for word in path.read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
