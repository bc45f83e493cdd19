"""Read-only view of an SGLang engine for policies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.mem_cache.common import match_kv_cache

from ....core.decisions import Limits, Line, NextQueue
from ....core.policy import Key
from ....core.state import RequestState
from ....core.wire import predicted_length_from_wire, priority_from_wire, slo_from_wire
from ...plugin.hosted import HostedPolicy, HostedView

_ATTRIBUTE = "slo_bench"  # of SGLang's request, where ours is kept


class SglangRequest(RequestState):
    """State of a request, attached to SGLang's `req`, which keeps it alive."""

    __slots__ = ("_req", "key", "line")

    def __init__(self, req: Any, seq: int, arrival_s: float) -> None:
        params = req.sampling_params
        wire = getattr(params, "custom_params", None) or {}
        output = int(params.max_new_tokens or 0)
        super().__init__(
            seq,
            arrival_s,
            len(req.origin_input_ids),
            output,
            int(wire.get("max_output_tokens", output)),
            slo_from_wire(wire, arrival_s),
        )
        self.seq = seq
        self.predicted_output_tokens = predicted_length_from_wire(wire)
        self.priority = priority_from_wire(wire)
        self.key: Key = arrival_s  # its place in the queue
        self.line: Line | None = None  # where the place changes with time
        self._req = weakref.ref(req)
        setattr(req, _ATTRIBUTE, self)

    @property
    def req(self) -> Any:
        """The request object of SGLang."""
        return self._req()


def ours(req: Any) -> SglangRequest | None:
    """Our state of one of SGLang's requests; None if it has none."""
    state: SglangRequest | None = getattr(req, _ATTRIBUTE, None)
    return state


def all_ours(reqs: Iterable[Any]) -> list[SglangRequest]:
    """Our states of these requests of SGLang."""
    return [r for req in reqs if (r := ours(req)) is not None]


class SglangView(HostedView):
    """Implements `harness.core.view.View` over SGLang's scheduler.

    `look` sets the running requests before the policy is called: while SGLang plans a step, its own
    `running_batch` is out of date.
    """

    def __init__(self, scheduler: Any, hosted: HostedPolicy) -> None:
        super().__init__(hosted)
        self._scheduler = scheduler
        self._running: Sequence[Sequence[Any]] = ()
        self._entering: Sequence[Any] = ()  # in the prefill that is being put together
        self._batch: list[SglangRequest] | None = None
        self.limits = Limits()  # of the policy; `admissible` and `free_blocks` keep to them

    def look(self, now_s: float, running: Sequence[Sequence[Any]] | None = None) -> None:
        """Set the clock and the lists of SGLang's running requests; None: unchanged."""
        self.time_s = now_s
        self._batch = None
        self._entering = ()
        if running is not None:
            self._running = running

    def look_at_entering(self, running: Sequence[Any], entering: Sequence[Any]) -> None:
        """Set the requests that decode, and those that have entered in this step so far."""
        self.look(self.time_s, [running, entering])
        self._entering = entering

    @property
    def batch(self) -> list[SglangRequest]:
        """Running requests, with the prompt that is being prefilled in chunks."""
        if self._batch is None:
            reqs = [req for group in self._running for req in group]
            if self._scheduler.chunked_req is not None:
                reqs.append(self._scheduler.chunked_req)
            once = {id(req): req for req in reqs if not (req.finished() or req.is_retracted)}
            self._batch = all_ours(once.values())
        return self._batch

    @property
    def block_size(self) -> int:
        return int(self._scheduler.page_size)

    @property
    def total_blocks(self) -> int:
        return int(self._scheduler.max_total_num_tokens) // self.block_size

    @property
    def free_blocks(self) -> int:
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        free_blocks = int(free + scheduler.tree_cache.evictable_size()) // self.block_size
        return free_blocks - self._promised_blocks()

    def _promised_blocks(self) -> int:
        """Blocks that admitted prompts have still to take: those that enter in this step, and where
        prompts reserve theirs on entry also the rest of one in chunks.
        """
        promised, whole = 0, not self.limits.allocate_per_chunk
        chunked, entering = self._scheduler.chunked_req, list(self._entering)
        if whole and chunked is not None and chunked not in entering:
            entering.append(chunked)
        for req in entering:
            r = ours(req)
            tokens = r.target_tokens if r is not None and whole else req.extend_end
            held = max(req.prefix_len // self.block_size, self._allocated_blocks(req))
            promised += max(0, self._blocks(tokens) - held)
        return promised

    def _allocated_blocks(self, req: Any) -> int:
        return self._blocks(int(req.kv.kv_allocated_len))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def host_free_blocks(self) -> int:
        return 0

    @property
    def n_waiting(self) -> int:
        return len(self._scheduler.waiting_queue)

    @property
    def n_swapped(self) -> int:
        return 0

    @property
    def n_prefilling(self) -> int:
        return sum(r.req is self._scheduler.chunked_req for r in self.batch)

    @property
    def remaining_prefill_tokens(self) -> int:
        chunked = self._scheduler.chunked_req
        return sum(r.target_tokens - self.kv_tokens(r) for r in self.batch if r.req is chunked)

    @property
    def n_decoding(self) -> int:
        return self.n_running - self.n_prefilling

    @property
    def n_running(self) -> int:
        return len(self.batch)

    @property
    def decode_kv_tokens(self) -> int:
        chunked = self._scheduler.chunked_req
        return sum(self.kv_tokens(r) for r in self.batch if r.req is not chunked)

    @property
    def max_future_kv_tokens(self) -> int:
        max_tokens = sum(r.prompt_tokens + r.max_output_tokens for r in self.batch)
        return max_tokens - sum(self.kv_tokens(r) for r in self.batch)

    def waiting(self) -> Iterable[RequestState]:
        return all_ours(self._scheduler.waiting_queue)

    def running(self) -> Iterable[RequestState]:
        return list(self.batch)

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """The first waiting requests whose prompts fit now."""
        if group is NextQueue.SWAPPED:
            return []
        limits = self.limits
        free = self.free_blocks - limits.watermark_blocks
        room = limits.token_budget - (self.n_decoding if limits.mixed_batches else 0)
        fitting: list[RequestState] = []
        for r in all_ours(self._scheduler.waiting_queue):
            free -= self._blocks(r.target_tokens)
            if free < 0 or room <= 0 or self.n_running + len(fitting) >= limits.max_seqs:
                break
            room -= r.target_tokens
            fitting.append(r)
        return fitting

    def kv_tokens(self, r: RequestState) -> int:
        return int(_req(r).kv.kv_committed_len)

    def emitted_tokens(self, r: RequestState) -> int:
        return len(_req(r).output_ids)

    def held_blocks(self, r: RequestState) -> int:
        return self._allocated_blocks(_req(r))

    def cached_tokens(self, r: RequestState) -> int:
        req = _req(r)
        match_kv_cache(req, self._scheduler.tree_cache)
        return int(req.num_matched_prefix_tokens)


def _req(r: RequestState) -> Any:
    assert isinstance(r, SglangRequest)
    return r.req
