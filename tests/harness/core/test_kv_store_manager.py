"""Prefixes from the own GPU and from a shared store; blocks are conserved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.kv_cache_manager import BlockLedger
from slo_bench.harness.core.kv_store import KvStore, TierSpec
from slo_bench.harness.core.kv_store_manager import StoreLedger
from slo_bench.harness.core.state import RequestState
from slo_bench.predictors.specs import LinkSpec
from slo_bench.workloads.request import Slo

HOST = LinkSpec("host", bandwidth_bytes_per_s=100.0, latency_s=0.5)


def request(prefix, tokens):
    return RequestState(0, 0.0, tokens, 1, 1, Slo(), tuple(prefix))


def pair(units=100, blocks=20):
    store = KvStore([TierSpec("CPU", units * 10, HOST)], unit_bytes=10)
    return store, [StoreLedger(store, blocks, 4, 0, 8) for _ in range(2)]


def computed(ledger, r):
    """`r` enters, is prefilled and ends."""
    units = ledger.match_units(r)
    load_s = ledger.take_match(r, units) if units else 0.0
    blocks = ledger.blocks(r.target_tokens)
    ledger.free -= blocks - r.blocks
    r.blocks = blocks
    ledger.evict()
    r.kv_tokens = r.target_tokens
    ledger.publish(r, r.kv_tokens)
    ledger.release(r)
    return units, load_s


def test_what_one_has_computed_the_other_finds():
    store, (one, two) = pair()
    assert computed(one, request([1, 2, 3], 30)) == (0, 0.0)
    assert len(store) == 3
    assert computed(two, request([1, 2, 4], 30)) == (2, pytest.approx(0.5 + 20 / 100))
    assert computed(two, request([1, 2, 4], 30)) == (3, 0.0)  # on its own GPU by now
    assert computed(one, request([1, 2, 4], 30)) == (3, pytest.approx(0.5 + 10 / 100))
    assert one.free == one.total
    assert two.free == two.total


def test_the_last_token_is_always_computed():
    _, (one, two) = pair()
    computed(one, request([1, 2], 16))
    assert two.match_units(request([1, 2], 16)) == 1


def test_what_the_gpu_evicts_is_still_in_the_store():
    store, (one, _) = pair(blocks=4)
    computed(one, request([1, 2], 16))
    computed(one, request([3, 4], 16))  # takes all blocks
    assert 1 not in one.refs
    units, load_s = computed(one, request([1, 2], 16))
    assert units == 1
    assert load_s > 0
    assert len(store) == 4


def test_absent_units_count_as_blocks_to_take():
    _, (one, two) = pair()
    computed(one, request([1, 2, 3], 30))
    r = request([1, 2, 3], 30)
    assert two.idle_in_match(r, 3) == 6  # two blocks a unit, none of them here


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        max_size=25,
    ),
    st.integers(0, 6),
)
def test_blocks_are_conserved_and_a_store_of_nothing_changes_nothing(served, units):
    _, ledgers = pair(units)
    alone = BlockLedger(20, 4, 0, 8)
    for which, path in served:
        prefix = [hash(tuple(path[: k + 1])) for k in range(len(path))]
        computed(ledgers[which], request(prefix, 8 * len(path) + 3))
        if which == 0 and units == 0:
            assert computed(alone, request(prefix, 8 * len(path) + 3))[1] == 0.0
    for ledger in ledgers:
        assert ledger.free == ledger.total
        assert ledger.idle_blocks == len(ledger.idle) * ledger.unit_blocks <= ledger.total
    if units == 0:
        assert alone.idle == ledgers[0].idle


def test_resizing_keeps_what_is_held():
    ledger = BlockLedger(10, 4)
    ledger.free -= 6
    ledger.resize(8)
    assert (ledger.total, ledger.free) == (8, 2)
    with pytest.raises(AssertionError, match="6 blocks are held, more than 5"):
        ledger.resize(5)
