"""Decisions of a policy inside SGLang's scheduler.

SGLang executes: it manages blocks, batches and outputs. The policy's decisions are put where SGLang
reads them: the next request in the order of its waiting queue, the victim in the order of
retraction. Rejected, dropped and offloaded requests are removed from the queue with an error.
Limits are those of the policy, within the limits that the server was started with. A request enters
where the policy has room for it and SGLang, too, by its own estimate of output lengths.

The policy is asked when something has changed. Until then SGLang's `batch_is_full` keeps the queue
closed behind a request that did not fit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.managers.utils import is_health_check_generate_req

from ....core.decisions import Limits, NextQueue, ReleaseReason
from ....core.policy import Key, Policy, overrides
from ....core.queues.wait_queue import REKEY_AT_MOST
from ....core.state import Phase
from ....core.wire import DROPPED, REJECTED
from ...plugin.hosted import HostedPolicy
from .sglang_compatibility import refusal_of
from .sglang_steps import SglangSteps, requests_left
from .sglang_view import SglangRequest, SglangView, all_ours, ours


class Decider:
    """State and decisions of a policy for one scheduler; the hooks call it."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)  # as SGLang's own times

    def __init__(self, scheduler: Any, policy: Policy) -> None:
        self._scheduler = scheduler
        self._failed: dict[Any, str] = {}  # messages of requests that are to end
        self._hosted = HostedPolicy(policy)
        self._policy = self._hosted.policy
        self.steps = SglangSteps(self._hosted.predictions, self._hosted.log)
        self.view = SglangView(scheduler, self._hosted)
        self._victims: list[int] = []  # requests of which some are being retracted
        self._arrived = self._retracted = 0
        own_chunk = scheduler.chunked_prefill_size
        self._own_tokens = min(scheduler.max_prefill_tokens, own_chunk or math.inf)
        self._changed = True  # since the policy was last asked
        self._open = True  # the policy lets waiting requests enter
        self._head: Any = None  # of the queue, when the policy was last asked
        self._decoding = False  # SGLang puts a decode step together
        self._calls_headroom = overrides(self._policy, "headroom_blocks")
        self._calls_next_queue = overrides(self._policy, "next_queue")
        self._limits = Limits()
        self._limit()
        if not self._limits.chunked and own_chunk is not None:
            raise RuntimeError("the policy splits no prompt: start with --chunked-prefill-size -1")

    def _limit(self) -> None:
        self._limits = self.view.limits = self._policy.limits(self.view)
        if reason := refusal_of(self._limits):
            raise RuntimeError(f"SGLang cannot run this policy: {reason}")

    # ---------------------------------------------------------------- one step

    def plan(self, running_batch: Any, last_batch: Any) -> None:
        """Prepare a step: what the policy says about the present batch and queue."""
        batches = [running_batch, last_batch]
        if self._policy.may_start_at_timeout:
            self._look(batches)
        else:
            self.expire_timeouts(batches)
        queue = self._scheduler.waiting_queue
        head = None
        if queue and self._policy.queue_order == "linear-in-time":
            head = min(queue, key=self._rank)
        if not self._changed and head is self._head:
            return
        self._changed, self._head = False, head
        if self._policy.dynamic_limits:
            self._limit()
        if self._calls_next_queue and queue:
            self._sort(queue)
            self._open = self._policy.next_queue(self.view) is not NextQueue.NONE
        running_batch.batch_is_full = False

    def planned(self) -> None:
        """A step has been put together."""
        if self._policy.may_start_at_timeout:
            self._expire()

    def prefill_waits(self, running_batch: Any) -> bool:
        """Set the tokens of the next prefill; True: none fits beside the decodes."""
        scheduler = self._scheduler
        page, decodes = self.view.block_size, running_batch.batch_size()
        beside = decodes if scheduler.is_mixed_chunk else 0
        chunk = max(0, int(min(self._limits.token_budget, self._own_tokens)) - beside)
        chunk = chunk // page * page
        if not chunk and decodes:
            return True
        scheduler.max_prefill_tokens = beside + max(chunk, page)
        if scheduler.chunked_prefill_size is not None:
            scheduler.chunked_prefill_size = scheduler.max_prefill_tokens
        return False

    def room(self, allocatable: int, running: int) -> int:
        """Number of requests that may enter: SGLang's own room, within the policy's limit."""
        return min(allocatable, self._limits.max_seqs - running) if self._open else 0

    def may_enter(self, adder: Any, req: Any) -> bool:
        """Whether the policy has room for a request; always where no other runs."""
        r, limits = ours(req), self._limits
        if r is None or not (limits.watermark_blocks or self._calls_headroom):
            return True
        running = [] if adder.running_batch is None else adder.running_batch.reqs
        if not (running or adder.can_run_list):
            return True
        view = self.view
        view.look_at_entering(running, adder.can_run_list)
        blocks = -(-r.target_tokens // view.block_size) + limits.watermark_blocks
        return blocks + self._policy.headroom_blocks(r, view) <= view.free_blocks

    @contextlib.contextmanager
    def decode_step(self) -> Iterator[None]:
        """SGLang puts a decode step together, and retracts requests where memory is short."""
        self._decoding = True
        try:
            yield
        finally:
            self._decoding = False

    def has_headroom(self, batch: Any, selected: Sequence[int] | None) -> bool:
        """Whether a decode step of these requests leaves the policy's headroom free, which is for
        others than the last request.
        """
        headroom = self._limits.decode_headroom_blocks
        n_requests = len(batch.reqs if selected is None else selected)
        if not (self._decoding and headroom) or n_requests <= 1:
            return True
        growth = batch.new_tokens_required_next_decode(selected) // self.view.block_size
        return bool(self.view.free_blocks - growth >= headroom)

    # ---------------------------------------------------------------- coming and going

    def comes(self, req: Any) -> bool:
        """Admit a request that enters the queue, for the first time or again; False: rejected."""
        self.view.look(type(self).clock())
        self._changed = True
        r = ours(req)
        if r is not None:  # retracted
            r.phase = Phase.WAITING
            r.target_tokens = len(req.origin_input_ids) + len(req.output_ids)
            r.recomputes += 1
            self._retracted += 1
            if r.seq in self._victims:
                self._victims.remove(r.seq)
            self._hosted.decisions.preempt(r.seq, self._victims)
            self._place(r)
            self.steps.log.write("preempted", time_s=self.view.now_s, id=str(req.rid))
            return True
        if is_health_check_generate_req(req) or req.to_finish is not None:
            return True  # none of the policy's: it would be wrong to let it wait or go
        self._arrived += 1
        received_s = float(getattr(req.time_stats, "scheduler_recv_time", 0.0)) or self.view.now_s
        r = SglangRequest(req, self._arrived, min(received_s, self.view.now_s))
        if self._hosted.rejects(r, self.view):
            self._send_away(req, ReleaseReason.REJECT)
            return False
        self._place(r)
        self._hosted.add_timeout(r, self.view)
        self._failed |= self._hosted.errors.failed()
        if (why := self._failed.pop(r, None)) is not None:
            self._end(req, why, HTTPStatus.INTERNAL_SERVER_ERROR)
            return False
        return True

    def _place(self, r: SglangRequest) -> None:
        if self._policy.queue_order == "linear-in-time":
            r.line = self._policy.queue_key_line(r, self.view)
        elif self._policy.queue_order == "static":
            r.key = self._hosted.queue_key(r, self.view)

    def write_tally(self) -> None:
        """Write what was counted so far, for the process that started the server."""
        self._hosted.write_tally(preempted_recompute=self._retracted)

    def expire_timeouts(self, batches: Iterable[Any]) -> None:
        """Drop or offload waiting requests whose timeout has passed; `batches` run now."""
        self._look(batches)
        self._expire()

    def _look(self, batches: Iterable[Any]) -> None:
        running = [batch.reqs for batch in batches if batch is not None]
        self.view.look(type(self).clock(), running)

    def _expire(self) -> None:
        queue = self._scheduler.waiting_queue
        self._failed |= self._hosted.errors.failed()
        for r, why in list(self._failed.items()):
            position = next(
                (i for i, waiting_req in enumerate(queue) if waiting_req is r.req), None
            )
            if position is not None:
                del self._failed[r], queue[position]
                self._end(r.req, why, HTTPStatus.INTERNAL_SERVER_ERROR)
            elif r.phase is Phase.DONE:
                del self._failed[r]
        for r, reason in self._hosted.timed_out(self.view.now_s):
            assert isinstance(r, SglangRequest)
            req = r.req
            if req is None or not math.isnan(r.first_scheduled_s):
                continue
            position = next((i for i, other in enumerate(queue) if other is req), None)
            if position is not None:
                del queue[position]
                self._send_away(req, reason)

    def _send_away(self, req: Any, reason: ReleaseReason) -> None:
        self._hosted.decisions.release += 1
        why = REJECTED if reason is ReleaseReason.REJECT else DROPPED
        self._end(req, f"{why} by the policy", HTTPStatus.SERVICE_UNAVAILABLE)

    def _end(self, req: Any, why: str, status: HTTPStatus) -> None:
        self._changed = True
        scheduler = self._scheduler
        scheduler._release_aborted_request(req)
        scheduler.beam_coordinator.retire_group(req)
        finished = {
            "type": "abort",
            "status_code": status,
            "message": why,
        }
        send = getattr(scheduler, "send_abort_output", None)  # from SGLang 0.5.23 on
        if send is None:
            send = scheduler.ipc_channels.send_to_tokenizer.send_output
        send(_make_abort_req(req, finished_reason=finished), req)
        self.steps.log.write("away", time_s=self.view.now_s, id=str(req.rid), reason=why)

    # ---------------------------------------------------------------- order and victims

    def order(self, queue: list[Any], running: Any) -> None:
        """Sort the waiting queue in place."""
        self.view.look(type(self).clock(), [] if running is None else [running.reqs])
        self._sort(queue)

    def _sort(self, queue: list[Any]) -> None:
        if self._policy.queue_order == "prefix-cache":
            by_arrival = len(queue) > REKEY_AT_MOST
            for r in all_ours(queue):
                r.key = r.arrival_s if by_arrival else self._hosted.queue_key(r, self.view)
        elif self._policy.queue_order == "dynamic":
            for r in all_ours(queue):
                r.key = self._hosted.queue_key(r, self.view)
        queue.sort(key=self._rank)

    def _rank(self, req: Any) -> tuple[bool, Key, int]:
        r = ours(req)
        if r is None:
            return (False, 0.0, 0)  # health checks and the like go first
        return (True, r.key if r.line is None else r.line.at(self.view.now_s), r.seq)

    def victims(self, reqs: list[Any]) -> list[int]:
        """Indices of `reqs`: the last is retracted first; of equal keys, the later arrival."""
        self.view.look(type(self).clock(), [reqs])
        keys: list[tuple[bool, Key, int]] = []
        for req in reqs:
            r = ours(req)
            if r is None:
                keys.append((True, 0.0, 0))  # health checks and the like stay
            else:
                keys.append((False, self._policy.victim_key(r, self.view), -r.seq))
        self._victims = [r.seq for r in all_ours(reqs)]
        return sorted(range(len(reqs)), key=keys.__getitem__, reverse=True)

    # ---------------------------------------------------------------- steps

    def begins(self, batch: Any) -> None:
        """Record the start of a batch and the phases of its requests."""
        now_s = type(self).clock()
        self.view.look(now_s)
        prefill = batch.forward_mode.is_extend()
        entered = [r.seq for r in all_ours(batch.reqs) if prefill and r.phase is Phase.WAITING]
        if entered:
            waiting = [r.seq for r in all_ours(self._scheduler.waiting_queue)]
            self._hosted.decisions.enter(entered, waiting)
        decoding = set(all_ours(batch.decoding_reqs or ())) if prefill else set()
        self._changed |= prefill
        for r in all_ours(batch.reqs):
            r.phase = Phase.PREFILL if prefill and r not in decoding else Phase.DECODE
            if math.isnan(r.first_scheduled_s):
                r.first_scheduled_s = now_s
        free_blocks = self.view.free_blocks if self.steps.log.wanted else 0
        self.steps.begin(batch, now_s, waiting=self.view.n_waiting, free_blocks=free_blocks)

    def ended(self, batch: Any) -> None:
        """Record the end of a batch, and call the policy's `on_finished` for requests that have
        ended.
        """
        now_s = type(self).clock()
        left = requests_left(self._scheduler, batch) if self.steps.log.wanted else 0
        self.steps.done(now_s, left)
        self.view.look(now_s)
        for r in all_ours(batch.reqs):
            req = r.req
            if req.output_ids and math.isnan(r.first_token_s):
                r.first_token_s = now_s
            if r.phase is Phase.DONE or not req.finished():
                continue
            self._changed = True
            r.phase = Phase.DONE
            r.finish_s = now_s
            r.emitted_tokens = r.output_tokens = len(req.output_ids)
            if req.finished_reason.to_json().get("type") != "abort":
                self._policy.on_finished(r, self.view)
