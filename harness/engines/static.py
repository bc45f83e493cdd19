"""Static batching on a virtual clock: padded batches that run until their longest member ends.

Prompts are padded to the longest of the batch and prefilled in one pass; every member then
decodes until the longest answer is out, and all answers are given back together. Padded tokens
are computed like any other and counted in `Measures.padded_tokens`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...predictors.step_time import StepTime
from ...workloads.errors import SloBenchError
from ..core.decisions import Refill
from ..core.ledger import BlockLedger
from ..core.policy import StaticPolicy
from ..core.state import Phase, RequestState
from ..core.view import Predictions
from .arrival_queue import ArrivalQueue
from .device import Device, occupy
from .loop import INF
from .measures import Measures
from .release import Release
from .view import LoopView


class StaticInstance:
    """One instance that serves one static batch after the other."""

    def __init__(
        self,
        policy: StaticPolicy,
        ledger: BlockLedger,
        predictions: Predictions,
        step_time: StepTime,
        stages: tuple[Device, ...],
        measures: Measures,
        index: int = 0,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.predictions = predictions
        self.step_time = step_time
        self.stages = stages
        self.measures = measures
        self.index = index
        self.now_s = 0.0
        self.inbox: deque[RequestState] = deque()
        self.outbox: list[Release] = []
        self.finished: list[RequestState] = []
        self.waiting = ArrivalQueue()
        self._arrived = 0
        self.resident: list[RequestState] = []
        self.stalled: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        # The batch, until the clock passes its end; policies look between batches.
        self.decoding: dict[RequestState, None] = {}
        self.kv_sum = self.tick = self.most_tokens = 0
        self.policy_state: Any = None
        self.view = LoopView(self)

    @property
    def idle(self) -> bool:
        return not (self.waiting.live or self.decoding)

    @property
    def may_release(self) -> bool:
        return False

    def ready_s(self) -> float:
        if not self.idle:
            return self.now_s
        return max(self.now_s, self.inbox[0].visible_s) if self.inbox else INF

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        inbox, waiting, measures = self.inbox, self.waiting, self.measures
        while True:
            while inbox and inbox[0].visible_s <= self.now_s:
                r = inbox.popleft()
                self._arrived += 1
                r.seq = self._arrived
                r.instance = self.index
                waiting.push(r)
            if self.decoding and self.now_s < horizon_s:
                self._give_back()
            if stop_on_release and self.outbox:
                return
            if not waiting.live:
                if not inbox or inbox[0].visible_s >= horizon_s:
                    return
                arrival_s = inbox[0].visible_s
                measures.idle_s += arrival_s - self.now_s
                self.now_s = arrival_s
                continue
            if self.now_s >= horizon_s:
                return
            self._run_batch(self._next_batch())

    def _next_batch(self) -> list[RequestState]:
        """The policy's choice, taken out of the queue.

        Raises:
            SloBenchError: it chose nobody, somebody twice, or somebody who does not wait.
        """
        name, waits = type(self.policy).__name__, self.waiting.live
        chosen = self.policy.form_batch(list(self.waiting), self.view)
        if not chosen:
            raise SloBenchError(f"{name}.form_batch chose nobody of {waits} waiting requests")
        batch = self._fitting(chosen)
        self.waiting.remove_all(batch)
        if waits - self.waiting.live != len(batch):
            raise SloBenchError(
                f"{name}.form_batch chose a request twice or one that does not wait"
            )
        return batch

    def would_enter(self, group: Refill) -> list[RequestState]:
        return []  # static batches are formed, not refilled

    def _fitting(self, batch: list[RequestState]) -> list[RequestState]:
        """The longest prefix of `batch` whose padded KV fits; the rest goes on waiting."""
        prompt = answer = 0
        for n, r in enumerate(batch):
            prompt = max(prompt, r.prompt_tokens)
            answer = max(answer, r.max_output_tokens)
            if (n + 1) * self.ledger.blocks(prompt + answer) > self.ledger.total and n:
                return batch[:n]
        return batch

    def _run_batch(self, batch: list[RequestState]) -> None:
        measures, n = self.measures, len(batch)
        prompt = max(r.prompt_tokens for r in batch)
        answer = max(r.output_tokens for r in batch)
        begin_s = self.now_s
        prefill_s = self.step_time.step_s(0, 0, [(0, prompt)] * n)
        first_s = occupy(self.stages, begin_s, prefill_s)
        decode_s = self.step_time.span_s(n, n * prompt, answer - 1) if answer > 1 else 0.0
        end_s = occupy(self.stages, first_s, decode_s) if answer > 1 else first_s
        self.decoding = dict.fromkeys(batch)
        blocks = n * self.ledger.blocks(prompt + answer - 1)
        useful = 0
        for r in batch:
            r.scheduled_s = begin_s
            r.first_token_s = first_s
            r.finish_s = end_s
            r.emitted_tokens = r.output_tokens
            r.cached_tokens = 0
            r.phase = Phase.DONE
            useful += r.prompt_tokens + r.output_tokens - 1
        self.now_s = end_s
        gaps = sum(r.output_tokens - 1 for r in batch)
        if gaps:
            measures.gap((end_s - first_s) / (answer - 1), gaps)
        measures.steps += answer
        measures.prefill_tokens += n * prompt
        measures.decode_tokens += n * (answer - 1)
        measures.padded_tokens += n * (prompt + answer - 1) - useful
        measures.kv_block_s += blocks * (end_s - begin_s)
        measures.kv_peak = max(measures.kv_peak, blocks)
        if first_s >= measures.next_sample_s:
            measures.samples.append((begin_s, self.waiting.live, n, blocks))
            measures.samples.append((end_s, self.waiting.live, 0, 0))
            measures.next_sample_s = end_s + measures.sample_s

    def _give_back(self) -> None:
        """The batch has ended: all its answers go out."""
        self.finished.extend(self.decoding)
        self.outbox.extend(Release.finish(r) for r in self.decoding if r.notify)
        self.decoding.clear()
