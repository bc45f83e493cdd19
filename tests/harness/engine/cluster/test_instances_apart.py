"""Systems that hand requests over between instances: nothing is lost, and leaping is stepping."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.examples import examples
from reference.plain import PlainInstance
from reference.workloads import one_prefix
from slo_bench import Experiment
from slo_bench.harness.core.cluster_policy import Failure
from slo_bench.harness.core.phase_capacity import PhaseCapacity, PhaseSplit, phase_capacity
from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.cluster.lazy_instance import device_groups
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.engine.simulator.simulated_instances import Builder, instances_of
from slo_bench.harness.experiments.execution.cells import simulated, workload_of
from slo_bench.harness.policies.banaserve.banaserve_controller import BanaServe
from slo_bench.harness.policies.distserve import DistServe
from slo_bench.harness.policies.llumnix import Llumnix
from slo_bench.harness.policies.memserve import MemServe
from slo_bench.harness.policies.mooncake import Mooncake
from slo_bench.harness.policies.shared.kv_transfer import KvNetwork
from slo_bench.harness.policies.splitwise import Splitwise
from slo_bench.harness.policies.systems import System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-13b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model
EAGER = {
    "rise": 0.02, "fall": 0.01, "large_gap": 0.05, "efficiency": 0.0, "control_every_s": 0.2,
    "benefit": "printed",
}  # fmt: skip
CLUSTERS = {
    "distserve": DistServe(prefill_instances=1, decode_instances=0),
    "distserve over a slow network": DistServe(2, 2, 0.5),
    "splitwise": Splitwise(prefill_instances=2, decode_instances=0),
    "mooncake": Mooncake(1, 1, store_cpu_gib=0.05, store_ssd_gib=0.1),
    "memserve": MemServe(prefill_instances=2, decode_instances=0, store_cpu_gib=0.1),
    "llumnix": Llumnix(low=400, high=450, control_every_s=0.1),
    "banaserve": BanaServe(prefill_instances=1, decode_instances=0),
    "banaserve, eager": BanaServe(2, 2, **EAGER),
    "banaserve, eager, layers": BanaServe(1, 3, head_moves=False, store=False, **EAGER),
    "banaserve, eager, heads": BanaServe(1, 3, layer_moves=False, load_aware=False, **EAGER),
    "banaserve, no moves": BanaServe(1, 1, layer_moves=False, head_moves=False),
}


def system(name: str, policy: Vllm | None = None, **parameters: object) -> System:
    policy = policy or Vllm(max_num_batched_tokens=256, max_num_seqs=16)
    return System(
        name, policy, prefix_cache=True, cluster=CLUSTERS[name].with_parameters(**parameters)
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rate = draw(st.sampled_from([3.0, 30.0, 300.0]))
    prompts = rng.integers(1, draw(st.sampled_from([40, 400])), n)
    outputs = rng.integers(1, draw(st.sampled_from([3, 100, 250])), n)
    family = rng.integers(0, 4, n)
    prefixes = [
        tuple(int(f) * 1000 + k for k in range(p // 16 + 1))
        for f, p in zip(family, prompts, strict=True)
    ]
    return Workload(
        arrival_s=np.cumsum(rng.exponential(1 / rate, n)),
        prompt_tokens=prompts,
        output_tokens=outputs,
        prefix_blocks=prefixes if draw(st.booleans()) else None,
        prefix_block_size=16,
    )


RELAXED = settings(
    max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", CLUSTERS)
@RELAXED
@given(workload=workloads(), num_gpu_blocks=st.sampled_from([45, 70, 400]))
def test_all_requests_are_served_where_memory_is_short(name, workload, num_gpu_blocks):
    placement = dataclasses.replace(PLACEMENT, fixed_num_gpu_blocks=num_gpu_blocks)
    for engine in (None, PlainInstance):
        ran = simulate(workload, system(name), placement, STEP_TIME, instances=4, engine=engine)
        assert (ran.records.outcome == Outcome.FINISHED).all()
        assert (ran.records.output_tokens == workload.output_tokens).all()


STILL = [n for n, c in CLUSTERS.items() if not isinstance(c, BanaServe) or n.endswith("no moves")]


def assert_leaping_is_stepping(name, workload, num_gpu_blocks):
    placement = dataclasses.replace(PLACEMENT, fixed_num_gpu_blocks=num_gpu_blocks)
    cluster_system = system(name)
    ways = [
        simulate(workload, cluster_system, placement, STEP_TIME, instances=4, engine=engine)
        for engine in (None, None, PlainInstance)
    ]
    records = ways[0].records
    assert records.finish_s.tobytes() == ways[1].records.finish_s.tobytes()
    assert (records.outcome == Outcome.FINISHED).all()
    for other in ways[1:]:
        for column in dataclasses.fields(records):
            ours, theirs = (getattr(w.records, column.name) for w in (ways[0], other))
            # Sums of many steps against the same steps in a row.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=column.name)


@pytest.mark.parametrize("name", STILL)
@RELAXED
@given(workload=workloads(), num_gpu_blocks=st.sampled_from([800, 3000]))
def test_leaping_equals_stepping(name, workload, num_gpu_blocks):
    assert_leaping_is_stepping(name, workload, num_gpu_blocks)


@pytest.mark.parametrize("name", STILL)
@RELAXED
@given(workload=workloads(), num_gpu_blocks=st.sampled_from([45, 70]))
def test_leaping_equals_stepping_while_parked_kv_blocks_prefill(name, workload, num_gpu_blocks):
    assert_leaping_is_stepping(name, workload, num_gpu_blocks)


@RELAXED
@given(workload=workloads(), name=st.sampled_from([n for n in CLUSTERS if n != "llumnix"]))
def test_kv_bytes_sent_by_instances_all_arrive(name, workload):
    networks = []

    def links(self, instances):
        kv_network = type(CLUSTERS[name]).links(self, instances)
        networks.append(kv_network)
        return kv_network

    watched = type("Watched", (type(CLUSTERS[name]),), {"links": links})
    cluster_system = dataclasses.replace(
        system(name), cluster=watched(**_parameters(CLUSTERS[name]))
    )
    result = simulate(workload, cluster_system, PLACEMENT, STEP_TIME, instances=4)
    (kv_network,) = networks
    assert isinstance(kv_network, KvNetwork)
    assert kv_network.network.sent_bytes == kv_network.network.received_bytes
    if not name.startswith("banaserve"):
        moved = workload.prompt_tokens[workload.output_tokens > 1].sum()
        assert kv_network.network.sent_bytes == moved * PLACEMENT.kv_bytes_per_token
    assert (result.records.outcome == Outcome.FINISHED).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CLUSTERS if n not in STILL])
def test_leaping_nearly_equals_stepping_with_modules_away(name):
    """So that the host may wait a step earlier or later for it than when both are stepped."""
    workload = busy(prefill=False)
    ways = [
        simulate(workload, system(name, Vllm()), PLACEMENT, STEP_TIME, instances=4, engine=engine)
        for engine in (None, PlainInstance)
    ]
    assert ways[0].cluster.modules.history or name == "banaserve"
    means = [np.mean(way.records.finish_s - workload.arrival_s) for way in ways]
    assert means[0] == pytest.approx(means[1], rel=0.02)


def _parameters(cluster):
    return {name: getattr(cluster, name) for name in cluster.bounds()}


@pytest.mark.parametrize("name", CLUSTERS)
def test_instance_failure_loses_no_request(name):
    rng = np.random.default_rng(1)
    workload = Workload(
        arrival_s=np.cumsum(rng.exponential(0.05, 80)),
        prompt_tokens=rng.integers(1, 400, 80),
        output_tokens=rng.integers(1, 200, 80),
    )
    for instance in range(4):
        failures = [Failure(instance, 1.0, 2.5)]
        result = simulate(
            workload, system(name), PLACEMENT, STEP_TIME, instances=4, failures=failures
        )
        ended = np.isin(result.records.outcome, [Outcome.FINISHED, Outcome.FAILED])
        assert ended.all()


def test_prefill_decode_ratio_maximises_the_slower_phase():
    even = PhaseCapacity(prefill_rps=2.0, decode_rps=2.0)
    assert even.prefill_instances(4) == 2
    assert DistServe().for_load(even, 6).counts(6) == (3, 3)
    assert PhaseCapacity(1.0, 30.0).prefill_instances(4) == 3
    assert PhaseCapacity(30.0, 1.0).prefill_instances(4) == 1
    assert DistServe(1, 3).for_load(even, 4) == DistServe(1, 3)
    assert DistServe(0, 3).for_load(even, 4).counts(4) == (1, 3)


def test_phase_capacity_by_hand():
    """Prompts of 4,096 tokens in 0.1 s; a step takes 1 ms a sequence, TPOT 10 ms: batches of 10."""
    workload = Workload(
        np.zeros(4),
        np.full(4, 4096),
        np.full(4, 100),
        ttft_slo_s=np.full(4, 0.1 + 0.3 * math.log(10)),
        tpot_slo_s=np.full(4, 0.0101),
    )

    class Steps:
        def step_s(self, decode_seqs, decode_kv_tokens, chunks):
            return 0.001 * decode_seqs + sum(0.1 * tokens / 4096 for _, tokens in chunks)

    capacity = phase_capacity(workload, PLACEMENT, Steps())
    # A mean wait of 0.3 s: R x 0.01 / (2 (1 - 0.1 R)) = 0.3.
    assert capacity.prefill_rps == pytest.approx(0.6 / (0.01 + 0.06))
    assert capacity.decode_rps == pytest.approx(10 / 0.010 / 100)


def test_phase_tp_degrees_are_chosen_with_the_ratio():
    """Two GPUs prefill 5 requests a second as one instance, 4 as two; they decode 12 or 16."""
    tp_2 = PhaseCapacity(5.0, 12.0, tp=2)
    tp_1 = PhaseCapacity(2.0, 8.0, others=(tp_2,))
    assert tp_1.split(3) == PhaseSplit(1, 1, prefill_tp=2, decode_tp=1)  # 5, else 4
    assert tp_1.split(4) == PhaseSplit(3, 1, 1, 1)  # 6, else 5
    assert tp_1.split(4, prefill_tp=2) == PhaseSplit(1, 2, 2, 1)
    assert tp_1.split(4, decode_tp=2) == PhaseSplit(1, 1, 2, 2)
    assert tp_1.split(3, prefill_tp=4) is None
    assert tp_1.split(2) == PhaseSplit(1, 1, 1, 1)
    late = dataclasses.replace(tp_1, in_slo=(False, True))
    assert late.split(4) == PhaseSplit(1, 2, 2, 1)  # a prompt alone is late with tp 1
    chosen = DistServe().for_load(tp_1, 3)
    assert chosen == DistServe(1, 0, prefill_tp=2, decode_tp=1)
    assert DistServe(1, 0).for_load(tp_1, 3) == DistServe(1, 0)


def roles(policy: DistServe, instances: int, tp: int = 1) -> list[tuple[int, int]]:
    """Instances and tensor-parallel degree of prefill and of decode."""
    placement = dataclasses.replace(PLACEMENT, tp=tp)
    layout = policy.layout(Vllm(), placement, instances)
    return [(role.instances, (role.placement or placement).tp) for role in layout]


def test_instances_of_unlike_tp_degrees_fill_the_gpus():
    assert roles(DistServe(1, 0, prefill_tp=2), 4) == [(1, 2), (2, 1)]
    assert roles(DistServe(0, 2, prefill_tp=2), 4) == [(1, 2), (2, 1)]
    assert roles(DistServe(1, 2, prefill_tp=2), 8) == [(2, 2), (4, 1)]
    assert roles(DistServe(prefill_tp=2), 4) == [(1, 2), (2, 1)]
    assert roles(DistServe(1, 0, decode_tp=1), 2, tp=2) == [(1, 2), (2, 1)]
    assert roles(DistServe(1, 0, prefill_tp=2, decode_tp=2), 2, tp=2) == [(1, 2), (1, 2)]
    assert DistServe(1, 2, prefill_tp=2).least_instances == 4
    for wrong in (DistServe(1, 0, prefill_tp=4), DistServe(1, 1, prefill_tp=2)):
        with pytest.raises(SloBenchError, match="4 GPUs cannot be shared out to prefill_instances"):
            roles(wrong, 4)


SETTLED = {"systems": "distserve", "seeds": 1, "requests": 60, "rates": 4}


def test_tp_of_a_phase_equals_tp_of_the_run():
    """Two instances of tp 2: as the run has it, or as the phases have it, with the same options."""
    ways = [
        Experiment(
            **SETTLED, host_s=0.004, gpus=4, tp=tp, parameters={"distserve": parameters}
        ).plan()
        for tp, parameters in (
            (2, {"prefill_instances": 1}),
            (1, {"prefill_instances": 1, "prefill_tp": 2, "decode_tp": 2}),
        )
    ]
    records = [simulated(plan.cells[0], workload_of(plan.cells[0]), None).records for plan in ways]
    assert records[0].finish_s.tobytes() == records[1].finish_s.tobytes()
    assert records[0].first_token_s.tobytes() == records[1].first_token_s.tobytes()


def test_failures_refuse_an_instance_number_beyond_the_last():
    parameters = {"distserve": {"prefill_instances": 1, "prefill_tp": 2}}
    assert Experiment(**SETTLED, gpus=4, failures="2@1s..2s", parameters=parameters).plan().cells
    with pytest.raises(SloBenchError, match="instance 3"):
        Experiment(**SETTLED, gpus=4, failures="3@1s..2s", parameters=parameters).plan()


def test_real_servers_of_unlike_tp_degrees_are_refused(slo_bench):
    words = ["run", "--backend", "vllm", "--model", "m", "--system", "distserve", "--rates", 1]
    code, _, err = slo_bench(*words, "--set", "distserve.prefill_tp=2")
    assert code == 2
    assert "leave prefill_tp, decode_tp out" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate_rps", "options"),
    [
        (9.0, {"workload": "sharegpt", "gpus": 4, "requests": 1500}),
        (600.0, {"workload": "alpaca", "gpus": 4, "requests": 1500}),
        # With step times of which one split is far ahead.
        (
            1.1,
            {
                **{"workload": "longbench", "gpus": 3, "requests": 200, "profile": "roofline"},
                "slo": "ttft=1.5,tpot=0.05",
            },
        ),
    ],
)
def test_picked_phase_split_serves_at_least_as_many_in_slo_as_all_others(rate_rps, options):
    """What is picked against every other split of the GPUs, in a simulation near capacity."""
    run_settings = {"systems": "distserve", "rates": rate_rps, "seeds": 1, **options}
    [picked] = Experiment(**run_settings).plan().cells
    gpus, served = options["gpus"], {}
    for prefill_tp, decode_tp, n in itertools.product((1, 2), (1, 2), range(1, gpus)):
        n_decode, rest = divmod(gpus - n * prefill_tp, decode_tp)
        if rest or n_decode < 1:
            continue
        parameters = {"prefill_instances": n, "prefill_tp": prefill_tp, "decode_tp": decode_tp}
        [spec] = Experiment(**run_settings, parameters={"distserve": parameters}).plan().cells
        workload = workload_of(spec)
        met = judge(workload, simulated(spec, workload, None).records).met
        served[n, prefill_tp, decode_tp] = float(met.mean())
    names = ("prefill_instances", "prefill_tp", "decode_tp")
    chosen = tuple(picked.columns[f"distserve.{name}"] for name in names)
    assert served[chosen] >= max(served.values()) - 0.01, served
    assert min(served.values()) < 0.9, "at a load at which the split matters"
    if options["workload"] == "longbench":
        assert chosen == (1, 2, 1)
        assert served[chosen] > max(v for split, v in served.items() if split != chosen) + 0.1


def test_distserve_counts_of_prefill_and_decode_instances():
    assert DistServe(1, 3).counts(8) == (2, 6)
    assert DistServe(3, 0).counts(8) == (3, 5)
    assert DistServe(2, 1).least_instances == 3
    with pytest.raises(SloBenchError, match="4 instances are no multiple of prefill_instances 1"):
        DistServe(1, 2).counts(4)
    with pytest.raises(SloBenchError, match="4 instances with prefill_instances 4 leave none"):
        DistServe(4, 0).counts(4)


def one(prompt: int, output: int, n: int = 1, gap_s: float = 100.0) -> Workload:
    return Workload(
        arrival_s=np.arange(n) * gap_s,
        prompt_tokens=np.full(n, prompt),
        output_tokens=np.full(n, output),
    )


def test_distserve_hand_over_times_by_hand():
    """One prompt of 1,000 tokens: prefill, 819.2 MB over 10 GB/s, then four decode steps."""
    distserve = system("distserve", Vllm(), network_gb_per_s=10.0, decode_instances=1)
    records = simulate(one(1000, 5), distserve, PLACEMENT, STEP_TIME, instances=2).records
    first_s = STEP_TIME.step_s(0, 0, ((0, 1000),))
    assert records.first_token_s[0] == pytest.approx(first_s)
    transfer_s = 1000 * PLACEMENT.kv_bytes_per_token / 10e9 + 10e-6
    decode_s = STEP_TIME.span_s(1, 1000, 4)
    assert records.finish_s[0] == pytest.approx(first_s + transfer_s + decode_s)
    assert records.instance[0] == 1


def test_layerwise_transfer_waits_for_the_last_layer_only():
    splitwise = system("splitwise", Vllm(), network_gb_per_s=10.0, prefill_instances=1)
    records = simulate(one(1000, 5), splitwise, PLACEMENT, STEP_TIME, instances=2).records
    transfer_s = 1000 * PLACEMENT.kv_bytes_per_token / 10e9 / 40 + 10e-6
    decode_s = STEP_TIME.span_s(1, 1000, 4)
    assert records.finish_s[0] == pytest.approx(records.first_token_s[0] + transfer_s + decode_s)


def test_full_decode_instance_holds_prompts_at_prefill():
    """Room for one: the second waits where it was prefilled until the first has ended."""
    placement = dataclasses.replace(PLACEMENT, fixed_num_gpu_blocks=40)
    workload = one(400, 100, n=2, gap_s=0.0)
    distserve = system("distserve", decode_instances=1)
    records = simulate(workload, distserve, placement, STEP_TIME, instances=2).records
    first, second = np.argsort(records.finish_s)
    alone_s = STEP_TIME.span_s(1, 400, 99)
    assert records.finish_s[second] - records.finish_s[first] >= alone_s
    assert records.preemptions_recompute.sum() == 0


def conversation(turns: int) -> Workload:
    """One user whose every prompt holds all that was said before."""
    prompts = 320 * np.arange(1, turns + 1)
    return Workload(
        arrival_s=20.0 * np.arange(turns),
        prompt_tokens=prompts,
        output_tokens=np.full(turns, 160),
        prefix_blocks=[tuple(range((p + 160) // 16)) for p in prompts.tolist()],
        prefix_block_size=16,
    )


@pytest.mark.parametrize(
    ("name", "cached"), [("distserve", 320), ("memserve", 464), ("banaserve, no moves", 464)]
)
def test_follow_up_prompt_finds_the_answers_kv_at_prefill(name, cached):
    """Prompt 320 + answer 160, of whose KV the last token is never computed: 479, or 29 blocks."""
    cluster_system = system(name, prefill_instances=1, decode_instances=1)
    if name == "memserve":
        cluster_system = cluster_system.with_parameters(store_cpu_gib=64.0)
    records = simulate(conversation(2), cluster_system, PLACEMENT, STEP_TIME, instances=2).records
    assert records.cached_tokens.tolist() == [0, cached]


def test_kv_store_serves_every_prefill_instance():
    """Two prompts with one prefix go to two instances."""
    workload = one_prefix()
    cached_tokens = {}
    for name in ("distserve over a slow network", "banaserve, eager", "mooncake"):
        cluster_system = system(name, prefill_instances=2, decode_instances=2)
        cached_tokens[name] = simulate(
            workload, cluster_system, PLACEMENT, STEP_TIME, instances=4
        ).records.cached_tokens.tolist()
    assert sorted(cached_tokens["distserve over a slow network"]) == [0, 0, 624]
    assert cached_tokens["banaserve, eager"] == cached_tokens["mooncake"] == [0, 624, 624]


def test_result_does_not_depend_on_the_order_of_instances():
    """Those that share a store are one group, whose turns go by time and then by index."""
    mooncake = Mooncake(3, 1, store_cpu_gib=1.0)
    builders = [
        Builder(role, one_prefix(), PLACEMENT, STEP_TIME, lambda r: 1, prefix_cache=True)
        for role in mooncake.layout(Vllm(), PLACEMENT, 4)
    ]
    instances = instances_of(builders)
    for order in (instances, instances[::-1]):
        groups = device_groups(order)
        members = sorted([instance.index for instance in group.instances] for group in groups)
        assert members == [[0, 1, 2, 3]]
        assert [group.index for group in groups] == [0]
        assert not any(instance.shares_devices for instance in instances)


def busy(prefill: bool) -> Workload:
    rng = np.random.default_rng(0)
    n = 400
    return Workload(
        arrival_s=np.cumsum(rng.exponential(1 / 12, n)),
        prompt_tokens=rng.integers(500, 1500, n) if prefill else rng.integers(4, 50, n),
        output_tokens=rng.integers(2, 100, n) if prefill else rng.integers(200, 500, n),
    )


def test_banaserve_moves_layers_to_free_instances_and_lowers_ttft():
    workload = busy(prefill=True)
    moving = simulate(workload, system("banaserve", Vllm()), PLACEMENT, STEP_TIME, instances=4)
    history = moving.cluster.modules.history
    first = history[0].move
    assert (first.module.value, first.source) == ("layers", 0)
    assert first.units > 0
    still = simulate(
        workload,
        system("banaserve", Vllm(), layer_moves=False, head_moves=False),
        PLACEMENT,
        STEP_TIME,
        instances=4,
    )
    waits = [np.mean(r.records.first_token_s - workload.arrival_s) for r in (moving, still)]
    assert waits[0] < 0.8 * waits[1]
