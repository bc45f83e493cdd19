"""Static batching on a virtual clock: padded batches that run until their longest member ends.

Prompts are padded to the longest of the batch and prefilled in one pass; every member then decodes
until the longest answer is out, and all answers are given back together: no token reaches a client
before, so the first and the last token of each answer come with the return of its batch (UELLM,
§2.2.1: a batch is returned once its longest answer is generated). Padded tokens are computed like
any other and counted in `Measures.padded_tokens`.

KV is reserved for the output lengths that the policy predicts. Longer outputs extend the
reservation while blocks are free. Without free blocks, members with a complete answer are padded no
more, and of the others the last return to the queue and begin anew (`recomputes`). A policy may cut
the answers of a batch (`output_cap_tokens`); each one cut is counted.
"""

from __future__ import annotations

from ....predictors.step_time import StepTime
from ....workloads.errors import SloBenchError
from ...core.counters import ANSWERS_CUT, CLOSED_BY_MEMORY, Counters
from ...core.device import StageDevice, occupy
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.policy import StaticPolicy
from ...core.state import Phase, Release, RequestState
from ...core.view import Predictions
from ..loop.arrival_queue import BatchInstance
from ..loop.measures import Measures


class StaticInstance(BatchInstance):
    """One instance that serves one static batch after the other."""

    def __init__(
        self,
        policy: StaticPolicy,
        kv_manager: KVCacheManager,
        predictions: Predictions,
        step_time: StepTime,
        stages: tuple[StageDevice, ...],
        measures: Measures,
        index: int = 0,
    ) -> None:
        super().__init__(
            policy.new_state(),
            Counters(policy.mechanisms()),
            kv_manager,
            predictions,
            stages,
            measures,
            index,
        )
        self.policy = policy
        self.step_time = step_time
        self.prefill_end_s = 0.0  # of the last batch
        self._calls_on_finished = type(policy).on_finished is not StaticPolicy.on_finished

    def earliest_release_s(self) -> float:
        return self.ready_s()

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        inbox, waiting, measures = self.inbox, self.waiting, self.measures
        while True:
            while inbox and inbox[0].visible_s <= self.now_s:
                waiting.push(self._next_arrival())
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
            batch = self._next_batch()
            self._cut_answers(batch)
            self._run_batch(batch)

    def _next_batch(self) -> list[RequestState]:
        """The policy's choice, taken out of the queue.

        Raises:
            SloBenchError: it chose no request, one twice, or one that does not wait.
        """
        name, waits = type(self.policy).__name__, self.waiting.live
        chosen = self.policy.form_batch(list(self.waiting), self.view)
        if not chosen:
            raise SloBenchError(
                f"{name}.form_batch must choose at least one of {waits} waiting requests"
            )
        batch = self._fitting(chosen)
        self.waiting.remove_all(batch)
        if waits - self.waiting.live != len(batch):
            raise SloBenchError(
                f"{name}.form_batch chose a request twice or one that does not wait"
            )
        return batch

    def _fitting(self, batch: list[RequestState]) -> list[RequestState]:
        """The longest prefix of `batch` whose padded KV fits; the rest waits."""
        prompt = answer = 0
        for n, r in enumerate(batch):
            prompt = max(prompt, r.prompt_tokens)
            expected = self.policy.reserve_tokens(r, self.view)
            answer = max(answer, min(expected, r.max_output_tokens))
            if (n + 1) * self.kv_manager.blocks(prompt + answer) > self.kv_manager.total and n:
                if CLOSED_BY_MEMORY in self.counters:
                    self.counters.add(CLOSED_BY_MEMORY)
                return batch[:n]
        return batch

    def _cut_answers(self, batch: list[RequestState]) -> None:
        """End the answers of `batch` where the policy says, and count those that are longer.

        Raises:
            SloBenchError: the policy leaves them no token.
        """
        cap_tokens = self.policy.output_cap_tokens(batch, self.view)
        if cap_tokens is None:
            return
        if cap_tokens < 1:
            name = type(self.policy).__name__
            raise SloBenchError(f"{name}.output_cap_tokens must be at least 1 but is {cap_tokens}")
        for r in batch:
            if r.output_tokens > cap_tokens:
                r.output_tokens = cap_tokens
                self.counters.add(ANSWERS_CUT, r)

    def _run_batch(self, batch: list[RequestState]) -> None:
        measures, begin_s = self.measures, self.now_s
        prompt = max(r.prompt_tokens for r in batch)
        self.prefill_end_s = self._compute(
            self.step_time.step_s(0, 0, [(0, prompt)] * len(batch)), len(batch), prompt
        )
        measures.steps += 1
        measures.prefill_tokens += len(batch) * prompt
        measures.padded_tokens += sum(prompt - r.prompt_tokens for r in batch)
        running, emitted, began_anew = batch, 1, set[RequestState]()
        while True:
            prompt = max(r.prompt_tokens for r in running)
            answer = max(r.output_tokens for r in running)
            # The last token is given back without a place in the cache.
            each = self.kv_manager.total // len(running) * self.kv_manager.block_size
            upto = min(answer, each - prompt + 1)
            if upto > emitted:
                self._decode(running, prompt, emitted, upto)
                emitted = upto
            if emitted == answer:
                break
            running, outgrown = self._make_room(running, prompt, emitted)
            began_anew.update(outgrown)
        self.decoding = {r: None for r in batch if r not in began_anew}
        for r in batch:
            if r.first_scheduled_s != r.first_scheduled_s:  # not in a batch before
                r.first_scheduled_s = begin_s
            r.cached_tokens = 0
        for r in self.decoding:
            r.first_token_s = r.finish_s = self.now_s
            r.emitted_tokens = r.output_tokens
            r.phase = Phase.DONE
        if began_anew:
            self.waiting.push_back(began_anew)
        if self.prefill_end_s >= measures.next_sample_s:
            blocks = len(batch) * self.kv_manager.blocks(prompt)
            measures.samples.append((begin_s, self.waiting.live, len(batch), blocks))
            measures.samples.append((self.now_s, self.waiting.live, 0, 0))
            measures.next_sample_s = self.now_s + measures.sample_s

    def _compute(self, duration_s: float, requests: int, tokens: int) -> float:
        """Clock after a computation that leaves `tokens` tokens of each member in the cache."""
        begin_s = self.now_s
        self.now_s = occupy(self.stages, begin_s, duration_s)
        self.measures.waited_s += self.now_s - begin_s - duration_s
        blocks = requests * self.kv_manager.blocks(tokens)
        self.measures.kv_block_s += blocks * (self.now_s - begin_s)
        self.measures.kv_peak = max(self.measures.kv_peak, blocks)
        return self.now_s

    def _decode(self, running: list[RequestState], prompt: int, emitted: int, upto: int) -> None:
        """All decode, padded, until they have `upto` tokens."""
        measures, n, steps = self.measures, len(running), upto - emitted
        decode_s = self.step_time.span_s(n, n * (prompt + emitted - 1), steps)
        self._compute(decode_s, n, prompt + upto - 1)
        useful = sum(max(0, min(r.output_tokens, upto) - emitted) for r in running)
        measures.steps += steps
        measures.decode_tokens += n * steps
        measures.padded_tokens += n * steps - useful

    def _make_room(
        self, running: list[RequestState], prompt: int, emitted: int
    ) -> tuple[list[RequestState], list[RequestState]]:
        """Without free blocks: the members that go on, for at least twice as long, and those that
        leave.
        """
        unfinished = [r for r in running if r.output_tokens > emitted]
        stay = len(unfinished)
        while stay > 1:
            longest_output = max(r.max_output_tokens for r in unfinished[:stay])
            if (
                stay * self.kv_manager.blocks(prompt + min(2 * emitted, longest_output))
                <= self.kv_manager.total
            ):
                break
            stay -= 1
        for r in unfinished[stay:]:
            r.phase = Phase.WAITING
            r.emitted_tokens = emitted
            r.recomputes += 1
            self.measures.preemptions += 1
        return unfinished[:stay], unfinished[stay:]

    def _give_back(self) -> None:
        """The batch has ended: all its answers go out."""
        if self._calls_on_finished:
            for r in self.decoding:
                self.policy.on_finished(r, self.view)
        self.finished.extend(self.decoding)
        reported = (r for r in self.decoding if r.notify_on_finish or self.reports_all_ends)
        self.outbox.extend(map(Release.finish, reported))
        self.decoding.clear()
