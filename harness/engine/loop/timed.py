"""An instance with given durations: measured while it executes, or read from a recording.

It decides with the same code as the simulated instance, one iteration at a time. Its clock advances
only at the end of an iteration and, while idle, to the next arrival; a wait that takes too long
counts into the next iteration. So decisions follow from durations alone, and a replayed recording
gives the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.decisions import Limits
from ...core.predictions import LearnedPredictions
from ..simulator.simulated import SimulatedInstance
from .batch_state import INF


class Ran(NamedTuple):
    """One iteration, or a pause in which blocks were only swapped. It includes `swap_s`,
    `moving_s`, the time of module moves, and `away_s`, for which another instance computed.
    """

    duration_s: float
    swapped_blocks: int = 0
    swap_s: float = 0.0
    moving_s: float = 0.0
    away_s: float = 0.0


Heard = Callable[[int, int, Sequence[tuple[int, int]], Ran], None]


class RecordedStepTime:
    """A `StepTime` of known iterations, one after the other; it knows nothing of those to come."""

    def __init__(self, predictions: LearnedPredictions) -> None:
        self._predictions = predictions
        self.heard: Heard | None = None  # called after every iteration

    def next(self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> Ran:
        """Execute the iteration, or look it up."""
        raise NotImplementedError

    def step_s(self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the iteration, which the predictions learn at once."""
        ran = self.next(seqs, kv_tokens, chunks)
        if not ran.away_s:  # predictions are those of a whole instance
            computed_s = ran.duration_s - ran.swap_s - ran.moving_s
            self._predictions.learn(seqs, kv_tokens, chunks, computed_s)
        self._predictions.learn_swap(ran.swapped_blocks, ran.swap_s)
        if self.heard is not None:
            self.heard(seqs, kv_tokens, chunks, ran)
        return ran.duration_s

    def span_s(self, seqs: int, kv_tokens: int, steps: int) -> float:
        """Infinite: no step is skipped."""
        return INF

    def steps_within(self, seqs: int, kv_tokens: int, duration_s: float) -> int:
        return 0


class Recording(RecordedStepTime):
    """What an instance ran, to be replayed."""

    def __init__(self, ran: Sequence[Ran], predictions: LearnedPredictions) -> None:
        super().__init__(predictions)
        self._ran = iter(ran)

    def next(self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> Ran:
        return next(self._ran)


class TimedInstance(SimulatedInstance):
    """One instance whose `step_time` is a `RecordedStepTime`."""

    __slots__ = ("_swapped",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._swapped = False

    def bounds(self) -> tuple[float, float, int]:
        """Releases may come as soon as it may act: how long its steps take is not known."""
        earliest_s, decode_only_s, n_requests = super().bounds()
        if self.decoding and (self.reports_all_ends or self.reports_empty_queue):
            earliest_s = min(earliest_s, self.now_s)
        return earliest_s, min(decode_only_s, self.ready_s()), n_requests

    def _limits(self) -> Limits:
        return replace(super()._limits(), store_s_per_token=0.0)  # storing is measured, too

    def schedule(self) -> bool:
        runs = super().schedule()
        # Predicted swap times are not added: the given durations include swapping.
        self._swapped = self.swap_s > 0 or self._swapped
        self.swap_s = 0.0
        if runs:
            self._swapped = False
        return runs

    def _pass_time(self, horizon_s: float) -> bool:
        if self._swapped:
            self._swapped = False
            self._must_refill = True
            self.now_s += self.step_time.step_s(0, 0, ())
            return True
        return super()._pass_time(horizon_s)
