"""The shared KV store: tiers and eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.kv.kv_store import KvStore, TierSpec
from slo_bench.predictors.specs import LinkSpec
from slo_bench.workloads.errors import SloBenchError

CPU = LinkSpec("cpu", bandwidth_bytes_per_s=100.0, latency_s=0.0)
SSD = LinkSpec("ssd", bandwidth_bytes_per_s=10.0, latency_s=1.0)


def store(cpu_units: int, ssd_units: int) -> KvStore:
    return KvStore(
        [TierSpec("CPU", cpu_units * 10, CPU), TierSpec("SSD", ssd_units * 10, SSD)], unit_bytes=10
    )


def test_oldest_units_move_down_a_tier_and_then_leave_the_store():
    kv = store(2, 1)
    kv.put([1, 2, 3])  # 1 goes to the disk
    assert kv.by_tier([1, 2, 3]) == [2, 1]
    kv.put([4])  # 2 to the disk, 1 out
    assert 1 not in kv
    assert kv.by_tier([2, 3, 4]) == [2, 1]
    assert kv.used_bytes == (20, 10)


def test_matched_prefix_ends_at_the_first_missing_unit():
    kv = store(4, 0)
    kv.put([1, 3])
    assert sum(kv.by_tier([1, 2, 3])) == 1
    assert sum(kv.by_tier([2])) == 0


def test_load_takes_the_time_of_each_tier_and_promotes_the_units():
    kv = store(2, 2)
    kv.put([1, 2, 3])
    assert kv.load_s([1, 2]) == pytest.approx(10 / 100 + 1.0 + 10 / 10)
    kv.put([1])
    assert kv.by_tier([1]) == [1, 0]
    assert kv.load_s([1]) == pytest.approx(0.1)


def test_store_without_tiers_is_refused():
    with pytest.raises(SloBenchError, match="needs a tier"):
        KvStore([], 10)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_booked_units_equal_stored_units(puts, cpu_units, ssd_units):
    kv = store(cpu_units, ssd_units)
    for units in puts:
        kv.put(units)
        if units and cpu_units:
            assert units[-1] in kv  # the newest is there
        assert sum(kv.used_bytes) == 10 * len(kv)
        assert kv.used_bytes[0] <= 10 * cpu_units
        assert kv.used_bytes[1] <= 10 * ssd_units
