"""A process that teaches a predictor what has come, while another one reads prompts with it.

Source: UELLM, §3.3.3. It answers a line of JSON for each that it is given: first `{"folder": …,
"base": …}`, then `{"new": [answer, …], "lately": [answer, …]}`. What is accepted lies in the folder
as its next generation before the answer is written. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import Answered
from .distribution import Floats

NICENESS = 15  # whoever answers requests goes first
_ENDS_S = 10.0


@dataclass(frozen=True)
class Taught:
    """What came of a lesson.

    `said`: the probabilities of buckets, shape (n, buckets), that the predictor as it is now gives
    the n answers that came lately; None where it is as it was.
    """

    step: float
    told: str
    said: Floats | None


class Teacher:
    """Such a process; started when it is first asked. One lesson at a time."""

    def __init__(self, folder: Path, base: str | None) -> None:
        self._order = {"folder": str(folder), "base": base}
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def teach(
        self,
        new: Sequence[Answered],
        lately: Sequence[Answered],
        then: Callable[[Taught | SloBenchError], None],
    ) -> None:
        """Returns at once; `then` is called from another thread, unless `close` comes first."""

        def work() -> None:
            try:
                found: Taught | SloBenchError = self._taught(new, lately)
            except (OSError, ValueError, SloBenchError) as error:
                found = SloBenchError(f"the predictor could not be taught: {error}")
            if not self._closed:
                then(found)

        threading.Thread(target=work, name="teacher of lengths", daemon=True).start()

    def _taught(self, new: Sequence[Answered], lately: Sequence[Answered]) -> Taught:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            if self._closed:
                self.close()
            self._put(self._order)
        self._put({"new": [_plain(row) for row in new], "lately": [_plain(row) for row in lately]})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SloBenchError("its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise SloBenchError(answer["error"])
        said = answer["said"]
        return Taught(answer["step"], answer["told"], None if said is None else np.array(said))

    def _put(self, order: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, in the middle of a lesson too: what it was to be taught is in the queue."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait(_ENDS_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _plain(row: Answered) -> dict[str, Any]:
    return {**asdict(row), "answer": None}


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": "1",
        },
        start_new_session=True,  # Ctrl-C is ours to pass on
    )


def _work(orders: IO[str], answers: IO[str]) -> None:
    """The process's side."""
    import torch

    from .online import OnlinePredictor

    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    order = json.loads(orders.readline())
    online: OnlinePredictor | None = None
    for line in orders:
        try:
            if online is None:
                folder = Path(order["folder"])
                online = OnlinePredictor(folder, base=order["base"], keep_queue=False)
            lesson = json.loads(line)
            online.queue = [Answered(**row) for row in lesson["new"]]
            outcome = online.update()
            said = None
            if outcome.accepted:
                online.save()
                lately = [Answered(**row) for row in lesson["lately"]]
                said = online.uncorrected(lately).bucket_probabilities().tolist()
            answer = {"step": outcome.step, "told": outcome.told(), "said": said}
        except SloBenchError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _work(sys.stdin, sys.stdout)
