"""The page of a plan: which plans are on the front, and what the page shows."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.reports.pages.plan_page import (
    confirmed_lines,
    plan_rows,
    undominated,
    write_plan,
)
from slo_bench.tuner.planning.deployment_levels import Verdict
from slo_bench.tuner.planning.plan_search import PlanOptions, TargetLoad, plan_cheapest


def row(usd, ttft_s, spare, joules=None):
    return {
        "usd_per_hour": usd,
        "ttft_p99_s": ttft_s,
        "tpot_p99_s": 0.05,
        "spare": spare,
        "joules_per_output_token": joules,
    }


@pytest.mark.parametrize(
    ("rows", "front"),
    [
        ([row(1, 0.5, 0.1), row(2, 0.5, 0.1)], [True, False]),
        ([row(1, 0.5, 0.1), row(2, 0.4, 0.1)], [True, True]),
        ([row(1, 0.5, 0.1), row(2, 0.5, 0.2)], [True, True]),
        ([row(1, 0.5, 0.1), row(1, 0.5, 0.1)], [True, True]),
        ([row(1, 0.5, 0.1, 2.0), row(2, 0.5, 0.1, 1.0)], [True, True]),
        ([row(1, 0.5, 0.1), row(2, 0.5, 0.1, 1.0)], [True, False]),  # energy of one is not known
    ],
)
def test_undominated_plans_form_the_front(rows, front):
    assert undominated(rows) == front


def test_refuted_plan_just_below_its_target_does_not_read_as_at_it():
    below = Verdict(False, 0.98966, 0.984, 0.993, runs=5, requests=40_000)
    plan = SimpleNamespace(verdict=below, name="4 × vllm on b200")
    assert "the worst had 98.9 % in SLO" in confirmed_lines([plan], [plan])[-1]


@pytest.mark.slow
def test_plan_page_shows_every_plan_with_its_figures(tmp_path, opened):
    asked = Experiment(
        systems=["vllm"],
        slo="ttft=1,tpot=0.1",
        output_tokens="uniform(5,15)",
        parameters={"vllm": {"max_num_batched_tokens": 2048}},
        tp=1,
    )
    planned = plan_cheapest(asked, TargetLoad(1, plans=2), PlanOptions(kinds=("h100-80g", "l4")))
    text = write_plan(planned, asked, tmp_path / "plan.html").read_text("utf-8")
    for one in plan_rows(planned):
        assert f"{one['gpus']} × {one['gpu']}" in text
        assert f"{one['usd_per_hour']:.2f}" in text
        assert one["ttft_p99_s"] > 0
        known = one["gpu_power_mean_w"] is not None
        assert known is (one["gpu"] == "h100-80g")
        assert not known or one["gpu_power_mean_w"] <= one["gpu_power_limit_w"]
    assert planned.prices.title in text
    assert all(fact in text for fact in ("llama-3.1-8b", "sharegpt", "P(SLO): probability that"))
    assert "SLO: TTFT ≤ 1 s, TPOT ≤ 100 ms" in text
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text).group(1))
    plot = opened(data["figures"]["price-ttft_p99_s"]["views"][0]["only"], data)
    marked = [trace["text"] for trace in plot["data"] if trace["mode"] == "text"]
    assert sorted(mark.strip() for marks in marked for mark in marks) == [
        str(place) for place, _ in enumerate(planned.plans, 1)
    ]
    prices = [x for trace in plot["data"] if trace["mode"] != "text" for x in trace["x"]]
    told = [one["usd_per_hour"] for one in plan_rows(planned)]
    assert sorted(prices) == pytest.approx(told, rel=1e-3)
