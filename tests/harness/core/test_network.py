"""Links carry one transfer at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.network import Link, LinkPath, SwitchNetwork
from slo_bench.predictors.specs import LinkSpec
from slo_bench.workloads.errors import SloBenchError

TEN = LinkSpec("ten", bandwidth_bytes_per_s=10.0, latency_s=0.5)
SLOW = LinkSpec("slow", bandwidth_bytes_per_s=4.0, latency_s=0.25)


def test_transfers_on_a_link_follow_one_another():
    link = Link(TEN)
    first, second = LinkPath([link]).send(20, 1.0), LinkPath([link]).send(10, 2.0)
    assert (first, second) == (3.5, 4.5)  # latency does not hold the link
    assert LinkPath([link]).send(10, 9.0) == 10.5
    assert link.free_at_s == 10.0
    assert link.carried_bytes == 40


def test_path_moves_at_its_slowest_link_and_occupies_all_links():
    fast, slow = Link(TEN), Link(SLOW)
    LinkPath([fast]).send(30, 0.0)  # until 3
    both = LinkPath([fast, slow]).send(8, 1.0)
    assert both == 5.75
    assert fast.free_at_s == slow.free_at_s == 5.0


def test_transfer_of_no_bytes_is_immediate_and_negative_is_an_error():
    link = Link(TEN)
    LinkPath([link]).send(100, 0.0)
    assert LinkPath([link]).send(0, 1.0) == 1.0
    with pytest.raises(SloBenchError, match="at least 0 bytes but has -1"):
        LinkPath([link]).send(-1, 0.0)


def test_senders_to_one_receiver_share_its_link():
    network = SwitchNetwork(TEN)
    first, second = network.send(0, 2, 10, 0.0), network.send(1, 2, 10, 0.0)
    assert (first, second) == (1.5, 2.5)  # one latency a hop
    assert network.send(2, 2, 10, 0.0) == 0.0
    assert network.send(2, 0, 10, 0.0) == 1.5  # the other direction is free


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 50), st.integers(0, 5)),
        max_size=30,
    )
)
def test_bytes_and_bandwidth_are_conserved(transfers):
    network = SwitchNetwork(TEN)
    now_s = last_s = 0.0
    for source, target, size, pause in transfers:
        now_s += pause
        last_s = max(last_s, network.send(source, target, size, now_s))
    assert network.sent_bytes == network.received_bytes
    assert network.sent_bytes == sum(n for a, b, n, _ in transfers if a != b)
    for k in range(4):
        for link in (network.out(k), network.into(k)):
            assert link.carried_bytes / 10 <= last_s + 1e-9
