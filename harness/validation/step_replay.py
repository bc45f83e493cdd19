"""A level of the engine `torch` once more, in simulation, every iteration as long as it took.

The same loop decides by the same policy on the same arrivals; only the model is not run. What is
decided must be what was decided: each iteration's batch is compared with the one in the log. Times
are then those of the run but for what lies between the engine and its records, which is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_json
from ..core.kv_cache_manager import KVCacheManager
from ..core.policy import Policy, StaticPolicy, overrides
from ..core.predictions import Guess, LearnedPredictions
from ..core.records import Outcome
from ..engine.loop.measures import Measures
from ..engine.loop.overlong_requests import fit
from ..engine.loop.timed import Ran, RecordedStepTime, TimedInstance
from ..engine.torch.execute import execute
from ..experiments.execution.cells import (
    CellSpec,
    configured,
    output_tokens_p90,
    predicted_output_tokens,
    workload_of,
)
from .log_replay import latencies

Floats = NDArray[np.float64]
Batch = tuple[int, int, list[tuple[int, int]]]


class ReplayError(SloBenchError):
    """A log that cannot be played again, or in which the loop decided otherwise."""


@dataclass(frozen=True)
class Replayed:
    """Seconds of requests that finished, by metric; `iterations` were decided as in the run."""

    latencies: dict[str, Floats]
    iterations: int


@dataclass(frozen=True)
class _Iteration:
    batch: Batch
    ran: Ran


class _Log(RecordedStepTime):
    """Iterations of a log; each is compared to the iteration that is simulated."""

    def __init__(self, log: Sequence[_Iteration], predictions: LearnedPredictions) -> None:
        super().__init__(predictions)
        self._log = log
        self.played = 0

    def next(self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> Ran:
        asked = seqs, kv_tokens, [(before, tokens) for before, tokens in chunks]
        number = self.played
        if number == len(self._log) or self._log[number].batch != asked:
            ran = self._log[number].batch if number < len(self._log) else "its end"
            raise ReplayError(
                f"iteration {number + 1} of the run has {ran}, that of the simulation {asked}"
            )
        self.played += 1
        return self._log[number].ran


def replay(spec: CellSpec, steps: Path, room: Mapping[str, Any]) -> Replayed:
    """Serve the level's requests with the durations of its log.

    Args:
        spec: the level, as it was run.
        steps: its iterations, as `backends.paged` logs them.
        room: KV blocks and limits, from its `meta.json`.

    Raises:
        ReplayError: something else would have been decided, or the log is of no use for this.
        FileFormatError: the log cannot be read.
    """
    served = configured(spec.system, spec.parameters)
    policy = served.policy
    if not isinstance(policy, Policy) or isinstance(policy, StaticPolicy):
        raise ReplayError("static batches keep no log of iterations")
    reserved = overrides(policy, "reserved_blocks")
    workload, rejected = fit(
        workload_of(spec), int(room["most_tokens"]), spec.overlong_requests, reserved=reserved
    )
    told = predicted_output_tokens(spec, workload)
    lengths = workload.output_tokens if told is None else told
    longest = output_tokens_p90(spec, workload)
    longest = lengths if longest is None else longest
    predictions = Guess(lambda r: int(lengths[r.id]), lambda r: int(longest[r.id]))
    log = _Log(_read(steps), predictions)
    names = ("blocks", "block_size", "num_cpu_blocks", "prefix_block_size")
    kv_manager = KVCacheManager(*(int(room[name]) for name in names))
    instance = TimedInstance(policy, kv_manager, predictions, log, (), Measures())
    records = execute(workload, instance, rejected=rejected).records
    ended = records.outcome == Outcome.FINISHED
    found = latencies(
        records.arrival_s[ended],
        records.first_token_s[ended],
        records.finish_s[ended],
        workload.output_tokens[ended],
    )
    return Replayed(found, log.played)


def _read(path: Path) -> list[_Iteration]:
    found = []
    try:
        lines = [parse_json(line) for line in path.read_text("utf-8").splitlines()]
        for step, done in zip(lines[::2], lines[1::2], strict=True):
            chunks = [(int(before), int(tokens)) for before, tokens in step["chunks"]]
            batch = step["decode_seqs"], step["decode_kv_tokens"], chunks
            found.append(_Iteration(batch, Ran(*done["ran"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, None, f"is no log of iterations: {error}") from None
    return found
