"""Prism's shared queue before two real models: one place, so each makes room for the other."""

from __future__ import annotations

import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.backends

PATIENCE_S = 1800  # two servers are started within it, on machines that are busy
PROMPT = list(range(10, 50))


def ask(url: str, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        completion = json.load(answer)
    assert completion["model"] == model
    return completion["choices"][0]["token_ids"]


@pytest.mark.weekly
def test_prism_serves_two_models_in_one_place(started_serve, installed, tiny_model, tmp_path):
    installed("vllm")
    models = [tmp_path / name for name in ("alpha", "beta")]
    for model in models:
        shutil.copytree(tiny_model("vllm"), model)
    words = [
        "prism",
        "--backend",
        "vllm",
        "--max-active-models",
        1,
        "--server-arg=--max-model-len=512",
    ]
    words += [word for model in models for word in ("--model", model)]
    with started_serve(*words) as up:
        with urllib.request.urlopen(f"{up.url}/v1/models", timeout=PATIENCE_S) as answer:
            assert [entry["id"] for entry in json.load(answer)["data"]] == ["alpha", "beta"]
        assert up.counts("activations_total") == [0, 0]  # nobody has asked yet
        with ThreadPoolExecutor(6) as pool:
            model_names = ["alpha", "beta", "alpha", "beta", "alpha", "beta"]
            answers = list(pool.map(lambda model: ask(up.url, model), model_names))
        assert answers == [answers[0]] * 6  # they are copies
        assert up.counts("answers_total") == [3, 3]
        assert up.counts("activations_total") == [1, 1]  # a change serves all who wait
        assert sorted(up.counts("evictions_total")) == [0, 1]
        assert sorted(up.counts("up")) == [0, 1]
        printed = up.stderr_file.read_text()
        assert "are stopped and started" in printed  # on CPU nobody sleeps
        assert printed.count("has left") == 1
    for model in models:
        assert (tmp_path / "servers" / f"s-{model.name}.log").is_file()


@pytest.mark.weekly
def test_run_wakes_and_evicts_real_models_where_the_simulator_does(installed, tiny_model, tmp_path):
    from slo_bench.harness.experiments.experiment import Experiment

    installed("vllm")
    models = [tmp_path / name for name in "abc"]
    for model in models:
        shutil.copytree(tiny_model("vllm"), model)
    trace = tmp_path / "trace.csv"
    rows = [
        f"{k},20,4,{'abc'[k // 3]}" for k in range(9)
    ]  # a model is idle when the next one comes
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,model", *rows]) + "\n")
    common = {
        "systems": ("prism", "static-partition"),
        "workload": str(trace),
        "replay_speeds": 1.0,
        "models": f"assign({', '.join(map(str, models))})",
        "model": str(models[0]),
        "gpus": 2,
        "gpu": "a10",
        "memory_share": 0.0506,  # one model of three on each
        "slo": f"ttft={PATIENCE_S}",
        "parameters": {
            name: {"max_num_batched_tokens": (8192,)} for name in ("prism", "static-partition")
        },
    }
    server = {"args": ("--max-model-len=512",), "startup_timeout_s": PATIENCE_S}
    measured = Experiment(backend="vllm", server=server, **common).run(tmp_path / "run").rows()
    simulated = Experiment(**common).run(tmp_path / "simulated").rows()
    for real, same in zip(measured, simulated, strict=True):
        for column in ("system", "models_unplaced", "count_activations", "attainment"):
            assert real[column] == same[column], column
    assert [row["models_unplaced"] for row in measured] == [0, 1]
    assert (tmp_path / "run" / "servers" / "prism.log").read_text().count("has left") == 1
