"""KV memory that several models of a GPU share page by page, while each counts its own blocks.

Source: Prism (see docs/papers.md), §5.1: physical pages of 2 MiB are mapped when an engine needs
them and unmapped when they are empty; a page holds whole tokens of one model; the fullest page is
filled first; a few pages stay mapped ahead, so that no request waits for a mapping.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kv_cache_manager import KVBlocks

PAGE_BYTES = 2 << 20


def pages_of(size_bytes: float) -> int:
    """Number of pages that hold `size_bytes`."""
    return -(-int(size_bytes) // PAGE_BYTES)


class PagePool:
    """Physical pages of one GPU: for KV, and for the weights of the models that stand on it."""

    __slots__ = ("free", "total")

    def __init__(self, total: int) -> None:
        self.total = self.free = total


class PooledKVCacheManager(KVBlocks):
    """KV blocks of one model in pages of pools that other models share, one pool for each of its
    GPUs.

    Blocks are counted, not named: freed blocks are assumed to empty whole pages, as they do if they
    were allocated together, so that a model holds the fewest pages for the tokens of its blocks,
    which may lie on two pages. `buffer_pages` more stay mapped ahead; other models cannot use
    these. `quota_blocks` is the most that the model may use. There is no prefix cache and no
    swapping.

    `layers`: a page holds K or V of one layer, as engines that keep each layer's KV in one tensor
    map it, so that pages are mapped for all layers together; 0: a page holds tokens with all their
    layers. `fill`: share of the tokens of the mapped pages that live ones take, where pages are not
    emptied together; 1: those that were counted above.
    """

    __slots__ = (
        "_group_pages",
        "_group_tokens",
        "_pools",
        "buffer_pages",
        "held_pages",
        "quota_blocks",
        "used",
    )

    def __init__(
        self,
        pools: Sequence[PagePool],
        block_bytes: int,
        block_size: int = 16,
        *,
        buffer_pages: int = 0,
        quota_blocks: int | None = None,
        layers: int = 0,
        fill: float = 1.0,
    ) -> None:
        """`block_bytes`: of one block on one GPU."""
        self._pools = tuple(pools)
        tensors = 2 * layers or 1  # of which pages are mapped together
        token_bytes = -(-block_bytes // (tensors * block_size))
        self._group_tokens = max(1, int(PAGE_BYTES // token_bytes * fill))
        self._group_pages = pages_of(token_bytes) * tensors
        self.buffer_pages = buffer_pages
        self.quota_blocks = quota_blocks
        self.used = self.held_pages = 0
        self.block_size = block_size
        super().__init__(self.free, block_size)
        self._hold(0)

    def pages_for(self, blocks: int) -> int:
        """Number of pages that hold `blocks` blocks."""
        return -(-blocks * self.block_size // self._group_tokens) * self._group_pages

    def blocks_in(self, pages: int) -> int:
        """Number of blocks that `pages` pages hold."""
        return pages // self._group_pages * self._group_tokens // self.block_size

    @property
    def free(self) -> int:
        """Blocks that this model could still take; below 0 where its quota has shrunk."""
        pages = self.held_pages + min(pool.free for pool in self._pools)
        blocks = self.blocks_in(pages)
        if self.quota_blocks is not None and self.quota_blocks < blocks:
            blocks = self.quota_blocks
        return blocks - self.used

    @free.setter
    def free(self, blocks: int) -> None:
        self.used += self.free - blocks
        self._hold(self.pages_for(self.used))

    @property
    def quota_binds(self) -> bool:
        """Whether the quota, and not the free pages, is what it may still take."""
        pages = self.held_pages + min(pool.free for pool in self._pools)
        return self.quota_blocks is not None and self.quota_blocks < self.blocks_in(pages)

    def _hold(self, pages: int) -> None:
        """Map or unmap pages until `pages` and, as far as there is memory, the buffer are
        mapped.
        """
        more = pages + self.buffer_pages - self.held_pages
        for pool in self._pools:
            more = min(more, pool.free)
        assert self.held_pages + more >= pages, "a model took pages that are not there"
        self.held_pages += more
        for pool in self._pools:
            pool.free -= more

    @property
    def total(self) -> int:
        """Blocks of the model, computed from the pools."""
        return self.used + self.free

    @total.setter
    def total(self, blocks: int) -> None:
        """Blocks of the model, computed from the pools."""

    def close(self) -> None:
        """The model leaves: every page goes back. Nothing may be in use."""
        assert not self.used, f"{self.used} blocks are in use"
        for pool in self._pools:
            pool.free += self.held_pages
        self.held_pages = self.buffer_pages = 0
