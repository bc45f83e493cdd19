"""A policy inside a real server hears what a trained predictor says of each answer's length."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.predictors.lengths.predictor_config import PredictorConfig

pytestmark = [pytest.mark.backends, pytest.mark.torch]
HERE = Path(__file__).parent
PATIENCE_S = 300
REQUESTS = 60
NEEDED = "learnt predictors need the extra torch (torch, transformers, peft)"

_spec = importlib.util.spec_from_file_location(
    "tiny_models", HERE.parents[2] / "predictors" / "tiny_models.py"
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)


ONE_AT_A_TIME = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"}


def kind_of(output_tokens):
    """The verbs of a prompt are far apart."""
    lengths = sorted(tiny_models.TELLING.values())
    return min(range(len(lengths)), key=lambda index: abs(lengths[index] - output_tokens))


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """A tiny BERT that has learnt which verbs ask for long answers."""
    for module in ("torch", "transformers", "peft", "safetensors"):
        pytest.importorskip(module, reason=NEEDED)
    from slo_bench.predictors.lengths.train import TrainSettings, train

    folder = tmp_path_factory.mktemp("lengths")
    base = tiny_models.make_model(folder / "base")
    settings = TrainSettings(epochs=7, learning_rate=8e-3, lora_r=4, batch=16)
    rows = tiny_models.answered(256)
    train(rows, folder / "made", labels="", base=str(base), settings=settings)
    return folder / "made"


@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_servers_get_predicted_lengths_from_a_run(
    installed, tiny_model, lengths, tmp_path, backend
):
    """Every request declares the same maximum, so only its prompt tells them apart.

    One runs at a time, so that the others wait and the policy says who is next.
    """
    installed(backend)
    requests = tiny_models.answered(REQUESTS, seed=5)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": r.prompt, "output_tokens": r.output_tokens} for r in requests]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "run",
        "--backend",
        backend,
        "--model",
        str(tiny_model(backend)),
        "--workload",
        prompts,
    ]
    words += ["--system", f"{HERE / 'long_answers_away.py'}:LongAnswersAway", "--rates", "400"]
    words += ["--length-predictor", f"learned({lengths}, model=a)", "--requests", REQUESTS]
    words += ["--seeds", "1", "--slo", "e2e=1000", "--sweep", "max_output_tokens=1024"]
    words += [f"--server-arg={ONE_AT_A_TIME[backend]}=1"]
    words += ["--out", tmp_path / "out", "--records", "csv", "--no-report"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    [file] = (tmp_path / "out" / "requests").iterdir()
    with gzip.open(file, "rt") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == REQUESTS
    for row in rows:
        away = row["outcome"] == "rejected"
        assert away == (int(row["expected_output_tokens"]) > 200), row
    assert {row["outcome"] for row in rows} == {"rejected", "finished"}
    # Who was chosen when all had come, and the policy had heard of it: the shorter, the sooner.
    all_sent_s = max(float(row["sent_s"]) for row in rows)
    served = [row for row in rows if row["outcome"] == "finished"]
    served.sort(key=lambda row: float(row["first_token_s"]))
    began_s = [0.0, *(float(row["finish_s"]) for row in served)]
    heard_s = all_sent_s + 0.05 * (began_s[-1] - all_sent_s)  # answers of 20 tokens are under way
    chosen = [r for r, s in zip(served, began_s, strict=False) if s > heard_s]
    kinds = [kind_of(int(row["output_tokens"])) for row in chosen]
    assert len(set(kinds)) > 1
    assert kinds == sorted(kinds)


@pytest.mark.weekly
def test_serve_predicts_lengths_and_learns_from_answers(
    started_serve, installed, tiny_model, lengths, tmp_path
):
    """One server, so that the gateway stands there for the lengths alone."""
    installed("vllm")
    predictor_folder = Path(shutil.copytree(lengths, tmp_path / "own"))
    words = [f"{HERE / 'long_answers_away.py'}:LongAnswersAway", "--backend", "vllm"]
    words += ["--model", tiny_model("vllm"), "--served-name", "tiny"]
    words += ["--length-predictor", f"learned({predictor_folder}, model=a, online=30)"]

    def ask(url, prompt, **values):
        # Answers are short whatever was said: the predictor has something to learn.
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        body["vllm_xargs"] = {"max_output_tokens": 1024, **values}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["usage"]["completion_tokens"]
        except urllib.error.HTTPError as error:
            message = error.read()
        assert b"slo_bench: rejected" in message
        return None

    requests = tiny_models.answered(48, seed=5)
    with started_serve(*words) as up:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda row: ask(up.url, row.prompt), requests))
        for row, tokens in zip(requests, answers, strict=True):
            assert (tokens is None) == (row.output_tokens > 200), row
        answered = sum(tokens is not None for tokens in answers)
        assert 30 <= answered < 48
        # Who tells himself is believed.
        assert ask(up.url, "narrate apples clouds please 1", predicted_output_tokens=3) == 3
        counts = lengths_counts(up.url)
        assert counts["predicted"] == 48
        assert counts["told_already"] == 1
        end_s = time.monotonic() + PATIENCE_S
        while not (done := lengths_counts(up.url)["taken"] + lengths_counts(up.url)["refused"]):
            assert time.monotonic() < end_s
            time.sleep(0.5)
        assert done == 1
    from slo_bench.predictors.lengths.online import QUEUE, read_queue

    generation = PredictorConfig.load(predictor_folder).generation
    assert len(read_queue(predictor_folder / QUEUE)) == (answered - 30 if generation else answered)


def lengths_counts(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return {
        outcome: int(n)
        for outcome, n in re.findall(r'lengths_\w+_total{outcome="(\w+)"} (\d+)', text)
    }
