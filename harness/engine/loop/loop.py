"""The scheduler of one instance: admission, batching, preemption and completion of requests.

Its state, and how requests enter and leave it: `batch_state.py`. An iteration costs O(requests
whose state changes), not O(batch): decoding requests are counters (`decode_counters.py`). The
caller that executes an iteration owns the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...core.compiled import mypyc_attr
from ...core.decisions import Limits, NextQueue, PreemptionMode, ReleaseReason
from ...core.queues.line_queue import overtaken_s
from ...core.state import WAITING, Phase, Release, RequestState
from .batch_state import INF, BatchState

_DONE: Final = Phase.DONE
_PREFILL: Final = Phase.PREFILL
_SWAPPED: Final = NextQueue.SWAPPED
_FINISH: Final = ReleaseReason.FINISH
_HAND_OVER: Final = ReleaseReason.HAND_OVER


@mypyc_attr(allow_interpreted_subclasses=True)
class Loop(BatchState):
    """State and transitions of one instance. An engine calls `schedule`, executes, `complete`.

    After `schedule()` the iteration is: `decode_seqs` requests that decode one token each
    (`decode_kv_tokens` KV tokens in all), `chunks` = (tokens in KV, tokens to prefill) of the
    first requests in `prefilling`, and `swap_s` seconds of swapping that go before them.
    """

    __slots__ = ()

    # ---------------------------------------------------------------- one iteration

    def schedule(self) -> bool:
        """Decide the next iteration. False if there is nothing to run now.

        In this order: running requests get the blocks of this iteration, and some are preempted
        if there are too few; the batch is refilled from the queues, if it or they changed since;
        prefilling requests share the token budget; the others decode one token each.
        """
        kv_manager, lim = self.kv_manager, self._lim
        decoding, prefilling = self.decoding, self.prefilling
        if self.now_s >= self.overtaken_s:  # a waiting request has passed another
            self.overtaken_s = INF
            self._must_refill = True
        if self._must_refill and self._dynamic_limits:
            lim = self._lim = self._limits()

        batch = len(decoding)
        decode_blocks = needed_blocks = self.residues[self.tick & self._mask] if batch else 0
        if prefilling and lim.allocate_per_chunk:
            needed_blocks += self._chunk_blocks(lim)
        preempted = False
        if kv_manager.free - lim.decode_headroom_blocks < needed_blocks:
            needed_blocks, preempted = self._make_room(lim)

        if self._must_refill and not (preempted and (decoding or self.pending_free)):
            self._must_refill = False
            if self.waiting.live or self.swapped or self.stalled:
                self._held_blocks = needed_blocks
                self._must_refill = self._fill_batch(lim)
                if self._by_time and not self._must_refill:
                    self.overtaken_s = self._overtaken_s()
        if preempted:
            self._must_refill = True

        seqs = len(decoding)
        if preempted or seqs != batch:
            decode_blocks = self.residues[self.tick & self._mask]
        if prefilling:
            seqs = self._plan_chunks(lim, seqs)
        elif self.chunks:
            self.chunks = []
        self.decode_seqs = seqs
        self.decode_kv_tokens = self.kv_sum if seqs else 0
        if seqs:
            kv_manager.free -= decode_blocks
        if kv_manager.idle_blocks > kv_manager.free:
            kv_manager.evict()
        return seqs > 0 or bool(self.chunks)

    def complete(self) -> bool:
        """Account for an executed iteration, with the clock at its end. Returns True if a request
        ended.

        Each decoding request has one more token; requests with a complete prefill have their next.
        """
        ended = False
        if self.pending_free:
            self.free_finished()
        seqs = self.decode_seqs
        if seqs:
            self.tick = tick = self.tick + 1
            self.kv_sum += seqs
            self.measures.decode_step(self.now_s, seqs)
            if self.ends[0][0] <= tick:
                ended = self.finish_due()
        if self._prefill_completed:
            ended = self._complete_prefills() or ended
        return ended

    # ---------------------------------------------------------------- KV growth and preemption

    def _make_room(self, lim: Limits) -> tuple[int, bool]:
        """Preempt until the running requests have the blocks of this iteration. Returns their
        number, and whether a request was preempted.
        """
        kv_manager = self.kv_manager
        preempted = False
        while True:
            need = self.residues[self.tick & self._mask] if self.decoding else 0
            if lim.allocate_per_chunk and self.prefilling:
                need += self._chunk_blocks(lim)
            if kv_manager.free - lim.decode_headroom_blocks >= need:
                break
            if not (self.decoding or self.prefilling):
                break
            if len(self.decoding) == 1 and not self.prefilling and kv_manager.free >= need:
                break  # the headroom serves other requests; there are none
            self._preempt()
            preempted = True
        return need, preempted

    def _chunk_blocks(self, lim: Limits) -> int:
        room = lim.token_budget - len(self.decoding)
        need = 0
        for r in self.prefilling:
            chunk = r.target_tokens - r.kv_tokens
            if chunk > room:
                chunk = room
            if chunk <= 0:
                break
            room -= chunk
            need += self.kv_manager.blocks(r.kv_tokens + chunk) - r.blocks
        return need

    def _cache_chunks(self, lim: Limits) -> None:
        """Cache the prompts in progress as far as this iteration computes them."""
        room = lim.token_budget - len(self.decoding)
        for r in self.prefilling:
            chunk = min(r.target_tokens - r.kv_tokens, room)
            if chunk <= 0:
                break
            room -= chunk
            if r.prefix_blocks:
                self.kv_manager.cache_scheduled(r, r.kv_tokens + chunk)

    def _preempt(self) -> None:
        policy, view, kv_manager, lim = self.policy, self.view, self.kv_manager, self._lim
        self.measures.preemptions += 1
        candidates = [*self.decoding, *self.prefilling, *self.pending_free]
        victim = min(candidates, key=lambda r: (policy.victim_key(r, view), -r.seq))
        if victim.phase is _DONE:
            self.pending_free.remove(victim)
            kv_manager.release(victim)
            return
        cached = victim.kv_tokens
        if victim.phase is Phase.DECODE:
            how = policy.preemption_mode(victim, view)
            self._stop_decode(victim)
            # With asynchronous scheduling the last token's text is still to come.
            cached = max(cached, victim.kv_tokens - lim.async_scheduling)
        else:
            how = PreemptionMode.RECOMPUTE
            self.prefilling.remove(victim)
            self._undo_prefill(victim)
        self.most_tokens -= victim.prompt_tokens + victim.max_output_tokens
        if how is PreemptionMode.STALL:
            victim.phase = Phase.STALLED
            self.stalled.append(victim)
            if self.decoding or self.prefilling:
                return
            # No request is left to run: the stalled one with the smallest key gives up its blocks.
            victim = min(self.stalled, key=lambda r: (policy.victim_key(r, view), -r.seq))
            self.stalled.remove(victim)
            self._must_refill = True
        if kv_manager.unit_tokens and victim.prefix_blocks:
            kv_manager.cache_blocks(victim, cached)  # reused if it is still cached then
        if how is PreemptionMode.SWAP and victim.blocks <= kv_manager.host_free:
            blocks = victim.blocks
            kv_manager.release(victim)
            victim.blocks = blocks
            kv_manager.host_free -= blocks
            victim.phase = Phase.SWAPPED
            victim.in_host_memory = True
            victim.swaps += 1
            self.swapped.append(victim)
            self.swap_s += self.predictions.swap_s(blocks)
        else:
            kv_manager.release(victim)
            victim.phase = Phase.WAITING
            victim.target_tokens = victim.prompt_tokens + victim.emitted_tokens
            victim.kv_tokens = 0
            victim.recomputes += 1
            self._put_in_queue(victim)

    # ---------------------------------------------------------------- admission

    def _fill_batch(self, lim: Limits) -> bool:
        """Admit requests to the batch. Returns True if the policy must decide again next
        iteration.
        """
        adapters = self.adapters
        if adapters is not None:
            adapters.begin((*self.decoding, *self.prefilling))
        if self.stalled:
            self._resume_stalled(lim)
        if self.swapped:
            which = self.policy.next_queue(self.view) if self._calls_next_queue else _SWAPPED
            if which is _SWAPPED:
                return self._enter_swapped(lim)
            if which is NextQueue.NONE:
                return self._budget_taken(lim)
        elif self._calls_next_queue and self.policy.next_queue(self.view) is NextQueue.NONE:
            return self._budget_taken(lim)
        waiting, kv_manager = self.waiting, self.kv_manager
        if not lim.mixed_batches:
            self._held_blocks = 0  # an iteration with a new prompt has no decodes
        room = lim.token_budget - (len(self.decoding) if lim.mixed_batches else 0)
        entered = False
        if kv_manager.idle_blocks:
            kv_manager.evict(self._held_blocks)  # running requests take their blocks first
        caches_ahead = lim.allocate_per_chunk and kv_manager.unit_tokens > 0
        if caches_ahead and self.prefilling:
            self._cache_chunks(lim)
        while waiting.live:
            pending = self.prefill_pending
            if pending >= room:
                return True  # stopped by the token budget alone: decide again next iteration
            r = waiting.head()
            first = adapters is None or adapters.admits(r)
            if adapters is not None and not first:
                fitting = next(filter(adapters.admits, waiting.ordered()), None)
                if fitting is None:
                    break
                r = fitting
            units = kv_manager.get_computed_blocks(r) if kv_manager.unit_tokens else 0
            tokens = r.target_tokens - units * kv_manager.unit_tokens
            if not lim.chunked and pending and pending + tokens > room:
                return True
            blocks = -(-r.target_tokens // kv_manager.block_size)
            need = blocks
            if units:  # in use by others: no cost; idle: counted as free
                need += kv_manager.num_evictable_blocks(r, units) - units * kv_manager.unit_blocks
            if not self._has_room(r, lim, need):
                break
            if first:
                waiting.take_head()
                self.waiting_tokens -= r.target_tokens
            else:
                self._leave_queue(r)
            entered = True
            if units:
                self.swap_s += kv_manager.allocate(r, units)
            if r.cached_tokens < 0:
                r.cached_tokens = r.kv_tokens
            chunk = tokens if pending + tokens <= room else room - pending
            if lim.allocate_per_chunk:
                self._held_blocks += -(-(r.kv_tokens + chunk) // kv_manager.block_size) - r.blocks
            else:
                kv_manager.free -= blocks - r.blocks
                r.blocks = blocks
            if kv_manager.idle_blocks:
                kv_manager.evict(self._held_blocks)
            if caches_ahead and r.prefix_blocks:
                kv_manager.cache_scheduled(r, r.kv_tokens + chunk)
            r.phase = _PREFILL
            self.prefilling.append(r)
            self.prefill_pending = pending + tokens
            self.measures.prefill_tokens += tokens
            self._enter_batch(r)
        if self.reports_empty_queue and entered and not waiting.live:
            self.outbox.append(Release(self.prefilling[-1], ReleaseReason.BEGUN, self.now_s))
        return entered and bool(self.swapped)  # the other queue may be next

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Requests of a queue that fit now, in queue order."""
        lim, kv_manager = self._lim, self.kv_manager
        if group is NextQueue.SWAPPED:
            candidates, held = self._swapped_in_order(), self._held_blocks
        else:
            candidates, held = self.waiting.ordered(), self._held_blocks if lim.mixed_batches else 0
        room = lim.token_budget - (len(self.decoding) if lim.mixed_batches else 0)
        pending = self.prefill_pending
        running = len(self.decoding) + len(self.prefilling) + len(self.pending_free)
        fitting: list[RequestState] = []
        for r in candidates:
            if running + len(fitting) >= lim.max_seqs:
                break
            if r.phase is WAITING:
                blocks, tokens = kv_manager.blocks(r.target_tokens), r.target_tokens
                full = pending >= room or (not lim.chunked and pending and pending + tokens > room)
            else:
                blocks, tokens = kv_manager.blocks(r.kv_tokens + 1), 1
                full = lim.mixed_batches and pending >= room
            spare = self.policy.headroom_blocks(r, self.view) if self._calls_headroom else 0
            if full or held + blocks + lim.watermark_blocks + spare > kv_manager.free:
                break
            held += blocks
            pending += tokens
            fitting.append(r)
        return fitting

    def _swapped_in_order(self) -> Iterator[RequestState]:
        policy, view = self.policy, self._key_view
        self.swapped.sort(key=lambda r: (policy.queue_key(r, view), r.seq))
        return iter(self.swapped)

    def _overtaken_s(self) -> float:
        lines = [self.policy.queue_key_line(r, self.view) for r in self.swapped]
        return min(self.waiting.overtaken_s(), overtaken_s(lines, self.now_s))

    def _has_room(self, r: RequestState, lim: Limits, need: int) -> bool:
        """Whether `r`, which takes `need` blocks, may enter the batch."""
        if len(self.decoding) + len(self.prefilling) + len(self.pending_free) >= lim.max_seqs:
            return False
        need += lim.watermark_blocks + self._held_blocks
        if self._calls_headroom:
            need += self.policy.headroom_blocks(r, self.view)
        if need > self.kv_manager.free:
            return False
        if self._calls_reserved and not r.reserved_blocks:
            promise = self.policy.reserved_blocks(r, self.view)
            return self.reserved_blocks + promise <= self.kv_manager.total
        return True

    def _enter_batch(self, r: RequestState) -> None:
        """Update the state that is common to all requests that enter the batch."""
        self.most_tokens += r.prompt_tokens + r.max_output_tokens
        if self.adapters is not None:
            self.swap_s += self.adapters.enter(r)
        if r.first_scheduled_s != r.first_scheduled_s:  # not yet
            r.first_scheduled_s = self.now_s
        if self._calls_reserved and not r.reserved_blocks:
            r.reserved_blocks = self.policy.reserved_blocks(r, self.view)
            self.reserved_blocks += r.reserved_blocks

    def _enter_swapped(self, lim: Limits) -> bool:
        """Return swapped requests to the batch. Prompts in progress have the token budget first.
        Returns True if the policy must decide again next iteration.
        """
        kv_manager, swapped = self.kv_manager, self.swapped
        bs = kv_manager.block_size
        entered = 0
        full = False
        for r in swapped if len(swapped) == 1 else self._swapped_in_order():
            full = lim.mixed_batches and self._budget_taken(lim)
            if full:
                break
            kv_tokens = r.kv_tokens
            need = kv_tokens // bs + 1  # for the next token, too
            if not self._has_room(r, lim, need):
                break
            if self.adapters is not None and not self.adapters.admits(r):
                break
            entered += 1
            blocks = -(-kv_tokens // bs)
            kv_manager.free -= blocks
            self._held_blocks += need - blocks
            if r.in_host_memory:
                kv_manager.host_free += r.blocks
                self.swap_s += self.predictions.swap_s(r.blocks)
                r.in_host_memory = False
            r.blocks = blocks
            self._enter_batch(r)
            self._start_decode(r)
        del swapped[:entered]
        return full or entered > 0

    def _budget_taken(self, lim: Limits) -> bool:
        """Whether prompts in progress and decodes use the whole token budget."""
        decodes = len(self.decoding) if lim.mixed_batches else 0
        return self.prefill_pending + decodes >= lim.token_budget

    def _resume_stalled(self, lim: Limits) -> None:
        """Resume stalled requests, the largest victim key first, while their next block exists."""
        policy, view, kv_manager = self.policy, self.view, self.kv_manager
        mask = kv_manager.block_size - 1
        free = kv_manager.free - self.residues[self.tick & mask]
        order = sorted(
            self.stalled, key=lambda r: (policy.victim_key(r, view), -r.seq), reverse=True
        )
        for r in order:
            need = 0 if r.kv_tokens & mask else 1
            if free - need < (lim.decode_headroom_blocks if self.decoding else 0):
                break
            free -= need
            self._held_blocks += need
            self.stalled.remove(r)
            self.most_tokens += r.prompt_tokens + r.max_output_tokens
            self._start_decode(r)

    # ---------------------------------------------------------------- prefill

    def _plan_chunks(self, lim: Limits, seqs: int) -> int:
        """Share the token budget among prefilling requests, oldest first, and allocate their
        blocks. Returns how many of the `seqs` decoding requests run in the same iteration.
        """
        kv_manager = self.kv_manager
        mixed = lim.mixed_batches
        budget = lim.token_budget - seqs if mixed else lim.token_budget
        chunks: list[tuple[int, int]] = []
        for r in self.prefilling:
            before = r.kv_tokens
            chunk = r.target_tokens - before
            if chunk <= budget:
                self._prefill_completed = True
            elif lim.chunked:
                if budget <= 0:
                    break
                chunk = budget
            elif chunks:
                break
            else:
                self._prefill_completed = True  # a prompt larger than the budget runs alone
            r.kv_tokens = after = before + chunk
            if after > r.blocks * kv_manager.block_size:
                blocks = -(-after // kv_manager.block_size)
                kv_manager.free -= blocks - r.blocks
                r.blocks = blocks
            self.prefill_pending -= chunk
            budget -= chunk
            chunks.append((before, chunk))
            if kv_manager.unit_tokens and r.prefix_blocks:
                kv_manager.cache_blocks(r, after)
        self.chunks = chunks
        return seqs if mixed or not chunks else 0

    def _complete_prefills(self) -> bool:
        """Emit the first token of requests with a complete prefill; they decode from the next
        iteration.
        """
        self._prefill_completed = False
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
                self._release_reservation(r)
                self._put_in_transfer(r)
                self.outbox.append(Release(r, _HAND_OVER, now_s))
                ended = True
            else:
                self._start_decode(r)
        self.prefilling = still
        if self.waiting.live or self.swapped or self._dynamic_limits:
            self._must_refill = True
        return ended

    def _finish(self, r: RequestState) -> None:
        r.finish_s = self.now_s
        r.phase = _DONE
        kv_manager = self.kv_manager
        if kv_manager.unit_tokens and r.prefix_blocks:
            kv_manager.cache_blocks(r, r.kv_tokens)
        if self._lim.async_scheduling:
            self.pending_free.append(r)
        else:
            kv_manager.release(r)
        self.most_tokens -= r.prompt_tokens + r.max_output_tokens
        self.reserved_blocks -= r.reserved_blocks
        self.finished.append(r)
        self._must_refill = True
        if r.notify_on_finish or self.reports_all_ends:
            self.outbox.append(Release(r, _FINISH, r.finish_s))
        if self._calls_on_finished:
            self.policy.on_finished(r, self.view)
