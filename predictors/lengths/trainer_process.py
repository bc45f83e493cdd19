"""A process that teaches a predictor what has come, while another one reads prompts with it.

Source: UELLM, §3.3.3. It answers a line of JSON for each that it is given: first `{"folder": …,
"base": …}`, then `{"new": [answer, …], "lately": [answer, …]}`. What is accepted lies in the folder
as its next generation before the answer is written. It ends with its standard input.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.child_process import ChildProcess, Parent
from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt
from .samples import without_answer

NICENESS = 15  # whoever answers requests goes first


@dataclass(frozen=True)
class TrainingResult:
    """What came of a lesson.

    `said`: the probabilities of buckets, shape (n, buckets), that the predictor as it is now gives
    the n answers that came lately; None where it is as it was.
    """

    step: float
    summary: str
    said: Floats | None


class TrainerProcess:
    """The trainer process; started on first use. It trains on one batch of answers at a time."""

    def __init__(self, folder: Path, base: str | None) -> None:
        self._order = {"folder": str(folder), "base": base}
        self._child: ChildProcess | None = None
        self._closed = False

    def teach(
        self,
        new: Sequence[LabelledPrompt],
        lately: Sequence[LabelledPrompt],
        then: Callable[[TrainingResult | SloBenchError], None],
    ) -> None:
        """Returns at once; `then` is called from another thread, unless `close` comes first."""

        def work() -> None:
            try:
                found: TrainingResult | SloBenchError = self._taught(new, lately)
            except (OSError, ValueError, SloBenchError) as error:
                found = SloBenchError(f"the predictor could not be taught: {error}")
            if not self._closed:
                then(found)

        threading.Thread(target=work, name="teacher of lengths", daemon=True).start()

    def _taught(
        self, new: Sequence[LabelledPrompt], lately: Sequence[LabelledPrompt]
    ) -> TrainingResult:
        child = self._child
        if child is None or child.process.poll() is not None:
            self._child = child = ChildProcess(__name__)
            if self._closed:
                self.close()
            child.send(self._order)
        child.send(
            {"new": list(map(without_answer, new)), "lately": list(map(without_answer, lately))}
        )
        answer = child.receive()
        if answer is None:
            raise SloBenchError("its process ended")
        if "error" in answer:
            raise SloBenchError(answer["error"])
        said = answer["said"]
        return TrainingResult(
            answer["step"], answer["summary"], None if said is None else np.array(said)
        )

    def close(self) -> None:
        """End it, in the middle of a lesson too: what it was to be taught is in the queue."""
        self._closed = True
        if self._child is not None:
            self._child.stop()


def _work(parent: Parent) -> None:
    """Main function of the trainer process."""
    import torch

    from .online import OnlinePredictor

    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    messages = parent.messages()
    order: dict[str, Any] = next(messages, {})
    online: OnlinePredictor | None = None
    for lesson in messages:
        try:
            if online is None:
                folder = Path(order["folder"])
                online = OnlinePredictor(folder, base=order["base"], keep_queue=False)
            online.queue = [LabelledPrompt(**row) for row in lesson["new"]]
            outcome = online.update()
            said = None
            if outcome.accepted:
                online.save()
                lately = [LabelledPrompt(**row) for row in lesson["lately"]]
                said = online.uncorrected(lately).bucket_probabilities().tolist()
            answer = {"step": outcome.step, "summary": outcome.summary(), "said": said}
        except SloBenchError as error:
            answer = {"error": str(error)}
        parent.send(answer)


if __name__ == "__main__":
    _work(Parent())
