"""KV blocks of one instance: how many are free, and which prefixes they still hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..compiled import mypyc_attr
from ..state import RequestState

_FIRST_COPY = -(1 << 80)  # no unit has such a hash


@mypyc_attr(allow_interpreted_subclasses=True)
class KVBlocks:
    """Counts the KV blocks of one instance; real engines keep the block ids themselves.

    `free` counts every block that can be allocated, including blocks of cached prefixes that no
    request uses; a subclass has `free` and `total` as attributes or computes them. With
    `unit_tokens` set, a prefix cache is kept in units of that many tokens: reference counts, and
    least-recently-used eviction of idle units (a request's last units first), done as soon as the
    free blocks no longer cover them. Units of answers wait for their turn, too, although no prompt
    finds them. A hash names its tokens and all before them, as
    in vLLM and in Mooncake's traces: equal hashes are equal prefixes.
    """

    __slots__ = (
        "activation_blocks",
        "block_size",
        "cache_version",
        "copies",
        "copies_made",
        "copy_of",
        "host_free",
        "host_total",
        "idle",
        "idle_blocks",
        "refs",
        "stride",
        "unit_blocks",
        "unit_tokens",
    )

    def __init__(
        self,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
    ) -> None:
        self.total = self.free = total
        self.activation_blocks = 0  # of those not free: held by a pass of an embedder
        self.block_size = block_size
        self.host_total = self.host_free = host_total
        self.unit_tokens = self.stride = self.unit_blocks = 0
        if prefix_block_size:
            # The smallest run of tokens that is a whole number of hashes and of blocks.
            self.unit_tokens = math.lcm(prefix_block_size, block_size)
            self.stride = self.unit_tokens // prefix_block_size
            self.unit_blocks = self.unit_tokens // block_size
        self.refs: dict[int, int] = {}
        self.idle: dict[int, None] = {}  # oldest first
        self.idle_blocks = 0
        self.cache_version = 0
        # Units that were computed although they were cached, under numbers of their own.
        self.copies: dict[int, list[int]] = {}  # by hash
        self.copy_of: dict[int, int] = {}  # the hash of each
        self.copies_made = 0

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        raise NotImplementedError

    @free.setter
    def free(self, blocks: int) -> None:
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Blocks of the instance."""
        raise NotImplementedError

    @total.setter
    def total(self, blocks: int) -> None:
        raise NotImplementedError

    def blocks(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def get_computed_blocks(self, r: RequestState) -> int:
        """Leading units of `r` in the cache; the last token is always left to compute."""
        if not self.refs or not r.prefix_blocks:
            return 0
        refs, copies, stride = self.refs, self.copies, self.stride
        max_units = (r.target_tokens - 1) // self.unit_tokens
        n = 0
        for h in r.prefix_blocks[stride - 1 :: stride]:
            if n >= max_units or (h not in refs and h not in copies):
                break
            n += 1
        return n

    def num_evictable_blocks(self, r: RequestState, units: int) -> int:
        """Blocks of the first `units` cached units that no request uses: allocating them lowers
        `free`.
        """
        idle = self.idle
        return sum(1 for unit in self._cached(r, units) if unit in idle) * self.unit_blocks

    def _cached(self, r: RequestState, units: int) -> list[int]:
        """The first `units` units of `r`, which are cached; a copy where only that is left."""
        stride, refs, copies = self.stride, self.refs, self.copies
        hashes = r.prefix_blocks[stride - 1 : units * stride : stride]
        if not copies:
            return list(hashes)
        return [copies[h][0] if h not in refs and h in copies else h for h in hashes]

    def load_s(self, r: RequestState, units: int) -> float:
        """Seconds that `allocate` would return."""
        return 0.0

    def allocate(self, r: RequestState, units: int) -> float:
        """`r` holds its leading `units` from the cache; its KV and blocks start with them.

        Seconds to bring in what was not on the GPU: none of it, unless a KV cache manager has more
        tiers.
        """
        hits = self._cached(r, units)
        for h in hits:
            if h in self.idle:
                del self.idle[h]
                self.idle_blocks -= self.unit_blocks
                self.free -= self.unit_blocks
            self.refs[h] += 1
        r.shared = hits
        r.kv_tokens = units * self.unit_tokens
        r.blocks = units * self.unit_blocks
        return 0.0

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        """Every full unit of the first `kv_tokens` of `r` is cached from now on, held by `r`; as a
        copy where another request has cached it already.
        """
        stride = self.stride
        full = min(kv_tokens // self.unit_tokens, len(r.prefix_blocks) // stride)
        held = r.shared
        if held is None:
            held = r.shared = []
        begin = len(held)
        if full <= begin:
            return
        refs = self.refs
        for h in r.prefix_blocks[(begin + 1) * stride - 1 : full * stride : stride]:
            if h in refs or h in self.copies:
                copy = self._new_number()
                self.copies.setdefault(h, []).append(copy)
                self.copy_of[copy] = h
                h = copy
            refs[h] = 1
            held.append(h)
            self.cache_version += 1

    def cache_scheduled(self, r: RequestState, kv_tokens: int) -> None:
        """As `cache_blocks`, before the iteration that computes these tokens: requests that enter
        with it find them.
        """
        self.cache_blocks(r, kv_tokens)

    def _new_number(self) -> int:
        """The number of a unit that no hash names."""
        self.copies_made += 1
        return _FIRST_COPY - self.copies_made

    def _keep_answer(self, r: RequestState) -> None:
        """Cache what `r` has filled beyond its prompt's units, under numbers of their own."""
        held = r.shared = r.shared or []
        filled = min(r.blocks - 1, r.kv_tokens // self.block_size)  # others are but reserved
        for _ in range(len(held), filled // self.unit_blocks):
            unit = self._new_number()
            self.refs[unit] = 1
            held.append(unit)

    def release(self, r: RequestState) -> None:
        """Give back all blocks of `r`; its cached units stay, idle, the last to be lost first."""
        if self.refs:  # else there is nothing that its answer could outlive
            self._keep_answer(r)
        self._give_back(r)

    def _give_back(self, r: RequestState) -> None:
        held = r.shared
        if held:
            refs, idle, unit_blocks = self.refs, self.idle, self.unit_blocks
            for h in reversed(held):
                refs[h] -= 1
                if not refs[h]:
                    idle[h] = None
                    self.idle_blocks += unit_blocks
                    self.free += unit_blocks
            self.free += r.blocks - len(held) * unit_blocks
            r.shared = None
        else:
            self.free += r.blocks
        r.blocks = 0

    def resize(self, total: int) -> None:
        """Hold `total` blocks from now on. What is held stays: `total` must cover it."""
        used = self.total - self.free
        assert total >= used, f"{used} blocks are held, more than {total}"
        self.total, self.free = total, total - used
        self.evict()

    def forget(self) -> None:
        """Drop every cached prefix. No request may hold one."""
        self.refs.clear()
        self.copies.clear()
        self.copy_of.clear()
        self.idle.clear()
        self.idle_blocks = 0
        self.cache_version += 1

    def warm(self, units: Sequence[int]) -> int:
        """Cache these units, the most valuable first, as far as there are free blocks; their
        number.
        """
        room = (self.free - self.idle_blocks) // self.unit_blocks
        absent = [h for h in units if h not in self.refs][: max(0, room)]
        for h in reversed(absent):  # the most valuable is lost last
            self.refs[h] = 0
            self.idle[h] = None
        self.idle_blocks += len(absent) * self.unit_blocks
        self.cache_version += len(absent)
        return len(absent)

    def evict(self, held: int = 0) -> None:
        """Forget the idle units, oldest first, that the free blocks, but for `held`, no longer
        cover.
        """
        idle, refs = self.idle, self.refs
        room = max(0, self.free - held)
        while self.idle_blocks > room:
            h = next(iter(idle))
            del idle[h], refs[h]
            if h in self.copy_of:
                self._forget_copy(h)
            self.idle_blocks -= self.unit_blocks
            self.cache_version += 1

    def _forget_copy(self, copy: int) -> None:
        h = self.copy_of.pop(copy)
        self.copies[h].remove(copy)
        if not self.copies[h]:
            del self.copies[h]


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(KVBlocks):
    """Those of an instance whose memory is its own."""

    __slots__ = ("free", "total")

    free: int
    total: int
