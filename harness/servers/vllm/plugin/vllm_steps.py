"""What vLLM's steps were and took: step log, predictions and tally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....core.decisions import PreemptionMode
from ...plugin.contract import Composition, StepLog, announce
from ...plugin.hosted import HostedPolicy
from .hooks import WATCHED, server_version


def composition(scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> Composition:
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
    return Composition(decode_seqs, kv_tokens, chunks)


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
            announce("vllm", server_version(), WATCHED, **engine_settings(scheduler))

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
        """Log a batch that was scheduled at `begin_s`; empty ones are left out."""
        if not output.num_scheduled_tokens:
            return
        self._begun.add(id(output))
        batch = composition(output.num_scheduled_tokens, scheduler.requests)
        self._log.write(
            "step",
            time_s=begin_s,
            **vars(batch),
            waiting=len(scheduler.waiting),
        )

    def ended(self, scheduler: Any, output: Any, end_s: float) -> None:
        """Log the end of a step."""
        if id(output) in self._begun:
            self._begun.remove(id(output))
            left = int(scheduler.get_num_unfinished_requests())
            self._log.write("done", time_s=end_s, left=left)


class StepRecorder:
    """Records the steps of `scheduler`, a `PolicyScheduler`, for the log and the predictions, and
    counts preemptions and swaps.
    """

    def __init__(self, scheduler: Any) -> None:
        self.preempted: list[dict[str, Any]] = []  # in this step
        self.ended: list[str] = []  # requests, since the last step
        self._scheduler = scheduler
        self._hosted: HostedPolicy = scheduler.hosted
        self._victims = {PreemptionMode.SWAP: 0, PreemptionMode.RECOMPUTE: 0}
        self._executed_out = self._executed_in = 0  # swaps, by the workers' own count
        self._began: tuple[float, Composition] | None = None
        self.passes: dict[str, int] = {}  # of an embedder, by the names of `EMBED_PASSES`

    def preempts(self, request_id: str, how: PreemptionMode, kv_tokens: int) -> None:
        """Count a preempted request and note its KV tokens for the step's line."""
        self._victims[how] += 1
        self.preempted.append({"id": request_id, "by": how.value, "kv_tokens": kv_tokens})

    def begins(self, output: Any, entered: Sequence[str]) -> None:
        """A step begins: its composition and the requests that enter with it."""
        scheduler, log = self._scheduler, self._hosted.log
        batch = composition(output.num_scheduled_tokens, scheduler.requests)
        self._began = (type(scheduler).clock(), batch)
        if log.wanted and (output.num_scheduled_tokens or self.preempted):
            log.write(
                "step",
                time_s=scheduler.view.time_s,
                **vars(batch),
                waiting=len(scheduler.waiting.waiting),
                swapped=len(scheduler.waiting.swapped),
                free_blocks=scheduler.view.free_blocks,
                entered=entered,
                preempted=list(self.preempted),
                ended=list(self.ended),
            )
            self.ended.clear()

    def ran(self, model_runner_output: Any, now_s: float) -> float | None:
        """A step has ended: learn from its duration, which is returned in seconds; None: it had no
        tokens.
        """
        duration_s: float | None = None
        if self._began is not None:
            begin_s, batch = self._began
            self._began = None
            if batch.decode_seqs or batch.chunks:
                duration_s = now_s - begin_s
                batch.teach(self._hosted.predictions, duration_s)
        self._note_moved(model_runner_output)
        return duration_s

    def _note_moved(self, model_runner_output: Any) -> None:
        """Take the workers' swap report out of the output, which vLLM need not log, and update the
        counters.
        """
        report: Any = getattr(model_runner_output, "kv_connector_output", None)
        moved = getattr(report, "kv_connector_stats", None)
        if moved is not None and self._scheduler.num_cpu_blocks:
            report.kv_connector_stats = None
            self._executed_out += moved.swaps_out
            self._executed_in += moved.swaps_in
            self._hosted.predictions.learn_swap(moved.blocks, moved.duration_s)
            if moved.copies:
                self._hosted.log.write("swaps", copies=moved.copies)
        self.write_tally()

    def write_tally(self) -> None:
        """Write all counters for the process that started the server."""
        connector = self._scheduler.connector
        self._hosted.write_tally(
            preempted_swap=self._victims[PreemptionMode.SWAP],
            preempted_recompute=self._victims[PreemptionMode.RECOMPUTE],
            decided_out=getattr(connector, "swaps_out", 0),
            decided_in=getattr(connector, "swaps_in", 0),
            executed_out=self._executed_out,
            executed_in=self._executed_in,
            **self.passes,
        )


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """Settings of the engine, with the names of a log's `meta.json`."""
    config = scheduler.vllm_config
    limits, cache, model = config.scheduler_config, config.cache_config, config.model_config
    return {
        "engine_kwargs": {
            "max_num_seqs": int(limits.max_num_seqs),
            "max_num_batched_tokens": int(limits.max_num_batched_tokens),
            "max_model_len": int(model.max_model_len),
            "tensor_parallel_size": int(config.parallel_config.tensor_parallel_size),
            "async_scheduling": bool(limits.async_scheduling),
            "enforce_eager": bool(model.enforce_eager),
        },
        "kv_cache": {
            "num_gpu_blocks": int(cache.num_gpu_blocks),
            "block_size": int(scheduler.block_size),
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
        },
    }
