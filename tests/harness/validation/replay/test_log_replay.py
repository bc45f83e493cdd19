"""Replaying logs: a simulator's own log comes out as it went in; real logs nearly so."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from reference.logs import LOGS as REAL
from reference.logs import PROFILE, log_file, needs_data, simulated_log
from slo_bench.cli.main import app
from slo_bench.harness.policies.systems import system
from slo_bench.harness.results.engine_logs import EngineSettings, read_log, read_settings
from slo_bench.harness.validation.replay.log_replay import METRICS, STATISTICS, validate
from slo_bench.predictors.profiles.importers import ImportOptions, import_profile
from slo_bench.predictors.profiles.profile_format import write_profile
from slo_bench.reports.pages.validation import headline, validation_json, write_validation
from slo_bench.workloads.errors import FileFormatError, SloBenchError


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_gpu_blocks", [400, 100_000])
def test_replayed_log_of_the_simulator_has_no_error(num_gpu_blocks, caching):
    log, preemptions = simulated_log(num_gpu_blocks, caching)
    assert (preemptions > 5) == (num_gpu_blocks == 400)
    validation = validate(log, PROFILE, host_s=0.004)
    assert validation.preemptions == preemptions
    assert [("hash_ids.jsonl" in note) for note in validation.notes] == [True] * caching
    assert [(r.metric, r.statistic) for r in validation.rows()] == [
        (m, s) for m in METRICS for s in STATISTICS
    ]
    for row in validation.rows():
        assert abs(row.error) < 1e-9, row


def test_replay_uses_the_servers_prefix_cache_for_every_system():
    replayed = {}
    for caching in (False, True):
        log, _ = simulated_log(400, caching)
        replayed[caching] = {
            name: validate(log, PROFILE, name, host_s=0.004) for name in ("vllm", "vllm-v0")
        }
    assert not system("vllm-v0").prefix_cache
    with_cache, without = (
        np.mean(replayed[caching]["vllm-v0"].simulated["e2e"]) for caching in (True, False)
    )
    assert replayed[True]["vllm-v0"].preemptions > 5
    assert with_cache < 0.99 * without


def test_replay_takes_the_given_swap_times():
    log, _ = simulated_log(400, caching=False)
    slow, fast = (
        validate(log, PROFILE, "vllm-swap", host_s=0.004, swap_s_per_token=each_s)
        for each_s in (1e-3, 1e-9)
    )
    assert fast.preemptions > 5
    assert np.mean(slow.simulated["e2e"]) > np.mean(fast.simulated["e2e"]) + 0.05
    assert not any("swapping" in note for note in fast.notes)
    assert any("swapping" in note for note in validate(log, PROFILE, "vllm-swap").notes)


def test_replay_error_depends_on_settings():
    log, _ = simulated_log(400, caching=False)
    errors = {
        name: {(r.metric, r.statistic): r.error for r in validate(log, PROFILE, **changes).rows()}
        for name, changes in {
            "roomy": {"overrides": EngineSettings(num_gpu_blocks=100_000), "host_s": 0.004},
            "narrow": {"overrides": EngineSettings(max_num_seqs=4), "host_s": 0.004},
            "slow host": {"host_s": 0.02},
        }.items()
    }
    assert errors["roomy"]["ttft", "mean"] < -0.1
    assert errors["narrow"]["ttft", "mean"] > 0.1
    assert errors["slow host"]["e2e", "mean"] > 0.01


def test_replay_names_what_the_log_leaves_open():
    log, _ = simulated_log(100_000, caching=False)
    bare = dataclasses.replace(log, engine=EngineSettings(tp=2, version="0.9.1"), notes=("3 lost",))
    validation = validate(bare, PROFILE)
    notes = " ".join(validation.notes)
    assert "3 lost" in notes
    assert "tp 2, the profile of tp 1" in notes
    assert "has no number of KV blocks" in notes
    assert validation.settings.async_scheduling is False
    assert validation.host.step_s > 0
    other = dataclasses.replace(
        log, engine=EngineSettings(model="Qwen/Qwen3-8B", num_gpu_blocks=9000)
    )
    assert "the log is of Qwen/Qwen3-8B" in " ".join(validate(other, PROFILE).notes)


def test_data_parallel_ranks_of_a_log_are_simulated_as_instances(tmp_path):
    log, _ = simulated_log(4000, caching=False)
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"engine_kwargs": {"data_parallel_size": 2}}))
    assert read_settings(meta).dp == 2
    ranks = dataclasses.replace(log, engine=dataclasses.replace(log.engine, dp=2))
    validation = validate(ranks, PROFILE)
    assert "2 data-parallel ranks are simulated as instances" in " ".join(validation.notes)
    alone = validate(log, PROFILE)
    assert validation.simulated["e2e"].mean() < alone.simulated["e2e"].mean()


def test_replay_refuses_logs_that_cannot_be_simulated():
    log, _ = simulated_log(100_000, caching=False)
    with pytest.raises(SloBenchError, match="too long"):
        validate(log, PROFILE, overrides=EngineSettings(num_gpu_blocks=20))
    with pytest.raises(SloBenchError, match="unknown system"):
        validate(log, PROFILE, "vlm")
    with pytest.raises(SloBenchError, match="host_s must be a time from 0 on"):
        validate(log, PROFILE, host_s=-1.0)


def test_replay_of_one_token_answers_has_no_tpot():
    log, _ = simulated_log(100_000, caching=False)
    short = dataclasses.replace(
        log, output_tokens=np.ones_like(log.output_tokens), last_s=log.first_s
    )
    rows = {(r.metric, r.statistic): r for r in validate(short, PROFILE).rows()}
    assert np.isnan(rows["tpot", "mean"].error)
    assert np.isfinite(rows["ttft", "mean"].error)


@pytest.mark.parametrize("block_size", [16, 32])
def test_replay_finds_recorded_prefixes_in_the_cache(block_size, tmp_path):
    log, _ = simulated_log(100_000, caching=True)
    bare = dataclasses.replace(log, engine=dataclasses.replace(log.engine, block_size=block_size))
    blocks = [range(int(tokens) // 16) for tokens in log.prompt_tokens]
    # Every prompt begins with the same 10 blocks.
    shared = [
        tuple(-1 - k if k < 10 else -1 - (row + 1) * 1000 - k for k in prompt_blocks)
        for row, prompt_blocks in enumerate(blocks)
    ]
    validation = validate(dataclasses.replace(bare, shared_blocks=shared), PROFILE)
    assert not validation.notes
    alone = validate(bare, PROFILE)
    assert "which prompts share a prefix is unknown" in " ".join(alone.notes)
    assert validation.simulated["ttft"].mean() < 0.95 * alone.simulated["ttft"].mean()
    distinct = [
        tuple(-1 - row * 1000 - k for k in prompt_blocks)
        for row, prompt_blocks in enumerate(blocks)
    ]
    same = validate(dataclasses.replace(bare, shared_blocks=distinct), PROFILE)
    np.testing.assert_allclose(same.simulated["e2e"], alone.simulated["e2e"])


def test_prefix_blocks_are_read_from_the_file_beside_the_log(tmp_path):
    file = log_file(tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    text = "\n".join(json.dumps({"request_id": f"r{k}", **row}) for k, row in enumerate(rows))
    ids = tmp_path / "hash_ids.jsonl"
    ids.write_text(
        "\n".join(
            json.dumps(
                {"request_id": f"r{k}", "hash_ids": [7, *range(100 * k + 100, 100 * k + 199)]}
            )
            for k in reversed(range(len(rows)))
        )
    )
    with pytest.raises(FileFormatError, match="has no request_id"):
        read_log(file)
    file.write_text(text)
    log = read_log(file)
    assert log.shared_blocks is not None
    assert [len(row) for row in log.shared_blocks] == [int(p) // 16 for p in log.prompt_tokens]
    assert len({row[0] for row in log.shared_blocks}) == 1
    assert len({h for row in log.shared_blocks for h in row[1:]}) == sum(
        len(row) - 1 for row in log.shared_blocks
    )
    blocks = log.blocks(16)
    assert blocks[3][: len(log.shared_blocks[3])] == log.shared_blocks[3]
    assert len(blocks[3]) == int(log.prompt_tokens[3] + log.output_tokens[3]) // 16
    lines = ids.read_text().splitlines()
    ids.write_text("\n".join(lines[:-1]))
    with pytest.raises(FileFormatError, match="has no line for request 'r0'"):
        read_log(file)
    ids.write_text(lines[0].replace("[7,", '["7",'))
    with pytest.raises(FileFormatError, match="must be a list of whole numbers"):
        read_log(file)
    ids.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(FileFormatError, match="request 'r79' has a line before"):
        read_log(file)


# -------------------------------------------------------------------- command and page


def test_validate_command_prints_errors(tmp_path):
    log, profile = log_file(tmp_path), write_profile(PROFILE, tmp_path / "p.toml")
    arguments = ["validate", str(log), "--profile", str(profile), "--num-gpu-blocks", "400",
                 "--block-size", "16", "--no-prefix-caching", "--host-ms", "4"]  # fmt: skip
    runner = CliRunner()
    invocation = runner.invoke(app, [*arguments, "--json"])
    assert invocation.exit_code == 0, invocation.output
    rows = json.loads(invocation.output)
    assert len(rows) == 15
    assert set(rows[0]) == {"metric", "statistic", "real_s", "simulated_s", "error"}
    assert max(abs(row["error"]) for row in rows) < 1e-6
    mape = [row for row in rows if row["statistic"] == "mape"]
    assert [row["real_s"] for row in mape] == [None] * 3
    page = tmp_path / "page.html"
    invocation = runner.invoke(app, [*arguments, "--html", str(page)])
    assert "80 requests of vllm replayed: means within 0.0%" in invocation.output.replace("\n", " ")
    assert "asynchronous scheduling" in invocation.output.replace("\n", " ")
    assert "scatter-ttft" in page.read_text()


def test_validation_page_has_all_requests_and_escapes_text(tmp_path, opened):
    log, _ = simulated_log(400, caching=False)
    validation = validate(dataclasses.replace(log, name="<script>"), PROFILE)
    text = write_validation(validation, tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    data = json.loads(text.split('id="report-data">')[1].split("</script>")[0])
    _, points = opened(data["figures"]["scatter-e2e"]["views"][0]["only"], data)["data"]
    assert len(points["x"]) == len(log)
    assert headline(validation) in text
    with pytest.raises(SloBenchError, match="cannot write"):
        write_validation(validation, tmp_path / "no" / "page.html")


# -------------------------------------------------------------------- real logs


@needs_data
def test_replay_llama_on_rtx_pro_6000():
    """vLLM 0.19 on 300 ShareGPT requests; the tables' linear layers are faster than the run's."""
    folder = REAL / "RTXPRO6000-Llama-3.1-8B-bf16-tp1"
    profile = import_profile("llmservingsim", folder, ImportOptions())
    log = read_log(folder / "real_vllm" / "requests.jsonl")
    validation = validate(log, profile)
    rows = {(row.metric, row.statistic): row for row in validation.rows()}
    # As its makers publish it, from being queued: 7097.2, 32.5 and 28200.7 ms.
    published = {"ttft": 7.0972, "tpot": 0.0325, "e2e": 28.2007}
    for metric, seconds in published.items():
        assert rows[metric, "mean"].real_s == pytest.approx(seconds, rel=2e-3)
        assert -0.06 < rows[metric, "mean"].error < 0.03
    assert rows["e2e", "mape"].error < 0.03
    assert len(validation_json(validation)) == 15


@needs_data
def test_replay_with_a_profile_of_another_tp_gives_a_warning():
    folder = REAL / "RTXPRO6000-Qwen3-32B-bf16-tp1"
    profile = import_profile("llmservingsim", folder, ImportOptions())
    validation = validate(read_log(folder / "real_vllm" / "requests.jsonl"), profile)
    assert any("tp 2, the profile of tp 1" in note for note in validation.notes)
    assert {row.metric: row.error for row in validation.rows() if row.statistic == "mean"}[
        "tpot"
    ] > 0
