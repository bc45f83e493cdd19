"""The requests of one instance: waiting, in the batch, swapped out, in transfer.

They arrive, time out, move to other instances and are lost with their instance; `loop.py` decides
which of them run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final

from ...core.compiled import mypyc_attr
from ...core.counters import Counters, TimedCounters
from ...core.decisions import Admission, Limits, NextQueue, ReleaseReason
from ...core.kv.adapter_slots import AdapterSlots
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.policy import Policy, Queue, overrides
from ...core.queues.line_queue import LineQueue
from ...core.queues.wait_queue import CacheOrderedQueue, ViewOrderedQueue, WaitQueue
from ...core.state import WAITING, Phase, Release, RequestState
from ...core.view import Predictions, View
from .decode_counters import DecodeCounters
from .loop_view import LoopView, queue_key_view
from .measures import Measures

INF: Final = float("inf")
_DECODE: Final = Phase.DECODE
_PREFILL: Final = Phase.PREFILL
_SWAPPED: Final = Phase.SWAPPED


def _queue(policy: Policy, view: View, kv_manager: KVBlocks) -> WaitQueue | Queue:
    """The waiting queue for `policy.queue_order`; `view` is the one for keys."""
    if policy.queue_order == "linear-in-time":
        return LineQueue(policy, view)
    if policy.queue_order == "dynamic":
        return policy.queue(view) or ViewOrderedQueue(policy, view)
    if policy.queue_order == "prefix-cache":
        return CacheOrderedQueue(policy, view, kv_manager)
    return WaitQueue(policy, view)


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchState(DecodeCounters):
    """State of one instance between two iterations, and how requests enter and leave it."""

    # Slots: the loop reads these a few dozen times an iteration.
    __slots__ = (
        "_arrived",
        "_by_time",
        "_calls_admit",
        "_calls_headroom",
        "_calls_next_queue",
        "_calls_on_finished",
        "_calls_reserved",
        "_calls_timeout",
        "_dynamic_limits",
        "_held_blocks",
        "_key_view",
        "_lim",
        "_may_start_at_timeout",
        "_must_refill",
        "_prefill_completed",
        "adapters",
        "blocked_till_s",
        "chunks",
        "counters",
        "decode_kv_tokens",
        "decode_seqs",
        "finished",
        "in_transfer",
        "inbox",
        "index",
        "most_tokens",
        "now_s",
        "outbox",
        "overtaken_s",
        "pending_free",
        "policy",
        "policy_state",
        "predictions",
        "prefill_only",
        "prefill_pending",
        "prefilling",
        "ranks",
        "reports_all_ends",
        "reports_empty_queue",
        "reserved_blocks",
        "stalled",
        "state_slots",
        "swap_s",
        "swapped",
        "timeouts",
        "view",
        "waiting",
        "waiting_tokens",
    )

    def __init__(
        self,
        policy: Policy,
        kv_manager: KVBlocks,
        predictions: Predictions,
        measures: Measures,
        index: int = 0,
    ) -> None:
        super().__init__(kv_manager, measures)
        self.policy = policy
        self.predictions = predictions
        self.index = index
        self.now_s = 0.0
        self.policy_state = policy.new_state()
        self.counters: Counters = TimedCounters(policy.mechanisms(), lambda: self.now_s)
        self.view = LoopView(self)
        self._key_view = queue_key_view(self, policy, self.view)

        self.inbox: deque[RequestState] = deque()  # by visible_s, complete up to the horizon
        self.outbox: list[Release] = []
        self.finished: list[RequestState] = []
        self.waiting = _queue(policy, self._key_view, kv_manager)
        self.waiting_tokens = 0  # that the waiting requests lack
        self.swapped: list[RequestState] = []
        self.stalled: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        # Finished in the previous iteration while the next one had been scheduled
        # (`Limits.async_scheduling`): they run no more, but keep place and blocks until the
        # next iteration ends.
        self.pending_free: list[RequestState] = []
        # In transfer to another instance: they keep their blocks until `free_transferred`.
        self.in_transfer: dict[RequestState, None] = {}
        self.adapters: AdapterSlots | None = None
        self.prefill_only = False  # prefilled requests decode on another instance
        self.reports_all_ends = self.reports_empty_queue = False  # see `ReleaseReason`
        self.blocked_till_s = 0.0  # nothing runs before this without an event

        self.timeouts: list[tuple[float, int, int, RequestState, ReleaseReason]] = []
        self.reserved_blocks = 0
        self.most_tokens = 0  # sum of prompt + maximum output over the batch
        self.prefill_pending = 0  # tokens that `prefilling` still lacks

        self.decode_seqs = 0
        self.decode_kv_tokens = 0
        self.chunks: list[tuple[int, int]] = []
        self.swap_s = 0.0
        self.overtaken_s = INF  # when the next request would change by time alone

        self.ranks = 1
        self.state_slots: int | None = None
        self._lim = self._limits()
        self._must_refill = True  # batch or queue changed since the last decision
        self._prefill_completed = False  # a prefill completes in this iteration
        self._held_blocks = 0  # blocks that running requests take in this iteration
        self._arrived = 0
        self._dynamic_limits = policy.dynamic_limits
        self._may_start_at_timeout = policy.may_start_at_timeout
        self._by_time = policy.queue_order == "linear-in-time"
        self._calls_admit = overrides(policy, "admit")
        self._calls_next_queue = overrides(policy, "next_queue")
        self._calls_headroom = overrides(policy, "headroom_blocks")
        self._calls_reserved = overrides(policy, "reserved_blocks")
        self._calls_timeout = overrides(policy, "timeout")
        self._calls_on_finished = overrides(policy, "on_finished")

    # ---------------------------------------------------------------- waiting requests

    @property
    def idle(self) -> bool:
        """Whether no request could run, not counting arrivals still in the inbox."""
        return not (
            self.decoding or self.prefilling or self.waiting.live or self.swapped or self.stalled
        )

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are in transit to this instance."""
        batch_and_queue = len(self.decoding) + len(self.prefilling) + self.waiting.live
        return batch_and_queue + len(self.inbox) + len(self.swapped) + len(self.stalled)

    def deliver(self, seen_s: float) -> None:
        """Accept all requests of the inbox that were visible at `seen_s`."""
        inbox = self.inbox
        while inbox and inbox[0].visible_s <= seen_s:
            r = inbox.popleft()
            self._arrived += 1
            r.seq = self._arrived
            r.instance = self.index
            self._must_refill = True
            if r.phase is _SWAPPED:
                self.swapped.append(r)
                continue
            if self._calls_admit and self.policy.admit(r, self.view) is Admission.REJECT:
                self.outbox.append(Release(r, ReleaseReason.REJECT, self.now_s))
                continue
            self._put_in_queue(r)
            if self._calls_timeout and not r.emitted_tokens:
                timeout = self.policy.timeout(r, self.view)
                if timeout is not None:
                    heappush(self.timeouts, (timeout.time_s, r.seq, r.version, r, timeout.reason))

    def _put_in_queue(self, r: RequestState) -> None:
        self.waiting.push(r)
        self.waiting_tokens += r.target_tokens

    def _leave_queue(self, r: RequestState) -> None:
        self.waiting.remove(r)
        self.waiting_tokens -= r.target_tokens

    def expire_timeouts(self) -> None:
        """Release waiting requests whose timeout has come and that have not begun."""
        timeouts = self.timeouts
        while timeouts and timeouts[0][0] <= self.now_s:
            _, _, version, r, reason = heappop(timeouts)
            if version == r.version:
                self._leave_queue(r)
                self.outbox.append(Release(r, reason, self.now_s))
                self._must_refill = True

    def reconsider(self) -> None:
        """Make the policy decide again after a change outside this instance."""
        self._must_refill = True
        self.blocked_till_s = 0.0

    def next_timeout_s(self) -> float:
        """Time of the next timeout of a waiting request; infinite if none."""
        timeouts = self.timeouts
        while timeouts and timeouts[0][2] != timeouts[0][3].version:
            heappop(timeouts)
        return timeouts[0][0] if timeouts else INF

    # ---------------------------------------------------------------- to and from other instances

    def take_out(self, r: RequestState) -> None:
        """Remove `r` between two iterations, as waiting or swapped. KV on the GPU keeps its blocks
        until `free_transferred`.
        """
        if r.phase is WAITING:
            self._leave_queue(r)
        elif r.phase is _SWAPPED:
            self.swapped.remove(r)
            self._leave_host(r)
        elif r.phase is _PREFILL:
            self.prefilling.remove(r)
            self._undo_prefill(r)
            self.kv_manager.release(r)
            self.most_tokens -= r.prompt_tokens + r.max_output_tokens
            r.phase, r.kv_tokens = WAITING, 0
        elif r.phase is _DECODE:
            self._stop_decode(r)
            self.most_tokens -= r.prompt_tokens + r.max_output_tokens
            self._put_in_transfer(r)
        else:
            self.stalled.remove(r)
            self._put_in_transfer(r)
        self._release_reservation(r)
        self.reconsider()

    def free_transferred(self, r: RequestState) -> None:
        """Free the blocks of a request whose KV has arrived at its target."""
        del self.in_transfer[r]
        self.kv_manager.release(r)
        self.reconsider()

    def spread_over(self, ranks: int) -> None:
        """Let the policy's token budget and batch size be those of each of `ranks` ranks."""
        self.ranks = ranks
        self._lim = self._limits()

    def keep_states(self, slots: int) -> None:
        """Let at most so many requests run at once, for each of which there is room for a state."""
        self.state_slots = slots
        self._lim = self._limits()

    def _limits(self) -> Limits:
        limits = self.policy.limits(self.view)
        if self.ranks == 1 and self.state_slots is None:
            return limits
        budget, seqs = limits.token_budget * self.ranks, limits.max_seqs * self.ranks
        if self.state_slots is not None:
            seqs = min(seqs, self.state_slots)
        return replace(limits, token_budget=budget, max_seqs=seqs)

    def fail_instance(self) -> list[RequestState]:
        """Fail the instance between two iterations. Returns its requests, which need prefill again,
        in order of arrival.
        """
        self.free_finished()
        requests = [*self.inbox, *self.waiting, *self.swapped, *self.stalled, *self.prefilling]
        for r in self.prefilling:
            self._undo_prefill(r)
        for r in list(self.decoding):
            self._stop_decode(r)
            requests.append(r)
        requests += self.in_transfer
        for r in requests:
            r.recomputes += r.phase is not WAITING
            self._leave_host(r)
            self.kv_manager.release(r)
            self._release_reservation(r)
            r.phase, r.kv_tokens = WAITING, 0
            r.target_tokens = r.prompt_tokens + r.emitted_tokens
        self.kv_manager.forget()
        self.waiting = _queue(self.policy, self._key_view, self.kv_manager)
        self.waiting_tokens = 0
        self.inbox.clear()
        self.swapped.clear()
        self.stalled.clear()
        self.prefilling.clear()
        self.in_transfer.clear()
        self.ends.clear()
        self.timeouts.clear()
        self.chunks = []
        self.most_tokens = 0
        self.swap_s = 0.0
        self.reconsider()
        return sorted(requests, key=lambda r: (r.arrival_s, r.id))

    def _put_in_transfer(self, r: RequestState) -> None:
        r.phase = _SWAPPED
        self.in_transfer[r] = None

    def _undo_prefill(self, r: RequestState) -> None:
        missing = r.target_tokens - r.kv_tokens
        self.prefill_pending -= missing
        self.measures.prefill_tokens -= missing

    def _release_reservation(self, r: RequestState) -> None:
        self.reserved_blocks -= r.reserved_blocks
        r.reserved_blocks = 0

    def _leave_host(self, r: RequestState) -> None:
        if r.in_host_memory:
            self.kv_manager.host_free += r.blocks
            r.blocks, r.in_host_memory = 0, False

    def free_finished(self) -> None:
        """Free places and blocks of finished requests."""
        for r in self.pending_free:
            self.kv_manager.release(r)
        self.pending_free.clear()
        self._must_refill = True

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Requests of a queue that fit now, in queue order."""
        raise NotImplementedError
