"""Replays a log with the clock set to each first and last token that it records.

The batches between two such events are then those of the real run, so that the time between them
is the time of known steps: what a calibration learns from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ....predictors.roofline import StepTime, wants_lengths
from ....workloads.arrays import Floats
from ...engine.loop.batch_state import INF
from ...engine.simulator.simulate import simulate
from ...engine.simulator.simulated import SimulatedInstance
from ...results.engine_logs import RealLog
from .log_replay import Replay

# Events of one step that are further apart in the log were not of one step there.
_TOGETHER_S = 0.005


@dataclass(frozen=True)
class Span:
    """Steps between two events of the log: tokens and predicted seconds of each, and what they took
    together.

    `end_s` is on the log's clock; `longer_prompt`: tokens by which the prompts of the last event
    are longer than those of the first, on average.
    """

    steps: tuple[tuple[int, float], ...]
    real_s: float
    end_s: float
    longer_prompt: float

    @property
    def predicted_s(self) -> float:
        """Seconds of the steps together."""
        return sum(seconds for _, seconds in self.steps)


@dataclass
class Snapped:
    """Spans of a replay. `disagreements` counts events that come in another order in the log, or
    that the simulation puts into one step and the log does not.
    """

    spans: list[Span] = field(default_factory=list)
    events: int = 0
    disagreements: int = 0
    max_disagreements: float = INF

    def disagrees(self) -> None:
        """Count a disagreement; end the replay when there are more than `max_disagreements`."""
        self.disagreements += 1
        if self.disagreements > self.max_disagreements:
            raise _TooManyError


def snapped_replay(log: RealLog, replayed: Replay, max_disagreements: float = INF) -> Snapped:
    """Replay `log` with the system, placement and step times that simulate it.

    It ends with more than `max_disagreements` disagreements, unfinished. With a front end requests
    enter the engine when they have passed it, in order of arrival.
    """
    snapped = Snapped(max_disagreements=max_disagreements)
    stepping = _Stepping(replayed.step_time.model)
    workload, front_end = replayed.workload, replayed.front_end
    if front_end is not None:
        passed_s = workload.arrival_s + front_end.passing_s(workload.prompt_tokens)
        workload = replace(workload, arrival_s=np.maximum.accumulate(passed_s))
        front_end = replace(front_end, latency_s=0.0, token_s=0.0)
    with suppress(_TooManyError):
        simulate(
            workload,
            replayed.system,
            replayed.placement,
            stepping,
            overlong_requests="error",
            engine=partial(_SnappedInstance, log, snapped, stepping.steps),
            front_end=front_end,
        )
    return snapped


class _TooManyError(Exception):
    """The replay is not that of the log."""


class _Stepping:
    """Step times that forbid leaps and keep the steps that were asked for."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self.wants_lengths = wants_lengths(step_time)
        self.steps: list[tuple[int, float]] = []  # tokens, seconds

    def tail_s(self, begins: Sequence[int], total: int) -> float:
        aware = self._step_time
        assert wants_lengths(aware)
        return aware.tail_s(begins, total)

    def step_s(
        self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]], tail_s: float = 0.0
    ) -> float:
        aware = self._step_time
        if wants_lengths(aware):
            seconds = aware.step_s(seqs, kv_tokens, chunks, tail_s)
        else:
            seconds = aware.step_s(seqs, kv_tokens, chunks)
        self.steps.append((seqs + sum(tokens for _, tokens in chunks), seconds))
        return seconds

    def span_s(self, seqs: int, kv_tokens: int, steps: int, tail_s: float = 0.0) -> float:
        return INF

    def steps_within(
        self, seqs: int, kv_tokens: int, duration_s: float, tail_s: float = 0.0
    ) -> int:
        return 0


class _SnappedInstance(SimulatedInstance):
    """An instance whose clock is set to the log's at every first and last token."""

    __slots__ = ("_log", "_prompt_tokens", "_since_s", "_snapped", "_steps")

    def __init__(
        self,
        log: RealLog,
        snapped: Snapped,
        steps: list[tuple[int, float]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._log = log
        self._snapped = snapped
        self._steps = steps  # since the last event
        self._since_s = -INF
        self._prompt_tokens = 0.0  # of the last event

    def finish_due(self) -> bool:
        due = [r.id for tick, _, v, r in self.ends if tick <= self.tick and v == r.version]
        self._snap(self._log.last_s[due], due)
        return super().finish_due()

    def _complete_prefills(self) -> bool:
        first = [
            r.id
            for r in self.prefilling
            if r.kv_tokens >= r.target_tokens and r.first_token_s != r.first_token_s
        ]
        self._snap(self._log.first_s[first], first)
        return super()._complete_prefills()

    def _snap(self, times_s: Floats, rows: list[int]) -> None:
        """Set the clock to the events of this step, of requests at these rows of the log, and keep
        the steps since the last ones.
        """
        if not len(times_s):
            return
        snapped, since_s, steps = self._snapped, self._since_s, self._steps
        event_s = float(np.median(times_s))
        together = float(np.ptp(times_s)) < _TOGETHER_S
        snapped.events += 1
        if not steps:  # a last and a first token of one step
            if not (together and abs(event_s - since_s) < _TOGETHER_S):
                snapped.disagrees()
            return
        if event_s <= since_s or not together:
            snapped.disagrees()
        if event_s <= since_s:
            return
        predicted_s = sum(seconds for _, seconds in steps)
        busy = abs(self.now_s - since_s - predicted_s) < 1e-6
        prompt_tokens = float(self._log.prompt_tokens[rows].mean())
        if busy and together:
            longer = prompt_tokens - self._prompt_tokens
            snapped.spans.append(Span(tuple(steps), event_s - since_s, event_s, longer))
        self._prompt_tokens = prompt_tokens
        steps.clear()
        self.now_s = self._since_s = event_s
