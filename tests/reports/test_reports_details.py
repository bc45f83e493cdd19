"""Request files to aggregates, by requests small enough to count."""

import numpy as np
import pandas as pd
import pytest

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.details import (
    TIMELINE_POINTS,
    SloRange,
    attainment_over_time,
    distribution,
    dollars_per_million,
    level_details,
    timeline_means,
)
from slo_bench.reports.figures.levels import combine

NAN = float("nan")
COLUMNS = [
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "outcome",
    "output_tokens",
    "slo_met",
]
REQUESTS = [
    # arrival, scheduled, first, finish, outcome, tokens, met; bounds: TTFT 1 s, TPOT 0.1 s
    (0.0, 0.0, 0.5, 1.5, "finished", 21, 1),
    (0.0, 2.0, 3.0, 4.0, "finished", 21, 0),  # TTFT
    (0.0, 0.0, 0.5, 5.5, "finished", 11, 0),  # TPOT
    (0.0, 1.0, 3.0, 5.0, "finished", 11, 0),  # both
    (0.0, 0.0, 0.5, 0.5, "finished", 1, 0),  # neither: end to end or deadline
    (0.0, NAN, NAN, NAN, "rejected", 0, 0),
    (0.0, NAN, NAN, NAN, "dropped", 0, 0),
    (0.0, 1.0, 2.0, NAN, "unfinished", 3, 0),
    (0.0, NAN, NAN, NAN, "cancelled", 0, 0),
]


def test_attainment_over_time_leaves_out_missing_arrivals():
    arrival_s = np.append(np.arange(40.0), [NAN] * 10)
    curve = attainment_over_time(arrival_s, np.ones(50, dtype=bool))
    assert curve.share.tolist() == [1.0, 1.0]
    assert not len(attainment_over_time(np.zeros(50), np.ones(50, dtype=bool)).time_s)


@pytest.fixture
def detail(make_run):
    """The one level of a run whose only cell holds REQUESTS."""
    folder = make_run(
        systems=["vllm"],
        rates=[2.0],
        seeds=1,
        makespan_s=3600.0,
        requests=len(REQUESTS),
        cost_usd_per_hour=4.2,
    )
    frame = pd.DataFrame(REQUESTS, columns=COLUMNS).assign(
        ttft_slo_s=1.0, tpot_slo_s=0.1, e2e_slo_s=np.inf, deadline_s=NAN
    )
    frame.to_csv(folder / "requests/000.csv.gz", index=False)
    runs = read_runs([folder])
    (only,) = level_details(runs, combine(runs))
    return only


def test_embeddings_have_no_first_token_and_count_in_no_distribution(make_run):
    for name, kind, share in (("without", None, 0.5), ("with", [0.0, 1.0], 1.0)):
        folder = make_run(name, systems=["vllm"], rates=[2.0], seeds=1, requests=2)
        frame = pd.DataFrame(REQUESTS[:1] * 2, columns=COLUMNS).assign(
            ttft_slo_s=1.0, tpot_slo_s=0.1, e2e_slo_s=np.inf, deadline_s=NAN
        )
        frame.loc[1, ["first_token_s", "output_tokens"]] = [NAN, 0]
        if kind is not None:
            frame = frame.assign(request_type=kind)
        frame.to_csv(folder / "requests/000.csv.gz", index=False)
        runs = read_runs([folder])
        (only,) = level_details(runs, combine(runs))
        assert only.ttft.share[-1] == share
        assert only.requests == 2


def test_every_miss_has_one_cause(detail):
    assert detail.missed == {
        "rejected": 1,
        "dropped": 1,
        "unfinished": 2,
        "TTFT": 1,
        "TTFT and TPOT": 1,
        "TPOT": 1,
        "end to end or deadline": 1,
    }
    assert detail.requests == len(REQUESTS)


def test_missed_time_is_divided_by_phase(detail):
    # Waiting 2, 0, 1, 0; prefill 1, 0.5, 2, 0.5; decode 1, 5, 2, 0.
    assert detail.missed_phase_s == pytest.approx(
        {"waiting": 0.75, "prefill": 1.0, "transfer": 0.0, "decode": 2.0}
    )


def test_latency_distributions_end_at_the_share_that_finished(detail):
    assert detail.ttft.share[-1] == pytest.approx(6 / 9)
    assert detail.ttft.value_s[-1] == 3.0
    # Of the requests that could have a TPOT (all but the one of one token), four of eight do.
    assert detail.tpot.share[-1] == pytest.approx(3 / 8 + 1 / 8)
    assert detail.tpot.value_s[-1] == pytest.approx(0.5)


def test_detail_has_slo_bounds_and_cost(detail):
    assert detail.bounds == {"ttft": SloRange(1.0, 1.0), "tpot": SloRange(0.1, 0.1)}
    assert detail.cost == pytest.approx(4.2 / 21 * 1e6)


def test_cost_without_a_token_in_slo_is_infinite():
    assert dollars_per_million(1.0, 0.0) == float("inf")
    assert dollars_per_million(2.0, 1e6) == 2.0


def test_details_leave_out_warmup_requests(make_run):
    folder = make_run(systems=["vllm"], rates=[2.0], seeds=1, requests=50)
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": str})
    cells["requests"] = 40
    cells.to_csv(folder / "cells.csv", index=False)
    runs = read_runs([folder])
    (only,) = level_details(runs, combine(runs))
    assert only.requests == 40


def test_distribution_of_known_values():
    values = np.arange(1.0, 101.0)
    curve = distribution(values[::-1].copy())
    assert curve.value_s[curve.share == 0.5] == [50.0]
    assert (curve.value_s[0], curve.value_s[-1]) == (1.0, 100.0)
    assert (np.diff(curve.value_s) >= 0).all()
    assert len(curve.value_s) < 100
    assert len(distribution(np.array([NAN])).value_s) == 0


def test_long_timeline_is_shortened_to_means():
    n = 10 * TIMELINE_POINTS
    frame = pd.DataFrame(
        {
            "time_s": np.arange(n) * 1.0,
            "waiting": np.arange(n) % 2,
            "running": 3,
            "kv_cache_usage": 0.5,
        }
    )
    means = timeline_means(frame)
    assert len(means.time_s) == TIMELINE_POINTS
    assert means.waiting.mean() == pytest.approx(0.5)
    assert set(means.running) == {3.0}


def test_run_without_request_records_has_timelines(make_run):
    folder = make_run(systems=["vllm"], rates=[2.0], seeds=1, requests=50)
    for file in (folder / "requests").iterdir():
        file.unlink()
    (folder / "requests").rmdir()
    runs = read_runs([folder])
    (only,) = level_details(runs, combine(runs))
    assert only.requests == 0
    assert len(only.timeline.time_s) == TIMELINE_POINTS
