"""Power of GPUs, and joules and dollars per token and request of a run."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from slo_bench.harness.core.records.request_records import Totals
from slo_bench.harness.results.energy import Energy, unit_costs
from slo_bench.predictors.power import PowerModel, power_model
from slo_bench.predictors.specs import gpu

HALF = PowerModel(limit_w=1000.0, constant=0.1, bandwidth=0.4, compute=0.5)


def test_watts_grow_with_utilisation_up_to_the_limit():
    assert HALF.watts(0.0, 0.0) == pytest.approx(100)
    assert HALF.watts(0.5, 0.25) == pytest.approx(550)
    assert HALF.watts(1.0, 1.0) == 1000
    for name in ("h100-80g", "b200"):
        power = power_model(gpu(name))
        assert power is not None
        assert power.limit_w == gpu(name).power_w
        assert power.watts(0.3, 0.01) < power.watts(0.3, 0.1) <= power.limit_w
    assert power_model(gpu("a100-80g")) is None


def test_mean_power_by_hand():
    """Two GPUs compute for half of 10 s: 50 steps of 8 GB weights and half of 4 GB of KV."""
    energy = Energy(HALF, weight_bytes=8e9, kv_bytes=4e9, bandwidth=1e11)
    totals = Totals(10.0, 5.0, 50, 0, 0, 0, 1.0, 0.5, gpu_busy_s=10.0)
    # 500 GB in 10 GPU seconds are 0.5 of the bandwidth, 2.5e13 operations 0.25 of the peak.
    assert energy.mean_w(totals, 2.5e13, 1e13) == pytest.approx(550)
    waiting = dataclasses.replace(totals, makespan_s=20.0)
    assert energy.mean_w(waiting, 2.5e13, 1e13) == pytest.approx(275)
    assert math.isnan(energy.mean_w(dataclasses.replace(totals, gpu_busy_s=math.nan), 1.0, 1.0))


def test_energy_of_a_token_and_a_request():
    row = {
        "output_tokens_per_s": 100.0,
        "makespan_s": 50.0,
        "attainment": 0.5,
        "requests": 20,
        "gpu_power_mean_w": 300.0,
        "cost_usd_per_hour": 3.6,
    }
    costs = unit_costs(row)
    assert costs["joules_per_output_token"] == pytest.approx(3)
    assert costs["joules_per_slo_request"] == pytest.approx(1500)
    assert costs["usd_per_output_token"] == pytest.approx(1e-5)
    assert costs["usd_per_slo_request"] == pytest.approx(0.005)
    unknown = unit_costs(row | {"gpu_power_mean_w": None, "attainment": 0.0})
    assert math.isnan(unknown["joules_per_output_token"])
    assert math.isnan(unknown["usd_per_slo_request"])


@pytest.mark.slow
def test_run_has_energy_columns_where_power_is_known(slo_bench):
    options = (
        "run",
        "--system",
        "vllm",
        "--model",
        "llama-3.1-8b",
        "--rates",
        "2,8",
        "--seeds",
        "1",
    )
    code, out, err = slo_bench(*options, "--requests", "40", "--gpu", "h100-80g", "--json")
    assert code == 0, err
    slow, fast = json.loads(out)
    limit_w = gpu("h100-80g").power_w
    assert 0 < slow["gpu_power_mean_w"] < fast["gpu_power_mean_w"] <= limit_w
    assert slow["joules_per_output_token"] == pytest.approx(
        slow["gpu_power_mean_w"] / slow["output_tokens_per_s"], rel=1e-6
    )
    assert fast["joules_per_output_token"] < slow["joules_per_output_token"]
    code, out, err = slo_bench(*options, "--requests", "40", "--gpu", "h100-80g", "--verbose")
    assert code == 0, err
    assert "J per output token" in out + err
    code, out, err = slo_bench(*options, "--requests", "40", "--gpu", "a100-80g", "--json")
    assert code == 0, err
    assert {row["joules_per_output_token"] for row in json.loads(out)} == {None}
