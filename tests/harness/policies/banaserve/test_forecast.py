"""BanaServe by forecast: what a prefill instance counts as, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slo_bench import Experiment
from slo_bench.harness.policies.banaserve import forecast
from slo_bench.harness.policies.banaserve.forecast import BanaServeForecast


def instance(role: str) -> Any:
    return SimpleNamespace(
        role=role, index=0, prefilled_tokens=0, sizes=SimpleNamespace(s_per_token=1e-4)
    )


@pytest.mark.parametrize(
    ("tokens_per_s", "queued", "load"),
    [
        (5_000.0, 0, 0.5),  # half of 10,000 tokens a second
        (5_000.0, 20_000, 0.5),  # 2 s of prompts wait, 5 s of the next 10 s are free
        (5_000.0, 80_000, 0.5 + 3 / 4),  # 8 s wait, 3 s of them are left after 10 s
        (15_000.0, 0, 1 + 5 / 6),  # 5 s more come than fit
    ],
)
def test_forecast_load_of_queued_and_expected_tokens(monkeypatch, tokens_per_s, queued, load):
    for module in (forecast, forecast.BanaServe._compute.__globals__):
        target = module if isinstance(module, dict) else vars(module)
        monkeypatch.setitem(target, "queued_tokens", lambda _: queued)
        if "decode_use" in target:
            monkeypatch.setitem(target, "decode_use", lambda _: 0.0)
    policy = BanaServeForecast(horizon_s=10.0, window_s=1.0)
    state = policy.new_state()
    state.tokens_per_s = tokens_per_s
    assert policy._compute(instance("prefill"), 1.0, state) == pytest.approx(load)


def test_forecast_moves_modules_before_load_arrives(tmp_path):
    shared = {"prefill_instances": 1, "decode_instances": 0}
    run = Experiment(
        systems=["banaserve", "banaserve-forecast"],
        model="llama-13b",
        workload="azure-conv",
        overlong_requests="truncate",
        arrivals="steps(1, 4, every_s=30)",
        rates=[12.0],
        duration_s=120,
        seeds=1,
        instances=4,
        parameters={"banaserve": shared, "banaserve-forecast": shared},
    ).run(tmp_path / "run")
    reactive, expected = run.rows()
    assert reactive["requests"] == expected["requests"]
    assert expected["count_layer_moves"] > 0
    assert expected["e2e_mean_s"] != reactive["e2e_mean_s"]
