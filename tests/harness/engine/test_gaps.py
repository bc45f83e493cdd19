"""Inter-token gaps: what is counted, and quantiles of weighted values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import Gaps
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.workloads.workload import Workload


def gaps(*pairs: tuple[float, int]) -> Gaps:
    return Gaps(np.array([g for g, _ in pairs]), np.array([n for _, n in pairs], dtype=np.int64))


def listed(g: Gaps) -> list[float]:
    return sorted(np.repeat(g.gap_s, g.count).round(9).tolist())


@pytest.mark.parametrize(
    ("q", "expected_s"), [(0.0, 1), (0.5, 1), (0.75, 1), (0.7501, 2), (0.875, 2), (0.99, 9), (1, 9)]
)
def test_quantiles_of_weighted_gaps(q, expected_s):
    # 1, 1, 1, 1, 1, 1, 2, 9
    assert gaps((9.0, 1), (1.0, 4), (2.0, 1), (1.0, 2)).quantile_s(q) == expected_s


def test_mean_of_weighted_gaps():
    assert gaps((9.0, 1), (1.0, 4), (2.0, 1), (1.0, 2)).mean_s() == 17 / 8


def test_figures_of_no_gaps_are_nan():
    assert math.isnan(gaps().quantile_s(0.5))
    assert math.isnan(gaps().mean_s())


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=20),
    st.floats(0.001, 1),
)
def test_quantile_is_the_inverted_distribution(pairs, q):
    g = gaps(*pairs)
    values = np.repeat(g.gap_s, g.count)
    quantile_s = g.quantile_s(q)
    # Sums of counts are exact; q times their sum may be off by rounding.
    assert (values <= quantile_s).mean() >= q - 1e-9
    assert (values < quantile_s).mean() <= q + 1e-9


def test_gaps_of_a_single_request_are_its_steps(serve_each_way, requests):
    served = serve_each_way(requests((0, 10, 5)), Vllm())
    assert listed(served.result.gaps) == [1, 1, 1, 1]


def test_one_token_has_no_gap(serve_each_way, requests):
    served = serve_each_way(requests((0, 10, 1), (3, 10, 1)), Vllm())
    assert not served.result.gaps.count.sum()


def test_a_prompt_beside_a_decode_lengthens_its_gap(serve_each_way, requests):
    # 0.01 s a token: the iteration that takes 100 prompt tokens along lasts 2.01 s.
    workload = requests((0, 10, 4), (1.5, 100, 1))
    served = serve_each_way(workload, Vllm(), per_token_s=0.01)
    assert listed(served.result.gaps) == [1.01, 1.01, 2.01]


def test_request_that_joins_a_batch_has_its_own_gaps(serve_each_way, requests):
    # The second's tokens come at 3, 4, 5: its first gap is as long as the first's.
    served = serve_each_way(requests((0, 10, 5), (1.5, 10, 3)), Vllm())
    assert listed(served.result.gaps) == [1] * 4 + [1] * 2


def test_stalled_decode_has_one_long_gap(serve_each_way, requests):
    # The first's second token waits for two prefills.
    served = serve_each_way(requests((0, 10, 3), (0.5, 10, 1), (0.7, 10, 2)), VllmV0(16))
    assert listed(served.result.gaps) == [1, 1, 3]


def test_preempted_request_has_one_long_gap(serve_each_way, requests):
    # The second is preempted with 3 tokens at 3 s and gives its fourth at 9 s.
    served = serve_each_way(requests((0, 30, 8), (0, 30, 4)), Vllm(), num_gpu_blocks=4)
    assert listed(served.result.gaps) == [1] * 9 + [6]


@pytest.mark.parametrize("policy", [Vllm(96), VllmV0(512)])
def test_gaps_add_up_to_the_time_between_first_and_last_tokens(serve, policy):
    rng = np.random.default_rng(5)
    n = 150
    workload = Workload(
        np.cumsum(rng.exponential(8.0, n)), rng.integers(1, 90, n), rng.integers(1, 60, n)
    )
    served = serve(workload, policy, per_token_s=0.01, num_gpu_blocks=24)
    records, g = served.records, served.result.gaps
    assert records.preemptions_recompute.sum() > 10
    assert g.count.sum() == (workload.output_tokens - 1).sum()
    between_s = (records.finish_s - records.first_token_s).sum()
    assert (g.gap_s * g.count).sum() == pytest.approx(between_s)
