"""A module run as a program that exchanges lines of JSON with the process that started it.

A program and not `multiprocessing`: a script or a notebook that starts one needs no
`if __name__ == "__main__"` and is not run again. The child ends at the latest when its standard
input ends, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Run `module` with this interpreter and this search path, one thread for numerical libraries.

    Args:
        module: its full name.
        arguments: what follows the name on the command line.
        options: further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env={
            **os.environ,
            # Modules of the user's (a policy, say) are found as they are found here.
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        start_new_session=True,  # Ctrl-C reaches only the parent, which then stops its children
        **options,
    )


def exit_reason(process: subprocess.Popen[Any], task: str) -> str:
    """A sentence about a process that ended by itself while it ran `task`."""
    code = process.wait()
    if code < 0:
        why = f"was killed (signal {-code}); if memory ran out, try fewer jobs"
    else:
        why = f"failed with code {code}; its error stands above"
    return f"the process that ran {task} {why}"


class ChildProcess:
    """The parent's end of the conversation; the child's end is `Parent`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = start_module(
            module, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._listener: threading.Thread | None = None

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def send(self, message: object) -> None:
        """Send one message; a child that has ended is noticed by `receive`."""
        assert self.process.stdin is not None
        line = json.dumps(message) + "\n"
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: `stop` has closed it
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def receive(self) -> Any:
        """The next message; None when the child has ended, also in the middle of a line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def listen(self, on_message: Callable[[Any], None]) -> None:
        """Call `on_message` from a thread with each message, and with None after the last one."""

        def work() -> None:
            for message in iter(self.receive, None):
                on_message(message)
            on_message(None)

        self._listener = threading.Thread(target=work, daemon=True)
        self._listener.start()

    def stop(self, grace_s: float = 0.0) -> None:
        """End the child: close its standard input, and kill it unless it ends within `grace_s`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not grace_s:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):  # the child did not read everything
            self.process.stdin.close()
        try:
            self.process.wait(grace_s or None)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._listener is not None:
            self._listener.join()
        self.process.stdout.close()


class Parent:
    """The child's end of the conversation. What other code prints goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: object) -> None:
        """Send one message. Raises BrokenPipeError if the parent has ended."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def messages(self) -> Iterator[Any]:
        """Messages of the parent, until it has ended or closes the connection."""
        return map(json.loads, sys.stdin)

    def exit_with(self, on_message: Callable[[Any], object] = lambda _: None) -> None:
        """From now on exit when the parent has ended, and call `on_message` from a thread with
        each of its messages.
        """

        def work() -> None:
            with contextlib.suppress(ValueError):  # half a line: the parent was killed
                for message in self.messages():
                    on_message(message)
            os._exit(1)

        threading.Thread(target=work, daemon=True).start()
