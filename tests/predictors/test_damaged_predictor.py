"""Every file that predict-eval reads, damaged: it is named, or what was found before is found."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reference.damage import DAMAGE
from slo_bench.cli.main import app
from slo_bench.workloads.errors import SloBenchError

pytestmark = pytest.mark.torch
for _module in ("torch", "transformers", "peft", "safetensors", "sklearn"):
    pytest.importorskip(_module)


def _loaded(path):
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tiny_models = _loaded(Path(__file__).with_name("tiny_models.py"))
PARTS = {"base": "the base model", "lengths": "", "answers.jsonl": "", "words": "is no tokenizer"}


def typed(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    """Two predictors with the models beneath, and answers to hold them against."""
    folder = tmp_path_factory.mktemp("made")
    for seed, name in enumerate(("whole", "other")):
        place = folder / name
        base = tiny_models.make_model(place / "base", seed=seed)
        data = tiny_models.write_jsonl(folder / "d.jsonl", tiny_models.answered(120, seed=seed))
        options = ["--base", base, "--lora-r", 2, "--epochs", 1, "--out", place / "lengths"]
        assert typed("predict-train", data, *options).exit_code == 0
        new = tiny_models.answered(20, seed=seed + 9)
        tiny_models.write_jsonl(place / "answers.jsonl", new)
        (place / "words").mkdir()
        shutil.copy(base / "tokenizer.json", place / "words")
    return folder


def scores(folder):
    """What predict-eval finds; never a traceback."""
    arguments = ["predict-eval", folder / "lengths", folder / "answers.jsonl", "--base"]
    arguments += [
        folder / "base",
        "--label-tokenizer",
        folder / "words",
        "--prequential",
        10,
        "--json",
    ]
    done = typed(*arguments)
    if done.exit_code:
        assert isinstance(done.exception, SloBenchError), done.exception
        return None, str(done.exception)
    return done.stdout, ""


@pytest.mark.parametrize("part", PARTS)
def test_predict_eval_names_a_damaged_file_or_scores_as_before(trained_folder, tmp_path, part):
    whole, other, place = trained_folder / "whole", trained_folder / "other", tmp_path / "run"
    before = scores(whole)
    files = [p for p in (whole / part).rglob("*") if p.is_file()] or [whole / part]
    for file in files:
        name = file.relative_to(whole)
        for how, damage in DAMAGE.items():
            shutil.copytree(whole, place)
            damage(place / name, other / name)
            printed, message = scores(place)
            if message:
                culprits = (name.name, str(place / part), PARTS[part] or name.name)
                assert any(culprit in message for culprit in culprits), (name, how, message)
            elif part == "lengths":
                assert (printed, message) == before, (name, how)
            shutil.rmtree(place)
