"""Weights of SLO-ODBS are searched on a real engine: the tiny model of the torch backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slo_bench import Experiment
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import tune

pytestmark = pytest.mark.torch

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")


def test_tune_measures_slo_odbs_weights_on_the_torch_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    trace = tmp_path / "short.csv"
    rows = [f"{i / 100},{4 + i % 5},{1 + i % 3}" for i in range(100)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    experiment = Experiment(
        systems="slo-odbs",
        backend="torch",
        workload=str(trace),
        arrivals="poisson",
        slo="e2e=uniform(0.05,5)",
        requests=100,
        seeds=1,
        server={"cpu_wait_limit": 1.0},  # other tests run beside this one
    )
    settings = TuneSettings(
        objectives=("attainment",),
        rate_rps=50.0,
        search={"slo_weight": "0..10", "output_weight": "0..10"},
        sampler="random",
        trials=2,
        confirm=False,
    )
    tuned = tune(experiment, settings, tmp_path / "o").study
    assert [row.state for row in tuned.trials] == ["finished"] * 2
    tried = {
        (row.configuration["slo_weight"], row.configuration["output_weight"])
        for row in tuned.trials
    }
    assert len(tried) == 2
    runs = [
        json.loads(line)
        for file in (tmp_path / "o" / "runs").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len(runs) == 2
    assert all(run["requests"] == 100 for run in runs)
    assert all(row.values[0] > 0 for row in tuned.trials)
