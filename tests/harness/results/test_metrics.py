import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.core.records.request_records import (
    Gaps,
    Outcome,
    Records,
    Result,
    Timeline,
    Totals,
)
from slo_bench.harness.results.metrics import Hardware, cell_metrics
from slo_bench.harness.results.request_figures import Requests, summarise
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

NAN = math.nan
ONE_GPU = Hardware(gpus=1, parameters=1e9, peak_flops=1e12, usd_per_gpu_hour=2.0)


def floats(*values):
    return np.array(values, dtype=np.float64)


def ints(*values):
    return np.array(values, dtype=np.int64)


def records(arrival, first, finish, tokens, outcome=None, **more):
    n = len(arrival)
    columns = {
        "arrival_s": floats(*arrival),
        "first_scheduled_s": floats(*first),
        "first_token_s": floats(*first),
        "finish_s": floats(*finish),
        "output_tokens": ints(*tokens),
        "outcome": ints(*(outcome or [Outcome.FINISHED] * n)),
    }
    return dataclasses.replace(Records.empty(n), **(columns | more))


def result(request_records, **totals):
    figures = {
        "makespan_s": 10.0,
        "busy_s": 5.0,
        "steps": 7,
        "prefill_tokens": 300,
        "decode_tokens": 200,
        "padded_tokens": 0,
        "kv_cache_usage_peak": 0.5,
        "kv_cache_usage_mean": 0.25,
    } | totals
    nothing = Timeline(floats(), ints(), ints(), floats())
    return Result(request_records, Gaps(floats(0.1, 0.2), ints(99, 1)), nothing, Totals(**figures))


def workload(arrival, *, tokens=None, **columns):
    n = len(arrival)
    return Workload(
        arrival_s=floats(*arrival),
        prompt_tokens=np.full(n, 100),
        output_tokens=ints(*(tokens or [11] * n)),
        **columns,
    )


def metrics(w, r, **options):
    requests = Requests.of(w, r.records, judge(w, r.records))
    return cell_metrics(requests, w, r, ONE_GPU, **options)


def test_each_slo_bound_is_judged_by_its_own_time():
    arrival = [0.0, 1.0, 2.0, 3.0, 4.0]
    w = workload(
        arrival,
        ttft_slo_s=floats(0.5),
        tpot_slo_s=floats(0.2),
        e2e_slo_s=floats(3.0),
        deadline_s=floats(6.0),
    )
    #         meets  late first  slow tokens  long          past the deadline
    first = [0.5, 1.6, 2.5, 3.5, 4.5]
    finish = [2.5, 2.6, 4.9, 6.0, 6.4]
    tokens = [11, 11, 11, 51, 51]
    e2e_late = dataclasses.replace(w, e2e_slo_s=floats(3.0, 3.0, 3.0, 2.9, 3.0))
    judged = judge(e2e_late, records(arrival, first, finish, tokens))
    assert judged.met.tolist() == [True, False, False, False, False]
    assert judged.late["ttft"].tolist() == [False, True, False, False, False]
    assert judged.late["tpot"].tolist() == [False, False, True, False, False]
    assert judged.late["e2e"].tolist() == [False, False, False, True, False]
    assert judged.late["deadline"].tolist() == [False, False, False, False, True]


def test_request_of_one_token_meets_any_tpot_bound():
    w = workload([0.0], tokens=[1], tpot_slo_s=floats(1e-6))
    assert judge(w, records([0.0], [5.0], [5.0], [1])).met.tolist() == [True]


def test_slo_bound_missed_only_by_rounding_is_met():
    # 10.3 - 9.3 is 1.0000000000000018 in binary.
    w = workload([9.3], ttft_slo_s=floats(1.0))
    assert judge(w, records([9.3], [10.3], [11.0], [11])).met.tolist() == [True]
    late = judge(w, records([9.3], [10.3 + 1e-6], [11.0], [11]))
    assert late.met.tolist() == [False]


def test_attainment_goodput_and_throughput_by_hand():
    # Four requests arrive within three seconds, the last answer ends five seconds later: one in
    # time, one late, one rejected, one never finished.
    w = workload([1.0, 2.0, 3.0, 4.0], ttft_slo_s=floats(1.0))
    r = records(
        [1.0, 2.0, 3.0, 4.0],
        [1.5, 4.0, NAN, 8.5],
        [6.0, 9.0, NAN, NAN],
        [11, 11, 0, 3],
        [Outcome.FINISHED, Outcome.FINISHED, Outcome.REJECTED, Outcome.UNFINISHED],
    )
    row = metrics(w, result(r))
    assert row["requests"] == 4
    assert row["attainment"] == 0.25
    assert (row["arrival_window_s"], row["drain_s"], row["makespan_s"]) == (3.0, 5.0, 8.0)
    assert row["goodput_rps"] == 1 / 3
    assert row["throughput_rps"] == 2 / 8
    assert row["output_tokens_per_s"] == 25 / 8
    assert (row["finished"], row["rejected"], row["dropped"], row["unfinished"]) == (2, 1, 0, 1)
    assert (row["missed_ttft"], row["missed_tpot"]) == (1, 0)
    assert row["ttft_p50_s"] == 2.0  # of 0.5, 2 and 4.5: the unfinished one did begin
    assert row["e2e_mean_s"] == 6.0
    assert row["tpot_mean_s"] == pytest.approx((4.5 / 10 + 5.0 / 10) / 2)


def test_goodput_does_not_depend_on_the_drain():
    w = workload([0.0, 1.0, 2.0])
    rows = [
        metrics(w, result(records([0.0, 1.0, 2.0], [0.5, 1.5, end], [1.0, 2.0, end], [11] * 3)))
        for end in (3.0, 300.0)
    ]
    assert [row["goodput_rps"] for row in rows] == [1.5, 1.5]
    assert [row["throughput_rps"] for row in rows] == [1.0, 0.01]


@pytest.mark.parametrize("concurrency", [None, 2])
def test_goodput_where_no_rate_is_offered_divides_by_the_makespan(concurrency):
    arrival = [0.0, 0.0, 0.0] if concurrency is None else [0.0, 0.0, 4.0]
    w = workload(arrival, concurrency=concurrency)
    row = metrics(w, result(records(arrival, [1.0, 2.0, 5.0], [4.0, 5.0, 6.0], [11] * 3)))
    assert row["makespan_s"] == 6.0
    assert row["goodput_rps"] == row["throughput_rps"] == 0.5


def test_weighted_turnaround_by_hand():
    # Waited 0, 3 and 4 s and was then served for 2, 1 and 2 s; a fourth never finished.
    w = workload([0.0, 0.0, 1.0, 1.0])
    r = records(
        [0.0, 0.0, 1.0, 1.0],
        [0.5, 3.5, 5.5, 6.0],
        [2.0, 4.0, 7.0, NAN],
        [11, 11, 11, 3],
        [Outcome.FINISHED] * 3 + [Outcome.UNFINISHED],
        first_scheduled_s=floats(0.0, 3.0, 5.0, 6.0),
    )
    row = metrics(w, result(r))
    assert row["weighted_turnaround"] == pytest.approx((1 + 4 + 3) / 3)
    unknown = dataclasses.replace(r, first_scheduled_s=np.full(4, NAN))  # a server does not say
    assert math.isnan(metrics(w, result(unknown))["weighted_turnaround"])


def test_utilisation_cost_and_gaps_by_hand():
    w = workload([0.0, 1.0])
    r = records([0.0, 1.0], [1.0, 2.0], [3.0, 4.0], [11, 11], cached_tokens=ints(50, 0))
    row = metrics(w, result(r))
    assert row["mfu"] == pytest.approx(2 * 1e9 * 500 / (1e12 * 10))
    assert row["kv_cache_usage_mean"] == 0.25
    assert row["kv_cache_usage_peak"] == 0.5
    assert row["prefix_hit_rate"] == 0.25
    assert row["cost_usd_per_hour"] == 2.0
    assert row["itl_mean_s"] == pytest.approx(0.101)
    assert row["itl_p99_s"] == 0.1


def test_warmup_leaves_early_requests_out():
    arrival = [0.0, 1.0, 5.0, 6.0]
    w = workload(arrival, ttft_slo_s=floats(1.0))
    r = records(arrival, [3.0, 4.0, 5.5, 9.0], [5.0, 6.0, 7.0, 11.0], [11] * 4)
    row = metrics(w, result(r), warmup_s=5.0)
    assert (row["requests"], row["attainment"]) == (2, 0.5)
    assert (row["arrival_window_s"], row["drain_s"]) == (1.0, 5.0)
    between = metrics(w, result(r), warmup_s=4.0)  # the window begins where the warm-up ends
    assert (between["requests"], between["arrival_window_s"]) == (2, 2.0)
    with pytest.raises(SloBenchError, match="leaves no request to measure"):
        metrics(w, result(r), warmup_s=7.0)


def test_follow_up_of_a_rejected_request_is_a_miss():
    w = workload([0.0, 1.0], follows=ints(-1, 0))
    r = records([0.0, NAN], [NAN, NAN], [NAN, NAN], [0, 0], [Outcome.REJECTED, Outcome.UNFINISHED])
    assert metrics(w, result(r))["attainment"] == 0.0
    assert metrics(w, result(r), warmup_s=0.5)["requests"] == 1


def test_classes_have_their_own_attainment():
    w = workload(
        [0.0, 1.0, 2.0],
        ttft_slo_s=floats(1.0),
        class_index=ints(0, 1, 1),
        class_names=("chat", "batch", "unused"),
    )
    r = records([0.0, 1.0, 2.0], [0.5, 1.5, 9.0], [2.0, 3.0, 10.0], [11] * 3)
    row = metrics(w, result(r))
    assert (row["attainment_chat"], row["attainment_batch"]) == (1.0, 0.5)
    assert row["attainment_spread"] == 0.5
    assert "attainment_unused" not in row
    assert row["ttft_p99_s_chat"] == 0.5
    assert row["ttft_p99_s_batch"] == pytest.approx(0.5 + 0.99 * 6.5)
    assert row["tpot_p99_s_chat"] == pytest.approx(0.15)
    assert "attainment_spread" not in metrics(workload([0.0, 1.0, 2.0]), result(r))


def test_closed_loop_has_figures_without_requests_that_start_together():
    # Three clients: the fourth request comes 8 ms after the engine has ended the first answer, and
    # before that one's last token has passed the front end, at 4 s.
    arrival = [0.0, 0.0, 0.1, 3.999, 5.0]
    r = records(arrival, [1.0, 3.0, 3.5, 4.5, 5.25], [4.0, 5.0, 6.0, 7.0, 8.0], [11] * 5)
    w = workload(arrival, ttft_slo_s=floats(2.0), concurrency=3)
    row = metrics(w, result(r))
    assert row["started_together"] == 3
    assert (row["attainment"], row["attainment_after_start"]) == (0.6, 1.0)
    assert row["ttft_p99_s_after_start"] == pytest.approx(0.25 + 0.99 * 0.251)
    left_out = metrics(w, result(r), warmup_s=1.0)
    assert "started_together" not in left_out
    assert left_out["attainment"] == 1.0
    for clients in (None, 1):
        other = metrics(dataclasses.replace(w, concurrency=clients), result(r))
        assert "started_together" not in other


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.FAILED])
def test_clients_whose_requests_are_refused_begin_with_others(outcome):
    # Two clients; one whose request is refused sends another one at once. The last row is one that
    # a simulated door refuses: it has no arrival of its own.
    arrival, served = [0.0, 0.0, 0.001, 4.0, 5.0, 0.0], Outcome.FINISHED
    first, finish = [NAN, 1.0, 3.0, 4.25, 5.25, NAN], [NAN, 4.0, 5.0, 6.0, 7.0, NAN]
    outcomes = [outcome, served, served, served, served, Outcome.REJECTED]
    r = records(arrival, first, finish, [0, 11, 11, 11, 11, 0], outcomes)
    w = workload([0.0] * 6, ttft_slo_s=floats(2.0), concurrency=2)
    row = metrics(w, result(r))
    assert row["started_together"] == 4
    assert row["ttft_p99_s_after_start"] == pytest.approx(0.25)
    assert "started_together" not in metrics(dataclasses.replace(w, concurrency=5), result(r))


def test_figures_of_no_values_are_nan():
    nothing = summarise(floats(NAN, NAN))
    assert nothing.pop("count") == 0
    assert all(math.isnan(value) for value in nothing.values())


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0, 100))
def test_attainment_grows_with_the_bound(ttfts, bound):
    n = len(ttfts)
    r = records([0.0] * n, ttfts, [200.0] * n, [11] * n)

    def share(ttft_slo_s):
        w = workload([0.0] * n, ttft_slo_s=floats(ttft_slo_s))
        return metrics(w, result(r))["attainment"]

    assert share(bound) <= share(bound + 1)
    assert share(bound) == pytest.approx(sum(t <= bound + 1e-9 for t in ttfts) / n)
    assert share(101) == 1.0
