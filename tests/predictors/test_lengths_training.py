"""Learnt predictors: trained, saved, loaded, moved, interrupted; encoders and decoders."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slo_bench.predictors.lengths.predictor_config import PredictorConfig
from slo_bench.predictors.output_length import length_predictor, longest_tokens
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

NEEDED = "learnt predictors need the extra torch (torch, transformers, peft, scikit-learn)"
for module in ("torch", "transformers", "peft", "safetensors", "sklearn"):
    pytest.importorskip(module, reason=NEEDED)

import torch  # noqa: E402
from safetensors.torch import load, save  # noqa: E402

from slo_bench.predictors.lengths.evaluate_predictor import waiting_saved  # noqa: E402
from slo_bench.predictors.lengths.length_network import waiting_loss  # noqa: E402
from slo_bench.predictors.lengths.length_samples import Prompt  # noqa: E402
from slo_bench.predictors.lengths.predictor import TrainedPredictor  # noqa: E402
from slo_bench.predictors.lengths.train import TrainSettings, train  # noqa: E402

pytestmark = pytest.mark.torch


_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).with_name("tiny_models.py")
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
TELLING, answered, make_model = tiny_models.TELLING, tiny_models.answered, tiny_models.make_model

QUICK = TrainSettings(epochs=5, learning_rate=8e-3, lora_r=4, batch=16, checkpoint_steps=5)
ROWS = answered(256)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "lengths"
    train(ROWS, out, labels="words", base=str(base), settings=QUICK)
    return out


def right(predictor, rows):
    """Share of answers in the likeliest bucket."""
    from slo_bench.predictors.lengths.distribution import buckets_in

    predicted = predictor.lengths([Prompt(r.prompt, r.prompt_tokens, r.model) for r in rows])
    true = buckets_in(predictor.config.shape.edges, np.array([r.output_tokens for r in rows]))
    return float((predicted.buckets() == true).mean())


def test_trained_predictor_learns_lengths_from_prompts(trained):
    predictor = TrainedPredictor.load(trained)
    assert right(predictor, answered(100, seed=5)) > 0.8
    assert predictor.config.labels == "words"
    assert predictor.config.shape.models == ("a",)
    assert (
        sum(map(sum, predictor.config.confusion))
        == predictor.config.training["rows"]["calibration"]
    )


def test_trained_predictor_files_are_json_and_safetensors(trained):
    assert sorted(path.name for path in trained.iterdir()) == [
        "predictor.json",
        "samples-0.jsonl.gz",
        "weights-0.safetensors",
    ]
    kept = json.loads((trained / "predictor.json").read_text())
    assert len(kept["base"]["weights_sha256"]) == 64
    assert kept["shape"]["edges"][:3] == [0, 8, 16]


@pytest.mark.parametrize("head", ["ordinal", "quantile"])
def test_train_with_each_head(base, tmp_path, head):
    settings = TrainSettings(
        head=head, epochs=10, learning_rate=5e-3, lora_r=4, batch=16, edges=(0, 10, 50, 300)
    )
    train(ROWS, tmp_path / "out", labels="", base=str(base), settings=settings)
    predictor = TrainedPredictor.load(tmp_path / "out")
    assert right(predictor, answered(100, seed=5)) > 0.6
    predicted = predictor.lengths(
        [Prompt(f"{verb} apples clouds please", 4, "a") for verb in TELLING]
    )
    assert (np.diff(predicted.median_tokens()) > 0).all()
    assert predicted.bucket_probabilities().sum(axis=1) == pytest.approx(1)


def test_waiting_loss_is_the_waiting_that_an_order_costs():
    """Two in the wrong order cost as much more as their lengths differ; equal lengths nothing."""
    tokens = torch.tensor([10.0, 20.0, 200.0])
    apart = 100.0  # so far apart that the logistic loss of a pair is nothing, or the distance
    right_order, swapped = waiting_loss(tokens * apart, tokens), waiting_loss(-tokens, tokens)
    assert right_order == 0
    assert swapped > 1
    nearly = waiting_loss(torch.tensor([2.0, 1.0, 3.0]) * apart, tokens)
    badly = waiting_loss(torch.tensor([1.0, 3.0, 2.0]) * apart, tokens)
    assert badly / nearly == pytest.approx((200 - 20) / (20 - 10))
    assert waiting_loss(tokens, torch.full((3,), 7.0)) == 0


@pytest.mark.parametrize("head", ["softmax", "ordinal", "quantile"])
def test_train_with_waiting_weight_learns_the_order(base, tmp_path, head):
    settings = TrainSettings(
        head=head,
        epochs=8,
        learning_rate=8e-3,
        lora_r=4,
        batch=16,
        edges=(0, 10, 50, 300),
        waiting_weight=1.0,
    )
    train(ROWS, tmp_path / "out", labels="", base=str(base), settings=settings)
    predictor = TrainedPredictor.load(tmp_path / "out")
    rows = answered(100, seed=5)
    predicted = predictor.lengths([Prompt(r.prompt, r.prompt_tokens, r.model) for r in rows])
    tokens = np.array([r.output_tokens for r in rows])
    assert waiting_saved(predicted.median_tokens(), tokens) > 0.8


def test_negative_waiting_weight_is_refused():
    with pytest.raises(SloBenchError, match="waiting_weight must be at least 0"):
        TrainSettings(waiting_weight=-1)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_train_on_decoder_base_models(tmp_path, kind):
    base = make_model(tmp_path / "base", kind)
    train(ROWS, tmp_path / "out", labels="", base=str(base), settings=QUICK)
    predictor = TrainedPredictor.load(tmp_path / "out")
    assert right(predictor, answered(100, seed=5)) > 0.6


def test_train_with_the_same_seed_gives_the_same_bytes(base, trained, tmp_path):
    train(ROWS, tmp_path / "again", labels="words", base=str(base), settings=QUICK)
    for path in trained.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


KILLED = """
import os, signal, sys, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)
warnings.simplefilter("ignore")
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads({threads})
from pathlib import Path
from tiny_models import answered
from slo_bench.predictors.lengths import train as module
from slo_bench.predictors.lengths.train import TrainSettings, train
import time
module.CHECKPOINT_S = {checkpoint_s}
learn = module._Training._learn
def learn_and_strike(self, rows):
    learn(self, rows)
    if {way} and self.step == 43:
        os.kill(os.getpid(), {way})
module._Training._learn = learn_and_strike
def slow(done, total):
    print(done, flush=True)
    if done == 43:
        time.sleep(60)
train(answered(256), Path({out!r}), labels="words", base={base!r},
      settings=TrainSettings(epochs=5, learning_rate=8e-3, lora_r=4, batch=16, checkpoint_steps=40),
      progress=slow)
"""


@pytest.mark.parametrize(
    ("struck_within", "struck_after", "checkpoint_s", "resumed_step"),
    [
        (0, signal.SIGKILL, 1e9, 40),  # checkpoint_steps
        (0, signal.SIGKILL, 0, 43),
        (0, signal.SIGINT, 1e9, 43),
        (signal.SIGINT, 0, 1e9, 43),
        (signal.SIGTERM, 0, 1e9, 43),
    ],
)
def test_killed_training_is_resumed_to_the_same_bytes(
    base, trained, tmp_path, struck_within, struck_after, checkpoint_s, resumed_step
):
    import torch

    out = tmp_path / "killed"
    code = KILLED.format(
        here=str(Path(__file__).parent),
        out=str(out),
        base=str(base),
        threads=torch.get_num_threads(),
        checkpoint_s=checkpoint_s,
        way=int(struck_within),
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        for line in child.stdout:
            if int(line) == 43:
                break
    finally:
        child.send_signal(struck_after)
        child.wait()
        child.stdout.close()
    assert not (out / "predictor.json").exists()
    with pytest.raises(SloBenchError, match=r"interrupted training; go on with it by .*--resume"):
        train(ROWS, out, labels="words", base=str(base), settings=QUICK)
    with pytest.raises(SloBenchError, match="a training of other data, settings or base"):
        train(ROWS[:-1], out, labels="words", base=str(base), settings=QUICK, resume=True)
    begun = []
    train(
        ROWS,
        out,
        labels="words",
        base=str(base),
        settings=QUICK,
        resume=True,
        progress=lambda done, total: begun.append(done),
    )
    assert begun[0] == resumed_step
    for path in trained.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_predictor_is_loaded_from_a_moved_folder_with_its_base(trained, base, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(trained, moved)
    kept = json.loads((moved / "predictor.json").read_text())
    kept["base"]["name"] = "/nowhere/model"
    del kept["crc32"]  # by hand
    (moved / "predictor.json").write_text(json.dumps(kept))
    with pytest.raises(SloBenchError, match="there is no model in /nowhere/model"):
        TrainedPredictor.load(moved)
    prompts = [Prompt("list apples please", 3, "a")]
    expected = TrainedPredictor.load(trained).lengths(prompts).below
    assert (TrainedPredictor.load(moved, base=str(base)).lengths(prompts).below == expected).all()
    shutil.copytree(base, moved / "model")
    assert (TrainedPredictor.load(moved).lengths(prompts).below == expected).all()


def test_loading_a_predictor_does_not_ask_the_hub(trained, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere"
    shutil.copytree(trained, moved)
    kept = json.loads((moved / "predictor.json").read_text())
    kept["base"]["name"] = "nobody/no-such-model"
    del kept["crc32"]  # by hand
    (moved / "predictor.json").write_text(json.dumps(kept))
    hosts = []

    def looked_up(host, *more, **named):
        hosts.append(host)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with pytest.raises(SloBenchError, match="hf download nobody/no-such-model"):
        TrainedPredictor.load(moved)
    assert hosts == []


def test_predictor_with_another_base_is_refused(trained, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    with pytest.raises(SloBenchError, match=r"was trained on .* with weights .* but .* has"):
        TrainedPredictor.load(trained, base=str(other))


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: b"", flip, lambda data: None],
    ids=["half", "empty", "flipped", "gone"],
)
@pytest.mark.parametrize("name", ["predictor.json", "samples-0.jsonl.gz", "weights-0.safetensors"])
def test_damaged_predictor_file_is_named(trained, tmp_path, name, damage):
    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    content = damage((damaged / name).read_bytes())
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_bytes(content)
    with pytest.raises(SloBenchError, match=name):
        TrainedPredictor.load(damaged)


def test_predictor_with_weights_of_another_is_refused(trained, tmp_path):
    """Whole and of the same shape, but trained otherwise."""
    mixed = tmp_path / "mixed"
    shutil.copytree(trained, mixed)
    weights = mixed / "weights-0.safetensors"
    tensors = {name: 2 * tensor for name, tensor in load(weights.read_bytes()).items()}
    weights.write_bytes(save(tensors))
    with pytest.raises(SloBenchError, match=r"is not the file that predictor\.json .*weights-0"):
        PredictorConfig.load(mixed)


def test_predictor_file_without_checksums_is_checked(trained, tmp_path):
    by_hand = tmp_path / "by-hand"
    shutil.copytree(trained, by_hand)
    kept = json.loads((by_hand / "predictor.json").read_text())
    del kept["crc32"], kept["files"]
    (by_hand / "predictor.json").write_text(json.dumps(kept))
    weights = by_hand / "weights-0.safetensors"
    tensors = load(weights.read_bytes())
    weights.write_bytes(b"no weights")
    with pytest.raises(SloBenchError, match="the weights cannot be read"):
        TrainedPredictor.load(by_hand)
    for name, problem in (("words/bias", "must be finite"), ("top.0.bias", "is no number")):
        broken = {n: t.clone() for n, t in tensors.items()}
        broken[name][0] = float("nan")
        weights.write_bytes(save(broken))
        with pytest.raises(SloBenchError, match=problem):
            TrainedPredictor.load(by_hand)
    for name, value in (("labels", 7), ("words_share", 1e400), ("generation", -1)):
        (by_hand / "predictor.json").write_text(json.dumps({**kept, name: value}))
        with pytest.raises(SloBenchError, match=f"{name} has no sensible value"):
            PredictorConfig.load(by_hand)
    (by_hand / "predictor.json").write_text("{}")
    with pytest.raises(SloBenchError, match="no predictor's configuration"):
        PredictorConfig.load(by_hand)
    with pytest.raises(SloBenchError, match="there is no predictor in"):
        PredictorConfig.load(tmp_path)


def test_train_refuses_data_without_information(base, tmp_path):
    same = answered(200, telling={"list": 20})
    with pytest.raises(SloBenchError, match=r"all \d+ answers fall into the one bucket"):
        train(same, tmp_path / "out", labels="", base=str(base))
    with pytest.raises(SloBenchError, match="12 different prompts are too few"):
        train(ROWS[:12], tmp_path / "out", labels="", base=str(base))
    assert not (tmp_path / "out").exists()


def test_train_refuses_folders_in_use(base, trained, tmp_path):
    with pytest.raises(SloBenchError, match="holds a predictor already"):
        train(ROWS, trained, labels="", base=str(base))
    with pytest.raises(SloBenchError, match="no interrupted training"):
        train(ROWS, tmp_path / "new", labels="", base=str(base), resume=True)
    (tmp_path / "x").write_text("mine")
    with pytest.raises(SloBenchError, match="is not empty"):
        train(ROWS, tmp_path, labels="", base=str(base))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"head": "sigmoid"}, "head must be one of softmax, ordinal, quantile"),
        ({"epochs": 0}, "epochs must be at least 1 but is 0"),
        ({"learning_rate": 0.0}, "learning_rate must be between 0 and 1"),
        ({"edges": (0, 4, 4)}, "bucket edges must rise"),
        ({"max_tokens": 4}, "max_tokens must be at least 16"),
    ],
)
def test_train_settings_refuse_impossible_values(settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        TrainSettings(**settings)


def test_early_stopping_keeps_the_best(base, tmp_path):
    """Lengths that no prompt tells: soon the validation loss only rises."""
    rng = np.random.default_rng(0)
    from dataclasses import replace

    noise = [replace(r, output_tokens=int(rng.integers(1, 2000))) for r in answered(200)]
    settings = TrainSettings(epochs=30, learning_rate=2e-2, lora_r=8, batch=16, patience=2)
    config = train(noise, tmp_path / "out", labels="", base=str(base), settings=settings)
    epochs = config.training["epochs"]
    assert len(epochs) < 30
    assert not any(epoch["best"] for epoch in epochs[-2:])


def workload(texts, tokens):
    tokens = np.array(tokens)
    return Workload(np.zeros(len(tokens)), np.full(len(tokens), 5), tokens, texts=texts)


def test_learned_lengths_of_a_workload_follow_its_prompts(trained):
    texts = [f"{verb} apples clouds please 1" for verb in TELLING]
    for text in (f"learned({trained}, model=a)", f"learned({trained}, model=a, online=0)"):
        predicted = length_predictor(text).predict(
            workload(texts, list(TELLING.values())), np.random.default_rng(0)
        )
        assert (np.diff(predicted) > 0).all()
        requests, rng = workload(texts, list(TELLING.values())), np.random.default_rng(0)
        assert (longest_tokens(length_predictor(text), requests, rng) >= predicted).all()
    assert longest_tokens(length_predictor("noisy(0.5)"), requests, rng) is None


@pytest.mark.filterwarnings("ignore:the length predictor")
def test_learned_predictor_follows_a_drifting_run(trained):
    """What is asked since it was made: soon it is told nearly right."""
    kept = {path.name: path.read_bytes() for path in trained.iterdir()}
    came = answered(180, seed=3, telling={"short": 40, "old": 300}, model="b")
    requests = workload([row.prompt for row in came], [row.output_tokens for row in came])
    error = {}
    for text in (f"learned({trained}, model=b)", f"learned({trained}, model=b, online=60)"):
        predicted = length_predictor(text).predict(requests, np.random.default_rng(0))
        error[text] = np.abs(np.log(predicted[60:] / requests.output_tokens[60:])).mean()
    as_it_is, online = error.values()
    assert online < 0.8 * as_it_is
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == kept
    with pytest.raises(SloBenchError, match="needs a folder to learn in"):
        length_predictor(text).at_dispatch(requests, np.random.default_rng(0))
    with pytest.raises(SloBenchError, match="online must be at least 0"):
        length_predictor(f"learned({trained}, online=-1)")


def test_learned_lengths_at_dispatch_do_not_depend_on_the_batch(trained):
    """And of what has no text it draws, as before."""
    texts = [f"{verb} apples clouds please 1" for verb in TELLING]
    requests = workload([*texts, None], [*TELLING.values(), 100])
    text = f"learned({trained}, model=a)"
    predicted = length_predictor(text).predict(requests, np.random.default_rng(0))
    at_dispatch = length_predictor(text).at_dispatch(requests, np.random.default_rng(0))
    pairs = at_dispatch.lengths([4, 2, 0])
    assert [half for half, _, _ in pairs] == pytest.approx(predicted[[4, 2, 0]], rel=0.02)
    assert all(half <= longest for half, longest, _ in pairs)
    assert pairs[0][0] == pairs[0][1]


def test_learned_lengths_without_texts_err_as_measured(trained):
    tokens = np.random.default_rng(1).choice([4, 20, 100, 700], 2000)
    predicted = length_predictor(str(trained)).predict(
        workload(None, tokens), np.random.default_rng(0)
    )
    confusion = np.array(PredictorConfig.load(trained).confusion)
    from slo_bench.predictors.output_length import buckets_of

    for length in (4, 20, 100, 700):
        bucket = int(buckets_of(np.array([length]))[0])
        share = confusion[bucket, bucket] / max(1, confusion[bucket].sum())
        right = (buckets_of(predicted[tokens == length]) == bucket).mean()
        assert right == pytest.approx(share if confusion[bucket].sum() else 1, abs=0.06)


def test_learned_predictor_warns_of_an_unknown_model(trained):
    requests = workload(["count apples clouds please 1"], [10])
    with pytest.warns(UserWarning, match=r"knows no model 'c'.*it knows a: name one"):
        length_predictor(f"learned({trained}, model=c)").predict(requests, np.random.default_rng(0))
