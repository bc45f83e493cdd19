"""Several instances: who is sent where, who follows whom, and stages that are never shared."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.plain import PlainInstance
from slo_bench.harness.core.decisions import Admission, Limits, ReleaseReason, Timeout
from slo_bench.harness.core.device import StageDevice
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.cluster.cluster_arrivals import Arrivals
from slo_bench.harness.engine.loop.engine_instance import EngineStuckError
from slo_bench.harness.engine.loop.loop import Loop
from slo_bench.harness.engine.simulator import simulated_instances
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.routers import router
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.workload import Workload

VLLM = System("vllm", Vllm(), prefix_cache=True)


@dataclass(frozen=True)
class ShortOnly(Vllm):
    """Turns away prompts above 50 tokens."""

    def admit(self, r, view):
        return Admission.REJECT if r.prompt_tokens > 50 else Admission.ADMIT


@dataclass(frozen=True)
class Impatient(Vllm):
    """Drops who has not begun within 1.5 s."""

    def timeout(self, r, view):
        return Timeout(r.arrival_s + 1.5, ReleaseReason.DROP)


@dataclass(frozen=True)
class Closed(Policy):
    """Lets nobody in."""

    def limits(self, view):
        return Limits(max_seqs=0)


SHORT_BATCHES = Fifo(max_batch=3)

# ---------------------------------------------------------------- routers


def test_arrivals_let_go_of_their_last_requests():
    arrivals = Arrivals(Workload(np.arange(3.0), np.full(3, 8), np.full(3, 4)))
    requests = [arrivals.pop() for _ in range(3)]
    assert arrivals.next_s() == np.inf
    holders = [holder for holder in gc.get_referrers(requests[0]) if isinstance(holder, list)]
    assert holders == [requests]


def test_round_robin_routes_to_instances_in_turn(serve, requests):
    workload = requests((0, 10, 50), (0.1, 10, 1), (0.2, 10, 50), (7, 10, 1), (7, 10, 1))
    records = serve(workload, VLLM, instances=3, router="round-robin").records
    assert records.instance.tolist() == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_present_at_the_moment(serve_each_way, requests):
    workload = requests(
        (0, 10, 50),  # equal: the first
        (0.5, 10, 1),  # 1 against 0
        (2.5, 10, 9),  # the second instance is empty again
        (2.6, 10, 9),  # 1 against 1
        (2.7, 10, 9),  # 2 against 1
    )
    records = serve_each_way(workload, VLLM, instances=2, router="least-loaded").records
    assert records.instance.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("kind", [Loop, PlainInstance])
def test_instance_load_counts_inbox_waiting_swapped_and_running(kind):
    there = kind.__new__(kind)
    there.inbox = deque(range(1))
    there.waiting = SimpleNamespace(live=2)
    there.swapped = list(range(4))
    there.stalled = list(range(8))
    there.prefilling = list(range(16))
    there.decoding = dict.fromkeys(range(32))
    assert there.n_requests == 63


def test_prefix_aware_routes_to_the_instance_with_the_prefix(serve, requests):
    workload = requests(
        *[(0.1 * k, 100, 50) for k in range(6)],
        prefix_blocks=[
            (1, 2, 3, 4),  # nothing seen: least loaded
            (8, 9),  # nothing in common: least loaded
            (1, 2, 3, 5),  # three of four blocks went to the first instance
            (1, 2, 6, 7),  # two of four are not more than half: least loaded
            (1, 2, 6, 7),  # all four to the second, two to the first
            (),  # no prefix: least loaded, of equals the first is the one with 2 against 3
        ],
    )
    records = serve(workload, SYSTEMS["sglang"], instances=2).records
    assert records.instance.tolist() == [0, 1, 0, 1, 1, 0]


def test_prefix_aware_routes_by_load_under_imbalance(serve, requests):
    # More than 32 apart: the other one, which thereby has seen the prefix too.
    n = 37
    workload = requests(*[(0, 100, 50)] * n, prefix_blocks=[(1, 2, 3)] * n)
    records = serve(workload, SYSTEMS["sglang"], instances=2).records
    assert records.instance.tolist() == [0] * 33 + [1, 0, 1, 0]


def test_prefix_aware_forgets_the_oldest_prefixes():
    class Short(type(router("prefix-aware"))):
        REMEMBERED_HASHES = 3

    sent = Short()
    instances = [SimpleNamespace(index=k, n_requests=0) for k in (0, 1)]

    def dispatch(*hashes):
        chosen = sent.route(SimpleNamespace(prefix_blocks=hashes), instances)
        return chosen.index

    assert dispatch(1, 2) == 0
    instances[0].n_requests = 1
    assert dispatch(1, 2) == 0
    assert dispatch(1, 2, 5) == 0
    assert dispatch(7, 8) == 1
    assert dispatch(1, 2, 5, 6) == 0  # four hashes: the oldest, 1, is forgotten
    assert dispatch(1, 2) == 1


def test_router_returns_a_new_instance_and_refuses_unknown_names():
    assert router("round-robin") is not router("round-robin")
    with pytest.raises(UnknownNameError, match="did you mean least-loaded"):
        router("least-load")


def test_random_router_draws_the_same_instances_in_each_run(serve_each_way, requests):
    workload = requests(*[(0.1 * (k // 2), 10, 2) for k in range(200)])  # two at a time
    drawn, again = (
        serve_each_way(workload, VLLM, instances=2, router="random").records.instance
        for _ in range(2)
    )
    assert (drawn == again).all()
    assert 80 <= drawn.sum() <= 120
    assert 20 <= (drawn[::2] == drawn[1::2]).sum() <= 80  # those that come together draw apart


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["round-robin", "random", "least-loaded", "prefix-aware"]),
)
def test_every_router_serves_all_requests(serve, seed, name):
    rng = np.random.default_rng(seed)
    n = 60
    workload = Workload(
        np.cumsum(rng.exponential(0.5, n)),
        rng.integers(1, 120, n),
        rng.integers(1, 20, n),
        prefix_blocks=[tuple(range(1, k)) for k in rng.integers(1, 6, n)],
    )
    records = serve(workload, VLLM, instances=3, router=name, num_gpu_blocks=20).records
    assert (records.outcome == Outcome.FINISHED).all()
    assert set(records.instance.tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(records.output_tokens, workload.output_tokens)


def test_slices_of_a_long_workload_lose_no_request(serve):
    n = 40_000  # more than two slices of 16,384
    arrival_s = np.repeat(np.arange(n // 4) * 3.0, 4)
    workload = Workload(arrival_s, np.full(n, 10), np.full(n, 2))
    records = serve(workload, VLLM, instances=2).records
    np.testing.assert_array_equal(records.finish_s, arrival_s + 2)
    np.testing.assert_array_equal(records.instance, np.arange(n) % 2)


# ---------------------------------------------------------------- followers


def test_follow_up_arrives_after_answer_and_think_time(serve_each_way, requests):
    workload = requests(
        (0, 10, 3),  # ends at 3
        (1, 10, 2),  # follows: arrives at 5.5, ends at 7.5
        (2, 10, 1),  # follows that one: arrives at 7.75
        (20, 10, 1),  # follows the first, but not before 20
        follows=[-1, 0, 1, 0],
        think_s=[0, 2.5, 0.25, 1],
    )
    records = serve_each_way(workload, VLLM).records
    assert records.arrival_s.tolist() == [0, 5.5, 7.75, 20]
    assert records.first_scheduled_s.tolist() == [0, 5.5, 7.75, 20]
    assert records.finish_s.tolist() == [3, 7.5, 8.75, 21]


@pytest.mark.parametrize("instances", [1, 2])
def test_follow_ups_of_rejected_requests_are_cancelled(serve_each_way, requests, instances):
    workload = requests(
        (0, 10, 2), (0, 60, 2), (1, 10, 2), (1, 10, 2), (2, 10, 2), (3, 60, 1), (3, 10, 1),
        follows=[-1, -1, 1, 2, 0, 4, 5],
    )  # fmt: skip
    records = serve_each_way(workload, ShortOnly(), instances=instances).records
    done, rejected, cancelled = Outcome.FINISHED, Outcome.REJECTED, Outcome.CANCELLED
    assert records.outcome.tolist() == [
        done, rejected, cancelled, cancelled, done, rejected, cancelled,
    ]  # fmt: skip
    assert np.isnan(records.arrival_s[[2, 3, 6]]).all()
    assert records.arrival_s[5] == records.finish_s[4]
    assert np.isnan(records.finish_s[[1, 2, 3, 5, 6]]).all()


def test_follow_ups_of_dropped_requests_are_cancelled(serve_each_way, requests):
    workload = requests((0, 2048, 5), (0.5, 2048, 1), (1, 10, 1), follows=[-1, -1, 1])
    records = serve_each_way(workload, Impatient(max_num_seqs=1)).records
    dropped = [Outcome.FINISHED, Outcome.DROPPED, Outcome.CANCELLED]
    assert records.outcome.tolist() == dropped
    assert np.isnan(records.finish_s[1])  # it has none, whenever it went


def test_follow_ups_of_overlong_requests_are_cancelled(serve_each_way, requests):
    # Ten blocks: 160 tokens. Rows 1 and 5 are too long; row 5 is so as a follower.
    workload = requests(
        (0, 10, 2), (0, 200, 2), (1, 10, 2), (1, 10, 2), (2, 10, 2), (3, 200, 1), (3, 10, 1),
        follows=[-1, -1, 1, 2, 0, 4, 5],
    )  # fmt: skip
    records = serve_each_way(workload, VLLM, num_gpu_blocks=10, overlong_requests="reject").records
    done, rejected, cancelled = Outcome.FINISHED, Outcome.REJECTED, Outcome.CANCELLED
    assert records.outcome.tolist() == [
        done, rejected, cancelled, cancelled, done, rejected, cancelled,
    ]  # fmt: skip
    assert records.output_tokens.tolist() == [2, 0, 0, 0, 2, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    instances=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from([ShortOnly(), Impatient(), SHORT_BATCHES]),
)
def test_requests_of_sessions_end_once_and_in_order(serve, seed, instances, policy):
    """Whatever is refused, dropped or too long: every request ends once, as its story demands."""
    rng = np.random.default_rng(seed)
    n = 50
    follows = np.array([int(rng.integers(-1, row)) for row in range(n)])
    follows[rng.random(n) < 0.3] = -1
    prompts = rng.integers(1, 60, n)
    prompts[rng.random(n) < 0.1] = 500  # too long
    workload = Workload(
        np.cumsum(rng.exponential(1.0, n)),
        prompts,
        rng.integers(1, 9, n),
        follows=follows,
        think_s=rng.exponential(2.0, n),
    )
    records = serve(
        workload,
        System("own", policy, router="least-loaded"),
        instances=instances,
        num_gpu_blocks=20,
        overlong_requests="reject",
    ).records
    finished = records.outcome == Outcome.FINISHED
    for row, before in enumerate(follows.tolist()):
        outcome = records.outcome[row]
        if prompts[row] == 500:
            assert outcome == Outcome.REJECTED
        elif before >= 0 and not finished[before]:
            assert outcome == Outcome.CANCELLED
            assert np.isnan(records.arrival_s[row])
        else:
            assert outcome in (Outcome.FINISHED, Outcome.REJECTED, Outcome.DROPPED)
            due_s = workload.arrival_s[row]
            if before >= 0:
                due_s = max(due_s, records.finish_s[before] + workload.think_s[row])
            assert records.arrival_s[row] == due_s
    np.testing.assert_array_equal(
        records.output_tokens, np.where(finished, workload.output_tokens, 0)
    )
    assert (records.first_scheduled_s[finished] >= records.arrival_s[finished]).all()


def test_long_chain_of_follow_ups_is_cancelled(requests):
    n = 5000
    workload = requests(*[(0, 10, 1)] * n, follows=np.arange(n) - 1)
    arrivals = Arrivals(workload, skip=np.array([0]))
    assert sorted(arrivals.cancelled) == list(range(1, n))
    assert arrivals.next_s() == np.inf


# ---------------------------------------------------------------- closed loop


def in_flight(records) -> int:
    """Most requests at once; one that ends when another arrives has made way for it."""
    events = [(t, 1) for t in records.arrival_s] + [(t, -1) for t in records.finish_s]
    peak = now = 0
    for _, change in sorted(events):
        now += change
        peak = max(peak, now)
    return peak


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    users=st.integers(1, 9),
    instances=st.sampled_from([1, 2, 3]),
    name=st.sampled_from(["vllm", "sarathi", "vllm-v0", "fifo", "orca"]),
)
def test_closed_loop_keeps_its_concurrency(serve, seed, users, instances, name):
    rng = np.random.default_rng(seed)
    n = 40
    workload = Workload(
        np.zeros(n), rng.integers(1, 90, n), rng.integers(1, 30, n), concurrency=users
    )
    records = serve(
        workload,
        SYSTEMS[name],
        per_token_s=0.013,
        instances=instances,
        router="least-loaded",
        num_gpu_blocks=30,
    ).records
    assert (records.outcome == Outcome.FINISHED).all()
    assert in_flight(records) == min(users, n)
    # Whoever comes, comes the moment somebody goes.
    np.testing.assert_array_equal(records.arrival_s[:users], 0)
    np.testing.assert_array_equal(
        np.sort(records.arrival_s[users:]), np.sort(records.finish_s)[: n - users]
    )


def test_closed_loop_sends_the_next_request_after_a_rejection(serve_each_way, requests):
    # The long ones are turned away at once; their users' next requests come at that moment.
    workload = requests(
        (0, 60, 1), (0, 10, 3), (0, 60, 1), (0, 10, 2), (0, 60, 1), (0, 10, 2), concurrency=2
    )
    records = serve_each_way(workload, ShortOnly()).records
    assert (records.outcome == Outcome.FINISHED).tolist() == [False, True, False, True, False, True]
    assert records.arrival_s.tolist() == [0, 0, 0, 0, 2, 2]
    assert records.finish_s[1::2].tolist() == [3, 2, 4]


def test_overlong_requests_occupy_no_user_of_a_closed_loop(serve_each_way, requests):
    workload = requests((0, 900, 1), (0, 10, 2), (0, 900, 1), (0, 10, 2), concurrency=1)
    records = serve_each_way(workload, VLLM, num_gpu_blocks=10, overlong_requests="reject").records
    assert records.outcome.tolist() == [Outcome.REJECTED, Outcome.FINISHED] * 2
    assert records.arrival_s[[1, 3]].tolist() == [0, 2]


def test_workload_of_only_rejected_requests_ends(serve_each_way, requests):
    for columns in ({}, {"concurrency": 2}, {"follows": [-1, 0, 1]}):
        workload = requests((0, 900, 1), (0, 900, 2), (0, 900, 2), **columns)
        result = serve_each_way(
            workload, VLLM, num_gpu_blocks=10, overlong_requests="reject"
        ).result
        assert (result.records.outcome == Outcome.REJECTED).all()
        assert result.totals.makespan_s == 0
        assert not len(result.gaps.gap_s)
        assert not result.timeline.running.any()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1 but is 0"),
        ({"concurrency": 1, "follows": [-1, 0]}, "leave concurrency out"),
    ],
)
def test_impossible_closed_loops_are_refused(serve, requests, columns, problem):
    with pytest.raises(SloBenchError, match=problem):
        serve(requests((0, 10, 1), (0, 10, 1), **columns), VLLM)


# ---------------------------------------------------------------- pipelines


def test_two_pipeline_lanes_share_two_stages(serve_each_way, requests):
    # A step takes half a second on each stage; the lanes run half a second apart.
    workload = requests((0, 10, 4), (0, 10, 4))
    served = serve_each_way(workload, VLLM, pp=2, router="round-robin")
    assert served.records.finish_s.tolist() == [4, 4.5]
    assert served.records.instance.tolist() == [0, 0]  # lanes of one instance


def test_single_pipeline_lane_gains_nothing(serve_each_way, requests):
    assert serve_each_way(requests((0, 10, 4)), VLLM, pp=2).records.finish_s.tolist() == [4]


def test_pipeline_lanes_divide_the_blocks(serve, requests):
    with pytest.raises(SloBenchError, match="160 fit the context"):
        serve(requests((0, 161, 1)), VLLM, pp=2, num_gpu_blocks=21)


def test_router_sees_instances_and_not_their_pipeline_lanes(serve, requests):
    workload = requests(*[(0, 10, 4)] * 6)
    records = serve(workload, VLLM, pp=2, instances=2, router="round-robin").records
    assert records.instance.tolist() == [0, 0, 1, 1, 0, 0]


class Watched(StageDevice):
    """Remembers when each step left it."""

    ends: list[list[float]] = []  # noqa: RUF012

    def __init__(self, name, share, hop_s):
        self.mine = []
        Watched.ends.append(self.mine)
        super().__init__(name, share, hop_s)

    @property
    def free_at_s(self):
        return self.mine[-1] if self.mine else 0.0

    @free_at_s.setter
    def free_at_s(self, value):
        if value:
            self.mine.append(value)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize("name", ["sarathi", "vllm-v0", "fifo"])
def test_pipeline_stage_computes_one_step_at_a_time(serve, monkeypatch, pp, leaps, name):
    Watched.ends = []
    monkeypatch.setattr(simulated_instances, "StageDevice", Watched)
    rng = np.random.default_rng(9)
    n = 60
    workload = Workload(
        np.cumsum(rng.exponential(3.0, n)), rng.integers(1, 90, n), rng.integers(1, 30, n)
    )
    served = serve(workload, SYSTEMS[name], pp=pp, leaps=leaps, num_gpu_blocks=60)
    assert (served.records.outcome == Outcome.FINISHED).all()
    stages = [np.array(ends) for ends in Watched.ends if ends]
    assert len(stages) == pp
    for ends in stages:
        assert (np.diff(ends) >= 1 / pp - 1e-9).all()
    # However many lanes: no more than one step a stage and share of a second.
    totals = served.result.totals
    assert totals.steps / pp <= totals.makespan_s
    assert totals.steps > totals.makespan_s * 0.9  # and the lanes do overlap


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_placements_with_tp_and_pp_serve_all_requests(tp, pp):
    placement = Placement(model("llama-3-8b"), gpu("a100-80g"), tp=tp, pp=pp)
    rng = np.random.default_rng(4)
    n = 40
    workload = Workload(
        np.cumsum(rng.exponential(0.05, n)), rng.integers(10, 2000, n), rng.integers(1, 200, n)
    )
    result = simulate(workload, System("sarathi", Sarathi()), placement, step_time(placement).model)
    records = result.records
    assert (records.outcome == Outcome.FINISHED).all()
    assert (records.instance == 0).all()
    assert 0 < result.totals.kv_cache_usage_mean < result.totals.kv_cache_usage_peak < 1
    single_gpu = Placement(model("llama-3-8b"), gpu("a100-80g"))
    alone = simulate(
        workload, System("sarathi", Sarathi()), single_gpu, step_time(single_gpu).model
    )
    if tp * pp > 1:
        assert result.totals.makespan_s < alone.totals.makespan_s


# ---------------------------------------------------------------- stuck


@pytest.mark.parametrize(
    "options",
    [{}, {"pp": 2}, {"instances": 2}, {"instances": 2, "router": "least-loaded"}],
    ids=["one", "lanes", "apart", "together"],
)
@pytest.mark.parametrize("columns", [{}, {"concurrency": 2}], ids=["open", "closed"])
def test_policy_that_admits_no_request_raises_engine_stuck(
    serve_each_way, requests, options, columns
):
    workload = requests((0, 10, 1), (1, 10, 1), (2, 10, 1), **columns)
    with pytest.raises(EngineStuckError, match="is stuck at"):
        serve_each_way(workload, Closed(), **options)
