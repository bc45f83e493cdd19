"""Algorithm 4-1 in a simulated run: when modules move, how many, and when none do any more."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-13b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def steady(rate_rps, duration_s, prompt_tokens=1000, output_tokens=50, from_s=0.0):
    n = int(rate_rps * duration_s)
    return Workload(
        arrival_s=from_s + np.arange(n) / rate_rps,
        prompt_tokens=np.full(n, prompt_tokens),
        output_tokens=np.full(n, output_tokens),
    )


def together(*parts):
    arrival_s = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(arrival_s, kind="stable")
    return Workload(
        arrival_s=arrival_s[order],
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts])[order],
        output_tokens=np.concatenate([part.output_tokens for part in parts])[order],
    )


def run(workload, prefill_instances=1, instances=4, **parameters):
    banaserve = SYSTEMS["banaserve"].with_parameters(
        prefill_instances=prefill_instances, decode_instances=0, **parameters
    )
    return simulate(workload, banaserve, PLACEMENT, STEP_TIME, instances=instances)


def moves(result):
    return result.cluster.modules.history


def test_modules_settle_under_constant_load():
    """One prefill instance gets more than it can do: a helper takes layers, and keeps them."""
    workload = steady(rate_rps=15, duration_s=120)
    result = run(workload)
    executed_moves = [executed for executed in moves(result) if executed.begin_s < 120]
    assert executed_moves
    assert all(executed.begin_s < 60 for executed in executed_moves)
    units = [executed.move.units for executed in executed_moves]
    assert units == sorted(units)  # nothing goes back and forth
    waits_s = result.records.first_token_s - workload.arrival_s
    still_s = run(workload, layer_moves=False, head_moves=False).records.first_token_s
    assert waits_s.max() < 0.25 * (still_s - workload.arrival_s).max()


def test_several_pairs_of_instances_move_in_one_cycle():
    executed_moves = moves(run(steady(rate_rps=24, duration_s=10), prefill_instances=2))
    first, second = executed_moves[:2]
    assert first.begin_s == second.begin_s
    both = {first.move.source, first.move.target} | {second.move.source, second.move.target}
    assert both == {0, 1, 2, 3}


def test_layers_return_to_their_owner_in_parts():
    """Prompts become fewer and the helper gets answers of its own: layers come home in parts."""
    answers = steady(12, 75, prompt_tokens=20, output_tokens=700, from_s=60)
    workload = together(steady(15, 60), steady(4, 100, from_s=60), answers)
    executed_moves = moves(run(workload, benefit="printed"))
    layers = [
        executed.move for executed in executed_moves if executed.move.module.value == "layers"
    ]
    units = [move.units for move in layers]
    back = [move.target == 0 for move in layers]
    assert any(back)
    assert not all(back)
    for (before, after), returned in zip(pairwise(units), back[1:], strict=True):
        assert (after < before) == returned
    assert any(n > 0 for n, returned in zip(units, back, strict=True) if returned)


@pytest.mark.parametrize(("efficiency", "moved"), [(0.05, True), (1.0, False)])
def test_efficiency_threshold_forbids_costly_moves_over_a_slow_link(efficiency, moved):
    """Layers take seconds at 2 GB/s: rho = 1 wants a gap that closes by as much."""
    executed_moves = moves(
        run(steady(15, 30), network_gb_per_s=2.0, efficiency=efficiency, benefit="printed")
    )
    assert bool(executed_moves) == moved
    assert all(executed.move.cost_s > 0.1 for executed in executed_moves)


def test_lasting_benefit_brings_all_layers_home_when_the_load_falls():
    """As printed a layer stays abroad for as long as the gap between two loads is small."""
    answers = steady(4, 160, prompt_tokens=20, output_tokens=300)  # whose steps wait for the layers
    workload = together(steady(15, 60), steady(1, 100, from_s=60), answers)
    last = moves(run(workload))[-1].move
    assert (last.target, last.units) == (0, 0)
    last = moves(run(workload, benefit="printed"))[-1].move
    assert last.units > 0


def test_lasting_benefit_moves_no_layer_for_a_burst_that_a_pair_outlives():
    """Poisson arrivals at three quarters of what the prefill instance can do: as printed the first
    burst moves layers, every step of the decode instance waits for them ever after, and latency
    grows beyond that of a pair without moves.
    """
    rng = np.random.default_rng(0)
    n = 600
    workload = Workload(
        arrival_s=np.cumsum(rng.exponential(1 / 4, n)),
        prompt_tokens=np.full(n, 1900),
        output_tokens=np.full(n, 70),
    )

    def latency_s(**parameters):
        result = run(workload, instances=2, **parameters)
        return (result.records.finish_s - workload.arrival_s).mean()

    still_s = latency_s(layer_moves=False, head_moves=False)
    assert latency_s(benefit="printed") > 1.15 * still_s
    assert latency_s() < 1.05 * still_s


def test_banaserve_on_servers_needs_store_and_moves_off():
    assert "store=false, layer_moves=false" in SYSTEMS["banaserve"].on_servers.refusals[""]
    bare = SYSTEMS["banaserve"].with_parameters(
        store=False, layer_moves=False, head_moves=False, prefill_instances=2
    )
    assert not bare.on_servers.refusals
    assert [role.servers for role in bare.on_servers.roles] == [2, 1]
    assert bare.router == "load-aware"
    assert "distserve" in bare.with_parameters(load_aware=False).on_servers.refusals[""]
    assert "threshold" in bare.with_parameters(load_threshold=2.0).on_servers.refusals[""]
    assert SYSTEMS["banaserve-forecast"].on_servers is None
