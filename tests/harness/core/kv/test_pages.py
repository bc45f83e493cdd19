"""KV pages that several models share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.kv.pages import PAGE_BYTES, PagePool, PooledKVCacheManager, pages_of


def test_kv_managers_share_the_pages_of_a_pool() -> None:
    pool = PagePool(10)
    large = PooledKVCacheManager([pool], PAGE_BYTES)  # a block a page
    small = PooledKVCacheManager([pool], PAGE_BYTES // 4)  # four
    assert (large.free, small.free, small.total) == (10, 40, 40)
    small.free -= 5  # two pages, three blocks to spare
    assert (pool.free, large.free, small.free) == (8, 8, 35)
    large.free -= 8
    assert (large.free, small.free, small.total) == (0, 3, 8)
    large.free += 8
    small.free += 5
    assert (pool.free, large.free, small.free) == (10, 10, 40)


def test_block_larger_than_a_page_takes_several_pages() -> None:
    pool = PagePool(10)
    wide = PooledKVCacheManager([pool], 3 * PAGE_BYTES - 1)  # 5 tokens a page, 16 in 3.2
    assert wide.free == 3
    wide.free -= 2
    assert pool.free == 3


def test_block_size_need_not_divide_the_page_size() -> None:
    """A token of Qwen3-8B has 144 KiB of KV (36 layers of K and V, 8 heads of 128), of
    Qwen2.5-7B 56 KiB: 14 and 36 on a page, a block of 16 on 1.14 and 0.44 pages.
    """
    qwen3 = PooledKVCacheManager([PagePool(16)], 16 * (144 << 10))
    assert qwen3.free == 16 * 14 // 16
    assert [qwen3.pages_for(blocks) for blocks in (0, 1, 7, 8)] == [0, 2, 8, 10]
    qwen2 = PooledKVCacheManager([PagePool(4)], 16 * (56 << 10))
    assert qwen2.free == 4 * 36 // 16
    assert [qwen2.pages_for(blocks) for blocks in (1, 2, 3, 9)] == [1, 1, 2, 4]


def test_pages_of_layers_are_mapped_together() -> None:
    """Four layers, K and V: a page holds an eighth of 16 blocks, so that 8 pages hold 16 blocks."""
    pool = PagePool(30)
    kv_manager = PooledKVCacheManager([pool], PAGE_BYTES // 2, layers=4)
    assert kv_manager.free == 3 * 16  # the last 6 pages are too few for another group
    kv_manager.free -= 1
    assert pool.free == 30 - 8
    kv_manager.free -= 16
    assert pool.free == 30 - 16
    whole = PooledKVCacheManager([PagePool(30)], PAGE_BYTES // 2)
    assert whole.free == 60


def test_fill_below_one_reduces_blocks_of_a_page() -> None:
    pool = PagePool(10)
    kv_manager = PooledKVCacheManager([pool], PAGE_BYTES // 8, fill=0.5)
    assert kv_manager.free == 40
    kv_manager.free -= 9
    assert pool.free == 7


def test_buffer_pages_are_reserved_for_their_manager() -> None:
    pool = PagePool(10)
    buffered = PooledKVCacheManager([pool], PAGE_BYTES, buffer_pages=3)
    other = PooledKVCacheManager([pool], PAGE_BYTES)
    assert (pool.free, buffered.free, other.free) == (7, 10, 7)
    other.free -= 7
    assert (buffered.free, other.free) == (3, 0)  # `buffered` can still go on
    buffered.free -= 3
    assert (buffered.free, pool.free) == (0, 0)
    other.free += 7
    buffered.free += 3
    buffered.close()
    assert pool.free == 10


def test_tensor_parallel_blocks_take_pages_of_every_gpu() -> None:
    pools = [PagePool(10), PagePool(4)]
    kv_manager = PooledKVCacheManager(pools, PAGE_BYTES)
    assert kv_manager.free == 4
    kv_manager.free -= 3
    assert [pool.free for pool in pools] == [7, 1]


def test_quota_below_used_blocks_makes_free_negative() -> None:
    kv_manager = PooledKVCacheManager([PagePool(10)], PAGE_BYTES, quota_blocks=6)
    kv_manager.free -= 5
    kv_manager.quota_blocks = 3
    assert (kv_manager.free, kv_manager.total) == (-2, 3)
    kv_manager.free += 4
    assert kv_manager.free == 2


def test_pages_of_weights_round_up() -> None:
    assert [pages_of(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, 1, 1, 2]


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 20)), max_size=60),
)
def test_pages_are_conserved_whatever_managers_take_and_release(
    total: int, sizes: list[int], buffer: int, moves: list[tuple[int, int]]
) -> None:
    pool = PagePool(total)
    kv_managers = [PooledKVCacheManager([pool], size, buffer_pages=buffer) for size in sizes]
    for which, blocks in moves:
        kv_manager = kv_managers[which % len(kv_managers)]
        free, used = kv_manager.free, kv_manager.used
        taken_blocks = max(-used, min(blocks, free))
        kv_manager.free -= taken_blocks
        assert kv_manager.used == used + taken_blocks
        assert kv_manager.free == free - taken_blocks
        assert pool.free >= 0
        assert pool.free + sum(each.held_pages for each in kv_managers) == total
        for size, each in zip(sizes, kv_managers, strict=True):
            assert each.used * size <= each.held_pages * PAGE_BYTES
    for kv_manager in kv_managers:
        kv_manager.free += kv_manager.used
        kv_manager.close()
    assert pool.free == total
