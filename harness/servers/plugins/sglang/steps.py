"""What was in a step and how long it took: told to the predictions and to the step log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ....core.predictions import LearnedPredictions
from ..contract import StepLog


@dataclass(frozen=True)
class SglangStep:
    """The composition of a batch. `chunks` are (tokens in KV before, tokens prefilled)."""

    begin_s: float
    decode_seqs: int
    decode_kv_tokens: int
    chunks: list[tuple[int, int]]
    entered: list[str]


class SglangSteps:
    """Begun steps in their order; results come in the same order, perhaps a step later."""

    def __init__(self, predictions: LearnedPredictions, log: StepLog) -> None:
        self.log = log
        self._predictions = predictions
        self._begun: deque[SglangStep] = deque()
        self._done_s = 0.0

    def begin(self, batch: Any, now_s: float, *, waiting: int, free_blocks: int) -> None:
        """SGLang runs this batch."""
        step = _step(batch, now_s)
        self._begun.append(step)
        if self.log.wanted:
            self.log.write(
                "step",
                time_s=now_s,
                decode_seqs=step.decode_seqs,
                decode_kv_tokens=step.decode_kv_tokens,
                chunks=step.chunks,
                waiting=waiting,
                free_blocks=free_blocks,
                entered=step.entered,
            )

    def done(self, now_s: float, left: int) -> None:
        """The result of the oldest begun step is there; `left` requests wait or run on.

        With overlapped scheduling a step begins on the device when the one before it ends.
        """
        if not self._begun:
            return
        step = self._begun.popleft()
        duration_s = now_s - max(step.begin_s, self._done_s)
        self._done_s = now_s
        decodes = step.decode_seqs, step.decode_kv_tokens
        self._predictions.learn(*decodes, step.chunks, duration_s)
        self.log.write("done", time_s=now_s, duration_s=duration_s, left=left)


def requests_left(scheduler: Any, batch: Any) -> int:
    """Requests that wait or run on, once the result of `batch` has been processed."""
    reqs = [*batch.reqs, *(scheduler.running_batch.reqs if scheduler.running_batch else ())]
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    running = {id(req) for req in reqs if not req.finished()}
    return len(scheduler.waiting_queue) + len(running)


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """How the engine is set up, in the words of a log's `meta.json`."""
    args = scheduler.server_args
    found: dict[str, Any] = {
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
        found["engine_kwargs"]["max_num_batched_tokens"] = chunk
    return found


def _step(batch: Any, now_s: float) -> SglangStep:
    mode = batch.forward_mode
    if not mode.is_extend():
        reqs = batch.reqs if mode.is_decode() else []
        kv_tokens = sum(int(req.kv.kv_committed_len) for req in reqs)
        return SglangStep(now_s, len(reqs), kv_tokens, [], [])
    decoding = {id(req) for req in batch.decoding_reqs or ()}  # in a mixed batch
    lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    chunks, entered, kv_tokens = [], [], 0
    for req, before, tokens in lengths:
        if id(req) in decoding:
            kv_tokens += int(before)
        else:
            chunks.append((int(before), int(tokens)))
            entered.append(str(req.rid))
    return SglangStep(now_s, len(decoding), kv_tokens, chunks, entered)
