"""A length predictor in front of real servers, corrected and trained by the outputs that arrive.

Source: UELLM, §3.3.3; `online` defines an update. Requests wait only for the prediction of their
prompts. Each observed length corrects later predictions at once and enters a queue on disk; a
process of its own trains on the queue (`TrainerProcess`), and an accepted update replaces the
predictor in use.

The trainer, this module run as a program, answers a line of JSON for each that it is given: first
`{"folder": …, "base": …}`, then `{"new": [answer, …], "lately": [answer, …]}`. What is accepted
lies in the folder as its next generation before the answer is written. It ends with its standard
input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import IO, Any

import numpy as np
import torch

from ...workloads.arrays import Floats
from ...workloads.child_process import ChildProcess, Parent
from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt
from .distribution import buckets_in
from .length_samples import Prompt, prompts_of, without_answer
from .online import (
    FEWEST,
    QUEUE,
    RECENT,
    OnlinePredictor,
    PriorCorrection,
    read_queue,
    write_queue,
)
from .predictor import TrainedPredictor
from .predictor_config import PredictorConfig, find_base

NICENESS = 15  # whoever answers requests goes first


@dataclass(frozen=True)
class TrainingResult:
    """What came of a lesson.

    `probabilities` of buckets, shape (n, buckets), that the predictor as it is now gives the n
    answers that came lately; None where it is as it was.
    """

    step: float
    summary: str
    probabilities: Floats | None


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
                outcome: TrainingResult | SloBenchError = self._taught(new, lately)
            except (OSError, ValueError, SloBenchError) as error:
                outcome = SloBenchError(f"the predictor could not be taught: {error}")
            if not self._closed:
                then(outcome)

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
        probabilities = answer["said"]
        return TrainingResult(
            answer["step"],
            answer["summary"],
            None if probabilities is None else np.array(probabilities),
        )

    def close(self) -> None:
        """End it, in the middle of a lesson too: what it was to be taught is in the queue."""
        self._closed = True
        if self._child is not None:
            self._child.stop()


def _work(parent: Parent) -> None:
    """Main function of the trainer process."""
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
            probabilities = None
            if outcome.accepted:
                online.save()
                lately = [LabelledPrompt(**row) for row in lesson["lately"]]
                probabilities = online.uncorrected(lately).bucket_probabilities().tolist()
            answer = {"step": outcome.step, "summary": outcome.summary(), "said": probabilities}
        except SloBenchError as error:
            answer = {"error": str(error)}
        parent.send(answer)


if sys.platform != "win32":
    import fcntl

WINDOW = 50  # answers for which the accuracy is reported
_MOST_QUEUED = 2_000  # the newest stay, where nothing is accepted
_MOST_WINDOWS = 10_000

Say = Callable[[str], None]


@dataclass(frozen=True)
class LengthPrediction:
    """What was predicted of an answer: tokens that half of such answers do not exceed (`median`),
    and nine in ten (`p90`). `probabilities` are those of the buckets as the network has them.
    """

    prompt: Prompt
    median: int
    p90: int
    probabilities: Floats
    named: int  # the bucket, corrected
    named_plain: int  # as the network has it


@dataclass(frozen=True)
class Window:
    """A number of answers in order of completion. `exact`, `within_one`: their share in the
    predicted bucket, or next to it; `plain`: in the one that the network alone would have
    predicted. `ratio`: the geometric mean of true over predicted lengths. `end_s` by
    `time.perf_counter`.
    """

    end_s: float
    answers: int
    generation: int
    exact: float
    plain: float
    within_one: float
    ratio: float


class OnlineLengthPredictor:
    """Predicts output lengths, and with `online`, a number of answers, trains after each such
    number. Thread-safe; `came` returns at once. With `online` it locks the folder, which holds the
    queue and the updates.

    Raises:
        SloBenchError: the predictor is missing, its base differs, there are too few answers to
            train on, or another process has locked the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base: str | None = None,
        online: int = 0,
        device: str = "auto",
        say: Say = lambda line: None,
    ) -> None:
        if online and online < FEWEST:
            raise SloBenchError(f"online must be at least {FEWEST} answers but is {online}")
        torch.set_num_threads(1)
        self._folder = folder
        self._base = find_base(base, folder, PredictorConfig.load(folder))
        self._device = device
        self._say = say
        self.online = online
        self._lock = threading.RLock()
        self._held: IO[str] | None = _hold(folder) if online else None
        self._predictor = self._loaded()
        self._prior = PriorCorrection(len(self.config.shape.edges))
        self._lately: deque[tuple[LengthPrediction, LabelledPrompt, int]] = deque(maxlen=RECENT)
        self._window: list[tuple[LengthPrediction, int, int]] = []
        self.windows: deque[Window] = deque(maxlen=_MOST_WINDOWS)
        self.taught: list[
            tuple[float, TrainingResult]
        ] = []  # with the moment, by `time.perf_counter`
        self.failures = 0  # lessons of which nothing came
        self._teacher = TrainerProcess(folder, self._base) if online else None
        self.teaches = False  # a training is in progress
        self._fresh: list[LabelledPrompt] = []
        self._since = 0  # answers since the last lesson began
        if online:
            self._begin()

    @property
    def config(self) -> PredictorConfig:
        """Configuration of the predictor in use; a retrained one replaces it."""
        return self._predictor.config

    def _loaded(self) -> TrainedPredictor:
        predictor = TrainedPredictor.load(self._folder, base=self._base, device=self._device)
        predictor.lengths([Prompt("warm", 1)])  # the first takes longer than any
        return predictor

    def _begin(self) -> None:
        """Go on where the last one ended."""
        path = self._folder / QUEUE
        if path.exists():
            self._fresh = read_queue(path)[-_MOST_QUEUED:]
            rows = self._fresh[-RECENT:]
            predictions = self.read(prompts_of(rows)) if rows else []
            for row, prediction in zip(rows, predictions, strict=True):
                self._observe(prediction, row)
            self._since = len(self._fresh)
            write_queue(path, self._fresh)  # without what was cut off
        self._queue = path.open("a", encoding="utf-8")

    # ---------------------------------------------------------------- before the answer

    def read(self, prompts: Sequence[Prompt]) -> list[LengthPrediction]:
        """Predictions of their answers, in order; takes its time."""
        predictor = self._predictor
        worth = predictor.config.neighbours
        plain = predictor.lengths(prompts)
        with self._lock:
            weights = np.array([self._prior.weights((p.model, "")) for p in prompts])
        corrected = plain if (weights == 1).all() else plain.reweighted(weights)
        columns = (
            prompts,
            corrected.median_tokens().tolist(),
            corrected.longest_tokens().tolist(),
            plain.bucket_probabilities(),
            corrected.buckets(worth).tolist(),
            plain.buckets(worth).tolist(),
        )
        return [LengthPrediction(*row) for row in zip(*columns, strict=True)]

    # ---------------------------------------------------------------- after it

    def came(self, prediction: LengthPrediction, output_tokens: int) -> None:
        """Record the true output length of a request; without `online` nothing happens."""
        if not self.online or output_tokens < 1:
            return
        prompt = prediction.prompt
        row = LabelledPrompt(prompt.text, prompt.tokens, output_tokens, prompt.model, "followed")
        with self._lock:
            self._observe(prediction, row)
            self._count(prediction, row)
            self._queue.write(json.dumps(without_answer(row)) + "\n")
            self._queue.flush()
            self._fresh.append(row)
            self._since += 1
            if self._since >= self.online and not self.teaches:
                self._teach()

    def _observe(self, prediction: LengthPrediction, row: LabelledPrompt) -> None:
        bucket = self._bucket(row)
        self._prior.observe((row.model, ""), prediction.probabilities, bucket)
        self._lately.append((prediction, row, bucket))

    def _bucket(self, row: LabelledPrompt) -> int:
        return int(buckets_in(self.config.shape.edges, np.array([row.output_tokens]))[0])

    def _count(self, prediction: LengthPrediction, row: LabelledPrompt) -> None:
        self._window.append((prediction, self._bucket(row), row.output_tokens))
        if len(self._window) >= WINDOW:
            self.windows.append(self._counted())
            self._window = []

    def _counted(self) -> Window:
        window = self._window
        true = np.array([bucket for _, bucket, _ in window])
        off = np.abs(true - [prediction.named for prediction, _, _ in window])
        plain = true == [prediction.named_plain for prediction, _, _ in window]
        ratio = np.log([tokens / prediction.median for prediction, _, tokens in window])
        return Window(
            perf_counter(),
            len(window),
            self.config.generation,
            float((off == 0).mean()),
            float(plain.mean()),
            float((off <= 1).mean()),
            float(np.exp(ratio.mean())),
        )

    def all_windows(self) -> list[Window]:
        """With what came since the last whole one."""
        with self._lock:
            return [*self.windows, *([self._counted()] if self._window else [])]

    # ---------------------------------------------------------------- lessons

    def _teach(self) -> None:
        """Have the queue taught; the lock is held."""
        self._since = 0
        assert self._teacher is not None
        self.teaches = True
        lately, new = list(self._lately), list(self._fresh)

        def then(outcome: TrainingResult | SloBenchError) -> None:
            try:
                if isinstance(outcome, SloBenchError):
                    raise outcome
                self._take(outcome, lately, len(new))
            except SloBenchError as error:
                self.failures += 1
                self._say(str(error))
            finally:
                self.teaches = False

        self._teacher.teach(new, [row for _, row, _ in lately], then)

    def _take(
        self,
        training: TrainingResult,
        lately: Sequence[tuple[LengthPrediction, LabelledPrompt, int]],
        answers: int,
    ) -> None:
        """A lesson is over, of the first `answers` answers in the queue."""
        predictor = self._predictor if training.probabilities is None else self._loaded()
        with self._lock:
            if training.probabilities is not None:
                self._predictor = predictor
                self._prior.forget()
                again = {
                    id(entry): row_probabilities
                    for entry, row_probabilities in zip(lately, training.probabilities, strict=True)
                }
                for entry in list(self._lately):
                    prediction, row, bucket = entry
                    probabilities = again.get(id(entry), prediction.probabilities)
                    self._prior.observe((row.model, ""), probabilities, bucket)
            self._fresh = self._fresh[answers if training.probabilities is not None else 0 :][
                -_MOST_QUEUED:
            ]
            self._queue.close()
            write_queue(self._folder / QUEUE, self._fresh)
            self._queue = (self._folder / QUEUE).open("a", encoding="utf-8")
            self.taught.append((perf_counter(), training))
        self._say(training.summary)

    def settle(self, limit_s: float) -> None:
        """Wait for the lesson that is under way, at most so long."""
        end_s = monotonic() + limit_s
        pause = threading.Event()
        while self.teaches and monotonic() < end_s:
            pause.wait(0.05)

    def close(self) -> None:
        """End the trainer and unlock the folder; the queue stays for the next process."""
        if self._teacher is None:
            return
        self._teacher.close()
        with self._lock:
            self._queue.close()
        if self._held is not None:
            self._held.close()


def _hold(folder: Path) -> IO[str]:
    """Keep others from following with this folder, for as long as the file is open."""
    file = (folder / ".followed").open("w")
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise SloBenchError(
                f"another process follows with the predictor in {folder}; give this one a copy"
            ) from error
    return file


if __name__ == "__main__":
    _work(Parent())
