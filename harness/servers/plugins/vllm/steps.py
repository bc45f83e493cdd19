"""Composition and duration of vLLM's steps, for the step log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract import StepLog, announce
from .hooks import WATCHED, vllm_version
from .view import engine_settings


@dataclass(frozen=True)
class Composition:
    """Composition of a batch. `chunks` are (tokens in KV before, tokens prefilled)."""

    decode_seqs: int
    decode_kv_tokens: int
    chunks: list[tuple[int, int]]

    @classmethod
    def of(cls, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> Composition:
        """Composition from tokens by request id, after vLLM has counted them as computed."""
        decode_seqs = kv_tokens = 0
        chunks = []
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            before = request.num_computed_tokens - tokens
            if tokens == 1 and before >= request.num_prompt_tokens:
                decode_seqs += 1
                kv_tokens += before
            else:
                chunks.append((before, tokens))
        return cls(decode_seqs, kv_tokens, chunks)


class StepWatch:
    """Writes the step log of a scheduler without changing its decisions.

    `schedule`, `update_from_output` and `__init__` are wrapped. Results come in the order of the
    steps; with asynchronous scheduling one step later.
    """

    def __init__(self, log: StepLog, clock: Callable[[], float] = time.time) -> None:
        self._log = log
        self._clock = clock
        self._begun: set[int] = set()

    def install(self, scheduler_class: Any) -> None:
        """Wrap the methods of vLLM's scheduler class."""
        init, schedule, update = (
            getattr(scheduler_class, name)
            for name in ("__init__", "schedule", "update_from_output")
        )

        def started(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            init(scheduler, *args, **kwargs)
            announce("vllm", vllm_version(), WATCHED, **engine_settings(scheduler))

        def begin(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s = self._clock()
            output = schedule(scheduler, *args, **kwargs)
            self.begun(scheduler, output, begin_s)
            return output

        def end(scheduler: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            end_s = self._clock()
            outputs = update(scheduler, output, *args, **kwargs)
            self.ended(scheduler, output, end_s)
            return outputs

        scheduler_class.__init__ = started
        scheduler_class.schedule = begin
        scheduler_class.update_from_output = end

    def begun(self, scheduler: Any, output: Any, begin_s: float) -> None:
        """Log a new batch."""
        if not output.num_scheduled_tokens:
            return
        self._begun.add(id(output))
        found = Composition.of(output.num_scheduled_tokens, scheduler.requests)
        self._log.write(
            "step",
            time_s=begin_s,
            **vars(found),
            waiting=len(scheduler.waiting),
        )

    def ended(self, scheduler: Any, output: Any, end_s: float) -> None:
        """Log the end of a step."""
        if id(output) in self._begun:
            self._begun.remove(id(output))
            left = int(scheduler.get_num_unfinished_requests())
            self._log.write("done", time_s=end_s, left=left)
