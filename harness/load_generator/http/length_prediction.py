"""Predicted output lengths of requests, sent to the server's policy.

The load generator identifies a request by its row, the gateway by its text. Predictors that read
prompts run in a thread of their own, with all waiting requests as one batch. The time of a
prediction is part of the latency of its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ....predictors.output_length import LearnedLength, length_predictor
from ....workloads.workload import Workload
from ...core.records.request_records import Outcome, TimeseriesRow
from ...core.wire import PredictedLength
from .answers import Raw, read_answer
from .faults import RequestFault
from .http_options import HttpOptions

if TYPE_CHECKING:
    from ....predictors.lengths.online_predictor import OnlineLengthPredictor

AT_ONCE = 32  # maximum number of prompts predicted in one batch
_LENGTHS_STREAM = 3

Request = TypeVar("Request")
# the value sent to the policy, and the state that `heard` takes with the answer
Predicted = tuple[PredictedLength, Any]


class LengthPrediction(Generic[Request]):
    """Predicts lengths of answers; with an online `follower` it also learns from answers."""

    def __init__(
        self,
        read: Callable[[Sequence[Request]], Sequence[Predicted]],
        follower: OnlineLengthPredictor | None = None,
    ) -> None:
        self.cut_off = 0  # answers cut short, so that their full length is unknown
        # Returns predictions in order; slow, so it is called in another thread.
        self.read = read
        self._follower = follower
        self._hearing = ThreadPoolExecutor(1, thread_name_prefix="answers heard")

    @property
    def learns(self) -> bool:
        """Return True if `heard` should be called."""
        return self._follower is not None and self._follower.online > 0

    def heard(self, prediction: Any, raw: Raw, *, exact: bool) -> None:
        """Learn from an answer; returns at once. `exact`: the output has the number of tokens in
        the workload.
        """
        self._hearing.submit(self._hear, prediction, raw, exact)

    def _hear(self, prediction: Any, raw: Raw, exact: bool) -> None:
        answer = read_answer(raw)
        if answer.outcome is not Outcome.FINISHED or answer.fault is not RequestFault.NONE:
            return
        if answer.finish == "length" and not exact:
            self.cut_off += 1
        elif prediction is not None:
            self.came(prediction, max(answer.completion_tokens, len(answer.token_s)))

    def came(self, prediction: Any, output_tokens: int) -> None:
        """Learn the number of output tokens of an answer."""
        assert self._follower is not None
        self._follower.came(prediction, output_tokens)

    def close(self) -> None:
        """Stop learning after all requests have ended."""
        self._hearing.shutdown()
        if self.learns:
            assert self._follower is not None
            self._follower.close()

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Metrics of an online predictor: name, labels and value."""
        follower = self._follower
        if follower is None:
            return
        yield "generation", "", follower.config.generation
        if not follower.online:
            return
        accepted = sum(taught.step > 0 for _, taught in follower.taught)
        refused = len(follower.taught) - accepted
        outcomes = {"taken": accepted, "refused": refused, "failed": follower.failures}
        for outcome, times in outcomes.items():
            yield "updates_total", f'{{outcome="{outcome}"}}', times
        for window in list(follower.windows)[-1:]:
            for measure in ("exact", "plain", "within_one", "ratio"):
                yield f"window_{measure}", "", round(getattr(window, measure), 6)

    def drift(self, start_s: float) -> tuple[TimeseriesRow, ...]:
        """Return the prediction accuracy over time of a learning predictor; `start_s` by
        `time.perf_counter`.
        """
        follower, rows = self._follower, []
        if follower is None:
            return ()
        begin_s = start_s
        for window in follower.all_windows():
            at_s = begin_s - start_s
            rows += [
                TimeseriesRow(at_s, "lengths", "as told", window.exact),
                TimeseriesRow(at_s, "lengths", "as told, within one", window.within_one),
                TimeseriesRow(at_s, "lengths", "without correction", window.plain),
            ]
            begin_s = window.end_s
        rows += [
            TimeseriesRow(at_s - start_s, "taught", "predictor", taught.step)
            for at_s, taught in follower.taught
            if taught.step
        ]
        return tuple(rows)


def prompt_lengths(workload: Workload, options: HttpOptions) -> LengthPrediction[int] | None:
    """Return the predictions that `options` select, by row; None without a predictor.

    Raises:
        SloBenchError: the predictor is not available.
    """
    if not options.length_predictor or options.values_field is None or not len(workload):
        return None
    rng = np.random.default_rng((options.length_seed, _LENGTHS_STREAM))
    predictor = length_predictor(options.length_predictor)
    if isinstance(predictor, LearnedLength) and workload.texts is not None and any(workload.texts):
        dispatched = predictor.at_dispatch(workload, rng, options.lengths_folder)

        def read(rows: Sequence[int]) -> list[Predicted]:
            return [
                (PredictedLength(median, p90), prediction)
                for median, p90, prediction in dispatched.lengths(rows)
            ]

        return LengthPrediction(read, dispatched.follower)
    tokens = predictor.predict(workload, rng).tolist()
    return LengthPrediction(
        lambda rows: [(PredictedLength(tokens[r], tokens[r]), None) for r in rows]
    )


class BatchedPredictions(Generic[Request]):
    """Batches predictions: one call covers all requests that arrived during the previous call."""

    def __init__(self, ask: Callable[[list[Request]], Sequence[Predicted]]) -> None:
        self._ask = ask
        self._waiting: deque[tuple[Request, asyncio.Future[Predicted]]] = deque()
        self._asks = False
        self.times = 0

    def of(self, request: Request) -> asyncio.Future[Predicted]:
        """Return the prediction for `request`, or raise the predictor's error."""
        future: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._next()
        return future

    def _next(self) -> None:
        if self._asks:
            return
        now: list[tuple[Request, asyncio.Future[Predicted]]] = []
        while self._waiting and len(now) < AT_ONCE:
            entry = self._waiting.popleft()
            if not entry[1].done():  # its client is still there
                now.append(entry)
        if not now:
            return
        self._asks = True
        self.times += 1

        def answered(done: asyncio.Future[Sequence[Predicted]]) -> None:
            self._asks = False
            error = done.exception()
            for place, (_, future) in enumerate(now):
                if future.done():
                    continue
                if error is None:
                    future.set_result(done.result()[place])
                else:
                    future.set_exception(error)
            self._next()

        batch = asyncio.get_running_loop().run_in_executor(
            None, self._ask, [request for request, _ in now]
        )
        batch.add_done_callback(answered)
