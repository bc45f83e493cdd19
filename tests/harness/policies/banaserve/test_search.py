"""Eq. 4-16 to 4-18 and 4-25 to 4-27: what a placement is predicted to bring, and the best one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from slo_bench.harness.core.module_moves import Module, ModuleMove
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.banaserve.module_costs import MovedStepTime, layer_move
from slo_bench.harness.policies.banaserve.modules import Modules, moved_step_time
from slo_bench.harness.policies.banaserve.placement_search import Budgets, PlacementSearch
from slo_bench.harness.policies.banaserve.prediction import (
    Demand,
    Hosted,
    Load,
    PlacedInstance,
    free_share,
    predict,
    tpot_of,
    ttft_of,
)
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import LinkSpec, gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-13b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model
OVER = LinkSpec("nvlink", 300e9, 1e-6)
NONE = Budgets(math.inf, math.inf, 1.0)


@pytest.fixture(scope="module")
def instances():
    """One prefill and two decode instances, with nothing to do."""
    cluster_instances = []

    class RecordingCluster(type(SYSTEMS["banaserve"].cluster)):
        def links(self, instances):
            cluster_instances.extend(instances)
            return super().links(instances)

    cluster = RecordingCluster(prefill_instances=1, decode_instances=2)
    workload = Workload(
        arrival_s=np.zeros(1), prompt_tokens=np.array([10]), output_tokens=np.array([2])
    )
    simulate(
        workload, replace(SYSTEMS["banaserve"], cluster=cluster), PLACEMENT, STEP_TIME, instances=3
    )
    return cluster_instances


def load(*demands: Demand, **changes) -> Load:
    options = {"prompt_tokens": 1000.0, "answer_tokens": 200.0, "transfer_s": 0.01} | changes
    return Load(dict(enumerate(demands)), **options)


def alone(instance, hosted=None) -> PlacedInstance:
    return PlacedInstance(instance, MovedStepTime(instance.step_time), hosted)


def test_predicted_ttft_parts_by_hand(instances):
    prefill = alone(instances[0])
    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    idle = ttft_of(prefill, load(Demand()))
    assert idle.compute_s == pytest.approx(1000 * each_s)
    assert (idle.transfer_s, idle.queue_s) == (0.01, 0.0)
    half = ttft_of(prefill, load(Demand(tokens_per_s=0.5 / each_s)))
    assert half.queue_s == pytest.approx(0.5 * 1000 * each_s)  # M/D/1 at one half
    # 4 s of prompts wait and twice as many come as can be computed: after 10 s 14 s wait.
    behind = ttft_of(prefill, load(Demand(2 / each_s, int(4 / each_s))))
    assert behind.queue_s == pytest.approx(9 + 1000 * each_s * 0.95 / 0.1, rel=0.01)
    # 4 s wait and none comes: 4, 3, 2, 1, 0 s over the first 4 of 10 s.
    drains = ttft_of(prefill, load(Demand(0.0, int(4 / each_s))))
    assert drains.queue_s == pytest.approx(0.8, rel=0.01)
    assert drains.total_s == drains.compute_s + drains.transfer_s + drains.queue_s


def test_predicted_tpot_parts_equal_those_of_a_step(instances):
    decode = alone(instances[1])
    idle, busy = Demand(), Demand(decode_seqs=40, decode_kv_tokens=40_000)
    assert tpot_of(decode, load(idle, idle, idle)).total_s == 0.0
    parts = tpot_of(decode, load(idle, busy, idle))
    assert parts.total_s == pytest.approx(STEP_TIME.step_s(40, 40_000, ()))
    no_kv_s = STEP_TIME.step_s(40, 0, ())
    assert parts.cache_s == pytest.approx(parts.total_s - no_kv_s)
    assert parts.compute_s + parts.memory_s == pytest.approx(no_kv_s)
    assert min(parts.compute_s, parts.cache_s, parts.memory_s) > 0


def test_predicted_host_waits_for_hosted_modules(instances):
    owner, helper, _ = instances
    times = moved_step_time(owner, Module.LAYERS, 20, OVER)
    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    host = alone(helper, Hosted(owner, Module.LAYERS, 20, times))
    expected_load = load(
        Demand(0.8 / each_s), Demand(decode_seqs=10, decode_kv_tokens=5000), Demand()
    )
    assert free_share(host, expected_load) == pytest.approx(1 - 0.4)  # half of the layers
    slower, before = tpot_of(host, expected_load), tpot_of(alone(helper), expected_load)
    assert slower.total_s == pytest.approx(before.total_s / 0.6)
    assert slower.memory_s > before.memory_s
    assert slower.cache_s == before.cache_s


def test_predict_gives_throughput_and_budget_excess(instances):
    placed = [alone(instance) for instance in instances]
    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    expected_load = load(Demand(0.5 / each_s), Demand(0, 0, 30, 30_000), Demand(0, 0, 10, 10_000))
    prediction = predict(placed, expected_load, math.inf, math.inf)
    ttft_s = ttft_of(placed[0], expected_load).total_s
    tpot_s = sum(n * tpot_of(placed[k], expected_load).total_s for k, n in ((1, 30), (2, 10))) / 40
    assert prediction.objective.ttft_s == pytest.approx(ttft_s)
    assert prediction.objective.tpot_s == pytest.approx(tpot_s)
    assert prediction.objective.tokens_per_s == pytest.approx(40 * 200 / (ttft_s + 200 * tpot_s))
    assert prediction.violation_s == 0
    strict = predict(placed, expected_load, ttft_s / 2, tpot_s - 0.001)
    assert strict.violation_s == pytest.approx(ttft_s / 2 + 0.001)
    assert prediction.worth_over(strict) == pytest.approx(strict.violation_s)
    # KV that waits for room: until as many answers have ended.
    held = replace(expected_load, held_tokens=6000)
    waits_s = 6000 / (1000 + 200) / (40 / (200 * tpot_s))
    assert predict(placed, held, 1.0, 1.0).objective.ttft_s == pytest.approx(ttft_s + waits_s)
    placed[1] = replace(placed[1], gained_blocks=375)
    assert predict(placed, held, 1.0, 1.0).objective.ttft_s == pytest.approx(ttft_s)
    # Room that is given up matters where it was not free.
    placed[1] = replace(placed[1], gained_blocks=-375)
    assert predict(placed, expected_load, 1.0, 1.0).objective.ttft_s == pytest.approx(
        ttft_s + waits_s
    )
    free = {**expected_load.demands, 2: replace(expected_load.demands[2], free_kv_tokens=6000)}
    enough = predict(placed, replace(expected_load, demands=free), 1.0, 1.0)
    assert enough.objective.ttft_s == pytest.approx(ttft_s)


def test_saved_latency_of_a_move_by_hand(instances):
    """16 of 40 layers to the helper: a prompt's pass takes 7/10 (four micro-batches on two stages)
    and the hop; the helper decodes in what its hosted half leaves.
    """
    owner, helper, other = instances
    whole_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    decoding = Demand(decode_seqs=10, decode_kv_tokens=5000, free_kv_tokens=10**6)
    coming = Demand(0.5 / whole_s)
    expected = load(coming, decoding, Demand())
    search = PlacementSearch(Modules(), instances, OVER)
    move = ModuleMove(Module.LAYERS, owner.index, helper.index, 16, 0.0, 0.0, 0.1)
    hop_s = 2 * OVER.latency_s + 2048 * 2 * 5120 * 2 / OVER.bandwidth_bytes_per_s
    split_s = whole_s * 7 / 10 + hop_s / 2048

    def ttft_s(each_s):
        use = 0.5 / whole_s * each_s
        return 1000 * each_s * (1 + use / (2 * (1 - use)))

    prompts = 10 * 0.5 / whole_s / 1000
    hosted = 0.5 * 16 / 40  # of a half-loaded instance
    expected_s = prompts * (ttft_s(whole_s) - ttft_s(split_s)) - 10 * 10 * (1 / (1 - hosted) - 1)
    assert search.saved_s(move, expected) == pytest.approx(expected_s, rel=1e-6)
    assert expected_s < 0
    # The idle instance loses nothing.
    to_idle = replace(move, target=other.index)
    assert search.saved_s(to_idle, expected) == pytest.approx(
        prompts * (ttft_s(whole_s) - ttft_s(split_s)), rel=1e-6
    )
    # Prompts that wait and grow in number are worth the wait of the answers.
    behind = replace(expected, demands={**expected.demands, 0: Demand(1.3 / whole_s, 20_000)})
    assert search.saved_s(move, behind) > 0


def test_search_relieves_the_overloaded_instance_only(instances):
    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    search = PlacementSearch(Modules(), instances, OVER)
    calm = load(Demand(0.2 / each_s), Demand(0, 0, 20, 10_000), Demand(0, 0, 2, 1000))
    assert search.plan(calm, replace(NONE, efficiency=20.0), layers=True, heads=True) == []
    busy = replace(calm, demands={**calm.demands, 0: Demand(1.3 / each_s, 20_000)})
    (first, *_) = search.plan(busy, NONE, layers=True, heads=True)
    # To the decode instance that has less to do.
    assert (first.module, first.source, first.target) == (Module.LAYERS, 0, 2)
    assert first.units > 5
    assert search.plan(busy, NONE, layers=False, heads=False) == []
    assert search.plan(busy, replace(NONE, efficiency=1e9), layers=True, heads=True) == []
    tight = PlacementSearch(Modules(most_share=0.1), instances, OVER)
    assert [m.units for m in tight.plan(busy, NONE, layers=True, heads=False)] == [4]


def test_first_move_of_the_search_is_the_best_by_brute_force(instances):
    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    much, little = Demand(0, 0, 60, 60_000, 10**6), Demand(0, 0, 5, 5000, 10**6)
    expected_load = load(Demand(1.1 / each_s, 5000), much, little)
    modules = Modules()
    (move, *_) = PlacementSearch(modules, instances, OVER).plan(
        expected_load, NONE, layers=True, heads=True
    )
    allowed = {Module.LAYERS: True, Module.HEADS: True}
    choices = list(modules.choices(instances, OVER, allowed))
    assert len(choices) > 50
    now = predict([alone(instance) for instance in instances], expected_load, math.inf, math.inf)

    def worth(module, owner, helper, units):
        times = moved_step_time(instances[owner], module, units, OVER)
        placed = [alone(instance) for instance in instances]
        placed[owner] = replace(placed[owner], step_time=times)
        hosted = Hosted(instances[owner], module, units, times)
        placed[helper] = replace(placed[helper], hosted=hosted)
        return predict(placed, expected_load, math.inf, math.inf).worth_over(now)

    best = max(worth(c.module, c.owner.index, c.helper.index, c.units) for c in choices)
    assert worth(move.module, move.source, move.target, move.units) == pytest.approx(best)


def test_buffers_are_allocated_again_for_every_layer():
    """Eq. 4-24: k modules pay T_mem_realloc k times."""
    free_s = layer_move(PLACEMENT, 8, 0, OVER).seconds
    modules = Modules(realloc_s=0.5)
    assert modules._pause_s(8) == pytest.approx(0.005 + 8 * 0.5)
    assert layer_move(PLACEMENT, 8, 0, OVER, modules._pause_s(8)).seconds == pytest.approx(
        free_s + 8 * 0.5
    )


def test_search_moves_layers_to_waiting_prompts_in_a_run():
    n = 60 * 15
    workload = Workload(
        arrival_s=np.arange(n) / 15,
        prompt_tokens=np.full(n, 1000),
        output_tokens=np.full(n, 50),
        ttft_slo_s=np.full(n, 2.0),
        tpot_slo_s=np.full(n, 0.1),
    )

    def waits_s(**parameters):
        banaserve = SYSTEMS["banaserve"].with_parameters(
            prefill_instances=1, decode_instances=0, **parameters
        )
        result = simulate(workload, banaserve, PLACEMENT, STEP_TIME, instances=4)
        return result, result.records.ttft_s.mean()

    searched, searched_s = waits_s(moves_by="objective")
    _, still_s = waits_s(layer_moves=False, head_moves=False)
    assert searched.counts["layer_moves"] >= 1
    assert searched_s < 0.1 * still_s
