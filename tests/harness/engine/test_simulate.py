"""One simulated cell: what is refused, what is counted, and what stays within bounds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.decisions import Limits, ReleaseReason, Timeout
from slo_bench.harness.core.policy import Policy, StaticPolicy
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.orca import Orca
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.workload import Workload

CACHED = System("vllm", Vllm(), prefix_cache=True)
SIMULATED = [name for name, stock in SYSTEMS.items() if not (stock.cluster or stock.sharing)]


@dataclass(frozen=True)
class Hasty(Policy):
    """Drops everybody on the spot."""

    def timeout(self, r, view):
        return Timeout(r.arrival_s, ReleaseReason.DROP)


@dataclass(frozen=True)
class Closed(Policy):
    """Lets nobody in."""

    def limits(self, view):
        return Limits(max_seqs=0)


def drawn(seed: int, n: int = 60, *, rate_rps: float = 0.3) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        np.cumsum(rng.exponential(1 / rate_rps, n)),
        rng.integers(1, 150, n),
        rng.integers(1, 40, n),
    )


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"overlong_requests": "ignore"},
            "overlong_requests must be one of error, reject, truncate but is 'ignore'",
        ),
        ({"instances": 0}, "instances must be at least 1 but is 0"),
        ({"num_gpu_blocks": 0}, "no memory is left for KV blocks"),
        ({"num_gpu_blocks": 1, "pp": 2}, "no memory is left for KV blocks"),
        ({"block_size": 24}, "block_size must be a power of two but is 24"),
    ],
)
def test_simulate_refuses_impossible_options(serve, requests, options, problem):
    with pytest.raises(SloBenchError, match=problem):
        serve(requests((0, 10, 1)), Vllm(), **options)


def test_unknown_router_is_refused_with_a_suggestion(serve, requests):
    with pytest.raises(UnknownNameError, match="unknown router 'roundrobin'; did you mean"):
        serve(requests((0, 10, 1)), Vllm(), router="roundrobin")


def test_simulate_of_embeddings_needs_an_embedder(serve, requests):
    with pytest.raises(SloBenchError, match="name the embedding model"):
        serve(requests((0, 10, 1), (0, 10, 1), request_type=np.array([0, 1])), Vllm())


def test_policy_that_admits_no_request_is_reported_as_stuck(serve_each_way, requests):
    with pytest.raises(SloBenchError, match=r"instance 0 is stuck at 2.000 s"):
        serve_each_way(requests((2, 10, 1)), Closed())


# ---------------------------------------------------------------- overlong_requests


def test_overlong_request_is_an_error_by_default(serve, requests):
    # Ten blocks hold 160 tokens.
    with pytest.raises(SloBenchError, match=r"2 of 3 .* request 1 has 150 prompt and 11 output"):
        serve(requests((0, 150, 10), (0, 150, 11), (0, 300, 1)), Vllm(), num_gpu_blocks=10)


def test_request_longer_than_the_context_is_an_error(serve, requests):
    options = {"context_tokens": 100}
    serve(requests((0, 90, 10)), Vllm(), **options)
    with pytest.raises(SloBenchError, match="100 fit the context"):
        serve(requests((0, 90, 11)), Vllm(), **options)


@pytest.mark.parametrize(
    ("policy", "fits"),
    [
        (Vllm(), 160),
        (Sarathi(watermark=0.2), 128),  # two blocks stay free at entry
        (VllmV0(watermark=0.2), 112),  # and one more for decodes
        (Orca(), 160),
        (Fifo(), 160),
    ],
    ids=lambda p: type(p).__name__,
)
def test_longest_request_that_fits_the_kv_cache_is_served(serve_each_way, requests, policy, fits):
    """The longest request that is let in gets through; one token more is refused."""
    for prompt in (1, fits // 2, fits - 1):
        workload = requests((0, prompt, fits - prompt), (0, prompt, fits - prompt))
        records = serve_each_way(workload, policy, num_gpu_blocks=10).records
        assert (records.outcome == Outcome.FINISHED).all()
        longer = requests((0, prompt, fits - prompt + 1))
        with pytest.raises(SloBenchError, match=f"{fits} fit"):
            serve_each_way(longer, policy, num_gpu_blocks=10)


@pytest.mark.parametrize(("policy", "refused"), [(Vllm(), False), (Orca(), True), (Fifo(), True)])
def test_reserving_policy_counts_the_maximum_output_tokens(serve, requests, policy, refused):
    workload = requests((0, 100, 10), max_output_tokens=[61])
    if refused:
        with pytest.raises(SloBenchError, match="100 prompt and 61 maximum output tokens"):
            serve(workload, policy, num_gpu_blocks=10)
    else:
        serve(workload, policy, num_gpu_blocks=10)


def test_overlong_requests_reject_records_them_as_rejected(serve_each_way, requests):
    workload = requests((0, 150, 10), (1, 150, 11), (2, 300, 1), (3, 10, 2))
    result = serve_each_way(workload, Vllm(), num_gpu_blocks=10, overlong_requests="reject").result
    records = result.records
    finished, rejected = Outcome.FINISHED, Outcome.REJECTED
    assert records.outcome.tolist() == [finished, rejected, rejected, finished]
    assert records.arrival_s.tolist() == [0, 1, 2, 3]
    assert np.isnan(records.finish_s[1:3]).all()
    assert records.instance.tolist() == [0, -1, -1, 0]
    assert records.output_tokens.tolist() == [10, 0, 0, 2]


def test_overlong_requests_truncate_shortens_prompt_and_answer(serve, requests):
    workload = requests((0, 150, 10), (20, 150, 30), (60, 300, 1), (80, 5, 400))
    served = serve(workload, Vllm(), num_gpu_blocks=10, overlong_requests="truncate", leaps=False)
    assert served.records.output_tokens.tolist() == [10, 30, 1, 159]
    prompts = [n for _, _, chunks in served.log for _, n in chunks]
    assert prompts == [150, 130, 159, 1]
    assert (served.records.outcome == Outcome.FINISHED).all()


def test_truncate_where_no_token_fits_is_an_error(serve, requests):
    with pytest.raises(SloBenchError, match="0 tokens fit the KV cache"):
        serve(requests((0, 100, 5)), VllmV0(), num_gpu_blocks=1, overlong_requests="truncate")


def test_truncated_prompt_shares_no_prefix(serve_each_way, requests):
    # The third is cut by 40 tokens in front: its blocks no longer begin as the first's do.
    blocks = [tuple(range(1, 9)), tuple(range(1, 9)), tuple(range(1, 13))]
    workload = requests((0, 128, 1), (10, 130, 1), (20, 199, 1), prefix_blocks=blocks)
    served = serve_each_way(workload, CACHED, num_gpu_blocks=10, overlong_requests="truncate")
    assert served.records.cached_tokens.tolist() == [0, 128, 0]


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("name", [n for n in SIMULATED if isinstance(SYSTEMS[n].policy, Policy)])
@pytest.mark.parametrize("instances", [1, 2])
def test_prefill_and_decode_tokens_are_conserved(serve, name, instances):
    workload = drawn(1)
    result = serve(workload, SYSTEMS[name], instances=instances, num_gpu_blocks=300).result
    assert not result.records.preemptions_recompute.any()
    totals = result.totals
    assert totals.prefill_tokens == workload.prompt_tokens.sum()
    assert totals.decode_tokens == (workload.output_tokens - 1).sum()
    assert totals.padded_tokens == 0
    assert result.gaps.count.sum() == totals.decode_tokens


def test_cached_tokens_are_not_computed(serve):
    rng = np.random.default_rng(8)
    n = 60
    prompts = rng.integers(1, 200, n)
    blocks = [tuple(range(1, p // 16 + 1)) for p in prompts]  # all begin alike
    workload = Workload(np.arange(n) * 3.0, prompts, rng.integers(1, 9, n), prefix_blocks=blocks)
    result = serve(workload, CACHED).result
    cached = result.records.cached_tokens
    assert (cached < prompts).all()
    assert cached.sum() > 0.5 * prompts.sum()
    assert result.totals.prefill_tokens == prompts.sum() - cached.sum()
    assert (cached[1:] % 16 == 0).all()


def test_system_without_prefix_cache_has_no_cached_tokens(serve, requests):
    workload = requests((0, 40, 1), (5, 40, 1), prefix_blocks=[(1, 2), (1, 2)])
    assert not serve(workload, System("v", Vllm())).records.cached_tokens.any()
    assert serve(workload, CACHED).records.cached_tokens.tolist() == [0, 32]


def test_recomputed_tokens_are_counted_again(serve, requests):
    # The second is recomputed with three tokens out, and decodes on from there.
    served = serve(requests((0, 30, 8), (0, 30, 5)), Vllm(), num_gpu_blocks=4)
    assert served.result.totals.prefill_tokens == 30 + 30 + 33
    assert served.result.totals.decode_tokens == 7 + (2 + 1)


@pytest.mark.parametrize("leaps", [True, False])
def test_totals_of_one_request(serve, requests, leaps):
    # 30 tokens take 2 blocks for 3 s (31 and 32 tokens too), and 3 blocks for 2 s.
    totals = serve(requests((4, 30, 5)), Vllm(), num_gpu_blocks=8, leaps=leaps).result.totals
    assert totals.makespan_s == 9
    assert totals.busy_s == 5
    assert totals.steps == 5
    assert totals.kv_cache_usage_peak == 3 / 8
    assert totals.kv_cache_usage_mean == pytest.approx((3 * 2 + 2 * 3) / (9 * 8), rel=0.1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(SIMULATED),
    instances=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
)
def test_utilisation_shares_and_times_stay_within_bounds(serve, seed, name, instances, pp):
    workload = drawn(seed)
    result = serve(
        workload,
        SYSTEMS[name],
        instances=instances,
        pp=pp,
        num_gpu_blocks=26 * pp,
        num_cpu_blocks=20 * pp,
    ).result
    records, totals, timeline = result.records, result.totals, result.timeline
    assert (records.outcome == Outcome.FINISHED).all()
    assert (records.first_scheduled_s >= records.arrival_s).all()
    assert (records.first_token_s > records.first_scheduled_s).all()
    assert (records.finish_s >= records.first_token_s).all()
    assert totals.makespan_s == records.finish_s.max()
    assert 0 < totals.kv_cache_usage_mean <= totals.kv_cache_usage_peak <= 1
    assert totals.busy_s <= instances * pp * totals.makespan_s * (1 + 1e-12)
    assert (np.diff(timeline.time_s) > 0).all()
    assert ((timeline.kv_cache_usage >= 0) & (timeline.kv_cache_usage <= 1)).all()
    assert (timeline.waiting + timeline.running <= len(workload)).all()
    assert timeline.waiting.min() >= 0
    assert timeline.running.min() >= 0
    assert timeline.running.max() > 0
    assert timeline.running[-1] == timeline.waiting[-1] == timeline.kv_cache_usage[-1] == 0


def test_timeline_by_hand(serve, requests):
    # The span is 300 s: a sample a second. One runs, then one waits while the other runs.
    workload = requests((0, 30, 4), (1.5, 10, 2), (300, 10, 1))
    timeline = serve(workload, Vllm(max_num_seqs=1), num_gpu_blocks=10).result.timeline
    state = dict(
        zip(
            timeline.time_s.tolist(),
            zip(timeline.waiting.tolist(), timeline.running.tolist(), strict=True),
            strict=True,
        )
    )
    assert state[1] == (0, 1)
    assert state[3] == (1, 1)
    assert state[5] == (0, 1)
    assert state[301] == (0, 0)
    share = dict(zip(timeline.time_s.tolist(), timeline.kv_cache_usage.tolist(), strict=True))
    assert share[1] == 0.2
    assert share[301] == 0


def test_simulation_of_the_same_input_repeats_exactly(serve):
    first, second = (
        serve(drawn(3), SYSTEMS["sglang"], num_gpu_blocks=24, instances=2).records for _ in range(2)
    )
    for name in (
        "first_scheduled_s",
        "first_token_s",
        "finish_s",
        "instance",
        "preemptions_recompute",
    ):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("columns", [{}, {"concurrency": 3}])
@pytest.mark.parametrize("instances", [1, 2])
def test_progress_reaches_the_number_of_requests(serve, columns, instances):
    reports = []
    workload = drawn(3)
    if columns:
        workload = Workload(
            workload.arrival_s, workload.prompt_tokens, workload.output_tokens, **columns
        )
    serve(
        workload, Vllm(), instances=instances, progress=lambda n, now_s: reports.append((n, now_s))
    )
    ended = [n for n, _ in reports]
    assert ended[-1] == 60
    assert all(a <= b for a, b in itertools.pairwise(ended))


# ---------------------------------------------------------------- edges


def empty() -> Workload:
    nothing = np.array([])
    return Workload(nothing, nothing.astype(int), nothing.astype(int))


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"pp": 2}])
def test_empty_workload_gives_empty_records(serve, name, options):
    result = serve(empty(), SYSTEMS[name], **options).result
    assert len(result.records) == 0
    assert result.totals.makespan_s == result.totals.busy_s == 0
    assert np.isnan(result.gaps.quantile_s(0.99))


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"pp": 2}])
def test_workload_of_one_token_is_served(serve, requests, name, options):
    result = serve(requests((0, 1, 1)), SYSTEMS[name], **options).result
    assert result.records.finish_s.tolist() == [1]
    assert np.isnan(result.records.tpot_s).all()
    assert result.totals.prefill_tokens == 1
    assert result.totals.decode_tokens == 0


@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"pp": 2}])
def test_policy_that_drops_every_request_gives_only_dropped_records(
    serve_each_way, requests, options
):
    result = serve_each_way(requests((0, 10, 1), (5, 10, 2)), Hasty(), **options).result
    assert (result.records.outcome == Outcome.DROPPED).all()
    assert np.isnan(result.records.finish_s).all()
    assert result.totals.makespan_s == 0
    assert result.totals.kv_cache_usage_peak == 0


def test_empty_records_are_unfinished_and_unplaced():
    from slo_bench.harness.core.records.request_records import Records

    records = Records.empty(2)
    assert (records.outcome == Outcome.UNFINISHED).all()
    assert (records.instance == -1).all()
    for column in (records.ttft_s, records.e2e_s, records.tpot_s):
        assert np.isnan(column).all()


def test_stock_static_systems_have_static_policies():
    names = {n for n, s in SYSTEMS.items() if isinstance(s.policy, StaticPolicy)}
    assert names >= {"fifo", "sjf", "ljf"}
