"""The iteration loop of one instance: who enters, who runs, who is preempted, who is done.

An iteration costs O(requests whose state changes), not O(batch): those that decode are counters
(`decode_counters.py`). The clock belongs to whoever executes the iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from ...core.decisions import Admission, Limits, PreemptBy, Refill, Why
from ...core.kv_cache_manager import BlockLedger
from ...core.line_queue import LineQueue, overtaken_s
from ...core.policy import Policy, overrides
from ...core.queue import Queue
from ...core.queues import CacheOrderedQueue, ViewOrderedQueue, WaitQueue
from ...core.release import Release
from ...core.state import WAITING, Phase, RequestState
from ...core.view import Predictions, View
from .decode_counters import DecodeCounters
from .measures import Measures
from .view import LoopView

INF = float("inf")
_DECODE, _DONE, _PREFILL, _RESIDENT = Phase.DECODE, Phase.DONE, Phase.PREFILL, Phase.RESIDENT


def _queue(policy: Policy, view: View, ledger: BlockLedger) -> Queue:
    if policy.order == "time":
        return LineQueue(policy, view)
    if policy.order == "view":
        return policy.queue(view) or ViewOrderedQueue(policy, view)
    if policy.order == "cache":
        return CacheOrderedQueue(policy, view, ledger)
    return WaitQueue(policy, view)


class Loop(DecodeCounters):
    """State and transitions of one instance. An engine calls `schedule`, executes, `complete`.

    After `schedule()` the iteration is: `decode_seqs` requests that decode one token each
    (`decode_kv_tokens` KV tokens in all), `chunks` = (tokens in KV, tokens to prefill) of the
    first requests in `prefilling`, and `swap_s` seconds of swapping that go before them.
    """

    # Slots: the loop reads these a few dozen times an iteration.
    __slots__ = (
        "_arrived",
        "_asks_admit",
        "_asks_commit",
        "_asks_leave",
        "_asks_refill",
        "_asks_reserve",
        "_by_time",
        "_dirty",
        "_filled",
        "_hold",
        "_lim",
        "_limits_vary",
        "_tells_finished",
        "blocked_till_s",
        "chunks",
        "decode_kv_tokens",
        "decode_seqs",
        "finished",
        "inbox",
        "index",
        "leavers",
        "lingering",
        "most_tokens",
        "now_s",
        "outbox",
        "overtaken_s",
        "parked",
        "policy",
        "policy_state",
        "predictions",
        "prefill_only",
        "prefill_pending",
        "prefilling",
        "promised_blocks",
        "resident",
        "stalled",
        "swap_s",
        "tells_begun",
        "tells_ends",
        "view",
        "waiting",
    )

    def __init__(
        self,
        policy: Policy,
        ledger: BlockLedger,
        predictions: Predictions,
        measures: Measures,
        index: int = 0,
    ) -> None:
        super().__init__(ledger, measures)
        self.policy = policy
        self.predictions = predictions
        self.index = index
        self.now_s = 0.0
        self.policy_state = policy.new_state()
        self.view = LoopView(self)

        self.inbox: deque[RequestState] = deque()  # by visible_s, complete up to the horizon
        self.outbox: list[Release] = []
        self.finished: list[RequestState] = []
        self.waiting = _queue(policy, self.view, ledger)
        self.resident: list[RequestState] = []
        self.stalled: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        # Ended in the iteration before, while the next had been decided (`Limits.ahead`): they run
        # no more, but keep place and blocks until that next one is over.
        self.lingering: list[RequestState] = []
        # On their way to another instance: they keep their blocks until `let_go_of`.
        self.parked: dict[RequestState, None] = {}
        self.prefill_only = False  # who has been prefilled decodes elsewhere
        self.tells_ends = self.tells_begun = False  # see `Why`
        self.blocked_till_s = 0.0  # nothing runs, nor will by itself before this

        self.leavers: list[tuple[float, int, int, RequestState, Why]] = []
        self.promised_blocks = 0
        self.most_tokens = 0  # sum of prompt + maximum output over the batch
        self.prefill_pending = 0  # tokens that `prefilling` still lacks

        self.decode_seqs = 0
        self.decode_kv_tokens = 0
        self.chunks: list[tuple[int, int]] = []
        self.swap_s = 0.0
        self.overtaken_s = INF  # when somebody else would go next, if nothing happens before

        self._lim = policy.limits(self.view)
        self._dirty = True  # the composition changed since the policy was last asked
        self._filled = False  # does a prefill complete in this iteration?
        self._hold = 0  # blocks that running requests take in this iteration
        self._arrived = 0
        self._limits_vary = policy.limits_vary
        self._by_time = policy.order == "time"
        self._asks_admit = overrides(policy, "admit")
        self._asks_refill = overrides(policy, "refill")
        self._asks_reserve = overrides(policy, "reserve")
        self._asks_commit = overrides(policy, "commit")
        self._asks_leave = overrides(policy, "leave")
        self._tells_finished = overrides(policy, "finished")

    # ---------------------------------------------------------------- what waits

    @property
    def idle(self) -> bool:
        """Is nothing here that could run (arrivals still in the inbox aside)?"""
        return not (
            self.decoding or self.prefilling or self.waiting.live or self.resident or self.stalled
        )

    @property
    def n_requests(self) -> int:
        """Who waits, runs, or is on the way here."""
        there = len(self.decoding) + len(self.prefilling) + self.waiting.live
        return there + len(self.inbox) + len(self.resident) + len(self.stalled)

    def deliver(self, seen_s: float) -> None:
        """Take in everything from the inbox that was there at `seen_s`."""
        inbox = self.inbox
        while inbox and inbox[0].visible_s <= seen_s:
            r = inbox.popleft()
            self._arrived += 1
            r.seq = self._arrived
            r.instance = self.index
            self._dirty = True
            if r.phase is _RESIDENT:
                self.resident.append(r)
                continue
            if self._asks_admit and self.policy.admit(r, self.view) is Admission.REJECT:
                self.outbox.append(Release(r, Why.REJECT, self.now_s))
                continue
            self.waiting.push(r)
            if self._asks_leave and not r.emitted_tokens:
                leave = self.policy.leave(r, self.view)
                if leave is not None:
                    heappush(self.leavers, (leave.time_s, r.seq, r.version, r, leave.why))

    def dismiss(self) -> None:
        """Those whose time to leave has come and who have not begun go back to the router."""
        leavers = self.leavers
        while leavers and leavers[0][0] <= self.now_s:
            _, _, version, r, why = heappop(leavers)
            if version == r.version:
                self.waiting.remove(r)
                self.outbox.append(Release(r, why, self.now_s))
                self._dirty = True

    def reconsider(self) -> None:
        """Something changed beside this instance: the policy is asked again."""
        self._dirty = True
        self.blocked_till_s = 0.0

    def next_leave_s(self) -> float:
        """When the next waiting request would leave; infinite if none would."""
        leavers = self.leavers
        while leavers and leavers[0][2] != leavers[0][3].version:
            heappop(leavers)
        return leavers[0][0] if leavers else INF

    # ---------------------------------------------------------------- to and from other instances

    def take_out(self, r: RequestState) -> None:
        """`r` leaves between two iterations, waiting or resident for wherever it goes.

        What has KV here keeps its blocks until `let_go_of`.
        """
        if r.phase is WAITING:
            self.waiting.remove(r)
        elif r.phase is _RESIDENT:
            self.resident.remove(r)
            self._leave_host(r)
        elif r.phase is _PREFILL:
            self.prefilling.remove(r)
            self._unfill(r)
            self.ledger.release(r)
            self.most_tokens -= r.prompt_tokens + r.max_output_tokens
            r.phase, r.kv_tokens = WAITING, 0
        elif r.phase is _DECODE:
            self._stop_decode(r)
            self.most_tokens -= r.prompt_tokens + r.max_output_tokens
            self._park(r)
        else:
            self.stalled.remove(r)
            self._park(r)
        self._unpromise(r)
        self.reconsider()

    def let_go_of(self, r: RequestState) -> None:
        """The KV of a parked request is elsewhere now."""
        del self.parked[r]
        self.ledger.release(r)
        self.reconsider()

    def lose_all(self) -> list[RequestState]:
        """The instance fails between two iterations: who was here, to be prefilled again, the
        first comers first.
        """
        self.let_go()
        there = [*self.inbox, *self.waiting, *self.resident, *self.stalled, *self.prefilling]
        for r in self.prefilling:
            self._unfill(r)
        for r in list(self.decoding):
            self._stop_decode(r)
            there.append(r)
        there += self.parked
        for r in there:
            r.recomputes += r.phase is not WAITING
            self._leave_host(r)
            self.ledger.release(r)
            self._unpromise(r)
            r.phase, r.kv_tokens = WAITING, 0
            r.target_tokens = r.prompt_tokens + r.emitted_tokens
        self.ledger.forget()
        self.waiting = _queue(self.policy, self.view, self.ledger)
        self.inbox.clear()
        self.resident.clear()
        self.stalled.clear()
        self.prefilling.clear()
        self.parked.clear()
        self.ends.clear()
        self.leavers.clear()
        self.chunks = []
        self.most_tokens = 0
        self.swap_s = 0.0
        self.reconsider()
        return sorted(there, key=lambda r: (r.arrival_s, r.id))

    def _park(self, r: RequestState) -> None:
        r.phase = _RESIDENT
        self.parked[r] = None

    def _unfill(self, r: RequestState) -> None:
        missing = r.target_tokens - r.kv_tokens
        self.prefill_pending -= missing
        self.measures.prefill_tokens -= missing

    def _unpromise(self, r: RequestState) -> None:
        self.promised_blocks -= r.promised_blocks
        r.promised_blocks = 0

    def _leave_host(self, r: RequestState) -> None:
        if r.in_host:
            self.ledger.host_free += r.blocks
            r.blocks, r.in_host = 0, False

    # ---------------------------------------------------------------- one iteration

    def schedule(self) -> bool:
        """Decide the next iteration. False if there is nothing to run now."""
        ledger = self.ledger
        if self.now_s >= self.overtaken_s:
            self.overtaken_s = INF
            self._dirty = True
        if self._dirty and self._limits_vary:
            self._lim = self.policy.limits(self.view)
        lim = self._lim
        decoding = self.decoding
        before = len(decoding)
        growth = need = self.residues[self.tick & self._mask] if before else 0
        if self.prefilling and lim.by_chunk:
            need += self._chunk_need(lim)
        preempted = False
        if ledger.free - lim.headroom_blocks < need:
            need, preempted = self._make_room(lim)
        if self._dirty and not (preempted and (decoding or self.lingering)):
            if self.waiting.live or self.resident or self.stalled:
                self._hold = need
                self._dirty = self._refill(lim)
                if self._by_time and not self._dirty:
                    self.overtaken_s = self._overtaken_s()
            else:
                self._dirty = False
        if preempted:
            self._dirty = True

        seqs = len(decoding)
        if self.prefilling:
            seqs = self._plan_chunks(lim, seqs)
        elif self.chunks:
            self.chunks = []
        if seqs:
            self.decode_kv_tokens = self.kv_sum
            if preempted or len(decoding) != before:
                growth = self.residues[self.tick & self._mask]
            ledger.free -= growth
        else:
            self.decode_kv_tokens = 0
        self.decode_seqs = seqs
        if ledger.idle_blocks > ledger.free:
            ledger.evict()
        return seqs > 0 or bool(self.chunks)

    def complete(self) -> bool:
        """The iteration has been executed and the clock stands at its end; True if anyone ended.

        Each decoding request has one more token; requests whose prompt is in have their next.
        """
        ended = False
        if self.lingering:
            self.let_go()
        if self.decode_seqs:
            self.tick = tick = self.tick + 1
            self.kv_sum += self.decode_seqs
            self.measures.decode_step(self.now_s, self.decode_seqs)
            if self.ends[0][0] <= tick:
                ended = self.finish_due()
        if self._filled:
            ended = self._complete_prefills() or ended
        return ended

    def let_go(self) -> None:
        """Those who linger give back their places and blocks."""
        for r in self.lingering:
            self.ledger.release(r)
        self.lingering.clear()
        self._dirty = True

    def finish_due(self) -> bool:
        """Those decoding requests whose last token is out are done; True if any was."""
        any_ended = False
        for r in self._take_out_due():
            self._finish(r)
            any_ended = True
        return any_ended

    # ---------------------------------------------------------------- KV growth and preemption

    def _make_room(self, lim: Limits) -> tuple[int, bool]:
        """Preempt until the blocks are there that running requests take in this iteration; how
        many that is then, and whether anybody had to go.
        """
        ledger = self.ledger
        preempted = False
        while True:
            need = self.residues[self.tick & self._mask] if self.decoding else 0
            if lim.by_chunk and self.prefilling:
                need += self._chunk_need(lim)
            if ledger.free - lim.headroom_blocks >= need:
                break
            if not (self.decoding or self.prefilling):
                break
            if len(self.decoding) == 1 and not self.prefilling and ledger.free >= need:
                break  # the headroom is for others, and there are none
            self._preempt()
            preempted = True
        return need, preempted

    def _chunk_need(self, lim: Limits) -> int:
        room = lim.token_budget - len(self.decoding)
        need = 0
        for r in self.prefilling:
            chunk = min(r.target_tokens - r.kv_tokens, room)
            if chunk <= 0:
                break
            room -= chunk
            need += self.ledger.blocks(r.kv_tokens + chunk) - r.blocks
        return need

    def _preempt(self) -> None:
        policy, view, ledger, lim = self.policy, self.view, self.ledger, self._lim
        self.measures.preemptions += 1
        candidates = [*self.decoding, *self.prefilling, *self.lingering]
        victim = min(candidates, key=lambda r: (policy.keep(r, view), -r.seq))
        if victim.phase is _DONE:
            self.lingering.remove(victim)
            ledger.release(victim)
            return
        cached = victim.kv_tokens
        if victim.phase is Phase.DECODE:
            how = policy.preempt_by(victim, view)
            self._stop_decode(victim)
            # The last token's text is still to come where steps are decided ahead.
            cached = max(cached, victim.kv_tokens - lim.ahead)
        else:
            how = PreemptBy.RECOMPUTE
            self.prefilling.remove(victim)
            self._unfill(victim)
        self.most_tokens -= victim.prompt_tokens + victim.max_output_tokens
        if how is PreemptBy.STALL:
            victim.phase = Phase.STALLED
            self.stalled.append(victim)
            if self.decoding or self.prefilling:
                return
            # Nobody is left to run: the least of those sitting out must give up its blocks.
            victim = min(self.stalled, key=lambda r: (policy.keep(r, view), -r.seq))
            self.stalled.remove(victim)
            self._dirty = True
        if ledger.unit_tokens and victim.prefix_blocks:
            ledger.publish(victim, cached)  # what it comes back for, if it still is there
        if how is PreemptBy.SWAP and victim.blocks <= ledger.host_free:
            blocks = victim.blocks
            ledger.release(victim)
            victim.blocks = blocks
            ledger.host_free -= blocks
            victim.phase = Phase.RESIDENT
            victim.in_host = True
            victim.swaps += 1
            self.resident.append(victim)
            self.swap_s += self.predictions.swap_s(blocks)
        else:
            ledger.release(victim)
            victim.phase = Phase.WAITING
            victim.target_tokens = victim.prompt_tokens + victim.emitted_tokens
            victim.kv_tokens = 0
            victim.recomputes += 1
            self.waiting.push(victim)

    # ---------------------------------------------------------------- entering

    def _refill(self, lim: Limits) -> bool:
        """Let requests enter; True if the policy must be asked again in the next iteration."""
        if self.stalled:
            self._resume_stalled(lim)
        if self.resident:
            which = self.policy.refill(self.view)
            if which is Refill.RESIDENT:
                return self._enter_residents(lim)
            if which is Refill.NEITHER:
                return self._budget_taken(lim)
        elif self._asks_refill and self.policy.refill(self.view) is Refill.NEITHER:
            return self._budget_taken(lim)
        waiting, ledger = self.waiting, self.ledger
        if not lim.mix:
            self._hold = 0  # if anybody enters, nobody decodes in this iteration
        room = lim.token_budget - (len(self.decoding) if lim.mix else 0)
        entered = False
        if ledger.idle_blocks and ledger.idle_blocks > ledger.free - self._hold:
            ledger.evict(self._hold)  # those who run take their blocks before anybody enters
        while waiting.live:
            pending = self.prefill_pending
            if pending >= room:
                return True  # only the token budget stopped us: ask again next time
            r = waiting.head()
            units = ledger.match_units(r) if ledger.unit_tokens else 0
            tokens = r.target_tokens - units * ledger.unit_tokens
            if not lim.chunked and pending and pending + tokens > room:
                return True
            if not self._has_room(r, lim, units):
                break
            waiting.take_head()
            entered = True
            if units:
                self.swap_s += ledger.take_match(r, units)
            if r.cached_tokens < 0:
                r.cached_tokens = r.kv_tokens
            if lim.by_chunk:
                chunk = min(tokens, room - pending)
                self._hold += -(-(r.kv_tokens + chunk) // ledger.block_tokens) - r.blocks
            else:
                blocks = -(-r.target_tokens // ledger.block_tokens)
                ledger.free -= blocks - r.blocks
                r.blocks = blocks
            if ledger.idle_blocks and ledger.idle_blocks > ledger.free - self._hold:
                ledger.evict(self._hold)
            r.phase = _PREFILL
            self.prefilling.append(r)
            self.prefill_pending = pending + tokens
            self.measures.prefill_tokens += tokens
            self._enlist(r)
        if self.tells_begun and entered and not waiting.live:
            self.outbox.append(Release(self.prefilling[-1], Why.BEGUN, self.now_s))
        return entered and bool(self.resident)  # whose turn it may be next

    def would_enter(self, group: Refill) -> list[RequestState]:
        """Those of a group, in their order, for whom there is room now."""
        lim, ledger = self._lim, self.ledger
        if group is Refill.RESIDENT:
            candidates, held = self._residents(), self._hold
        else:
            candidates, held = self.waiting.ordered(), self._hold if lim.mix else 0
        room = lim.token_budget - (len(self.decoding) if lim.mix else 0)
        pending = self.prefill_pending
        most = lim.max_seqs - len(self.decoding) - len(self.prefilling) - len(self.lingering)
        fitting: list[RequestState] = []
        for r in candidates:
            if len(fitting) >= most:
                break
            if r.phase is WAITING:
                blocks, tokens = ledger.blocks(r.target_tokens), r.target_tokens
                full = pending >= room or (not lim.chunked and pending and pending + tokens > room)
            else:
                blocks, tokens = ledger.blocks(r.kv_tokens + 1), 1
                full = lim.mix and pending >= room
            spare = self.policy.reserve(r, self.view) if self._asks_reserve else 0
            if full or held + blocks + lim.watermark_blocks + spare > ledger.free:
                break
            held += blocks
            pending += tokens
            fitting.append(r)
        return fitting

    def _residents(self) -> Iterator[RequestState]:
        policy, view = self.policy, self.view
        self.resident.sort(key=lambda r: (policy.urgency(r, view), r.seq))
        return iter(self.resident)

    def _overtaken_s(self) -> float:
        lines = [self.policy.urgency_line(r, self.view) for r in self.resident]
        return min(self.waiting.overtaken_s(), overtaken_s(lines, self.now_s))

    def _has_room(self, r: RequestState, lim: Limits, units: int) -> bool:
        if len(self.decoding) + len(self.prefilling) + len(self.lingering) >= lim.max_seqs:
            return False
        ledger = self.ledger
        if r.phase is WAITING:
            need = -(-r.target_tokens // ledger.block_tokens)
            if units:  # held by others: free of charge; idle: already counted as free
                need += ledger.idle_in_match(r, units) - units * ledger.unit_blocks
        else:
            need = ledger.blocks(r.kv_tokens + 1)
        need += lim.watermark_blocks + self._hold
        if self._asks_reserve:
            need += self.policy.reserve(r, self.view)
        if need > ledger.free:
            return False
        if self._asks_commit and not r.promised_blocks:
            promise = self.policy.commit(r, self.view)
            return self.promised_blocks + promise <= ledger.total
        return True

    def _enlist(self, r: RequestState) -> None:
        """What is common to all who join the batch."""
        self.most_tokens += r.prompt_tokens + r.max_output_tokens
        if r.scheduled_s != r.scheduled_s:  # not yet
            r.scheduled_s = self.now_s
        if self._asks_commit and not r.promised_blocks:
            r.promised_blocks = self.policy.commit(r, self.view)
            self.promised_blocks += r.promised_blocks

    def _enter_residents(self, lim: Limits) -> bool:
        """As `_refill`. Prompts under way have the token budget before those who come back."""
        ledger = self.ledger
        entered = 0
        full = False
        for r in self._residents():
            full = lim.mix and self._budget_taken(lim)
            if full or not self._has_room(r, lim, 0):
                break
            entered += 1
            blocks = ledger.blocks(r.kv_tokens)
            ledger.free -= blocks
            self._hold += ledger.blocks(r.kv_tokens + 1) - blocks
            if r.in_host:
                ledger.host_free += r.blocks
                self.swap_s += self.predictions.swap_s(r.blocks)
                r.in_host = False
            r.blocks = blocks
            self._enlist(r)
            self._start_decode(r)
        del self.resident[:entered]
        return full or entered > 0

    def _budget_taken(self, lim: Limits) -> bool:
        """Is no token of the budget left beside the prompts under way?"""
        decodes = len(self.decoding) if lim.mix else 0
        return self.prefill_pending + decodes >= lim.token_budget

    def _resume_stalled(self, lim: Limits) -> None:
        """Those sitting out go on, who is kept longest first, while their next block exists."""
        policy, view, ledger = self.policy, self.view, self.ledger
        mask = ledger.block_tokens - 1
        free = ledger.free - self.residues[self.tick & mask]
        order = sorted(self.stalled, key=lambda r: (policy.keep(r, view), -r.seq), reverse=True)
        for r in order:
            need = 0 if r.kv_tokens & mask else 1
            if free - need < (lim.headroom_blocks if self.decoding else 0):
                break
            free -= need
            self._hold += need
            self.stalled.remove(r)
            self.most_tokens += r.prompt_tokens + r.max_output_tokens
            self._start_decode(r)

    # ---------------------------------------------------------------- prefill

    def _plan_chunks(self, lim: Limits, seqs: int) -> int:
        """Share the token budget among the prefilling requests, oldest first, and take their
        blocks. Returns how many of the `seqs` decoding requests run beside them.
        """
        ledger = self.ledger
        mix = lim.mix
        budget = lim.token_budget - seqs if mix else lim.token_budget
        chunks: list[tuple[int, int]] = []
        for r in self.prefilling:
            before = r.kv_tokens
            chunk = r.target_tokens - before
            if chunk <= budget:
                self._filled = True
            elif lim.chunked:
                if budget <= 0:
                    break
                chunk = budget
            elif chunks:
                break
            else:
                self._filled = True  # a whole prompt larger than the budget still goes, alone
            r.kv_tokens = after = before + chunk
            if after > r.blocks * ledger.block_tokens:
                blocks = -(-after // ledger.block_tokens)
                ledger.free -= blocks - r.blocks
                r.blocks = blocks
            self.prefill_pending -= chunk
            budget -= chunk
            chunks.append((before, chunk))
            if ledger.unit_tokens and r.prefix_blocks:
                ledger.publish(r, after)
        self.chunks = chunks
        return seqs if mix or not chunks else 0

    def _complete_prefills(self) -> bool:
        """Those whose prompt is in have a token; they decode from the next iteration on."""
        self._filled = False
        now_s = self.now_s
        ended = False
        still: list[RequestState] = []
        for r in self.prefilling:
            if r.kv_tokens < r.target_tokens:
                still.append(r)
                continue
            r.emitted_tokens += 1
            if r.first_token_s != r.first_token_s:  # not yet
                r.first_token_s = now_s
            else:
                self.measures.gap(now_s - r.last_token_s)
            r.last_token_s = now_s
            if r.emitted_tokens >= r.output_tokens:
                self._finish(r)
                ended = True
            elif self.prefill_only:
                self.most_tokens -= r.prompt_tokens + r.max_output_tokens
                self._unpromise(r)
                self._park(r)
                self.outbox.append(Release(r, Why.HAND_OVER, now_s))
                ended = True
            else:
                self._start_decode(r)
        self.prefilling = still
        if self.waiting.live or self.resident or self._limits_vary:
            self._dirty = True
        return ended

    def _finish(self, r: RequestState) -> None:
        r.finish_s = self.now_s
        r.phase = _DONE
        ledger = self.ledger
        if ledger.unit_tokens and r.prefix_blocks:
            ledger.publish(r, r.kv_tokens)
        if self._lim.ahead:
            self.lingering.append(r)
        else:
            ledger.release(r)
        self.most_tokens -= r.prompt_tokens + r.max_output_tokens
        self.promised_blocks -= r.promised_blocks
        self.finished.append(r)
        self._dirty = True
        if r.notify or self.tells_ends:
            self.outbox.append(Release.finish(r))
        if self._tells_finished:
            self.policy.finished(r, self.view)
