"""Composition and duration of steps, for the predictions and the step log."""

from __future__ import annotations

from collections import deque
from typing import Any

from ....core.predictions import LearnedPredictions
from ...plugin.contract import Composition, StepLog


class SglangSteps:
    """Started steps in order; their results come in the same order, possibly one step later."""

    def __init__(self, predictions: LearnedPredictions, log: StepLog) -> None:
        self.log = log
        self._predictions = predictions
        self._begun: deque[tuple[float, Composition]] = deque()
        self._done_s = 0.0

    def begin(self, batch: Any, now_s: float, *, waiting: int, free_blocks: int) -> None:
        """Record a batch that starts now."""
        step, entered = _step(batch)
        self._begun.append((now_s, step))
        if self.log.wanted:
            self.log.write(
                "step",
                time_s=now_s,
                **vars(step),
                waiting=waiting,
                free_blocks=free_blocks,
                entered=entered,
            )

    def done(self, now_s: float, left: int) -> None:
        """Record the result of the oldest started step; `left` requests wait or run.

        With overlapped scheduling a step begins on the device when the one before it ends.
        """
        if not self._begun:
            return
        begin_s, step = self._begun.popleft()
        duration_s = now_s - max(begin_s, self._done_s)
        self._done_s = now_s
        step.teach(self._predictions, duration_s)
        self.log.write("done", time_s=now_s, duration_s=duration_s, left=left)


def requests_left(scheduler: Any, batch: Any) -> int:
    """Requests that wait or run on, once the result of `batch` has been processed."""
    reqs = [*batch.reqs, *(scheduler.running_batch.reqs if scheduler.running_batch else ())]
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    running = {id(req) for req in reqs if not req.finished()}
    return len(scheduler.waiting_queue) + len(running)


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """Settings of the engine, with the names of a log's `meta.json`."""
    args = scheduler.server_args
    settings: dict[str, Any] = {
        "engine_kwargs": {
            "max_num_seqs": int(scheduler.max_running_requests),
            "tensor_parallel_size": int(args.tp_size),
            "async_scheduling": not args.disable_overlap_schedule,
            "enforce_eager": bool(args.disable_cuda_graph),
        },
        "kv_cache": {
            "num_gpu_blocks": int(scheduler.max_total_num_tokens) // int(scheduler.page_size),
            "block_size": int(scheduler.page_size),
            "enable_prefix_caching": not args.disable_radix_cache,
        },
    }
    if scheduler.chunked_prefill_size:
        chunk = int(scheduler.chunked_prefill_size)
        settings["engine_kwargs"]["max_num_batched_tokens"] = chunk
    return settings


def _step(batch: Any) -> tuple[Composition, list[str]]:
    """Composition of a batch, and the ids of the requests that enter with it."""
    mode = batch.forward_mode
    if not mode.is_extend():
        reqs = batch.reqs if mode.is_decode() else []
        kv_tokens = sum(int(req.kv.kv_committed_len) for req in reqs)
        return Composition(len(reqs), kv_tokens, []), []
    decoding = {id(req) for req in batch.decoding_reqs or ()}  # in a mixed batch
    lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    chunks, entered, kv_tokens = [], [], 0
    for req, before, tokens in lengths:
        if id(req) in decoding:
            kv_tokens += int(before)
        else:
            chunks.append((int(before), int(tokens)))
            entered.append(str(req.rid))
    return Composition(len(decoding), kv_tokens, chunks), entered
