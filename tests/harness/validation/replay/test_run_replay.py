"""Run folders of real servers, replayed with step times of their own step logs.

The "servers" are simulations whose step times are known: what is fitted to their steps must bring
their own times out again.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from reference.plain import PlainInstance
from slo_bench.cli.main import app
from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import system
from slo_bench.harness.results.cell_files import gzip_csv, request_columns
from slo_bench.harness.results.engine_logs import (
    PROFILING,
    REPEATED,
    profiling_cell,
    read_log,
    repeated_cell,
)
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.harness.validation.replay.log_replay import METRICS, STATISTICS
from slo_bench.harness.validation.replay.run_replay import validate_run
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.profiles.profile_format import Source, read_profile, write_profile
from slo_bench.predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from slo_bench.predictors.specs import gpu, model
from slo_bench.reports.pages import validation
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.whole_file import write_whole
from slo_bench.workloads.workload import Workload

CLIENT_S = 0.004  # what the "client" adds to every token


class Truth:
    """Known step times, which remember every step that was asked for."""

    def __init__(self, slower) -> None:
        self.steps = []
        self.slower = slower

    def _step_s(self, seqs, kv, chunks):
        if not chunks:
            return self.slower * (4e-3 + 2e-5 * seqs + 1e-7 * kv)
        tokens = seqs + sum(chunk for _, chunk in chunks)
        pairs = sum(chunk * (before + chunk / 2) for before, chunk in chunks)
        return self.slower * (6e-3 + 4e-5 * tokens + 1e-8 * pairs + 1e-7 * kv)

    def step_s(self, seqs, kv, chunks):
        self.steps.append((seqs, kv, [list(chunk) for chunk in chunks]))
        return self._step_s(seqs, kv, chunks)

    def lines(self):
        """As a plugin logs them, one right after the other."""
        now_s = 0.0
        for seqs, kv, chunks in self.steps:
            yield {
                "event": "step",
                "time_s": now_s,
                "decode_seqs": seqs,
                "decode_kv_tokens": kv,
                "chunks": chunks,
            }
            now_s += self._step_s(seqs, kv, chunks)
            yield {"event": "done", "time_s": now_s, "left": 1}


def workload(requests, rate_rps, seed):
    rng = np.random.default_rng(seed)
    return Workload(
        np.cumsum(rng.exponential(1 / rate_rps, requests)),
        rng.integers(20, 400, requests),
        rng.integers(1, 60, requests),
    )


def measure(folder, cell, rate_rps, seed, requests=80, slower=1.0, **changes):
    """A level of a server that is none: its requests, its steps, how it was set up."""
    truth = Truth(slower)
    served = system("vllm").with_parameters(max_num_seqs=16, max_num_batched_tokens=256)
    place = Placement(
        model("llama-3.1-8b"), gpu("a100-80g"), block_size=32, fixed_num_gpu_blocks=200
    )
    load = workload(requests, rate_rps, seed)
    result = simulate(load, served, place, truth, engine=PlainInstance)
    records = result.records
    records.first_token_s[:] += CLIENT_S
    records.finish_s[:] += CLIENT_S
    columns = request_columns(load, records, judge(load, records))
    columns["sent_s"] = records.arrival_s
    columns["server_prompt_tokens"] = load.prompt_tokens
    write_whole(folder / "requests" / f"{cell}.csv.gz", gzip_csv(columns))
    log = folder / "servers" / "vllm.steps.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    with log.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in truth.lines())
    meta = {
        "server": "vllm",
        "model": "tiny",
        "gpu": "cpu",
        "system": "vllm",
        "parameters": {},
        "version": "0.32.0",
        "vllm_version": "0.32.0",
        "engine_kwargs": {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "max_model_len": 1024,
            "tensor_parallel_size": 1,
            "async_scheduling": False,
            "enforce_eager": True,
        },
        "kv_cache": {"num_gpu_blocks": 201, "block_size": 32, "enable_prefix_caching": False},
        "steps": [{"file": "servers/vllm.steps.jsonl", "begin": begin, "end": log.stat().st_size}],
        **changes,
    }
    (folder / "servers" / f"{cell}.meta.json").write_text(json.dumps(meta))
    return {
        "cell": cell,
        "system": "vllm",
        "backend": "vllm",
        "model": "tiny",
        "rate_rps": rate_rps,
        "seed": seed,
        "valid": True,
    }


def table(folder, *rows):
    with (folder / "cells.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    return table(folder, measure(folder, "low", 5.0, 0), measure(folder, "high", 12.0, 1))


def test_each_level_is_replayed_with_steps_of_the_others(run):
    levels = validate_run(run)
    assert [(level.cell, level.fitted_on) for level in levels] == [
        ("low", ("high",)),
        ("high", ("low",)),
    ]
    for level in levels:
        assert level.validation.client_s == pytest.approx(CLIENT_S, rel=0.2)
        for row in level.validation.rows():
            assert abs(row.error) < 0.02, row
        assert level.validation.log.output_tokens.sum() > 0
        assert level.validation.settings.num_gpu_blocks == 201
        assert level.validation.settings.max_num_seqs == 16


def test_preemptions_and_cache_hits_are_told_measured_and_simulated(tmp_path):
    folder = tmp_path / "run"
    rows = [measure(folder, "low", 5.0, 0), measure(folder, "high", 12.0, 1)]
    rows[0]["server_preemptions"], rows[1]["server_preemptions"] = 3, None
    low, high = validate_run(table(folder, *rows))
    assert (low.preemptions, high.preemptions) == (3, None)
    text = validation.counts_text(low.validation, low.preemptions)
    assert text == f"Preemptions: 3 measured, {low.validation.preemptions} simulated."
    assert validation.counts_text(high.validation).startswith("Preemptions: 0 simulated")
    prompt_tokens = int(low.validation.log.prompt_tokens.sum())
    cached = dataclasses.replace(
        low.validation,
        settings=dataclasses.replace(low.validation.settings, prefix_caching=True),
        log=dataclasses.replace(low.validation.log, cached_tokens=prompt_tokens // 2),
        cached_tokens=prompt_tokens // 4,
    )
    text = validation.counts_text(cached, 3)
    assert text.endswith("; prompt tokens in the prefix cache: 50.0% measured, 25.0% simulated.")
    saved = json.loads((folder / "validation.json").read_text())
    assert saved[0]["preemptions"] == {"real": 3, "simulated": low.validation.preemptions}
    assert saved[0]["cached_tokens"] == {"real": 0, "simulated": 0}
    printed = CliRunner().invoke(app, ["validate", str(folder)]).output
    assert "Preemptions: 3 measured" in printed


def test_client_delay_is_estimated_from_a_level_with_queues(tmp_path):
    """Which a server of other step times has: half as fast, so that its queues are longer."""
    folder = tmp_path / "run"
    rows = [measure(folder, "low", 5.0, 0), measure(folder, "full", 14.0, 1, slower=1.03)]
    low, _ = validate_run(table(folder, *rows))
    assert low.validation.client_s == pytest.approx(CLIENT_S, abs=0.002)


@pytest.mark.slow
def test_steps_of_a_level_are_not_used_for_itself(run):
    before = validate_run(run)[0].profile.fits
    text = (run / "servers" / "vllm.steps.jsonl").read_text()
    meta = json.loads((run / "servers" / "low.meta.json").read_text())
    end = meta["steps"][0]["end"]
    slower = text[:end].replace('"decode_seqs": 1,', '"decode_seqs": 9,')
    (run / "servers" / "vllm.steps.jsonl").write_text(slower + text[end:])
    assert validate_run(run)[0].profile.fits == before
    assert validate_run(run)[1].profile.fits != before


def test_validation_json_keeps_the_levels(run):
    levels = validate_run(run)
    saved = json.loads((run / "validation.json").read_text())
    assert [level["cell"] for level in saved] == ["low", "high"]
    assert saved[0]["fitted_on"] == ["high"]
    assert saved[0]["rows"] == levels[0].rows()
    with (run / "validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(METRICS) * len(STATISTICS)
    assert {"cell", "rate_rps", "metric", "statistic", "real_s", "simulated_s", "error"} <= set(
        rows[0]
    )
    profile = read_profile(run / "validation" / "high.toml")
    assert (profile.model, profile.gpu, profile.best) == ("tiny", "cpu", "sums")
    assert profile.sources[0].version == "0.32.0"
    assert (run / "validation" / "high.csv.gz").is_file()


def test_replay_profile_takes_the_catalogues_model(tmp_path):
    folder = tmp_path / "run"
    changes = {"model": "Meta-Llama-3.1-8B"}
    rows = [measure(folder, name, 5.0, seed, **changes) for seed, name in enumerate("ab")]
    for level in validate_run(table(folder, *rows)):
        assert level.profile.model == "llama-3.1-8b"
        assert level.validation.notes == ()


def test_single_level_without_a_step_log_of_another_is_refused(tmp_path):
    folder = tmp_path / "run"
    table(folder, measure(folder, "only", 5.0, 0))
    with pytest.raises(SloBenchError, match="only has no other level with a step log"):
        validate_run(folder)
    measure(folder / PROFILING, profiling_cell("only"), 5.0, 7)
    (level,) = validate_run(folder)
    assert level.fitted_on == ("profiling-only",)
    assert max(abs(row.error) for row in level.validation.rows()) < 0.02


def test_levels_of_other_server_settings_are_not_used(tmp_path):
    folder = tmp_path / "run"
    first = measure(folder, "first", 5.0, 0)
    other = measure(folder, "other", 5.0, 1, parameters={"max_num_seqs": 16})
    with pytest.raises(SloBenchError, match="no other level"):
        validate_run(table(folder, first, other))


def test_invalid_level_is_marked(run):
    with (run / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows = [row | {"invalid_because": ""} for row in rows]
    rows[1] |= {"valid": "False", "invalid_because": "sent late"}
    levels = validate_run(table(run, *rows))
    assert levels[0].validation.notes == ()
    assert levels[1].validation.notes == ("the level is not valid: sent late",)


@pytest.mark.slow
def test_repeated_level_gives_the_spread_of_the_machine(run):
    assert all(row.within is None for row in validate_run(run)[0].errors())
    measure(run / REPEATED, repeated_cell("low", 2), 5.0, 0, slower=1.3)
    low, high = validate_run(run)
    assert (len(low.again), len(high.again)) == (1, 0)
    rows = {(row.metric, row.statistic): row for row in low.errors()}
    tpot = rows["tpot", "p50"]
    assert 0.25 < tpot.spread < 0.6  # a slower machine has larger batches, too
    assert tpot.undecidable
    assert tpot.within is None
    # Held against the middle of both; the first alone is what was simulated.
    (first,) = (
        row for row in low.validation.rows() if (row.metric, row.statistic) == ("tpot", "p50")
    )
    assert abs(first.error) < 0.02
    assert tpot.real_s == pytest.approx(first.real_s * (1 + tpot.spread / 2))
    assert tpot.error == pytest.approx(tpot.simulated_s / tpot.real_s - 1)
    assert dataclasses.replace(tpot, error=tpot.spread + 0.01).within is False
    assert dataclasses.replace(tpot, error=-0.049, spread=0.0).within is True
    assert rows["tpot", "mape"].within is None
    # Steps of both runs tell of the machine; they are not of the level that is judged.
    assert len(high.profile.tables["steps"]) > 1.5 * len(low.profile.tables["steps"])
    assert high.fitted_on == ("low",)
    saved = json.loads((run / "validation.json").read_text())
    assert [level["measured"] for level in saved] == [2, 1]
    assert saved[0]["rows"][1]["within"] is None
    assert saved[1]["rows"][1]["spread"] is None
    printed = CliRunner().invoke(app, ["validate", str(run)]).output
    assert "run to run" in printed
    message = " ".join(printed.split())
    assert "0 of 6 errors are within 5%; undecidable: TTFT p50" in message
    shown = validation.shown(validation._of_run(run, {}))
    rows = [row for _, rows in shown["errors"].groups for row in rows]
    assert sum("run to run" in row for row in rows) == len(METRICS)
    (verdict,) = shown["verdicts"]
    assert verdict.startswith("low: The same level, measured again, differs by")


def test_too_few_logged_steps_are_refused(tmp_path):
    folder = tmp_path / "run"
    rows = [measure(folder, cell, 5.0, 0, requests=1) for cell in ("a", "b")]
    for cell in ("a", "b"):
        path = folder / "servers" / f"{cell}.meta.json"
        meta = json.loads(path.read_text())
        meta["steps"][0]["end"] = meta["steps"][0]["begin"] + 400
        path.write_text(json.dumps(meta))
    with pytest.raises(SloBenchError, match="too few to fit"):
        validate_run(table(folder, *rows))


@pytest.mark.slow
def test_validate_command_on_a_run_folder(run):
    done = CliRunner().invoke(app, ["validate", str(run), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert len(rows) == 2 * len(METRICS) * len(STATISTICS)
    assert {row["cell"] for row in rows} == {"low", "high"}
    assert all(math.isfinite(row["error"]) for row in rows)
    single = CliRunner().invoke(app, ["validate", str(run), "--cell", "low"])
    assert single.exit_code == 0
    assert "its own steps were not used" in " ".join(single.output.split())
    both = CliRunner().invoke(app, ["validate", str(run)])
    assert "Real against simulated" in both.output
    for words, problem in (
        (["--cell", "lo"], "unknown cell 'lo'"),
        (["--num-gpu-blocks", "9"], "with no --profile FILE only --cell and --json"),
    ):
        wrong = CliRunner().invoke(app, ["validate", str(run), *words])
        assert wrong.exit_code == 1
        assert problem in str(wrong.exception)


def test_server_settings_are_read_from_the_run_folder(run):
    log = read_log(run, "low")
    assert (log.engine.num_gpu_blocks, log.engine.system, log.engine.context_tokens) == (
        201,
        "vllm",
        1024,
    )
    profile = run / "validation" / "low.toml"
    validate_run(run)
    done = CliRunner().invoke(
        app, ["validate", str(run), "--cell", "low", "--profile", str(profile), "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = {(row["metric"], row["statistic"]): row for row in json.loads(done.output)}
    assert abs(rows["tpot", "mean"]["error"]) < 0.02


def constant_profile(tmp_path):
    steps = [LoggedStep(n, 40 * n, [(0, 8)] * (n % 2), 0.002) for n in range(1, 60)]
    profile = profile_of_steps(
        steps, model="llama-3.1-8b", gpu="a100-80g", source=Source("test", "steps")
    )
    return write_profile(profile, tmp_path / "given.toml")


@pytest.mark.slow
def test_validate_of_a_running_server_needs_a_profile(tmp_path):
    words = ["run", "--workload", "sharegpt", "--requests", "12", "--rates", "100", "--seeds", "1"]
    words += ["--records", "csv", "--out", str(tmp_path / "run"), "--no-report", "--validate"]
    with serving(MockConfig(ttft_s=0.002, itl_s=0.0005)) as server:
        refused = CliRunner().invoke(app, [*words, "--base-url", server.url])
        assert refused.exit_code == 1
        assert "has no step log" in str(refused.exception)
        assert not (tmp_path / "run").exists()
        profile = str(constant_profile(tmp_path))
        done = CliRunner().invoke(
            app, [*words, "--base-url", server.url, "--profile", profile, "--json"]
        )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {(row["metric"], row["statistic"]) for row in rows} == {
        (metric, statistic) for metric in METRICS for statistic in STATISTICS
    }
    (cell,) = {row["cell"] for row in rows}
    simulated = {(r["metric"], r["statistic"]): r["simulated_s"] for r in rows}
    assert simulated["tpot", "mean"] == pytest.approx(0.002, rel=0.1)
    assert json.loads((tmp_path / "run" / "validation.json").read_text())[0]["cell"] == cell


def test_validate_of_a_simulation_is_refused(tmp_path):
    wrong = CliRunner().invoke(app, ["run", "--validate", "--out", str(tmp_path / "run")])
    assert wrong.exit_code == 1
    assert "choose one with --backend vllm or sglang" in str(wrong.exception)
