"""The plain reference: one decode step at a time, every request touched in every step.

It answers to the same policies under the same contract as `engine.loop`, but shares none of its
bookkeeping: no ticks, no heaps, no residues, no leaps; lengths are counted on the requests, block
needs request by request. Tests run it beside the leaping engine and compare records.
"""

from __future__ import annotations

from collections import deque

from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.decisions import (
    Admission,
    Limits,
    NextQueue,
    PreemptionMode,
    ReleaseReason,
    Timeout,
)
from slo_bench.harness.core.device import Away, SplitStepTime, StageDevice, occupy
from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager
from slo_bench.harness.core.module_moves import Module
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.queues.wait_queue import REKEY_AT_MOST
from slo_bench.harness.core.state import Phase, Release, RequestState
from slo_bench.harness.core.view import Predictions
from slo_bench.harness.engine.loop.arrival_queue import ArrivalQueue
from slo_bench.harness.engine.loop.engine_instance import EngineStuckError, Movable
from slo_bench.harness.engine.loop.loop_view import LoopView, queue_key_view
from slo_bench.harness.engine.loop.measures import Measures
from slo_bench.predictors.roofline import wants_lengths
from slo_bench.predictors.step_time import StepTime

INF = float("inf")


class PlainInstance:
    """One instance, the slow and obvious way."""

    def __init__(
        self,
        policy: Policy,
        kv_manager: KVCacheManager,
        predictions: Predictions,
        step_time: StepTime,
        stages: tuple[StageDevice, ...],
        measures: Measures,
        index: int = 0,
    ) -> None:
        self.policy = policy
        self.kv_manager = kv_manager
        self.predictions = predictions
        self.step_time = step_time
        self.away: Away | None = None
        self.stages = stages
        self.measures = measures
        self.index = index
        self.now_s = 0.0
        self.began_s = 0.0  # when the last iteration began
        self.policy_state = policy.new_state()
        self.counters = Counters(policy.mechanisms())
        self.inbox: deque[RequestState] = deque()
        self.outbox: list[Release] = []
        self.finished: list[RequestState] = []
        self.waiting = ArrivalQueue()
        self.swapped: list[RequestState] = []
        self.stalled: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.decoding: dict[RequestState, None] = {}
        self.pending_free: list[RequestState] = []  # ended, but not let go yet
        self.in_transfer: dict[RequestState, None] = {}  # on their way to another instance
        self.prefill_only = self.reports_all_ends = self.reports_empty_queue = False
        self.blocked_till_s = 0.0
        self.chunks: list[tuple[int, int]] = []
        self.tick = 0  # never moves: lengths stand on the requests themselves
        self.swap_s = 0.0
        self.held = 0
        self.arrived = 0
        self.changed = True
        self.timeouts: dict[RequestState, Timeout] = {}
        self.next_ones: list[RequestState] = []
        self.view = LoopView(self)
        self.key_view = queue_key_view(self, policy, self.view)
        self.limits = policy.limits(self.view)

    @property
    def kv_sum(self) -> int:
        return sum(r.kv_tokens for r in self.decoding)

    @property
    def most_tokens(self) -> int:
        batch = [*self.decoding, *self.prefilling]
        return sum(r.prompt_tokens + r.max_output_tokens for r in batch)

    @property
    def idle(self) -> bool:
        return not (
            self.decoding or self.prefilling or self.waiting.live or self.swapped or self.stalled
        )

    @property
    def n_requests(self) -> int:
        there = len(self.decoding) + len(self.prefilling) + self.waiting.live
        return there + len(self.inbox) + len(self.swapped) + len(self.stalled)

    @property
    def waiting_tokens(self) -> int:
        return sum(r.target_tokens for r in self.waiting)

    def earliest_release_s(self) -> float:
        return max(self.ready_s(), self.blocked_till_s)

    def bring_home(self, step_time: StepTime, pause_s: float) -> None:
        self.step_time, self.away = step_time, None
        self.stages[0].owed_s += pause_s

    def offload(
        self,
        module: Module,
        units: int,
        helper: Movable,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        self.step_time, self.away = step_time, Away(step_time, helper.stages[0])
        self.stages[0].owed_s += pause_s

    def reconsider(self) -> None:
        self.changed = True
        self.blocked_till_s = 0.0

    def take_out(self, r: RequestState) -> None:
        if r.phase is Phase.WAITING:
            self.waiting.remove_all([r])
            self.timeouts.pop(r, None)
        elif r.phase is Phase.SWAPPED:
            self.swapped.remove(r)
            self._leave_host(r)
        elif r.phase is Phase.PREFILL:
            self.prefilling.remove(r)
            self.kv_manager.release(r)
            r.phase, r.kv_tokens = Phase.WAITING, 0
        elif r.phase is Phase.DECODE:
            del self.decoding[r]
            self._put_in_transfer(r)
        else:
            self.stalled.remove(r)
            self._put_in_transfer(r)
        r.reserved_blocks = 0
        self.reconsider()

    def free_transferred(self, r: RequestState) -> None:
        del self.in_transfer[r]
        self.kv_manager.release(r)
        self.reconsider()

    def fail_instance(self) -> list[RequestState]:
        self._let_go()
        there = [*self.inbox, *self.waiting, *self.swapped, *self.stalled]
        there += [*self.prefilling, *self.decoding, *self.in_transfer]
        for r in there:
            r.recomputes += r.phase is not Phase.WAITING
            self._leave_host(r)
            self.kv_manager.release(r)
            r.phase, r.kv_tokens, r.reserved_blocks = Phase.WAITING, 0, 0
            r.target_tokens = r.prompt_tokens + r.emitted_tokens
        self.kv_manager.forget()
        self.waiting = ArrivalQueue()
        self.swapped, self.stalled, self.prefilling, self.decoding = [], [], [], {}
        self.inbox.clear()
        self.in_transfer.clear()
        self.timeouts.clear()
        self.chunks = []
        self.swap_s = 0.0
        self.reconsider()
        return sorted(there, key=lambda r: (r.arrival_s, r.id))

    def _put_in_transfer(self, r: RequestState) -> None:
        r.phase = Phase.SWAPPED
        r.reserved_blocks = 0
        self.in_transfer[r] = None

    def _leave_host(self, r: RequestState) -> None:
        if r.in_host_memory:
            self.kv_manager.host_free += r.blocks
            r.blocks, r.in_host_memory = 0, False

    def ready_s(self) -> float:
        if not self.idle:
            return self.now_s
        return max(self.now_s, self.inbox[0].visible_s) if self.inbox else INF

    def next_lookup_s(self) -> float:
        arrival_s = self.inbox[0].visible_s if self.inbox else INF
        return max(self.ready_s(), min(self.blocked_till_s, arrival_s))

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        self.blocked_till_s = 0.0
        while True:
            self._arrive(all_here=self.now_s < horizon_s and not (stop_on_release and self.outbox))
            if not self.policy.may_start_at_timeout:
                self._dismiss()
            if stop_on_release and self.outbox:
                return
            if self.now_s >= horizon_s:
                return
            if self.idle:
                if not self.inbox or self.inbox[0].visible_s >= horizon_s:
                    return
                self.now_s = max(self.now_s, self.inbox[0].visible_s)
                continue
            if not self._iterate():
                if self.idle:
                    continue
                if self.pending_free:
                    self._let_go()
                elif not self._pass_time(horizon_s):
                    return
                self.began_s = self.now_s

    # ---------------------------------------------------------------- queue

    def _arrive(self, *, all_here: bool) -> None:
        """`all_here`: is everybody here who has come by now?"""
        if not self.limits.async_scheduling:
            self._take_in(self.now_s)
            return
        self._take_in(self.began_s)
        if self.idle:
            self._let_go()
            if all_here:
                self._take_in(self.now_s)

    def _take_in(self, seen_s: float) -> None:
        while self.inbox and self.inbox[0].visible_s <= seen_s:
            r = self.inbox.popleft()
            self.arrived += 1
            r.seq = self.arrived
            r.instance = self.index
            self.changed = True
            if r.phase is Phase.SWAPPED:
                self.swapped.append(r)
            elif self.policy.admit(r, self.view) is Admission.REJECT:
                self.outbox.append(Release(r, ReleaseReason.REJECT, self.now_s))
            else:
                self.waiting.push(r)
                timeout = None if r.emitted_tokens else self.policy.timeout(r, self.view)
                if timeout is not None:
                    self.timeouts[r] = timeout

    def _dismiss(self) -> None:
        due = [(timeout.time_s, r.seq, r) for r, timeout in self.timeouts.items()]
        for time_s, _, r in sorted(due, key=lambda d: d[:2]):
            if time_s <= self.now_s:
                timeout = self.timeouts.pop(r)
                self.waiting.remove_all([r])
                self.outbox.append(Release(r, timeout.reason, self.now_s))
                self.changed = True

    def _by_queue_key(self, requests: list[RequestState]) -> list[RequestState]:
        return sorted(requests, key=lambda r: (self.policy.queue_key(r, self.key_view), r.seq))

    def _next_ones(self) -> list[RequestState]:
        """Who would go next of those that wait and of those whose KV is elsewhere."""
        groups = (list(self.waiting), self.swapped)
        return [self._by_queue_key(group)[0] for group in groups if group]

    def _next_waiting(self) -> RequestState:
        if self.policy.queue_order == "prefix-cache" and self.waiting.live > REKEY_AT_MOST:
            return min(self.waiting, key=lambda r: (r.arrival_s, r.seq))
        return self._by_queue_key(list(self.waiting))[0]

    # ---------------------------------------------------------------- one iteration

    def _iterate(self) -> bool:
        if self.policy.queue_order == "linear-in-time" and self._next_ones() != self.next_ones:
            self.changed = True
        if self.changed and self.policy.dynamic_limits:
            self.limits = self.policy.limits(self.view)
        limits, kv_manager = self.limits, self.kv_manager
        preempted = self._preempt_until_growth_fits(limits)
        if self.changed and not (preempted and (self.decoding or self.pending_free)):
            self.changed = self._enter_who_fits(limits)
            self.next_ones = self._next_ones()
        self.changed = self.changed or preempted
        if self.policy.may_start_at_timeout:
            self._dismiss()
        plan = self._chunks(limits)
        decoders = list(self.decoding) if limits.mixed_batches or not plan else []
        kv_tokens = sum(r.kv_tokens for r in decoders)
        begins = sorted(-r.kv_tokens for r in decoders)
        for r in decoders:
            self._hold(r, r.kv_tokens + 1)
        chunks = []
        for r, tokens in plan:
            chunks.append((r.kv_tokens, tokens))
            r.kv_tokens += tokens
            self._hold(r, r.kv_tokens)
            if r.prefix_blocks and kv_manager.unit_tokens:
                kv_manager.cache_blocks(r, r.kv_tokens)
        kv_manager.evict()
        if not decoders and not plan:
            return False
        batch = (len(decoders), kv_tokens, chunks)
        self.chunks = chunks
        step_time = self.step_time
        if wants_lengths(step_time) and begins:
            duration_s = step_time.step_s(*batch, step_time.tail_s(begins, sum(begins)))
        else:
            duration_s = step_time.step_s(*batch)
        duration_s += limits.exposed_swap_s(duration_s, self.swap_s, chunks)
        self.swap_s = 0.0
        self.began_s = self.now_s
        if self.away is not None:
            self.away.step_s(*batch)
        self.now_s = occupy(self.stages, self.now_s, duration_s)
        self._let_go()
        for r in decoders:
            self._decoded(r)
        for r, _ in plan:
            if r.kv_tokens == r.target_tokens:
                self._prefilled(r)
        return True

    def _hold(self, r: RequestState, tokens: int) -> None:
        blocks = max(r.blocks, self.kv_manager.blocks(tokens))
        self.kv_manager.free -= blocks - r.blocks
        r.blocks = blocks

    def _decoded(self, r: RequestState) -> None:
        r.kv_tokens += 1
        r.emitted_tokens += 1
        self.measures.gap(self.now_s - r.last_token_s)
        r.last_token_s = self.now_s
        if r.emitted_tokens == r.output_tokens:
            del self.decoding[r]
            self._finish(r)

    def _prefilled(self, r: RequestState) -> None:
        self.prefilling.remove(r)
        r.emitted_tokens += 1
        if r.emitted_tokens == 1:
            r.first_token_s = self.now_s
        else:
            self.measures.gap(self.now_s - r.last_token_s)
        r.last_token_s = self.now_s
        if r.emitted_tokens == r.output_tokens:
            self._finish(r)
        elif self.prefill_only:
            self._put_in_transfer(r)
            self.outbox.append(Release(r, ReleaseReason.HAND_OVER, self.now_s))
            self.changed = True
        else:
            r.phase = Phase.DECODE
            r.tick0 = 0
            self.decoding[r] = None
        if self.waiting.live or self.swapped or self.policy.dynamic_limits:
            self.changed = True

    def _finish(self, r: RequestState) -> None:
        r.finish_s = self.now_s
        r.phase = Phase.DONE
        if r.prefix_blocks and self.kv_manager.unit_tokens:
            self.kv_manager.cache_blocks(r, r.kv_tokens)
        if self.limits.async_scheduling:
            self.pending_free.append(r)
        else:
            self.kv_manager.release(r)
        self.finished.append(r)
        self.changed = True
        if r.notify_on_finish or self.reports_all_ends:
            self.outbox.append(Release.finish(r))
        self.policy.on_finished(r, self.view)

    def _let_go(self) -> None:
        for r in self.pending_free:
            self.kv_manager.release(r)
            self.changed = True
        self.pending_free = []

    def _pass_time(self, horizon_s: float) -> bool:
        self.changed = True
        if self.swap_s:
            self.now_s += self.swap_s
            self.swap_s = 0.0
            return True
        times = [timeout.time_s for timeout in self.timeouts.values()]
        if self.inbox:
            times.append(self.inbox[0].visible_s)
        next_s = min(times, default=INF)
        if next_s >= horizon_s:
            if horizon_s == INF:
                raise EngineStuckError(f"instance {self.index} is stuck at {self.now_s:.3f} s")
            self.now_s = horizon_s
            self.blocked_till_s = next_s
            return False
        self.now_s = max(self.now_s, next_s)
        return True

    # ---------------------------------------------------------------- KV pressure

    def _growth(self, limits: Limits) -> int:
        """Blocks that the running requests take in this iteration."""
        blocks = self.kv_manager.blocks
        need = sum(blocks(r.kv_tokens + 1) - r.blocks for r in self.decoding)
        if limits.allocate_per_chunk:
            room = limits.token_budget - len(self.decoding)
            for r in self.prefilling:
                tokens = min(r.target_tokens - r.kv_tokens, room)
                if tokens <= 0:
                    break
                room -= tokens
                need += blocks(r.kv_tokens + tokens) - r.blocks
        return need

    def _preempt_until_growth_fits(self, limits: Limits) -> bool:
        preempted = False
        while self.decoding or self.prefilling:
            need = self._growth(limits)
            if self.kv_manager.free - limits.decode_headroom_blocks >= need:
                break
            alone = len(self.decoding) == 1 and not self.prefilling
            if alone and self.kv_manager.free >= need:
                break
            self._preempt()
            preempted = True
        return preempted

    def _preempt(self) -> None:
        def rank(r: RequestState) -> tuple[object, int]:
            return (self.policy.victim_key(r, self.view), -r.seq)

        self.measures.preemptions += 1
        victim = min([*self.decoding, *self.prefilling, *self.pending_free], key=rank)
        if victim in self.pending_free:
            self.pending_free.remove(victim)
            self.kv_manager.release(victim)
            return
        how = PreemptionMode.RECOMPUTE
        cached = victim.kv_tokens
        if victim in self.decoding:
            how = self.policy.preemption_mode(victim, self.view)
            del self.decoding[victim]
            if self.limits.async_scheduling and cached > victim.target_tokens:
                cached -= 1  # the text of its last token is still to come
        else:
            self.prefilling.remove(victim)
        if how is PreemptionMode.STALL:
            victim.phase = Phase.STALLED
            self.stalled.append(victim)
            if self.decoding or self.prefilling:
                return
            victim = min(self.stalled, key=rank)
            self.stalled.remove(victim)
            self.changed = True
        blocks = victim.blocks
        if victim.prefix_blocks and self.kv_manager.unit_tokens:
            self.kv_manager.cache_blocks(victim, cached)
        self.kv_manager.release(victim)
        if how is PreemptionMode.SWAP and blocks <= self.kv_manager.host_free:
            victim.blocks = blocks
            self.kv_manager.host_free -= blocks
            victim.phase = Phase.SWAPPED
            victim.in_host_memory = True
            victim.swaps += 1
            self.swapped.append(victim)
            self.swap_s += self.predictions.swap_s(blocks)
        else:
            victim.phase = Phase.WAITING
            victim.target_tokens = victim.prompt_tokens + victim.emitted_tokens
            victim.kv_tokens = 0
            victim.recomputes += 1
            self.waiting.push(victim)

    # ---------------------------------------------------------------- entering

    def _enter_who_fits(self, limits: Limits) -> bool:
        if self.stalled:
            self._resume_stalled(limits)
        held = self.held = self._growth(limits)
        if self.swapped or self.waiting.live:
            which = self.policy.next_queue(self.view)
            if self.swapped and which is NextQueue.SWAPPED:
                return self._enter_swapped(limits, held)
            if which is NextQueue.NONE:
                return self._budget_taken(limits)
        kv_manager = self.kv_manager
        if not limits.mixed_batches:
            held = 0  # if anybody enters, nobody decodes in this iteration
        room = limits.token_budget - (len(self.decoding) if limits.mixed_batches else 0)
        entered = False
        kv_manager.evict(held)
        caches_ahead = limits.allocate_per_chunk and kv_manager.unit_tokens > 0
        if caches_ahead:
            chunks_room = room
            for r in self.prefilling:
                tokens = max(0, min(r.target_tokens - r.kv_tokens, chunks_room))
                chunks_room -= tokens
                kv_manager.cache_blocks(r, r.kv_tokens + tokens)
        while self.waiting.live:
            pending = sum(r.target_tokens - r.kv_tokens for r in self.prefilling)
            if pending >= room:
                return True
            r = self._next_waiting()
            units = kv_manager.get_computed_blocks(r) if kv_manager.unit_tokens else 0
            tokens = r.target_tokens - units * kv_manager.unit_tokens
            if not limits.chunked and pending and pending + tokens > room:
                return True
            need = kv_manager.blocks(r.target_tokens)
            if units:
                need += kv_manager.num_evictable_blocks(r, units) - units * kv_manager.unit_blocks
            if not self._has_room(r, need + held, limits):
                break
            entered = True
            self.waiting.remove_all([r])
            self.timeouts.pop(r, None)
            if units:
                self.swap_s += kv_manager.allocate(r, units)
            if r.cached_tokens < 0:
                r.cached_tokens = r.kv_tokens
            chunk = min(tokens, room - pending)
            if limits.allocate_per_chunk:
                held += kv_manager.blocks(r.kv_tokens + chunk) - r.blocks
            else:
                self._hold(r, r.target_tokens)
            kv_manager.evict(held)
            if caches_ahead:
                kv_manager.cache_blocks(r, r.kv_tokens + chunk)
            r.phase = Phase.PREFILL
            self.prefilling.append(r)
            self._enter_batch(r)
        if self.reports_empty_queue and entered and not self.waiting.live:
            self.outbox.append(Release(self.prefilling[-1], ReleaseReason.BEGUN, self.now_s))
        return entered and bool(self.swapped)

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Those of a group, in their order, for whom there is room now."""
        limits, kv_manager = self.limits, self.kv_manager
        waits = group is NextQueue.WAITING
        held = 0 if waits and not limits.mixed_batches else self.held
        pending = sum(r.target_tokens - r.kv_tokens for r in self.prefilling)
        room = limits.token_budget - (len(self.decoding) if limits.mixed_batches else 0)
        seqs = len(self.decoding) + len(self.prefilling) + len(self.pending_free)
        fitting: list[RequestState] = []
        for r in self._by_queue_key(list(self.waiting) if waits else self.swapped):
            tokens = r.target_tokens if waits else r.kv_tokens + 1
            held += kv_manager.blocks(tokens)
            needed = held + limits.watermark_blocks + self.policy.headroom_blocks(r, self.view)
            if needed > kv_manager.free or seqs + len(fitting) >= limits.max_seqs:
                break
            if (waits or limits.mixed_batches) and pending >= room:
                break
            if waits and not limits.chunked and pending and pending + tokens > room:
                break
            pending += tokens if waits else 1
            fitting.append(r)
        return fitting

    def _has_room(self, r: RequestState, need: int, limits: Limits) -> bool:
        policy, kv_manager = self.policy, self.kv_manager
        need += limits.watermark_blocks + policy.headroom_blocks(r, self.view)
        promised = sum(x.reserved_blocks for x in self._everybody())
        promise = 0 if r.reserved_blocks else policy.reserved_blocks(r, self.view)
        return (
            len(self.decoding) + len(self.prefilling) + len(self.pending_free) < limits.max_seqs
            and need <= kv_manager.free
            and promised + promise <= kv_manager.total
        )

    def _everybody(self) -> list[RequestState]:
        batch = [*self.decoding, *self.prefilling]
        return [*batch, *self.stalled, *self.swapped, *self.waiting]

    def _enter_batch(self, r: RequestState) -> None:
        if r.first_scheduled_s != r.first_scheduled_s:
            r.first_scheduled_s = self.now_s
        if not r.reserved_blocks:
            r.reserved_blocks = self.policy.reserved_blocks(r, self.view)

    def _enter_swapped(self, limits: Limits, held: int) -> bool:
        kv_manager = self.kv_manager
        entered = False
        for r in self._by_queue_key(self.swapped):
            if limits.mixed_batches and self._budget_taken(limits):
                return True
            blocks = kv_manager.blocks(r.kv_tokens + 1)
            if not self._has_room(r, blocks + held, limits):
                break
            entered = True
            self.swapped.remove(r)
            if r.in_host_memory:
                kv_manager.host_free += r.blocks
                self.swap_s += self.predictions.swap_s(r.blocks)
                r.in_host_memory = False
            r.blocks = kv_manager.blocks(r.kv_tokens)
            kv_manager.free -= r.blocks
            held += blocks - r.blocks
            self._enter_batch(r)
            r.phase = Phase.DECODE
            self.decoding[r] = None
        return entered

    def _budget_taken(self, limits: Limits) -> bool:
        pending = sum(r.target_tokens - r.kv_tokens for r in self.prefilling)
        return pending + (len(self.decoding) if limits.mixed_batches else 0) >= limits.token_budget

    def _resume_stalled(self, limits: Limits) -> None:
        def rank(r: RequestState) -> tuple[object, int]:
            return (self.policy.victim_key(r, self.view), -r.seq)

        for r in sorted(self.stalled, key=rank, reverse=True):
            spare = limits.decode_headroom_blocks if self.decoding else 0
            decoders = [*self.decoding, r]
            need = sum(self.kv_manager.blocks(x.kv_tokens + 1) - x.blocks for x in decoders)
            if self.kv_manager.free - need < spare:
                break
            self.stalled.remove(r)
            r.phase = Phase.DECODE
            self.decoding[r] = None

    def _chunks(self, limits: Limits) -> list[tuple[RequestState, int]]:
        budget = limits.token_budget - (len(self.decoding) if limits.mixed_batches else 0)
        plan: list[tuple[RequestState, int]] = []
        for r in self.prefilling:
            tokens = r.target_tokens - r.kv_tokens
            if tokens > budget:
                if limits.chunked:
                    tokens = budget
                elif plan:
                    break
            if tokens <= 0:
                break
            plan.append((r, tokens))
            budget -= tokens
        return plan
