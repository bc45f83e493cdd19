"""Collocation's decisions: the examples worked by hand, and what must hold whatever comes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.plain import PlainInstance
from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.decisions import PreemptionMode
from slo_bench.harness.core.records.request_records import Outcome, Records, Result
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.collocation.collocation_policy import (
    Collocation,
    Decision,
    smooth_adjust,
)
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.predictors.embedder import embedder
from slo_bench.predictors.load_forecaster import DecayingForecaster, LoadForecaster
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import RequestType, Slo
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload

SYSTEM_NAMES = (
    "collocation",
    "collocation-lru",
    "collocation-open",
    "static-split",
    "collocated-fcfs",
    "merged-batches",
    "vllm",
)
MIX = (
    "mix(chat=synthetic(prompt=uniform(50,300),output=uniform(20,300),priority=1):1,"
    "batch=synthetic(prompt=uniform(100,500),output=uniform(20,300)):1,"
    "embed=embed(texts=uniform(16,64),tokens=uniform(50,512)):2)"
)
NO_SLO = Slo()
SLO = "chat:ttft=1,tpot=0.15; batch:ttft=5,tpot=0.3; embed:e2e=2"


def placement(blocks: int) -> Placement:
    return Placement(model("llama-2-7b"), gpu("a100-80g"), fixed_num_gpu_blocks=blocks)


def served(
    policy: Any, workload: Workload, blocks: int, engine: Any = None, embeds: str = "bge-m3"
) -> Result:
    where = placement(blocks)
    return simulate(
        workload,
        policy if isinstance(policy, System) else System("test", policy),
        where,
        step_time(where).model,
        embedder=embedder(model(embeds), where),
        engine=engine,
        overlong_requests="reject",
    )


def mixed(rate_rps: float, seed: int, requests: int = 80) -> Workload:
    return load_source(MIX).make(
        rate_rps=rate_rps, requests=requests, seed=seed, slo=parse_slo(SLO)
    )


def generated(*rows: tuple[float, int, int], **columns: Any) -> Workload:
    arrival, prompt, output = (np.array(c) for c in zip(*rows, strict=True))
    return Workload(arrival.astype(float), prompt, output, **columns)


runs = given(
    rate=st.sampled_from([4.0, 15.0, 60.0]),
    blocks=st.sampled_from([250, 400, 1500]),
    seed=st.integers(0, 2**31),
)


# ---------------------------------------------------------------- the engine


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEM_NAMES)
@settings(max_examples=12)
@runs
def test_leaping_equals_stepping_beside_an_embedder(name, rate, blocks, seed):
    workload = mixed(rate, seed)
    leapt, stepped = (
        served(SYSTEMS[name], workload, blocks, engine).records for engine in (None, PlainInstance)
    )
    for f in dataclasses.fields(Records):
        np.testing.assert_allclose(
            getattr(leapt, f.name), getattr(stepped, f.name), rtol=1e-9, atol=1e-9, err_msg=f.name
        )
    assert np.isin(leapt.outcome, [Outcome.FINISHED, Outcome.REJECTED]).all()
    embeds = workload.request_type == RequestType.EMBED
    assert np.isnan(leapt.first_token_s[embeds]).all()
    assert (leapt.output_tokens[embeds] == 0).all()


def test_single_embedding_takes_one_pass():
    workload = generated(
        (2.0, 512, 1), request_type=np.array([RequestType.EMBED]), num_inputs=np.array([4])
    )
    records = served(SYSTEMS["vllm"], workload, 400).records
    beside = embedder(model("bge-m3"), placement(400))
    assert records.first_scheduled_s[0] == 2.0
    assert records.finish_s[0] == pytest.approx(2.0 + beside.pass_s([(4, 128)]))


def test_embedding_passes_and_decode_steps_share_the_device():
    """A decode step waits for the pass that began before it; both get what they need in all."""
    alone = served(SYSTEMS["vllm"], generated((0, 100, 50)), 400).records.finish_s[0]
    workload = generated(
        (0, 100, 50), (0.1, 8192, 1), request_type=np.array([0, 1]), num_inputs=np.array([1, 16])
    )
    both = served(SYSTEMS["vllm"], workload, 400).records.finish_s[0]
    pass_s = embedder(model("bge-m3"), placement(400)).pass_s([(16, 512)])
    assert both == pytest.approx(alone + pass_s)


def test_embedding_pass_holds_its_memory_until_it_ends():
    beside = embedder(model("bge-m3"), placement(200))
    needs = beside.blocks([(64, 512)])
    workload = generated(
        (0, 16 * (201 - needs), 2),
        (0.0001, 64 * 512, 1),
        request_type=np.array([0, 1]),
        num_inputs=np.array([1, 64]),
    )
    records = served(SYSTEMS["vllm"], workload, 200).records
    assert (
        records.first_scheduled_s[1] >= records.finish_s[0]
    )  # one block too few beside the prompt
    roomier = served(SYSTEMS["vllm"], workload, 202).records
    assert roomier.first_scheduled_s[1] < roomier.finish_s[0]


def test_merging_prefills_texts_in_the_batch():
    workload = generated(
        (0, 100, 5), (0, 64, 1), request_type=np.array([0, 1]), num_inputs=np.array([1, 2])
    )
    merged = served(SYSTEMS["merged-batches"], workload, 400, embeds="llama-2-7b").records
    assert merged.first_token_s[0] == merged.finish_s[1]  # the same iteration
    apart = served(SYSTEMS["vllm"], workload, 400, embeds="llama-2-7b").records
    assert apart.finish_s[1] != apart.first_token_s[0]


def test_first_come_first_served_across_kinds():
    """A short prompt behind a pass that lacks memory waits for it."""
    rows = ((0, 16 * 150, 50), (0.3, 64 * 512, 1), (0.31, 32, 2))
    columns = {"request_type": np.array([0, 1, 0]), "num_inputs": np.array([1, 64, 1])}
    strict = served(SYSTEMS["collocated-fcfs"], generated(*rows, **columns), 200).records
    assert strict.first_scheduled_s[2] >= strict.first_scheduled_s[1]
    loose = served(SYSTEMS["vllm"], generated(*rows, **columns), 200).records
    assert loose.first_scheduled_s[2] < loose.first_scheduled_s[1]


def test_static_split_rejects_a_pass_larger_than_its_share():
    workload = generated((0, 64 * 512, 1), request_type=np.array([1]), num_inputs=np.array([64]))
    small = SYSTEMS["static-split"].with_parameters(llm_share=0.9)
    large = SYSTEMS["static-split"].with_parameters(llm_share=0.5)
    assert served(small, workload, 400).records.outcome[0] == Outcome.REJECTED
    assert served(large, workload, 400).records.outcome[0] == Outcome.FINISHED


def test_static_split_keeps_generation_within_its_share():
    rows = [(0, 160, 100)] * 20
    result = served(SYSTEMS["static-split"].with_parameters(llm_share=0.5), generated(*rows), 400)
    assert result.totals.kv_cache_usage_peak <= 0.5


# ---------------------------------------------------------------- worked examples


@dataclass
class Predict:
    step: float = 0.01

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return self.step + sum(tokens for _, tokens in chunks) * 1e-3

    def output_tokens(self, r):
        return r.output_tokens

    output_tokens_p90 = output_tokens


@dataclass
class Fake:
    """A view in which every request in `batch` decodes, at the lengths it has."""

    batch: list[RequestState] = field(default_factory=list)
    queue: list[RequestState] = field(default_factory=list)
    now_s: float = 0.0
    total_blocks: int = 100
    free_blocks: int = 100
    block_size: int = 1
    predict: Predict = field(default_factory=Predict)
    policy_state: Any = None
    decode_kv_tokens: int = 0
    counters: Counters = field(default_factory=Counters)

    @property
    def n_running(self):
        return len(self.batch)

    n_decoding = n_running

    @property
    def n_waiting(self):
        return len(self.queue)

    def running(self):
        return self.batch

    def waiting(self):
        return self.queue

    def emitted_tokens(self, r):
        return r.emitted_tokens

    def held_blocks(self, r):
        return r.blocks


def request(
    prompt: int, output: int, emitted: int = 0, slo: Slo = NO_SLO, priority: int = 0
) -> RequestState:
    r = RequestState(0, 0.0, prompt, output, output, slo)
    r.priority, r.emitted_tokens, r.blocks = priority, emitted, prompt + emitted
    if emitted:
        r.first_token_s = 0.0
    return r


def view_of(policy: Collocation, *batch: RequestState, **fields: Any) -> Fake:
    view = Fake(list(batch), policy_state=policy.new_state(), **fields)
    view.counters = Counters(policy.mechanisms())
    for r in (*batch, *view.queue):
        policy.admit(r, view)
    return view


PLAIN: dict[str, Any] = {"safety_ratio": 0.0, "speculative_share": 0.0}


def test_admission_counts_reservations_of_three_requests():
    """Counting what they hold now lets all three in; counting reservations lets in two."""
    for counts, third in (("reserved", Decision.DEFER), ("current", Decision.ADMIT)):
        policy = Collocation(counts=counts, **PLAIN)
        first, second, new = request(5, 40, 1), request(5, 40, 1), request(5, 40)
        view = view_of(policy, first, queue=[new], free_blocks=94)
        assert policy.decide(new, view) is Decision.ADMIT
        view = view_of(policy, first, second, queue=[new], free_blocks=88)
        assert policy.decide(new, view) is third


@pytest.mark.parametrize(("counts", "preempted"), [("reserved", False), ("current", True)])
def test_admission_of_three_requests_by_current_use_preempts(counts, preempted):
    rows = [(0, 16, 45 * 16 - 16)] * 3
    policy = Collocation(counts=counts, **PLAIN)
    records = served(policy, generated(*rows), 100).records
    assert bool(records.preemptions_recompute.sum()) is preempted
    assert (records.outcome == Outcome.FINISHED).all()
    if not preempted:
        assert records.first_scheduled_s[2] >= records.finish_s[:2].min()


@pytest.mark.parametrize(("emitted", "left"), [(10, 30), (39, 1), (40, 80), (118, 2), (200, 1)])
def test_request_longer_than_expected_is_not_about_to_finish(emitted, left):
    class Unsure(Predict):
        def output_tokens(self, r):
            return 40

        def output_tokens_p90(self, r):
            return 120

    policy = Collocation(completion_tokens=16, **PLAIN)
    r = request(5, 300, emitted, Slo(e2e_s=60))
    view = view_of(policy, r, predict=Unsure())
    assert policy.protected(r, view) is (left < 16)
    [slack_s] = [policy.slack_s(r, view) for r in view.running()]
    assert slack_s == policy.slack_s(r, view) == pytest.approx(60 - left * 0.01)


def test_high_priority_admission_preempts_low_priority_only():
    policy = Collocation(completion_tokens=1, **PLAIN)
    low, high = request(50, 40, 1), request(50, 40, 1, priority=1)
    new = request(50, 40, priority=1)
    assert policy.decide(new, view_of(policy, low, queue=[new])) is Decision.ADMIT_WITH_PREEMPTION
    assert policy.decide(new, view_of(policy, high, queue=[new])) is Decision.DEFER


def test_request_is_deferred_until_the_threshold_then_rejected():
    policy = Collocation(defer_threshold_s=2.0, **PLAIN)
    running = request(50, 40, 1)
    new = request(50, 40, slo=Slo(ttft_s=5))
    assert policy.decide(new, view_of(policy, running, queue=[new])) is Decision.DEFER
    late = view_of(policy, running, queue=[new], now_s=3.5)
    assert policy.decide(new, late) is Decision.REJECT
    leave = policy.timeout(new, view_of(policy, running, queue=[new]))
    assert leave is not None
    assert leave.time_s == 3.0


def test_a_request_just_late_is_the_last_to_be_evicted_not_the_first():
    """1 / (slack + ε) is -25 at 0.14 s late: the letter evicts it first."""
    rows = {}
    for slack in ("clamped", "letter"):
        policy = Collocation(slack=slack, recompute_weight=0.0)
        late = request(10, 102, 2, Slo(e2e_s=0.86))  # 100 steps of 10 ms to go
        easy = request(10, 102, 2, Slo(e2e_s=60))
        view = view_of(policy, late, easy)
        rows[slack] = [policy.eviction_cost_s(r, view) for r in (late, easy)]
    assert rows["clamped"] == pytest.approx([10.0, 1 / 59.1])
    assert rows["letter"] == pytest.approx([-25.0, 1 / 59.1])


def test_eviction_cost_includes_recomputing_the_prompt():
    """To the letter a 1,000-token prompt with 2 tokens of answer is cheap to evict."""
    for recompute, cheapest in (("sequence", 1), ("answer", 0)):
        policy = Collocation(recompute=recompute)
        batch = [request(1000, 200, 2), request(10, 200, 50)]
        view = view_of(policy, *batch, total_blocks=2000)
        costs = [policy.eviction_cost_s(r, view) for r in batch]
        assert costs.index(min(costs)) == cheapest


def test_urgency_is_bounded_and_never_falls_with_lateness():
    policy, letter = Collocation(hopeless_s=10), Collocation(lateness="letter")
    assert policy.urgency_score([-10.0]) == policy.urgency_score([-1000.0]) == 11.0
    assert letter.urgency_score([-1000.0]) == 1000.0
    assert policy.urgency_score([-0.01]) > policy.urgency_score([0.0]) == 1.0
    assert letter.urgency_score([-0.01]) < letter.urgency_score([0.0])
    assert policy.urgency_score([5.0, math.inf]) == 0.0


def test_target_llm_share_follows_urgency_within_bounds():
    policy = Collocation(min_llm_share=0.5, min_embed_share=0.1, default_llm_share=0.75)
    assert policy.target_llm_share(0.0, 0.0) == pytest.approx(0.8)
    assert policy.target_llm_share(3.0, 1.0) == pytest.approx(0.8)
    assert policy.target_llm_share(0.0, 9.0) == pytest.approx(0.5)
    assert policy.target_llm_share(9.0, 0.0) == pytest.approx(0.9)


def test_forecast_is_the_rate_of_the_window_times_the_horizon():
    forecaster = LoadForecaster(10.0)
    for second in range(20):
        forecaster.saw(float(second), blocks=3, texts=6)
    assert forecaster.blocks_within(19.5, 2.0) == pytest.approx(2 * 3 * 10 / 10)
    assert forecaster.blocks_per_text() == 0.5
    assert forecaster.blocks_within(100.0, 2.0) == 0.0


def test_low_priority_leaves_room_for_the_high_priority_to_come():
    policy = Collocation(safety_ratio=0.0, speculative_share=0.5, horizon_s=1.0, window_s=10.0)
    running, low = request(20, 20, 1), request(25, 25)
    view = view_of(policy, running, queue=[low], now_s=10.0)
    assert policy.decide(low, view) is Decision.ADMIT
    for _ in range(10):
        policy.admit(request(20, 20, priority=1), view)  # 40 blocks a second
    assert policy.decide(low, view) is Decision.DEFER
    high = request(25, 25, priority=1)
    policy.admit(high, view)
    assert policy.decide(high, view) is Decision.ADMIT


# ---------------------------------------------------------------- properties


@given(
    current=st.floats(0, 1000),
    target=st.floats(0, 1000),
    max_change=st.floats(0.1, 100),
    steps=st.integers(1, 50),
)
def test_smooth_adjust_is_bounded_and_settles_without_overshoot(current, target, max_change, steps):
    for _ in range(steps):
        after = smooth_adjust(current, target, max_change)
        assert abs(after - current) <= max_change * (1 + 1e-9)
        assert min(current, target) - 1e-9 <= after <= max(current, target) + 1e-9
        assert abs(after - target) <= abs(current - target) + 1e-9
        current = after
    for _ in range(10_001):
        current = smooth_adjust(current, target, max_change)
    assert current == pytest.approx(target)


@dataclass(frozen=True)
class Watched(Collocation):
    """Remembers its quotas, its victims and what it promised."""

    quotas: list[tuple[float, float]] = field(default_factory=list, compare=False)
    victims: list[tuple[int, bool]] = field(default_factory=list, compare=False)
    promised: list[tuple[float, int]] = field(default_factory=list, compare=False)

    def limits(self, view):
        running = list(view.running())
        if len(running) > 1:
            ends = [self._predicted_blocks(r, view) for r in running]
            self.promised.append((sum(ends) / view.total_blocks, len(running)))
        limits = super().limits(view)
        state = view.policy_state
        if state.embedder is not None:
            self.quotas.append((view.now_s, state.llm_quota_blocks))
        return limits

    def preemption_mode(self, r, view):
        growth = view.n_decoding
        self.victims.append((self._remaining_tokens(r, view), view.free_blocks < growth))
        return PreemptionMode.RECOMPUTE


@settings(max_examples=40)
@runs
def test_quotas_change_slowly_and_stay_within_the_minimum_shares(rate, blocks, seed):
    policy = Watched(change_per_s=0.2)
    served(policy, mixed(rate, seed), blocks)
    for (before_s, before), (after_s, after) in itertools.pairwise(policy.quotas):
        # Adjusted once a period, by as much as the time since the last adjustment allows.
        max_change = 0.2 * blocks * (after_s - before_s + policy.period_s)
        assert abs(after - before) <= max_change + 1e-6
        assert 0.5 * blocks - 1e-6 <= after <= 0.99 * blocks + 1e-6


def test_quotas_settle_under_steady_input():
    """While only one queue is late, the quota goes to its bound, straight, and stays there."""
    policy = Watched(change_per_s=0.1)
    embeds = "embed(texts=64,tokens=512)"
    workload = load_source(f"mix(chat=synthetic(prompt=50,output=200):1,embed={embeds}:12)").make(
        rate_rps=40, requests=700, seed=1, slo=parse_slo("embed:e2e=0.5")
    )
    served(policy, workload, 800)
    late = [quota for now_s, quota in policy.quotas if 1 < now_s < workload.span_s]
    assert all(after <= before for before, after in itertools.pairwise(late))
    assert late[0] > 700
    assert late[-1] == pytest.approx(0.5 * 800)
    assert sum(quota == pytest.approx(400) for quota in late) > len(late) / 2


@dataclass(frozen=True)
class Compared(Collocation):
    """Checks each short cut of a decision against the whole."""

    checks: list[int] = field(default_factory=list, compare=False)

    def _urgent_slacks_s(self, view, state):
        slacks_s = super()._urgent_slacks_s(view, state)
        all_s = [self.slack_s(r, view) for r in view.running()]
        assert self.urgency_score(slacks_s) == self.urgency_score(all_s)
        self.checks.append(len(all_s) - len(slacks_s))
        return slacks_s

    def _lacking_at_most(self, r, view):
        upper_bound = super()._lacking_at_most(r, view)
        assert upper_bound >= self._lacking(r, view)
        return upper_bound


@pytest.mark.slow
@settings(max_examples=40)
@runs
def test_decision_shortcuts_change_no_decision(rate, blocks, seed):
    served(Compared(critical_s=seed % 7, period_s=0.1), mixed(rate, seed), blocks)


def test_urgency_leaves_out_requests_with_much_slack():
    policy = Compared(period_s=0.1)
    served(policy, mixed(4.0, 1), 2000)
    assert sum(policy.checks) > 0


@pytest.mark.slow
@settings(max_examples=60)
@runs
def test_eviction_spares_requests_about_to_finish(rate, blocks, seed):
    policy = Watched()
    served(policy, mixed(rate, seed), blocks)
    assert all(left >= policy.completion_tokens or full for left, full in policy.victims)


def test_eviction_occurs_under_pressure():
    policy = Watched()
    served(policy, mixed(15.0, 3), 250)
    assert policy.victims


@pytest.mark.slow
@settings(max_examples=60)
@runs
def test_admission_never_overcommits_when_the_forecast_is_right(rate, blocks, seed):
    """What all in the batch will hold at their ends fits; so nobody ever lacks a block."""
    policy = Watched(quota="static", default_llm_share=1.0, min_embed_share=0.0)
    workload = mixed(rate, seed)
    alike = dataclasses.replace(workload, priority=np.zeros(len(workload), dtype=np.int64))
    served(policy, alike, blocks)
    assert all(share <= 0.9 + 1e-9 for share, _ in policy.promised)
    assert not any(full for _, full in policy.victims)


@settings(max_examples=40)
@runs
def test_no_request_is_preempted_without_embeddings(rate, blocks, seed):
    workload = mixed(rate, seed)
    rows = np.flatnonzero(workload.request_type == RequestType.GENERATE)
    alone = Workload(
        workload.arrival_s[rows], workload.prompt_tokens[rows], workload.output_tokens[rows]
    )
    records = served(Collocation(), alone, blocks).records
    assert not records.preemptions_recompute.any()


@pytest.mark.parametrize("name", ["collocation", "collocation-open", "collocated-fcfs", "vllm"])
@settings(max_examples=20)
@runs
def test_no_request_waits_while_the_device_is_idle(name, rate, blocks, seed):
    """Work conservation: in the time between arrival and beginning somebody else is served."""
    records = served(SYSTEMS[name], mixed(rate, seed), blocks).records
    done = records.outcome == Outcome.FINISHED
    spans = sorted(zip(records.first_scheduled_s[done], records.finish_s[done], strict=True))
    merged: list[list[float]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1] + 1e-9:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    for arrival, begin in zip(
        records.arrival_s[done], records.first_scheduled_s[done], strict=True
    ):
        if begin > arrival + 1e-9:
            assert any(a <= arrival + 1e-9 and begin <= b + 1e-9 for a, b in merged)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"recompute_weight": -1.0}, "Collocation.recompute_weight must be from 0.0 to"),
        ({"epsilon_s": 0.0}, "Collocation.epsilon_s must be from 0.0001"),
        ({"defer_threshold_s": -1.0}, "Collocation.defer_threshold_s must be from 0.0"),
        ({"violation_weight": math.nan}, "Collocation.violation_weight must be from"),
        ({"counts": "guessed"}, "Collocation.counts must be one of reserved, current"),
        ({"completion_tokens": 1.5}, "completion_tokens must be a whole number"),
        (
            {"min_llm_share": 0.8, "min_embed_share": 0.3},
            r"min_llm_share \+ min_embed_share must be at most 1 but are 1.1",
        ),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters, problem):
    with pytest.raises(SloBenchError, match=problem):
        SYSTEMS["collocation"].with_parameters(**parameters)


# ---------------------------------------------------------------- memory over time (MemoryMonitor)


def test_memory_over_time_is_kv_and_activations_and_the_rest():
    workload = mixed(15.0, 3)
    result = served(SYSTEMS["collocation"], workload, 400)
    parts: dict[str, dict[float, float]] = {}
    for row in result.timeline.timeseries:
        assert row.metric == "memory"
        parts.setdefault(row.entity.partition(": ")[2], {})[row.time_s] = row.value
    assert set(parts) == {"KV", "embeddings", "free"}
    end_s = max(max(series) for series in parts.values())
    times_s = np.linspace(0, end_s, 97)
    shares = np.array([_held_at(series, times_s) for series in parts.values()])
    assert np.allclose(shares.sum(axis=0), 1.0, atol=2e-4)
    assert (shares >= 0).all()
    # A pass holds its blocks for its own time: the area over time is theirs.
    beside = embedder(model("bge-m3"), placement(400))
    alone = generated(
        (0.0, 512 * 32, 1), request_type=np.array([RequestType.EMBED]), num_inputs=np.array([32])
    )
    rows = served(SYSTEMS["vllm"], alone, 400).timeline.timeseries
    share = beside.blocks([(32, 512)]) / 400
    held = [r.value for r in rows if r.entity.endswith("embeddings")]
    assert held == [pytest.approx(share, abs=1e-4), 0.0]


def _held_at(values: dict[float, float], times_s: np.ndarray) -> np.ndarray:
    sample_times_s = np.array(sorted(values))
    positions = np.searchsorted(sample_times_s, times_s + 1e-9, side="right") - 1
    return np.array([values[sample_times_s[k]] for k in positions])


# ---------------------------------------------------------------- forecasts


def test_decaying_forecast_follows_a_burst_sooner_than_the_window():
    window, decay = LoadForecaster(10.0), DecayingForecaster(10.0)
    for tick in range(2000):
        for forecaster in (window, decay):
            forecaster.saw(tick / 20, blocks=3, texts=6)
    for forecaster in (window, decay):
        assert forecaster.blocks_within(100.0, 2.0) == pytest.approx(2 * 3 * 20, rel=0.02)
        assert forecaster.blocks_per_text() == 0.5
    for tick in range(40):  # ten times the load for two seconds
        for forecaster in (window, decay):
            forecaster.saw(100 + tick / 20, blocks=30, texts=60)
    assert decay.blocks_within(102.0, 1.0) < 600
    assert 60 < decay.blocks_within(102.0, 1.0) == pytest.approx(60 + 540 * 0.181, rel=0.03)
    for forecaster in (window, decay):
        assert forecaster.any
    assert window.blocks_within(112.5, 1.0) == 0.0
    assert 0 < decay.blocks_within(112.5, 1.0) < decay.blocks_within(112.5, 2.0)
    assert not DecayingForecaster(10.0).any
    assert DecayingForecaster(10.0).blocks_within(0.0, 1.0) == 0.0


def test_forecast_sum_stops_at_batches_starting_after_the_window():
    """Alg. 1, line 8: expected_start < future_window."""
    embedder_ = Queue(blocks_each=10, pass_s_each=0.5, n=6)
    policy = Collocation(forecast="queue", forecast_as="sum", **PLAIN)
    view = view_of(policy)
    view.policy_state.embedder = embedder_
    embedder_.policy_state = view.policy_state
    assert policy.embed_forecast(view, 10.0) == 60
    assert policy.embed_forecast(view, 1.2) == 30  # starts at 0, 0.5 and 1 s
    embedder_.now_s = 1.0  # a pass is in progress until then
    assert policy.embed_forecast(view, 1.2) == 10


@dataclass
class Queue:
    """An embedder with `n` waiting requests."""

    blocks_each: int
    pass_s_each: float
    n: int
    now_s: float = 0.0
    held_blocks: int = 0
    policy_state: Any = None

    def waiting(self, now_s):
        return [request(5, 1) for _ in range(self.n)]

    def blocks(self, batch):
        return self.blocks_each * len(batch)

    def pass_s(self, batch):
        return self.pass_s_each * len(batch)
