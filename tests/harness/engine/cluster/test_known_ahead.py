"""What the simulator knows of an instance without letting it catch up is what it then finds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reference.plain import PlainInstance
from slo_bench.harness.core import cluster_policy
from slo_bench.harness.core.state import WAITING
from slo_bench.harness.engine.cluster.cluster import Cluster
from slo_bench.harness.engine.cluster.lazy_instance import LazyInstance
from slo_bench.harness.engine.compiled_core import core_is_compiled
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies import llumnix, mooncake
from slo_bench.harness.policies.distserve import DistServe
from slo_bench.harness.policies.llumnix import Llumnix, freeness_bound
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-13b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def served(cluster, instances=4):
    rng = np.random.default_rng(5)
    workload = Workload(
        arrival_s=np.cumsum(rng.exponential(0.15, 400)),
        prompt_tokens=rng.integers(20, 1500, 400),
        output_tokens=rng.integers(2, 500, 400),
    )
    system = System("system", Vllm(), cluster=cluster)
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=instances).records


def test_expected_free_blocks_and_waiting_tokens_equal_later_ones(monkeypatch):
    has_free, waiting_tokens = LazyInstance.has_free, LazyInstance.waiting_tokens.__get__
    checks = {"blocks": 0, "tokens": 0, "some": 0}

    def checked_blocks(self, blocks):
        free = self.free_blocks
        for number in (0, 1, free - 200, free - 1, free, free + 1, free + 200):
            assert has_free(self, number) == (number <= free)
        checks["blocks"] += 1
        return has_free(self, blocks)

    def checked_tokens(self):
        expected = waiting_tokens(self)
        requests = [*self.view.waiting(), *self.inbox]
        total = sum(r.target_tokens for r in requests if r.phase is WAITING)
        assert expected == total
        checks["tokens"] += 1
        checks["some"] += total > 0
        return expected

    monkeypatch.setattr(LazyInstance, "has_free", checked_blocks)
    monkeypatch.setattr(LazyInstance, "waiting_tokens", property(checked_tokens))
    served(DistServe(2, 2))
    served(Llumnix(), instances=2)  # few, so that requests wait
    assert min(checks.values()) > 50, checks


@pytest.mark.skipif(core_is_compiled(), reason="compiled methods cannot be replaced")
@pytest.mark.parametrize("cluster", [DistServe(2, 2), Llumnix()], ids=["distserve", "llumnix"])
def test_expecting_a_request_in_transfer_changes_no_times(cluster, monkeypatch):
    expecting = served(cluster)
    expected = []
    monkeypatch.setattr(LazyInstance, "expects", lambda self, at_s: expected.append(at_s) and False)
    never_expecting = served(cluster)
    assert expected
    assert np.array_equal(expecting.finish_s, never_expecting.finish_s)
    assert np.array_equal(expecting.first_token_s, never_expecting.first_token_s)


def test_a_router_reads_again_only_instances_that_have_changed(monkeypatch):
    reads = {"kept": 0, "all": 0}

    def counted(name):
        def bound(instance):
            reads[name] += 1
            return freeness_bound(instance)

        return bound

    monkeypatch.setattr(llumnix, "freeness_bound", counted("kept"))
    records = served(Llumnix(), instances=20)
    monkeypatch.setattr(llumnix, "freeness_bound", counted("all"))
    monkeypatch.setattr(Cluster, "kept", lambda self, value: np.array([value(i) for i in self.up]))
    read_all = served(Llumnix(), instances=20)
    assert np.array_equal(records.finish_s, read_all.finish_s)
    assert np.array_equal(records.instance, read_all.instance)
    assert 0 < reads["kept"] < reads["all"] / 3


@pytest.mark.parametrize("blocks", [150, 4000])
@pytest.mark.parametrize("name", ["vllm", "sarathi", "vllm-v0", "vllm-swap", "sglang", "edf-drop"])
def test_closed_loop_on_one_instance_is_that_of_instances_together(name, blocks):
    rng = np.random.default_rng(7)
    workload = Workload(
        arrival_s=np.zeros(300),
        prompt_tokens=rng.integers(20, 1500, 300),
        output_tokens=rng.integers(1, 300, 300),
        concurrency=24,
        deadline_s=np.full(300, 20.0),
    )
    placement = dataclasses.replace(PLACEMENT, fixed_num_gpu_blocks=blocks)
    alone, together = (
        simulate(workload, SYSTEMS[name], placement, STEP_TIME, engine=engine).records
        for engine in (None, PlainInstance)
    )
    assert (alone.outcome == together.outcome).all()
    for column in ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s"):
        ours, theirs = getattr(alone, column), getattr(together, column)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=column)


@pytest.mark.parametrize("name", ["distserve", "mooncake"])
def test_kept_values_route_as_reading_every_instance_does(name, monkeypatch):
    cluster = SYSTEMS[name].with_parameters(prefill_instances=17, decode_instances=17).cluster
    calls = []
    kept = Cluster.kept
    monkeypatch.setattr(
        Cluster, "kept", lambda self, *words: calls.append(words) or kept(self, *words)
    )
    records = served(cluster, instances=34)
    assert len(calls) >= len(records)
    for module in (cluster_policy, mooncake):
        monkeypatch.setattr(module, "MANY", 1000)
    calls.clear()
    read_all = served(cluster, instances=34)
    assert not calls
    assert np.array_equal(records.finish_s, read_all.finish_s)
    assert np.array_equal(records.instance, read_all.instance)
