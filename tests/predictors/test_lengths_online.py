"""A predictor at work: corrected at once, taught with replay, never made worse."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

NEEDED = "learnt predictors need the extra torch (torch, transformers, peft, scikit-learn)"
for module in ("torch", "transformers", "peft", "safetensors", "sklearn"):
    pytest.importorskip(module, reason=NEEDED)

import torch  # noqa: E402

from slo_bench.predictors.lengths.distribution import buckets_in  # noqa: E402
from slo_bench.predictors.lengths.length_samples import prompts_of  # noqa: E402
from slo_bench.predictors.lengths.online import OnlinePredictor, PriorCorrection, update_predictor  # noqa: E402
from slo_bench.predictors.lengths.predictor import TrainedPredictor  # noqa: E402
from slo_bench.predictors.lengths.predictor_config import PredictorConfig  # noqa: E402
from slo_bench.predictors.lengths.train import TrainSettings, train  # noqa: E402
from slo_bench.workloads.errors import SloBenchError  # noqa: E402

pytestmark = pytest.mark.torch


_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).with_name("tiny_models.py")
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
answered = tiny_models.answered

# What is asked since the predictor was made.
DRIFTED = {"short": 40, "old": 300}


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    base = tiny_models.make_model(folder / "base")
    settings = TrainSettings(epochs=5, learning_rate=8e-3, lora_r=4, batch=16)
    train(answered(256), folder / "lengths", labels="", base=str(base), settings=settings)
    return folder / "lengths"


@pytest.fixture
def folder(trained_folder, tmp_path):
    return Path(shutil.copytree(trained_folder, tmp_path / "lengths"))


def exact(lengths, rows):
    true = buckets_in(lengths.edges, np.array([row.output_tokens for row in rows]))
    return float((lengths.buckets() == true).mean())


def test_prior_correction_follows_observed_lengths():
    prior = PriorCorrection(3)
    key = ("m", "w")
    assert (prior.weights(key) == 1).all()
    for _ in range(50):
        prior.observe(key, np.array([0.8, 0.1, 0.1]), 2)
    weights = prior.weights(key)
    corrected = weights * [0.8, 0.1, 0.1]
    assert corrected.argmax() == 2
    assert (prior.weights(("m", "other")) == 1).all()
    prior.forget()
    assert (prior.weights(key) == 1).all()


def test_prior_correction_of_a_right_prior_stays_near_one():
    prior = PriorCorrection(2)
    rng = np.random.default_rng(0)
    for _ in range(400):
        prior.observe(("", ""), np.array([0.3, 0.7]), int(rng.random() < 0.7))
    assert prior.weights(("", "")) == pytest.approx([1, 1], abs=0.2)


def test_online_predictor_corrects_by_prior_before_training(folder):
    online = OnlinePredictor(folder)
    new = answered(60, seed=3, telling={"list": 300})
    before = exact(online.lengths(new, "chat"), new)
    online.observe(new, "chat")
    assert exact(online.lengths(new, "chat"), new) > before
    # What came in one workload says nothing of another.
    assert (online.lengths(new, "other").below == online.uncorrected(new).below).mean() > 0.9


def test_update_predictor_follows_new_answers_without_forgetting(folder):
    new = answered(240, seed=7, telling=DRIFTED, model="b")
    outcome = update_predictor(folder, new, epochs=12)
    assert outcome.accepted, outcome
    assert outcome.new_after < outcome.new_before
    assert PredictorConfig.load(folder).generation == 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "predictor.json",
        "samples-1.jsonl.gz",
        "weights-1.safetensors",
    ]
    predictor = TrainedPredictor.load(folder)
    later = answered(100, seed=11, telling=DRIFTED, model="b")
    assert exact(predictor.lengths(prompts_of(later)), later) > 0.6
    old = answered(100, seed=13)
    assert exact(predictor.lengths(prompts_of(old)), old) > 0.7


def test_update_predictor_refuses_a_lesson_that_spoils_old_answers(folder, monkeypatch):
    """A quarter of what is learnt here turns the last layer round already."""

    def forget(self, taught, epochs, progress):
        with torch.no_grad():
            for name, weight in self._network.named_parameters():
                if name.startswith("top.3"):
                    weight.mul_(-9.0)

    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(OnlinePredictor, "_teach", forget)
    outcome = update_predictor(folder, answered(120, seed=7, telling=DRIFTED, model="b"))
    assert not outcome.accepted
    assert "refused" in outcome.summary()
    assert outcome.old_after > outcome.old_loaded + 0.05
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept


def test_update_predictor_takes_a_part_of_an_overshooting_lesson(folder):
    """What was taught overshoots: the whole of it spoils old answers, less of it helps."""
    new = answered(120, seed=7, telling=DRIFTED, model="b")
    online = OnlinePredictor(folder, keep_queue=False)
    online.observe(new)
    teach = online._teach

    def overshoot(taught, epochs, progress):
        before = online._copy()
        teach(taught, 12, progress)
        after = online._copy()
        online._put({name: before[name].lerp(after[name], 4.0) for name in before})

    online._teach = overshoot
    outcome = online.update()
    assert outcome.step in (0.25, 0.5)
    assert "of it taken" in outcome.verdict
    assert outcome.new_after < outcome.new_before


def test_queue_of_new_answers_survives_the_process(folder):
    new = answered(40, seed=3, telling=DRIFTED, model="b")
    OnlinePredictor(folder).observe(new[:25], "chat")
    OnlinePredictor(folder).observe(new[25:], "chat")
    online = OnlinePredictor(folder)
    assert [row.output_tokens for row in online.queue] == [row.output_tokens for row in new]
    if online.update().accepted:
        online.save()
        assert not OnlinePredictor(folder).queue


def test_update_predictor_refuses_too_few_new_answers(folder):
    with pytest.raises(SloBenchError, match="0 new answers are too few"):
        update_predictor(folder, answered(256))  # it knows them all
