"""`slo-bench calibrate`: logs of every kind, a running server, and what is said of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reference.logs import PROFILE, log_file, simulated_log
from reference.recorded_metrics import in_turn, recorded
from slo_bench.cli.commands import observe, profile
from slo_bench.cli.commands.calibrate import calibrate
from slo_bench.cli.main import app
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.predictors.operators.front_end import FrontEnd
from slo_bench.predictors.profiles.profile_format import read_profile, write_profile

ENGINE = ("--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--no-prefix-caching")

ROOM = ("--num-gpu-blocks", "100000", "--block-size", "16")


def _line(**fields: object) -> str:
    """A request's line of a log, with some fields replaced."""
    names = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
    return json.dumps(dict(zip(names, (9, 3, 0.0, 0.1, 0.2), strict=True)) | fields)


def called(*words: object):
    return CliRunner().invoke(app, ["calibrate", *map(str, words)], env={"COLUMNS": "80"})


def client_file(folder: Path) -> Path:
    """What inference-perf writes of a server with a slow front end."""
    log, _ = simulated_log(
        100_000, caching=False, front_end=FrontEnd("a server", 2e-4, 0.05, 0.0), gap_s=0.25
    )
    columns = (log.prompt_tokens, log.output_tokens, log.arrival_s, log.first_s, log.last_s)
    requests = [
        {
            "start_time": float(sent_s),
            "end_time": float(last_s),
            "info": {
                "input_tokens": int(prompt),
                "output_tokens": int(output),
                "output_token_times": [float(first_s), float(last_s)],
            },
        }
        for prompt, output, sent_s, first_s, last_s in zip(*columns, strict=True)
    ]
    file = folder / "per_request_lifecycle_metrics.json"
    file.write_text(json.dumps(requests))
    return file


def test_profile_calibrate_is_the_same_command():
    assert profile.calibrate is calibrate


@pytest.mark.slow
def test_results_of_a_load_generator_become_a_profile_with_front_end(tmp_path):
    header = write_profile(PROFILE, tmp_path / "p.toml")
    out = tmp_path / "here.toml"
    done = called(client_file(tmp_path), "--profile", header, "--out", out, *ENGINE, *ROOM)
    assert done.exit_code == 0, done.output
    *_, verdict, command = done.stdout.strip().split("\n")
    assert verdict.startswith("llama-3.1-8b on rtx-4090: good to ± ")
    assert "(TTFT)" in verdict
    assert "req/s, prompts of" in verdict
    assert command == f"slo-bench run --profile {out}"
    assert len(done.stdout.splitlines()) <= 24
    written = read_profile(out)
    assert written.front_end is not None
    assert written.front_end.latency_s == pytest.approx(0.05, abs=0.01)
    place = PlacementSpec("llama-3.1-8b", "rtx-4090", tp=1, profile=str(out))
    assert placed(place.settled).front_end == written.front_end
    assert placed(place.replaced(front_end="none").settled).front_end is None


def test_log_alone_begins_with_operators_of_its_model(tmp_path):
    log = log_file(tmp_path)
    meta = {"model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0"}
    kept = json.loads((tmp_path / "meta.json").read_text())
    kept |= meta | {"kv_cache": {"num_gpu_blocks": 400, "block_size": 16}}
    (tmp_path / "meta.json").write_text(json.dumps(kept))
    out = tmp_path / "here.toml"
    done = called(log, "--gpu", "rtx-4090", "--out", out, "--json", *ENGINE)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["scope"]["server"] == "vllm-0.19.0"
    assert printed["verdict"].startswith(("good to", "not to be relied on"))
    assert abs(printed["after_percent"]["e2e"]) < abs(printed["before_percent"]["e2e"])
    written = read_profile(out)
    assert written.best == "operators"
    place = placed(PlacementSpec("llama-3.1-8b", "rtx-4090", tp=1, profile=str(out)).settled)
    assert place.placement.num_gpu_blocks == 399  # of which one holds nothing
    assert "calibrated on" in place.step_time.provenance
    words = ["run", "--profile", out, "--system", "vllm", "--rates", "30", "--requests", "20"]
    ran = CliRunner().invoke(app, [*map(str, words), "--seeds", "1", "--no-report",
                                   "--out", str(tmp_path / "run")])  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "outside the scope of here.toml (in brackets): 30 req/s (8.98)" in ran.stdout


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"prompt_tokens": 3}\n', ("--gpu", "l40s"), "is neither a run folder nor a result file"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n", ("--gpu", "l40s"), "no measurements"),
        ('{"first_token_ts": 1}\n{"fi', ("--gpu", "l40s"), ", line 2)"),
        ('{"first_token_ts": 1}\n', ("--gpu", "l40s"), "has no arrival_time or arrival_s"),
        (_line(output_toks=True), ("--gpu", "l40s"), "output_toks must be numbers"),
        (_line(last_token_ts=1e308), ("--gpu", "l40s"), "times must be seconds"),
        ("", ("--gpu", "l40s"), "is empty"),
    ],
)
def test_files_that_are_no_logs_are_refused_by_name(tmp_path, content, options, message):
    file = tmp_path / f"log.{'csv' if ',' in content[:20] and content[0] == 'a' else 'jsonl'}"
    file.write_text(content)
    done = called(file, *options, "--model", "llama-3.1-8b", "--out", tmp_path / "p.toml")
    assert message in str(done.exception)
    assert file.name in str(done.exception)


@pytest.mark.parametrize(
    ("log", "options", "message"),
    [
        ("requests.jsonl", ("--duration", "60"), "leave --duration out"),
        ("table.csv", ("--engine", "vllm"), "leave --engine out"),
        ("table.csv", ("--max-num-seqs", "8"), "leave --max-num-seqs out"),
        ("http://127.0.0.1:1", ("--cell", "x"), "leave --cell out"),
        ("requests.jsonl", ("--tp", "2"), "the log is of tp 1"),
        ("requests.jsonl", ("--model", "qwen3-32b"), "the log is of model llama-3.1-8b"),
        ("requests.jsonl", ("--peer-link", "16gb/s@20us"), "leave --peer-link out"),
    ],
)
def test_options_that_would_change_nothing_or_contradict_the_log_are_refused(
    tmp_path, log, options, message
):
    meta = json.loads(log_file(tmp_path).with_name("meta.json").read_text())
    meta["model"] = "meta-llama/Llama-3.1-8B"
    meta["engine_kwargs"]["tensor_parallel_size"] = 1
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "table.csv").write_text("model,gpu\n")
    place = log if "://" in log else tmp_path / log
    assert message in str(called(place, "--gpu", "rtx-4090", *options).exception)


def test_a_cell_of_another_load_generators_file_is_refused(tmp_path):
    file = client_file(tmp_path)
    shown = str(called(file, "--model", "llama-3.1-8b", "--gpu", "l40s", "--cell", "x").exception)
    assert "--cell is for run folders" in shown


def test_a_simulated_run_is_refused_as_a_folder_and_as_its_file(slo_bench, tmp_path):
    words = ("run", "--system", "vllm", "--rates", "2", "--requests", "30", "--seeds", "1")
    assert slo_bench(*words, "--no-report", "--out", tmp_path / "run")[0] == 0
    [file] = (tmp_path / "run" / "requests").iterdir()
    for place in (tmp_path / "run", file):
        assert "was simulated" in str(called(place, "--gpu", "l40s").exception)


def test_what_a_log_does_not_tell_must_be_named(tmp_path):
    log = log_file(tmp_path)
    assert "--model M" in str(called(log).exception)
    assert "--gpu G" in str(called(log, "--model", "llama-3.1-8b").exception)
    header = write_profile(PROFILE, tmp_path / "p.toml")
    assert "leave --gpu out" in str(called(log, "--profile", header, "--gpu", "l40s").exception)


@pytest.mark.slow
def test_metrics_of_a_running_server_become_a_profile(answering, monkeypatch, tmp_path):
    monkeypatch.setattr(observe, "sleep", lambda seconds: None)
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256},
        **{"intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 2048},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = recorded("vllm-0.32.0")
    url = answering(lambda path: (200, rows[-1][1]) if path == "/metrics" else (404, ""))
    in_turn(monkeypatch, rows)
    out = tmp_path / "seen.toml"
    done = called(url, "--model", tmp_path, "--duration", "60", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert set(printed["after_percent"]) == {"ttft", "tpot", "e2e"}
    assert printed["front_end"]["latency_s"] > 0
    written = read_profile(out)
    assert Path(written.model_file).is_file()
    assert written.scope is not None
    assert written.scope.concurrency is not None
