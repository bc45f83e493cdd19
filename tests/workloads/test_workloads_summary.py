import numpy as np
import pytest

from slo_bench.workloads.source import load_source
from slo_bench.workloads.summary import arrival_figures, prefix_figures, summarise
from slo_bench.workloads.workload import Workload


def test_workload_figures_by_hand():
    workload = Workload(
        np.array([0.0, 1.0, 2.0, 3.0]),
        np.array([10, 20, 30, 40]),
        np.array([1, 1, 1, 5]),
        class_index=np.array([0, 0, 0, 1]),
        class_names=("a", "b"),
    )
    summary = summarise(workload)
    assert summary.requests == 4
    assert summary.prompt_tokens.mean == 25
    assert summary.prompt_tokens.quantiles[0.5] == 25
    assert (summary.output_tokens.min, summary.output_tokens.max) == (1, 5)
    assert summary.arrivals.rate_rps == 1
    assert summary.arrivals.gap_cv == 0
    assert [(g.name, g.requests, g.mean_prompt_tokens) for g in summary.classes] == [
        ("a", 3, 20),
        ("b", 1, 40),
    ]
    assert summary.models == ()
    assert summary.prefixes is None


def test_arrival_figures_of_poisson_and_bursts():
    calm = load_source("alpaca").make(rate_rps=10, requests=50_000)
    wild = load_source("alpaca", arrivals="gamma(cv=3)").make(rate_rps=10, requests=50_000)
    calm_figures, wild_figures = (arrival_figures(w.arrival_s) for w in (calm, wild))
    assert calm_figures.gap_cv == pytest.approx(1, abs=0.03)
    assert all(d == pytest.approx(1, abs=0.2) for d in calm_figures.dispersion.values())
    assert wild_figures.gap_cv == pytest.approx(3, abs=0.3)
    assert wild_figures.dispersion[10.0] > 4


def test_arrival_figures_of_one_moment_are_none():
    assert arrival_figures(np.zeros(5)) is None
    assert arrival_figures(np.zeros(1)) is None


def test_prefix_hits_by_hand():
    workload = Workload(
        np.zeros(3),
        np.array([10, 10, 10]),
        np.array([1, 1, 1]),
        prefix_blocks=[(1, 2), (1, 3), (9, 1)],
        prefix_block_size=4,
    )
    figures = prefix_figures(workload)
    assert figures.distinct_blocks == 4
    assert figures.token_hit_share == pytest.approx(4 / 30)
    assert figures.request_hit_share == pytest.approx(1 / 3)
