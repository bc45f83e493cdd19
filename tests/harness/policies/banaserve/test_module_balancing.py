"""Algorithms 4-1 and 4-2 by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.module_moves import Module, ModuleMove
from slo_bench.harness.policies.banaserve.module_balancing import Balancer, Thresholds
from slo_bench.harness.policies.load_aware import assign

AT = Thresholds(rise=0.4, fall=0.2, large=0.6, efficiency=0.5, moves=8)


def offer(step=0.1, cost_s=0.1, can=(Module.LAYERS, Module.HEADS)):
    """Layers shift three steps of load, heads one."""

    def one(module, source, target, loads):
        if module not in can:
            return None
        shift = step * (3 if module is Module.LAYERS else 1)
        after = loads[source] - shift, loads[target] + shift
        return ModuleMove(module, source, target, 1, *after, cost_s)

    return one


def told(moves):
    return [(m.module.value, m.source, m.target) for m in moves]


def test_plan_moves_layers_for_a_large_gap_then_heads_for_the_rest():
    moves = Balancer(AT).plan({0: 1.5, 1: 0.5}, offer())
    # 1.0 apart: layers; 0.4: heads; 0.2: no more than `fall`.
    assert told(moves) == [("layers", 0, 1), ("heads", 0, 1)]


def test_plan_judges_every_device_again_after_each_move():
    moves = Balancer(AT).plan({0: 1.6, 1: 1.0, 2: 0.4}, offer())
    # 1.6 gives 0.3 to 0.4; then 1.3, 1.0, 0.7: the gap of 0.6 is still a large one, and closes.
    assert told(moves) == [("layers", 0, 2), ("layers", 0, 2)]


def test_plan_starts_above_rise_and_stops_below_fall():
    balancer = Balancer(AT)
    assert balancer.plan({0: 1.3, 1: 1.0}, offer()) == []  # 0.3: above fall, below rise
    assert len(balancer.plan({0: 1.5, 1: 1.0}, offer(0.05, cost_s=0.01))) == 3  # down to 0.2
    assert balancer.plan({0: 1.3, 1: 1.0}, offer()) == []


def test_plan_that_ran_out_of_moves_continues_below_rise():
    balancer = Balancer(Thresholds(0.4, 0.2, 0.6, 0.5, moves=1))
    assert len(balancer.plan({0: 1.45, 1: 1.0}, offer(0.05, cost_s=0.01))) == 1
    assert len(balancer.plan({0: 1.35, 1: 1.0}, offer(0.05, cost_s=0.01))) == 1


def test_plan_makes_only_moves_worth_their_cost():
    assert Balancer(AT).plan({0: 1.5, 1: 0.5}, offer(cost_s=2.0)) == []
    # Heads bring 0.2 at once, which 0.3 s at 0.5 a second is worth.
    assert Balancer(AT).plan({0: 1.0, 1: 0.5}, offer(cost_s=0.3)) != []


def test_plan_counts_saved_latency_in_place_of_the_gap():
    """0.4 s for a move: 1 s saved at 0.5 a second is worth it, 0.1 s is not, a loss never is."""
    loads = {0: 1.5, 1: 0.5}
    assert Balancer(AT).plan(loads, offer(cost_s=0.4), lambda move: 1.0) != []
    assert Balancer(AT).plan(loads, offer(cost_s=0.4), lambda move: 0.1) == []
    assert Balancer(AT).plan(loads, offer(cost_s=0.0), lambda move: -1.0) == []
    # What the letter refuses for its cost may pay while it lasts.
    assert Balancer(AT).plan(loads, offer(cost_s=2.0), lambda move: 9.0) != []


def test_plan_falls_back_to_heads_and_to_another_target():
    moves = Balancer(AT).plan({0: 1.5, 1: 0.5}, offer(can=(Module.HEADS,)))
    assert set(told(moves)) == {("heads", 0, 1)}

    def only_to_two(module, source, target, loads):
        return offer()(module, source, target, loads) if target == 2 else None

    moves = Balancer(AT).plan({0: 1.5, 1: 0.5, 2: 0.6}, only_to_two)
    assert {m.target for m in moves} == {2}


def test_plan_makes_no_move_that_overshoots():
    assert Balancer(AT).plan({0: 1.5, 1: 0.5}, offer(step=0.5, can=(Module.LAYERS,))) == []


@given(st.lists(st.floats(0, 2), min_size=0, max_size=6), st.floats(0.01, 0.5))
def test_plan_ends_and_never_widens_the_gap(loads, step):
    before = dict(enumerate(loads))
    moves = Balancer(AT).plan(before, offer(step, cost_s=0.0))
    assert len(moves) <= AT.moves
    after = dict(before)
    for move in moves:
        gap = abs(after[move.source] - after[move.target])
        after[move.source], after[move.target] = move.source_load, move.target_load
        assert abs(move.source_load - move.target_load) < gap
    assert sum(after.values()) == pytest.approx(sum(before.values()))


def test_assign_takes_least_loaded_then_shortest_queue():
    assert assign([0.1], [0.5, 0.3, 0.3], [0, 4, 2], 1.0) == [2]
    # All past the threshold: the shortest queue.
    assert assign([0.1], [1.5, 1.2, 1.9], [3, 4, 1], 1.0) == [2]


def test_assign_counts_each_assignment_for_the_next():
    assert assign([0.3, 0.3, 0.3], [0.0, 0.2, 0.9], [0, 0, 0], 1.0) == [0, 1, 0]
    # Past the threshold, in turn by queue; the letter would send all to one.
    assert assign([0.1] * 4, [1.5, 1.2], [0, 0], 1.0) == [1, 0, 1, 0]
