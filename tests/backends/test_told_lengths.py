"""A policy inside a real server hears what a trained predictor says of each answer's length."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = [pytest.mark.backends, pytest.mark.torch]
HERE = Path(__file__).parent
NEEDED = "learnt predictors need the extra torch (torch, transformers, peft)"

_spec = importlib.util.spec_from_file_location(
    "tiny_models", HERE.parent / "predictors" / "tiny_models.py"
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)


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


@pytest.mark.parametrize("backend", ["vllm"])
def test_long_answers_are_foreseen(installed, tiny_model, lengths, tmp_path, backend):
    """Every request declares the same maximum, so only its prompt tells them apart."""
    installed(backend)
    asked = tiny_models.answered(24, seed=5)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": r.prompt, "output_tokens": r.output_tokens} for r in asked]
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
    words += ["--system", f"{HERE / 'long_answers_away.py'}:LongAnswersAway", "--rates", "20"]
    words += ["--length-predictor", f"learned({lengths}, model=a)", "--requests", "24"]
    words += ["--seeds", "1", "--slo", "e2e=1000", "--sweep", "max_output_tokens=1024"]
    words += ["--out", tmp_path / "out", "--records", "csv", "--no-report"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    [file] = (tmp_path / "out" / "requests").iterdir()
    with gzip.open(file, "rt") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 24
    for row in rows:
        away = row["outcome"] == "rejected"
        assert away == (int(row["output_tokens"]) > 50), row
    assert {row["outcome"] for row in rows} == {"rejected", "finished"}
