"""Load-aware routing: by what servers say of themselves, and by what simulated instances do."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.core.cluster_policy import Routed
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.load_generator.real_cluster import Fastest, RealCluster, ServerLoadMeter
from slo_bench.harness.policies.load_aware import LoadAware
from slo_bench.harness.policies.routers import ROUTERS
from slo_bench.harness.servers.server_kinds import metrics_by_server
from slo_bench.workloads.request import Slo

KNOWN = metrics_by_server()


def metrics(prompts: float, answers: float, kv: float, *, cached: float = 0.0) -> str:
    labels = 'engine="0",model_name="m"'
    return f"""
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{labels}}} {prompts + cached}
vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} {prompts}
vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} {cached}
vllm:generation_tokens_total{{{labels}}} {answers}
vllm:kv_cache_usage_perc{{{labels}}} {kv}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",x="None"}} 1.0
"""


def request(number: int, tokens: int) -> RequestState:
    return RequestState(number, 0.0, tokens, 10, 10, Slo())


def test_server_load_meter_reads_rates_and_shares():
    fastest = Fastest()
    meter = ServerLoadMeter(fastest)
    meter.look(metrics(100, 10, 0.25, cached=1000), 5.0, KNOWN)
    assert (meter.kv_cache_usage, meter.kv_tokens, fastest.s_per_token) == (0.25, 1600, 0.0)
    meter.look(metrics(500, 30, 0.5, cached=9000), 7.0, KNOWN)
    assert meter.answer_tokens_per_s == 10.0
    assert fastest.tokens_per_s == 210.0  # what was found in the cache was not computed
    meter.look(metrics(501, 30, 0.5), 9.0, KNOWN)
    assert meter.answer_tokens_per_s == 0.0
    assert fastest.tokens_per_s == 210.0
    meter.look(metrics(3, 1, 0.0), 10.0, KNOWN)  # it has begun anew
    assert fastest.tokens_per_s == 210.0


def test_server_load_meter_reads_sglang_metrics():
    fastest = Fastest()
    meter = ServerLoadMeter(fastest)
    for moment, tokens in ((0.0, 0), (1.0, 80)):
        meter.look(
            f"sglang:prompt_tokens_total {tokens}\nsglang:generation_tokens_total {tokens}\n"
            "sglang:token_usage 0.3\nsglang:max_total_num_tokens 4096\n",
            moment,
            KNOWN,
        )
    assert (meter.kv_cache_usage, meter.kv_tokens, fastest.s_per_token) == (0.3, 4096, 1 / 160)


@pytest.fixture
def cluster() -> RealCluster:
    real_cluster = RealCluster(Routed(router=LoadAware()), ["serve"] * 3, lambda: 0.0)
    for instance in real_cluster.instances:
        instance.meter.look(metrics(0, 0, 0.0), 0.0, KNOWN)
    real_cluster.instances[2].meter.look(
        metrics(900, 100, 0.0), 1.0, metrics_by_server()
    )  # 1000 tokens a second
    real_cluster.instances[2].meter.look(metrics(900, 100, 0.0), 2.0, KNOWN)
    return real_cluster


def test_load_aware_chooses_real_servers_by_measured_load(cluster):
    first, second, third = cluster.instances
    assert cluster.measures
    assert cluster.route(request(1, 50)) is first
    first.meter.look(metrics(0, 0, 0.4), 1.0, KNOWN)
    second.meter.look(
        metrics(0, 300, 0.0), 1.0, metrics_by_server()
    )  # decodes with 300 of 1000 tokens a second
    assert [instance.use(1.0) for instance in cluster.instances] == pytest.approx([0.4, 0.3, 0.0])
    assert cluster.route(request(2, 50)) is third
    third.sent(request(3, 350))  # a prompt of 0.35 s
    assert third.use(1.0) == pytest.approx(0.35)
    assert cluster.route(request(4, 50)) is second
    assert second.adds(request(5, 160), 1.0) == pytest.approx(0.16 + 0.1)


def test_load_aware_chooses_the_shortest_queue_past_the_threshold(cluster):
    for instance, prompts in zip(
        cluster.instances, ((900, 900), (5000,), (900, 900, 900)), strict=True
    ):
        for k, tokens in enumerate(prompts):
            instance.sent(request(k, tokens))
        instance.meter.look(metrics(0, 0, 0.6), 3.0, KNOWN)
    assert all(instance.use(1.0) >= 1.2 for instance in cluster.instances)
    assert cluster.route(request(9, 10)) is cluster.instances[1]


def test_load_aware_skips_an_instance_that_is_down(cluster):
    cluster.leave(0)
    chosen = {cluster.route(request(k, 10)).index for k in range(4)}
    assert 0 not in chosen
    cluster.join(0)
    assert cluster.route(request(9, 10)) is cluster.instances[0]


def test_load_aware_is_the_only_stock_router_that_measures():
    assert isinstance(ROUTERS["load-aware"](), LoadAware)
    assert [name for name, router_class in ROUTERS.items() if router_class().measures] == [
        "load-aware"
    ]


def test_load_aware_balances_simulated_instances(tmp_path):
    from slo_bench.harness.experiments.experiment import Experiment

    run = Experiment(
        systems="vllm",
        workload="sharegpt",
        rates=30,
        requests=200,
        seeds=1,
        instances=3,
        router=("round-robin", "load-aware"),
    ).run(tmp_path / "run")
    for row in run.rows():
        counts = np.bincount(run.requests(row["cell"])["instance"])
        assert counts.sum() == 200
        assert counts.min() > 40
    assert {row["router"] for row in run.rows()} == {"round-robin", "load-aware"}
