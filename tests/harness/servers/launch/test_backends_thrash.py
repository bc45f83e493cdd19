"""Few KV blocks on a real vLLM: preemptions and a prefix cache that loses what it needs, simulated
with the durations of the server's own steps. Machines are busy: no time is compared but with them.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from reference.plain import PlainInstance
from slo_bench.cli.main import app
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.results.step_log import read_step_log
from slo_bench.harness.validation.replay.log_replay import latencies, latencies_of, replay_of
from slo_bench.harness.validation.replay.measured_level import (
    MeasuredLevel,
    asked_requests,
    planned_cells,
)
from slo_bench.predictors.profiles.profile_format import read_profile

pytestmark = [pytest.mark.backends, pytest.mark.weekly]

EXPERIMENT = """
backend = "vllm"
model = "{model}"
systems = "vllm"
seeds = 1
rates = 8.0
workload = "sharegpt"
requests = 48
prompt_tokens = "uniform(32,96)"
output_tokens = "uniform(16,48)"
sessions = "sessions(turns=fixed(4), think_s=1, system_prompt_tokens=64)"
slo = "ttft=60,tpot=1"
block_size = 32
num_gpu_blocks = 24
records = "csv"

[server]
args = ["--max-model-len=640", "--enable-prompt-tokens-details"]
repetitions = 1

[client]
send_delay_limit_s = 60.0
"""


class LoggedDurations:
    """Step times that are the logged ones, in order."""

    def __init__(self, durations_s: list[float]) -> None:
        self._left = iter(durations_s)

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return next(self._left, 0.01)  # a step more than the server made


@pytest.fixture
def level(installed, tiny_model, tmp_path):
    """The measured level, its row, its requests and the profile of the server."""
    installed("vllm")
    path = tmp_path / "thrash.toml"
    path.write_text(EXPERIMENT.format(model=tiny_model("vllm")))
    out = tmp_path / "out"
    words = ["run", str(path), "--validate", "--no-report", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    with (out / "cells.csv").open() as file:
        (row,) = csv.DictReader(file)
    measured = MeasuredLevel.read(out, row["cell"])
    spec = planned_cells(out)[row["cell"]]
    profile = read_profile(out / "validation" / f"{row['cell']}.toml")
    return measured, row, asked_requests(measured, spec), profile


def test_thrashing_cache_is_simulated_with_the_preemptions_and_hits_of_the_server(level):
    measured, row, requests, profile = level
    (part,) = measured.meta["steps"]
    steps = read_step_log(measured.root / part["file"], part["begin"], part["end"]).steps
    replayed = replay_of(measured.log, profile, "vllm", known_prefixes=True)
    result = simulate(
        requests.workload,
        replayed.system,
        replayed.placement,
        LoggedDurations([step.duration_s for step in steps]),
        engine=PlainInstance,
    )
    records = result.records
    assert (records.outcome == Outcome.FINISHED).all()

    preemptions = int(row["server_preemptions"])
    assert preemptions >= 1
    assert abs(records.preemptions_recompute.sum() - preemptions) <= 2 + preemptions // 4
    assert measured.log.cached_tokens > 0
    assert records.cached_tokens.sum() == pytest.approx(measured.log.cached_tokens, rel=0.05)

    real = latencies_of(measured.log)
    simulated = latencies(
        records.arrival_s,
        records.first_token_s,
        records.finish_s,
        requests.workload.output_tokens,
    )
    for metric in ("ttft", "e2e"):
        assert np.mean(simulated[metric]) == pytest.approx(np.mean(real[metric]), rel=0.1)
