"""Several models on shared GPUs: nothing is lost, nobody computes more than a GPU can."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from reference.examples import examples
from slo_bench.harness.core.multi_model_policy import SharingPolicy
from slo_bench.harness.core.records.request_records import Outcome, Result
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.cluster.multi_model import SharedGpuCluster
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.engine.simulator.simulate_models import OneModel, simulate_models
from slo_bench.harness.experiments.derived_slo import dedicated_slos
from slo_bench.harness.policies.muxserve import MuxServe
from slo_bench.harness.policies.prism.prism_controller import PrismGlobal
from slo_bench.harness.policies.qlm import Qlm
from slo_bench.harness.policies.shared.model_sharing import VllmSharing
from slo_bench.harness.policies.static_partition import StaticPartition
from slo_bench.harness.policies.systems import system
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload, take

POLICIES: list[SharingPolicy] = [
    PrismGlobal(),
    PrismGlobal(local_queue=False, global_placement=False),
    PrismGlobal(activation="naive"),
    PrismGlobal(evicts=False),
    MuxServe(),
    MuxServe(memory="quota"),
    StaticPartition(),
    Qlm(),
]


def hosted(names: tuple[str, ...], tp: int = 1, gpu_name: str = "h100-80g") -> dict[str, OneModel]:
    models = {}
    for name in names:
        place = Placement(model(name.partition("#")[0]), gpu(gpu_name), tp=tp, batched_tokens=2048)
        models[name] = OneModel(place, step_time(place).model)
    return models


def workload(models: str, rate_rps: float, duration_s: float, seed: int = 0) -> Workload:
    load = load_source("azure-conv", models=models).make(
        rate_rps=rate_rps, duration_s=duration_s, seed=seed
    )
    return dataclasses.replace(load, ttft_slo_s=np.full(len(load), 0.5))


def check(load: Workload, clusters: list[SharedGpuCluster], result: Result) -> None:
    """Everyone has ended, once; pages are where they were; links are free."""
    records = result.records
    assert (records.outcome != Outcome.UNFINISHED).all()
    done = records.outcome == Outcome.FINISHED
    assert (records.output_tokens[done] == load.output_tokens[done]).all()
    assert (records.first_token_s[done] > load.arrival_s[done]).all()
    assert (records.finish_s[done] >= records.first_token_s[done]).all()
    assert result.gaps.count.sum() == (load.output_tokens[done] - 1).sum()
    for cluster in clusters:
        for index, pool in enumerate(cluster.pools):
            weights = sum(t.weight_pages for t in cluster.on(index))
            assert pool.free == pool.total - weights


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[SharedGpuCluster]:
    run_clusters: list[SharedGpuCluster] = []
    run = SharedGpuCluster.run

    def kept(self: SharedGpuCluster, requests: int) -> None:
        run_clusters.append(self)
        run(self, requests)

    monkeypatch.setattr(SharedGpuCluster, "run", kept)
    return run_clusters


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("rate_rps", [2.0, 14.0])
def test_multi_model_policies_lose_no_request_where_memory_is_short(
    policy: SharingPolicy, rate_rps: float, clusters: list[SharedGpuCluster]
) -> None:
    """Six models of 8B on two GPUs, where memory is short; on one, where not all fit."""
    models = "fleet(llama-3.1-8b*2, qwen3-8b*2, mistral-7b*2, active_s=20, idle_s=20)"
    load = workload(models, rate_rps, 60.0)
    result = simulate_models(
        load, policy, hosted(load.model_names), gpus=2, overlong_requests="reject"
    )
    check(load, clusters, result)
    assert (result.records.outcome == Outcome.FINISHED).mean() > 0.95


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.integers(1, 5),
    st.floats(0.5, 40.0),
    st.integers(0, 1000),
)
def test_multi_model_policies_lose_no_request_of_random_fleets(
    policy: SharingPolicy, gpus: int, models: int, rate_rps: float, seed: int
) -> None:
    text = f"fleet(llama-3.1-8b*{models}, active_s=5, idle_s=5, swing_s=5)"
    try:
        load = workload(text, rate_rps, 12.0, seed)
    except SloBenchError:  # all are idle all the time
        reject()
    result = simulate_models(
        load, policy, hosted(load.model_names), gpus=gpus, overlong_requests="reject"
    )
    check(load, [], result)
    again = simulate_models(
        load, policy, hosted(load.model_names), gpus=gpus, overlong_requests="reject"
    )
    np.testing.assert_array_equal(result.records.finish_s, again.records.finish_s)


def test_tensor_parallel_model_is_served_beside_others(clusters: list[SharedGpuCluster]) -> None:
    text = "fleet(llama-3.1-8b*3, llama-3.1-70b, exponent=0, active_s=20, idle_s=20)"
    load = workload(text, 4.0, 60.0)
    models = hosted(load.model_names[1:]) | hosted(("llama-3.1-70b",), tp=4)
    for policy in (PrismGlobal(), MuxServe(), Qlm()):
        result = simulate_models(load, policy, models, gpus=4, overlong_requests="reject")
        check(load, clusters, result)
        parts = {len(t.gpus) for t in clusters[-1].model_instances if t.model == 0}
        assert parts <= {4}


def test_single_model_is_served_as_by_the_plain_simulator() -> None:
    """Nothing is shared: the times are those of the plain simulator."""
    load = workload("fleet(llama-3.1-8b)", 4.0, 60.0)
    single = hosted(("llama-3.1-8b",))
    shared = simulate_models(load, StaticPartition(), single, gpus=1, overlong_requests="reject")
    place = single["llama-3.1-8b"]
    plain = dataclasses.replace(system("vllm"), prefix_cache=False)
    alone = simulate(load, plain, place.placement, place.step_time)
    np.testing.assert_allclose(shared.records.finish_s, alone.records.finish_s, rtol=1e-9)
    np.testing.assert_allclose(shared.records.first_token_s, alone.records.first_token_s, rtol=1e-9)


def test_models_on_a_gpu_compute_no_more_than_the_gpu_alone() -> None:
    """Work done until the last end, at the speed of a GPU alone, fits into the time there was."""
    load = workload("fleet(llama-3.1-8b*3, idle_s=0, swing=1)", 12.0, 60.0)
    models = hosted(load.model_names)
    together = simulate_models(load, MuxServe(), models, gpus=1, overlong_requests="reject")
    makespan_s = together.totals.makespan_s
    apart = 0.0
    for index, name in enumerate(load.model_names):
        rows = np.flatnonzero(load.model_index == index)
        mine = Workload(np.zeros(len(rows)), load.prompt_tokens[rows], load.output_tokens[rows])
        burst = simulate_models(
            dataclasses.replace(mine, model_names=(name,)),
            MuxServe(),
            {name: models[name]},
            gpus=1,
            overlong_requests="reject",
        )  # all at once: the largest batches, hence the least work that the answers can take
        apart += burst.totals.makespan_s
    assert makespan_s > 0.9 * apart


@dataclasses.dataclass(frozen=True)
class Moving(VllmSharing):
    """Moves its one model to the other GPU at the first review, and evicts one of both copies."""

    evicted: str = "old"

    def begin(self, cluster: SharedGpuCluster) -> None:
        cluster.activate(cluster.models[0], (0,), loaded=True)

    def arrived(self, r: RequestState, model: int, cluster: SharedGpuCluster) -> None:
        model_instance = cluster.serving[model]
        assert model_instance is not None
        assert model_instance in cluster.model_instances
        cluster.send(r, model_instance)

    def control_step(self, cluster: SharedGpuCluster) -> None:
        if not cluster.activations:
            old = cluster.serving[0]
            assert old is not None
            new = cluster.activate(cluster.models[0], (1,))
            cluster.evict(old if self.evicted == "old" else new)


@pytest.mark.parametrize("evicted", ["old", "new"])
def test_copy_of_a_model_may_be_evicted_during_a_move(
    evicted: str, clusters: list[SharedGpuCluster]
) -> None:
    load = dataclasses.replace(
        workload("fleet(llama-3.1-8b, idle_s=0)", 5.0, 30.0),
    )
    rows = np.flatnonzero((load.arrival_s > 5) & (load.arrival_s < 5.5) | (load.arrival_s > 9))
    load = take(load, rows, load.arrival_s[rows])
    result = simulate_models(
        load, Moving(evicted=evicted), hosted(load.model_names), gpus=2, overlong_requests="reject"
    )
    check(load, clusters, result)
    assert [t.gpus for t in clusters[0].model_instances] == [(1,) if evicted == "old" else (0,)]
    if evicted == "old":  # the first wait for the weights, 0.7 s
        assert result.records.first_token_s[0] > 5.7


def test_dedicated_slos_are_in_the_range_of_the_paper() -> None:
    load = workload("fleet(llama-3.1-8b, llama-3.2-1b)", 2.0, 300.0)
    slos = dedicated_slos(load, hosted(load.model_names))
    assert list(slos) == ["llama-3.1-8b", "llama-3.2-1b"]
    assert 0.04 < slos["llama-3.1-8b"]["ttft"] < 0.13  # the range that Prism reports
    assert 0.0052 < slos["llama-3.1-8b"]["tpot"] < 0.0509
    assert slos["llama-3.2-1b"]["ttft"] < slos["llama-3.1-8b"]["ttft"]


def test_simulate_models_refuses_unhosted_models_and_closed_loops() -> None:
    load = workload("fleet(llama-3.1-8b, llama-3.2-1b)", 2.0, 30.0)
    with pytest.raises(SloBenchError, match=r"llama-3\.2-1b"):
        simulate_models(load, PrismGlobal(), hosted(("llama-3.1-8b",)), gpus=1)
    closed = dataclasses.replace(load, concurrency=4)
    with pytest.raises(SloBenchError, match="open arrivals"):
        simulate_models(closed, PrismGlobal(), hosted(load.model_names), gpus=1)
    long = dataclasses.replace(load, prompt_tokens=np.full(len(load), 10**6))
    with pytest.raises(SloBenchError, match="too long"):
        simulate_models(long, PrismGlobal(), hosted(load.model_names), gpus=1)
    refused = simulate_models(
        long, PrismGlobal(), hosted(load.model_names), gpus=1, overlong_requests="reject"
    )
    assert refused.overlong == len(load)
