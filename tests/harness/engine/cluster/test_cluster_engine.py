"""Requests between instances: offloaded, handed over, held, migrated, lost with their instance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.examples import examples
from reference.plain import PlainInstance
from reference.workloads import assert_same, workloads
from slo_bench.harness.core.cluster_policy import (
    DROP,
    HOLD,
    REJECT,
    ClusterPolicy,
    Failure,
    Role,
    least_loaded,
)
from slo_bench.harness.core.decisions import PreemptionMode, ReleaseReason, Timeout
from slo_bench.harness.core.policy import parameter
from slo_bench.harness.core.records.request_records import Outcome, Records
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.cluster.lazy_instance import Instance
from slo_bench.harness.engine.loop.engine_instance import EngineStuckError
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


@dataclass(frozen=True)
class OffloadsLate(Vllm):
    """Gives back who has not begun after `patience_s`."""

    patience_s: float = 0.3

    def timeout(self, r, view):
        return Timeout(r.arrival_s + self.patience_s, ReleaseReason.OFFLOAD)


@dataclass(frozen=True)
class DropsLate(VllmV0):
    def timeout(self, r, view):
        return Timeout(r.arrival_s + 5.0, ReleaseReason.DROP)


@dataclass(frozen=True)
class Swaps(Vllm):
    def preemption_mode(self, r, view):
        return PreemptionMode.SWAP


@dataclass(frozen=True)
class Offload(ClusterPolicy):
    """All begin in one pool; who waits too long goes to the other, or is dropped."""

    batch: int = 4
    sink: Vllm = Vllm()  # noqa: RUF009
    drops: bool = False

    def layout(self, policy, placement, instances):
        first = OffloadsLate(max_num_seqs=self.batch, max_num_batched_tokens=128)
        return (Role("first", first, instances), Role("second", self.sink, instances))

    def route(self, r, cluster):
        instances = cluster.role("first") or cluster.up
        return instances[r.id % len(instances)] if instances else REJECT

    def on_returned(self, release, cluster):
        instances = cluster.role("second")
        return DROP if self.drops or not instances else least_loaded(instances)


@dataclass
class Wire:
    """One transfer at a time on each source; `per_token_s` for each token."""

    per_token_s: float
    free_s: dict[int, float] = field(default_factory=dict)
    sent: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def ends_s(self, source, target, kv_tokens, now_s):
        begin_s = max(now_s, self.free_s.get(source.index, 0.0))
        end_s = begin_s + kv_tokens * self.per_token_s
        self.free_s[source.index] = end_s
        self.sent.append((source.index, target.index, kv_tokens, begin_s, end_s))
        return end_s


@dataclass(frozen=True)
class Disaggregated(ClusterPolicy):
    """Prefill on some, decode on others; with `max_requests`, KV waits at its source."""

    decode: Vllm = Vllm()  # noqa: RUF009
    max_requests: int = 1 << 30
    per_token_s: float = 1e-5

    def layout(self, policy, placement, instances):
        return (
            Role("prefill", policy, instances, prefill_only=True),
            Role("decode", self.decode, instances),
        )

    def links(self, instances):
        return Wire(self.per_token_s)

    def route(self, r, cluster):
        instances = cluster.role("prefill") or cluster.up
        return least_loaded(instances) if instances else REJECT

    def decode_instance(self, r, source, cluster):
        instances = [s for s in cluster.role("decode") if s.n_requests < self.max_requests]
        return (
            least_loaded(instances) if instances else (HOLD if cluster.role("decode") else source)
        )

    def on_returned(self, release, cluster):
        return least_loaded(cluster.up) if cluster.up else DROP


@dataclass(frozen=True)
class SharedQueue(ClusterPolicy):
    """Instances ask for work; the controller keeps what they have no place for."""

    max_requests: int = 2

    def route(self, r, cluster):
        free = [s for s in cluster.up if s.n_requests < self.max_requests]
        return least_loaded(free) if free else HOLD

    def on_capacity(self, instance, cluster):
        return cluster.held[0] if instance.n_requests < self.max_requests else None

    def on_returned(self, release, cluster):
        return HOLD


@dataclass(frozen=True)
class MigrateRequest:
    """`request` leaves `source` between two iterations and goes on at `target`."""

    request: RequestState
    source: Instance
    target: Instance

    def apply(self, cluster):
        cluster.migrate(self.request, self.source, self.target)


@dataclass(frozen=True)
class SendHeld:
    """A request from the controller's own queue goes to `target`."""

    request: RequestState
    target: Instance

    def apply(self, cluster):
        cluster.send(self.request, self.target)


@dataclass(frozen=True)
class Rebalance(ClusterPolicy):
    """Everybody to the first; a review takes one from the fullest to the emptiest."""

    every_s: float = 0.2

    def links(self, instances):
        return Wire(1e-5)

    def route(self, r, cluster):
        return HOLD if r.id % 5 == 4 else cluster.up[0]

    def on_returned(self, release, cluster):
        return least_loaded(cluster.up) if cluster.up else DROP

    @property
    def control_interval_s(self):
        return self.every_s

    def control_step(self, cluster):
        actions = [SendHeld(r, least_loaded(cluster.up)) for r in cluster.held[:1]]
        full, empty = (
            max(cluster.up, key=lambda instance: instance.n_requests),
            least_loaded(cluster.up),
        )
        if full.n_requests > empty.n_requests + 1:
            there = [*full.view.running(), *full.view.waiting(), *full.engine.swapped]
            r = min(there, key=lambda r: (r.id * 7919) % 101, default=None)
            if r is not None:
                actions.append(MigrateRequest(r, full, empty))
        return actions


def system(across: ClusterPolicy, policy=None, **columns) -> System:
    return System("own", policy or Vllm(max_num_batched_tokens=128), cluster=across, **columns)


CASES = {
    "offload": lambda n: system(Offload(batch=n)),
    "offload-swap": lambda n: system(Offload(batch=n, sink=Swaps(max_num_seqs=8))),
    "offload-drop": lambda n: system(Offload(batch=n, sink=DropsLate(), drops=n == 7)),
    "hand-over": lambda n: system(Disaggregated(), Vllm(max_num_seqs=n)),
    "hand-over-sarathi": lambda n: system(
        Disaggregated(decode=Sarathi(chunk_tokens=64, max_num_seqs=n)), VllmV0()
    ),
    "hand-over-swap": lambda n: system(Disaggregated(decode=Swaps()), Sarathi(chunk_tokens=64)),
    "hand-over-held": lambda n: system(
        Disaggregated(max_requests=n), Vllm(max_num_seqs=n), prefix_cache=True
    ),
    "hand-over-slow": lambda n: system(Disaggregated(per_token_s=1e-3), prefix_cache=True),
    "ascendra": lambda n: SYSTEMS["ascendra"].with_parameters(
        n_lp=1, max_num_seqs=n, hp_batch_tokens=128, performance_model="given"
    ),
    "ascendra-drop": lambda n: SYSTEMS["ascendra"].with_parameters(
        n_lp=1,
        n_hp=2,
        value="sjf",
        overdue="drop",
        elastic=False,
        hp_batch=n,
        token_budget=96,
        threshold=3.0,
        performance_model="given",
    ),
    "ascendra-no-tickets": lambda n: SYSTEMS["ascendra"].with_parameters(
        n_lp=2, tickets=False, max_num_seqs=n, token_budget=64, performance_model="given"
    ),
    "shared-queue": lambda n: system(SharedQueue(max_requests=n)),
    "rebalance": lambda n: system(Rebalance(), Swaps(max_num_seqs=n, max_num_batched_tokens=128)),
    "rebalance-cached": lambda n: system(Rebalance(every_s=0.05), prefix_cache=True),
}


def assert_nobody_lost(workload: Workload, records: Records) -> None:
    done = records.outcome == Outcome.FINISHED
    assert (records.outcome != Outcome.UNFINISHED).all()
    np.testing.assert_array_equal(records.output_tokens[done], workload.output_tokens[done])
    assert (records.first_scheduled_s[done] >= records.arrival_s[done]).all()
    assert (records.first_token_s[done] > records.first_scheduled_s[done]).all()
    assert (records.finish_s[done] >= records.first_token_s[done]).all()
    assert np.isnan(records.finish_s[~done]).all()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    blocks=st.sampled_from([70, 90, 130, 400]),
    num_cpu_blocks=st.sampled_from([0, 20, 400]),
    batch=st.sampled_from([2, 7, 64]),
    instances=st.sampled_from([1, 2, 3]),
    failures=st.lists(
        st.builds(
            Failure, st.integers(0, 2), st.floats(0.01, 4), st.sampled_from([4.1, 9.0, np.inf])
        ),
        max_size=2,
        unique_by=lambda f: f.instance,
    ),
)
def test_leaping_equals_stepping(
    case, workload, blocks, num_cpu_blocks, batch, instances, failures
):
    """Blocks are conserved (`simulate` checks), nobody is lost, the same seed gives the same."""
    if case in ("rebalance", "rebalance-cached", "shared-queue"):
        failures = [f for f in failures if f.back_s < np.inf or f.instance >= instances]
        if case != "shared-queue":
            failures = [f for f in failures if f.instance > 0]
    if case.startswith("ascendra"):
        instances *= CASES[case](batch).least_instances
    place = dataclasses.replace(
        PLACEMENT, fixed_num_gpu_blocks=blocks, fixed_num_cpu_blocks=num_cpu_blocks
    )
    results = [
        simulate(
            workload,
            CASES[case](batch),
            place,
            STEP_TIME,
            instances=instances,
            overlong_requests="reject",
            failures=failures,
            engine=engine,
        )
        for engine in (None, PlainInstance, None)
    ]
    leapt, stepped, again = (r.records for r in results)
    assert_same(leapt, stepped)
    for f in dataclasses.fields(Records):
        assert getattr(leapt, f.name).tobytes() == getattr(again, f.name).tobytes()
    assert_nobody_lost(workload, leapt)
    gaps = [r.gaps for r in results]
    assert gaps[0].count.sum() == gaps[1].count.sum()


@dataclass(frozen=True)
class Watches(ClusterPolicy):
    """Looks at everybody at each arrival, first without letting them run, then with.

    Closed loops send a request at the end of a step, and like instances step together: where a step
    ends at this moment but for rounding, what is known beforehand may have it on either side.
    """

    def route(self, r, cluster):
        for instance in cluster.up:
            published = (instance.n_requests, instance.snapshot.n_running, instance.queue)
            around_s = [cluster.now_s * near for near in (1 - 1e-12, 1, 1 + 1e-12)]
            before, lengths, after = map(instance.simulated.ahead, around_s)
            assert lengths == instance.lengths()
            view = instance.view
            there = view.n_waiting + len(instance.engine.inbox)
            held = there + view.n_swapped + len(instance.engine.stalled) + view.n_running
            assert published == (held, view.n_running, there)
            assert (view.free_blocks, view.decode_kv_tokens) in {before, lengths, after}
        return least_loaded(cluster.up)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    blocks=st.sampled_from([70, 130, 400]),
    batch=st.sampled_from([2, 7, 64]),
    policy=st.sampled_from([Vllm, Swaps, VllmV0, OffloadsLate]),
    ahead=st.booleans(),
)
def test_expected_state_of_an_instance_equals_its_later_state(
    workload, blocks, batch, policy, ahead
):
    place = dataclasses.replace(PLACEMENT, fixed_num_gpu_blocks=blocks)
    parameters = {"async_scheduling": ahead} if policy is Vllm else {}
    cluster_system = system(Watches(), policy(max_num_seqs=batch, **parameters), prefix_cache=True)
    simulate(workload, cluster_system, place, STEP_TIME, instances=3, overlong_requests="reject")


def one_by_one(across, policy=None, **columns):
    return system(across, policy or Vllm(max_num_seqs=1), **columns)


def test_offloaded_request_is_served_and_not_dropped(serve_each_way, requests):
    """The second request waits behind the first and goes over after 0.3 s, at a step's end."""
    workload = requests((0, 10, 5), (0, 10, 2))
    across = Offload(batch=1)
    records = serve_each_way(workload, one_by_one(across), instances=1).records
    assert records.instance.tolist() == [0, 1]
    assert records.queued_s.tolist() == [0, 1]  # what it waits there is not what it waited here
    assert records.first_scheduled_s.tolist() == [0, 1]
    assert records.finish_s.tolist() == [5, 3]


def test_hand_over_waits_for_its_link(serve_each_way, requests):
    """Prefill ends at 1 and at 2; 10 tokens take 0.5 s each on the wire."""
    workload = requests((0, 10, 3), (0, 10, 3))
    across = Disaggregated(per_token_s=0.05)
    result = serve_each_way(workload, one_by_one(across), instances=1).result
    records = result.records
    assert records.first_token_s.tolist() == [1, 2]
    assert records.instance.tolist() == [1, 1]
    assert records.finish_s.tolist() == [3.5, 4.5]  # together from 2.5 on
    assert [i.role for i in result.instances] == ["prefill", "decode"]


def test_kv_blocks_of_a_hand_over_are_held_until_the_transfer_ends(serve_each_way, requests):
    """One block of 16 tokens: the second prompt finds it free only when the first has left."""
    workload = requests((0, 10, 3), (0, 10, 3))
    across = Disaggregated(per_token_s=0.15)
    served = serve_each_way(workload, one_by_one(across), instances=1, num_gpu_blocks=1)
    assert served.records.first_scheduled_s.tolist() == [0, 2.5]


@dataclass(frozen=True)
class StartsLate(Offload):
    def layout(self, policy, placement, instances):
        return (Role("first", policy, instances, start_s=4.0),)

    def route(self, r, cluster):
        instances = cluster.role("first")
        return instances[0] if instances else HOLD


def test_held_requests_go_to_an_instance_when_it_starts(serve_each_way, requests):
    records = serve_each_way(
        requests((0, 10, 2), (1, 10, 2)), one_by_one(StartsLate()), instances=1
    ).records
    assert records.first_scheduled_s.tolist() == [4, 6]


@pytest.mark.parametrize("reroutes", [True, False])
def test_requests_of_a_failed_instance_are_rerouted_or_failed(serve_each_way, requests, reroutes):
    """They begin again elsewhere, with the tokens they have; or are reported as failed."""
    workload = requests((0, 10, 6), (0, 10, 6), (0, 10, 6))
    across = Offload(batch=1, drops=not reroutes)
    records = serve_each_way(
        workload,
        one_by_one(across),
        instances=3,
        failures=[Failure(1, 2.5)],
    ).records
    if reroutes:
        # Three tokens by 3, when its step ends; then the prompt and they again, at the fourth.
        assert records.instance.tolist() == [0, 3, 2]
        assert records.finish_s.tolist() == [6, 6, 6]
        assert records.preemptions_recompute.tolist() == [0, 1, 0]
    else:
        assert records.outcome.tolist() == [Outcome.FINISHED, Outcome.FAILED, Outcome.FINISHED]


@dataclass(frozen=True)
class HoldsAll(ClusterPolicy):
    def route(self, r, cluster):
        return HOLD


def test_request_held_for_ever_raises_engine_stuck(serve_each_way, requests):
    with pytest.raises(EngineStuckError, match="HoldsAll holds 1 requests"):
        serve_each_way(requests((0, 10, 1)), one_by_one(HoldsAll()))


def test_cluster_policy_refuses_a_router(serve, requests):
    with pytest.raises(SloBenchError, match="leave router out"):
        serve(requests((0, 10, 1)), one_by_one(SharedQueue()), router="least-loaded")


def test_static_batches_cannot_be_moved(serve, requests):
    with pytest.raises(SloBenchError, match="static batches"):
        serve(
            requests((0, 10, 50), (0, 10, 5)),
            one_by_one(SharedQueue(), Fifo()),
            failures=[Failure(0, 1.0)],
        )


def test_parameters_of_cluster_and_instance_policy_can_be_set(serve, requests):
    both = one_by_one(Parameterized())
    assert both.parameters()["patience"] == 3
    changed = both.with_parameters(patience=5, max_num_seqs=7)
    assert (changed.cluster.patience, changed.policy.max_num_seqs) == (5, 7)
    with pytest.raises(SloBenchError, match="must be from 1 to 9"):
        both.with_parameters(patience=10)
    with pytest.raises(SloBenchError, match="did you mean patience"):
        both.with_parameters(patienc=1)


@dataclass(frozen=True)
class Parameterized(ClusterPolicy):
    patience: int = parameter(3, 1, 9)
