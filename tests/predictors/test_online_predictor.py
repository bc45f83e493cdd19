"""A predictor that follows what comes: corrected at once, taught by another process, resumed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

NEEDED = "learnt predictors need the extra torch (torch, transformers, peft, scikit-learn)"
for module in ("torch", "transformers", "peft", "safetensors"):
    pytest.importorskip(module, reason=NEEDED)

from slo_bench.predictors.lengths import online_predictor as following  # noqa: E402
from slo_bench.predictors.lengths.length_samples import Prompt  # noqa: E402
from slo_bench.predictors.lengths.online import QUEUE, read_queue  # noqa: E402
from slo_bench.predictors.lengths.online_predictor import (  # noqa: E402
    OnlineLengthPredictor,
    TrainingResult,
)
from slo_bench.predictors.lengths.predictor_config import PredictorConfig  # noqa: E402
from slo_bench.predictors.lengths.train import TrainSettings, train  # noqa: E402
from slo_bench.workloads.errors import SloBenchError  # noqa: E402

pytestmark = pytest.mark.torch
PATIENCE_S = 300

_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).with_name("tiny_models.py")
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)

DRIFTED = {"short": 40, "old": 300}  # what is asked since the predictor was made


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("following")
    base = tiny_models.make_model(folder / "base")
    settings = TrainSettings(epochs=5, learning_rate=8e-3, lora_r=4, batch=16)
    rows = tiny_models.answered(256)
    train(rows, folder / "lengths", labels="", base=str(base), settings=settings)
    return folder / "lengths"


@pytest.fixture
def folder(trained_folder, tmp_path):
    return Path(shutil.copytree(trained_folder, tmp_path / "lengths"))


@pytest.fixture
def follower(folder):
    """It is closed at the end."""
    predictors = []

    def start(online, **options):
        predictors.append(OnlineLengthPredictor(folder, online=online, device="cpu", **options))
        return predictors[-1]

    yield start
    for predictor in predictors:
        predictor.close()


def tell(follower, rows):
    """All of them, one after the other."""
    for row in rows:
        [prediction] = follower.read([Prompt(row.prompt, row.prompt_tokens, row.model)])
        follower.came(prediction, row.output_tokens)


def drifted(count, seed=7):
    return tiny_models.answered(count, seed=seed, telling=DRIFTED, model="b")


def test_observed_answer_corrects_the_next_prediction(follower):
    predictor = follower(1000)
    prompt = [Prompt("old apples clouds please 3", 5, "b")]
    before = predictor.read(prompt)[0].median
    tell(predictor, tiny_models.answered(60, seed=3, telling={"old": 300}, model="b"))
    assert abs(predictor.read(prompt)[0].median - 300) < abs(before - 300)
    assert not predictor.taught


def test_predictor_loads_the_generation_trained_by_another_process(follower, folder):
    lines = []
    predictor = follower(60, say=lines.append)
    tell(predictor, drifted(60))
    assert predictor.teaches  # and nobody waited for it
    predictor.settle(PATIENCE_S)
    [(_, taught)] = predictor.taught
    assert taught.step > 0, taught
    assert predictor.config.generation == PredictorConfig.load(folder).generation == 1
    assert read_queue(folder / QUEUE) == []
    assert lines == [taught.summary]
    [(window, *rest)] = [predictor.all_windows()]
    assert (window.answers, window.generation, window.plain) == (50, 0, 0.0)
    assert [w.answers for w in rest] == [10]


def test_answers_of_a_refused_training_stay_in_the_queue(follower, folder, monkeypatch):
    predictor = follower(30)
    refused = TrainingResult(0.0, "refused", None)
    monkeypatch.setattr(predictor._teacher, "teach", lambda new, lately, then: then(refused))
    before = predictor._predictor
    rows = drifted(45)
    tell(predictor, rows)
    assert [taught.step for _, taught in predictor.taught] == [0.0]
    assert predictor._predictor is before
    assert [row.prompt for row in read_queue(folder / QUEUE)] == [row.prompt for row in rows]


def test_answers_that_come_during_training_are_kept(follower, folder, monkeypatch):
    predictor = follower(30)
    lessons = []
    monkeypatch.setattr(predictor._teacher, "teach", lambda *lesson: lessons.append(lesson))
    rows = drifted(40)
    tell(predictor, rows)
    [(new, lately, then)] = lessons
    assert len(new) == len(lately) == 30
    predictions = predictor.read(
        [Prompt(row.prompt, row.prompt_tokens, row.model) for row in lately]
    )
    then(TrainingResult(1.0, "taken", following.np.array([s.probabilities for s in predictions])))
    left = [row.prompt for row in read_queue(folder / QUEUE)]
    assert left == [row.prompt for row in rows[30:]]


def test_killed_online_predictor_continues_with_its_queue(follower, folder, monkeypatch):
    first = follower(40)
    rows = drifted(35)
    tell(first, rows)
    prompt = [Prompt("old apples clouds please 3", 5, "b")]
    corrected = first.read(prompt)[0]
    first.close()
    with (folder / QUEUE).open("a") as queue:
        queue.write('{"prompt": "cut o')
    again = follower(40)
    assert again.read(prompt)[0].median == corrected.median
    lessons = []
    monkeypatch.setattr(again._teacher, "teach", lambda *lesson: lessons.append(lesson))
    tell(again, drifted(5, seed=9))
    assert len(lessons[0][0]) == 40


def test_failed_training_keeps_the_predictor(follower, folder, monkeypatch):
    lines = []
    predictor = follower(30, say=lines.append)
    (folder / predictor.config.samples_file).unlink()  # the teacher cannot begin
    tell(predictor, drifted(30))
    predictor.settle(PATIENCE_S)
    assert predictor.failures == 1
    assert "is missing" in lines[0]
    assert predictor.config.samples_file in lines[0]
    assert len(read_queue(folder / QUEUE)) == 30
    tell(predictor, drifted(1))


def test_second_process_on_an_online_folder_is_refused(follower, folder):
    follower(30)
    with pytest.raises(SloBenchError, match="another process follows"):
        OnlineLengthPredictor(folder, online=30, device="cpu")
    OnlineLengthPredictor(folder, device="cpu").close()  # to read with is no matter


def test_online_with_too_few_answers_is_refused(folder):
    with pytest.raises(SloBenchError, match="at least 30 answers but is 5"):
        OnlineLengthPredictor(folder, online=5, device="cpu")
