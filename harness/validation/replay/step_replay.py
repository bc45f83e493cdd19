"""Replays a level of the engine `torch` in simulation with the logged duration of each iteration.

The same loop, policy and arrivals are used; only the model is not run. Each iteration's batch is
compared with the one in the log, so the decisions are those of the run. The times then differ from
those of the run only by the delay between engine and records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....workloads.arrays import Floats
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.parsing import parse_json
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.policy import Policy, StaticPolicy, overrides
from ...core.predictions import Guess, LearnedPredictions
from ...core.records.request_records import Outcome
from ...engine.loop.measures import Measures
from ...engine.loop.overlong_requests import fit
from ...engine.loop.timed import Ran, RecordedStepTime, TimedInstance
from ...engine.torch.execute import execute
from ...experiments.execution.cell_specs import CellSpec, configured
from ...experiments.execution.cells import output_tokens_p90, predicted_output_tokens, workload_of
from .log_replay import latencies

# Of a batch: decoding requests, their KV tokens, prompt chunks (tokens before, tokens).
Batch = tuple[int, int, list[tuple[int, int]]]


class ReplayError(SloBenchError):
    """A log cannot be replayed, or the loop decides differently from it."""


@dataclass(frozen=True)
class Replayed:
    """Latencies of finished requests in seconds, by metric, and the number of iterations."""

    latencies: dict[str, Floats]
    iterations: int


class _Log(RecordedStepTime):
    """Step times from a log; each of its batches is compared with the simulated one."""

    def __init__(self, log: Sequence[tuple[Batch, Ran]], predictions: LearnedPredictions) -> None:
        super().__init__(predictions)
        self._log = log
        self.played = 0

    def next(self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> Ran:
        batch = seqs, kv_tokens, [(before, tokens) for before, tokens in chunks]
        number = self.played
        if number == len(self._log) or self._log[number][0] != batch:
            ran = self._log[number][0] if number < len(self._log) else "its end"
            raise ReplayError(
                f"iteration {number + 1} of the run has {ran}, that of the simulation {batch}"
            )
        self.played += 1
        return self._log[number][1]


def replay(spec: CellSpec, steps: Path, room: Mapping[str, Any]) -> Replayed:
    """Simulate the requests of a level with the step durations of its log.

    Args:
        spec: the level, as it was run.
        steps: its iterations, as `backends.paged` logs them.
        room: KV blocks and limits, from its `meta.json`.

    Raises:
        ReplayError: a decision differs from the log, or the system keeps no such log.
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
    predicted = predicted_output_tokens(spec, workload)
    lengths = workload.output_tokens if predicted is None else predicted
    longest = output_tokens_p90(spec, workload)
    longest = lengths if longest is None else longest
    predictions = Guess(lambda r: int(lengths[r.id]), lambda r: int(longest[r.id]))
    log = _Log(_read(steps), predictions)
    names = ("blocks", "block_size", "num_cpu_blocks", "prefix_block_size")
    kv_manager = KVCacheManager(*(int(room[name]) for name in names))
    instance = TimedInstance(policy, kv_manager, predictions, log, (), Measures())
    records = execute(workload, instance, rejected=rejected).records
    ended = records.outcome == Outcome.FINISHED
    latencies_s = latencies(
        records.arrival_s[ended],
        records.first_token_s[ended],
        records.finish_s[ended],
        workload.output_tokens[ended],
    )
    return Replayed(latencies_s, log.played)


def _read(path: Path) -> list[tuple[Batch, Ran]]:
    iterations = []
    try:
        lines = [parse_json(line) for line in path.read_text("utf-8").splitlines()]
        for step, done in zip(lines[::2], lines[1::2], strict=True):
            chunks = [(int(before), int(tokens)) for before, tokens in step["chunks"]]
            batch = step["decode_seqs"], step["decode_kv_tokens"], chunks
            iterations.append((batch, Ran(*done["ran"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, None, f"is no log of iterations: {error}") from None
    return iterations
