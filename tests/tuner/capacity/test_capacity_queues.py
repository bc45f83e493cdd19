import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.mdc_queue import MdcQueue, measured_capacity


def test_attainment_of_one_server_without_waiting_is_its_idle_share():
    assert MdcQueue(1, 2.0, 0.0).attainment(0.3) == pytest.approx(1 - 0.6)


@pytest.mark.parametrize("wait_s", [0.25, 0.75, 1.5, 3.2])
def test_attainment_of_one_server_equals_erlangs_formula(wait_s):
    # A. K. Erlang (1909): P(W ≤ t) = (1 − ρ) Σ_j (−λ(t − jD))^j / j! · e^{λ(t − jD)}, j ≤ t / D.
    rate = 0.7
    erlang = (1 - rate) * sum(
        (-rate * (wait_s - j)) ** j / math.factorial(j) * math.exp(rate * (wait_s - j))
        for j in range(math.floor(wait_s) + 1)
    )
    assert MdcQueue(1, 1.0, wait_s).attainment(rate) == pytest.approx(erlang, abs=1e-9)


@pytest.mark.parametrize(("servers", "wait_s"), [(4, 0.5), (8, 1.0)])
def test_attainment_of_several_servers_equals_a_long_simulation(servers, wait_s):
    queue = MdcQueue(servers, 1.0, wait_s)
    rate = queue.capacity_rps(0.9)
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.standard_exponential(1_000_000)) / rate
    met = queue.waits_s(arrival_s)[10_000:] <= wait_s
    assert met.mean() == pytest.approx(0.9, abs=0.005)


def test_attainment_above_the_service_limit_is_zero():
    assert MdcQueue(2, 1.0, 5.0).attainment(2.0) == 0.0


def test_queue_capacity_rises_with_patience_and_falls_with_the_target():
    capacities = [MdcQueue(2, 1.0, wait_s).capacity_rps(0.9) for wait_s in (0.2, 1.0, 4.0)]
    assert capacities == sorted(capacities)
    queue = MdcQueue(2, 1.0, 1.0)
    assert queue.capacity_rps(0.99) < queue.capacity_rps(0.9) < queue.limit_rps


@given(
    st.integers(1, 4),
    st.lists(st.floats(0, 3), min_size=1, max_size=30),
)
def test_queue_waits_equal_a_step_by_step_queue(servers, gaps):
    arrival_s = np.cumsum(gaps)
    free_s = [0.0] * servers
    expected = []
    for arrival in arrival_s:
        start = max(arrival, heapq.heappop(free_s))
        expected.append(start - arrival)
        heapq.heappush(free_s, start + 1.0)
    assert MdcQueue(servers, 1.0, 0.0).waits_s(arrival_s) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("wait_s", [0.05, 0.34, 2.0])
def test_default_search_of_a_real_server_takes_four_minutes(wait_s):
    queue = MdcQueue(32, 0.68, wait_s)  # 50 ms are the first token's own
    true_rps = queue.capacity_rps(0.9)
    covered = 0
    for number in range(12):
        capacity, took_s = measured_capacity(queue, number)
        assert took_s <= 240
        assert capacity.capacity_rps == pytest.approx(true_rps, rel=0.15)
        assert capacity.low_rps <= capacity.capacity_rps <= capacity.high_rps
        covered += capacity.low_rps <= true_rps <= capacity.high_rps
    assert covered >= 10
