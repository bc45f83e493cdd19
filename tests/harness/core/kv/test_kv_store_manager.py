"""Prefixes from the own GPU and from a shared store; blocks are conserved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager
from slo_bench.harness.core.kv.kv_store import KvStore, TierSpec
from slo_bench.harness.core.kv.kv_store_manager import StoreKVCacheManager
from slo_bench.harness.core.state import RequestState
from slo_bench.predictors.specs import LinkSpec
from slo_bench.workloads.request import Slo

HOST = LinkSpec("host", bandwidth_bytes_per_s=100.0, latency_s=0.5)


def request(prefix, tokens):
    return RequestState(0, 0.0, tokens, 1, 1, Slo(), tuple(prefix))


def pair(units=100, blocks=20):
    store = KvStore([TierSpec("CPU", units * 10, HOST)], unit_bytes=10)
    return store, [StoreKVCacheManager(store, blocks, 4, 0, 8) for _ in range(2)]


def computed(kv_manager, r):
    """`r` enters, is prefilled and ends."""
    units = kv_manager.get_computed_blocks(r)
    load_s = kv_manager.allocate(r, units) if units else 0.0
    blocks = kv_manager.blocks(r.target_tokens)
    kv_manager.free -= blocks - r.blocks
    r.blocks = blocks
    kv_manager.evict()
    r.kv_tokens = r.target_tokens
    kv_manager.cache_blocks(r, r.kv_tokens)
    kv_manager.release(r)
    return units, load_s


def test_prefix_computed_by_one_instance_is_loaded_by_another():
    store, (first, second) = pair()
    assert computed(first, request([1, 2, 3], 30)) == (0, 0.0)
    assert len(store) == 3
    assert computed(second, request([1, 2, 4], 30)) == (2, pytest.approx(0.5 + 20 / 100))
    assert computed(second, request([1, 2, 4], 30)) == (3, 0.0)  # on its own GPU by now
    assert computed(first, request([1, 2, 4], 30)) == (3, pytest.approx(0.5 + 10 / 100))
    assert first.free == first.total
    assert second.free == second.total


def test_the_last_token_is_always_computed():
    _, (first, second) = pair()
    computed(first, request([1, 2], 16))
    assert second.get_computed_blocks(request([1, 2], 16)) == 1


def test_unit_evicted_from_the_gpu_stays_in_the_store():
    store, (first, _) = pair(blocks=4)
    computed(first, request([1, 2], 16))
    computed(first, request([3, 4], 16))  # takes all blocks
    assert 1 not in first.refs
    units, load_s = computed(first, request([1, 2], 16))
    assert units == 1
    assert load_s > 0
    assert len(store) == 4


def test_absent_units_count_as_blocks_to_take():
    _, (first, second) = pair()
    computed(first, request([1, 2, 3], 30))
    r = request([1, 2, 3], 30)
    assert second.num_evictable_blocks(r, 3) == 6  # two blocks a unit, none of them here


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        max_size=25,
    ),
    st.integers(0, 6),
)
def test_blocks_are_conserved_and_an_empty_store_changes_nothing(served, units):
    _, kv_managers = pair(units)
    alone = KVCacheManager(20, 4, 0, 8)
    for which, path in served:
        prefix = [hash(tuple(path[: k + 1])) for k in range(len(path))]
        computed(kv_managers[which], request(prefix, 8 * len(path) + 3))
        if which == 0 and units == 0:
            assert computed(alone, request(prefix, 8 * len(path) + 3))[1] == 0.0
    for kv_manager in kv_managers:
        assert kv_manager.free == kv_manager.total
        assert (
            kv_manager.idle_blocks
            == len(kv_manager.idle) * kv_manager.unit_blocks
            <= kv_manager.total
        )
    if units == 0:
        assert alone.idle == kv_managers[0].idle


def test_resize_keeps_held_blocks():
    kv_manager = KVCacheManager(10, 4)
    kv_manager.free -= 6
    kv_manager.resize(8)
    assert (kv_manager.total, kv_manager.free) == (8, 2)
    with pytest.raises(AssertionError, match="6 blocks are held, more than 5"):
        kv_manager.resize(5)
