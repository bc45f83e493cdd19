"""`slo-bench run --backend vllm --validate`: profiled from the server, and simulated; no times."""

from __future__ import annotations

import csv
import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.results.step_log import read_step_log
from slo_bench.harness.validation.replay.log_replay import METRICS, STATISTICS, TOLERANCE
from slo_bench.predictors.profiles.profile_format import read_profile

pytestmark = pytest.mark.backends

REQUESTS = 16
PROMPT_TOKENS = [40 + 3 * k for k in range(REQUESTS)]
OUTPUT_TOKENS = [12 + k for k in range(REQUESTS)]


@pytest.fixture
def ran(installed, tiny_model, tmp_path):
    """A level of a stock server and one of a server with a policy of ours inside."""
    installed("vllm")
    trace = tmp_path / "trace.csv"
    rows = [f"{k * 0.1},{PROMPT_TOKENS[k]},{OUTPUT_TOKENS[k]}" for k in range(REQUESTS)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    words = ["run", "--backend", "vllm", "--model", str(tiny_model("vllm")), "--system", "vllm"]
    words += ["--system", "edf", "--workload", str(trace), "--replay-speed", "1", "--seeds", "1"]
    words += ["--slo", "e2e=1000", "--records", "csv", "--sweep", "num_gpu_blocks=64"]
    words += ["--sweep", "block_size=32", "--server-arg=--no-enable-prefix-caching"]
    words += ["--out", str(tmp_path / "out"), "--no-report", "--validate", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return tmp_path / "out", json.loads(done.stdout)


def test_validate_profiles_and_simulates_both_systems(ran):
    folder, rows = ran
    with (folder / "cells.csv").open() as file:
        cells = {row["system"]: row["cell"] for row in csv.DictReader(file)}
    expected = {(m, s) for m in METRICS for s in STATISTICS}
    for system, cell in cells.items():
        cell_rows = [row for row in rows if row["cell"] == cell]
        assert {(row["metric"], row["statistic"]) for row in cell_rows} == expected
        # On a machine that starves the client a short answer may come all at once: TPOT 0.
        assert all(row["error"] is not None or not row["real_s"] for row in cell_rows)
        assert all(row["simulated_s"] > 0 for row in cell_rows if row["statistic"] != "mape")

        meta = json.loads((folder / "servers" / f"{cell}.meta.json").read_text())
        assert (meta["system"], meta["server"], meta["gpu"]) == (system, "vllm", "cpu")
        assert meta["kv_cache"] == {
            "num_gpu_blocks": 65,  # one is vLLM's own
            "block_size": 32,
            "enable_prefix_caching": False,
        }
        assert meta["engine_kwargs"]["max_num_seqs"] >= 1
        assert meta["engine_kwargs"]["async_scheduling"] is False

        # The level's own steps hold every token of it, and none of the level before it.
        (part,) = meta["steps"]
        log = folder / part["file"]
        assert log.name == f"{system}.steps.jsonl"
        steps = read_step_log(log, part["begin"], part["end"]).steps
        prefilled = sum(tokens for step in steps for _, tokens in step.chunks)
        assert prefilled == sum(PROMPT_TOKENS)
        assert sum(s.decode_seqs for s in steps) == sum(OUTPUT_TOKENS) - REQUESTS
        assert all(step.duration_s > 0 for step in steps)

        # Measured twice: the same requests after all levels of the start, steps of their own.
        assert all(r["spread"] is None or r["spread"] >= 0 for r in cell_rows)
        repeated = [row for row in cell_rows if None not in (row["spread"], row["error"])]
        assert repeated
        for row in repeated:  # a busy machine's runs may differ by more than the bound
            decided = row["spread"] <= TOLERANCE or abs(row["error"]) > row["spread"]
            assert (row["within"] is not None) is decided
        other = folder / "repeated" / "servers" / f"repeated-2-{cell}.meta.json"
        (later,) = json.loads(other.read_text())["steps"]
        assert later["begin"] >= part["end"]
        second = read_step_log(log, later["begin"], later["end"]).steps
        assert sum(n for step in second for _, n in step.chunks) == sum(PROMPT_TOKENS)

        # The profile is of other steps of that server: of the level that was measured first.
        profile = read_profile(folder / "validation" / f"{cell}.toml")
        assert (profile.gpu, profile.best) == ("cpu", "sums")
        assert profile.sources[0].path == f"profiling-{cell}"
        first = folder / "profiling" / "servers" / f"profiling-{cell}.meta.json"
        (before,) = json.loads(first.read_text())["steps"]
        assert (folder / "profiling" / before["file"]).resolve() == log.resolve()
        assert before["end"] <= part["begin"]
        fitted = len(profile.tables["steps"])
        counted = read_step_log(log, before["begin"], before["end"]).steps
        assert 0.8 * len(counted) <= fitted <= len(counted)

        replayed = pd.read_csv(folder / "validation" / f"{cell}.csv.gz")
        # On a busy machine two requests may enter the server in another order than they were sent.
        lengths = zip(replayed["prompt_tokens"], replayed["output_tokens"], strict=True)
        assert sorted(lengths) == sorted(zip(PROMPT_TOKENS, OUTPUT_TOKENS, strict=True))
    again = CliRunner().invoke(app, ["validate", str(folder), "--json"])
    assert json.loads(again.stdout) == rows
