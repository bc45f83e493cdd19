"""A run before a server that its predictor of lengths follows: what it hears, learns and shows."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest

NEEDED = "learnt predictors need the extra torch (torch, transformers, peft)"
for module in ("torch", "transformers", "peft", "safetensors"):
    pytest.importorskip(module, reason=NEEDED)

import numpy as np  # noqa: E402

from slo_bench.harness.servers.mock import MockConfig  # noqa: E402
from slo_bench.predictors.lengths.online import QUEUE, read_queue  # noqa: E402
from slo_bench.predictors.lengths.online_predictor import OnlineLengthPredictor  # noqa: E402
from slo_bench.predictors.lengths.predictor_config import PredictorConfig  # noqa: E402
from slo_bench.predictors.lengths.train import TrainSettings, train  # noqa: E402
from slo_bench.workloads.errors import SloBenchError  # noqa: E402

pytestmark = pytest.mark.torch

_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).parents[2] / "predictors" / "tiny_models.py"
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    base = tiny_models.make_model(folder / "base")
    settings = TrainSettings(epochs=1, learning_rate=8e-3, lora_r=4, batch=16)
    train(tiny_models.answered(96), folder / "made", labels="", base=str(base), settings=settings)
    return folder / "made"


def test_online_predictor_learns_answer_lengths_in_a_copy(
    workload, run, lengths, tmp_path, monkeypatch
):
    """The predictor says hundreds of tokens; answers have seven."""
    lessons, taught = [], threading.Event()

    def teach(self, new, lately, then):
        lessons.append(new)
        taught.set()

    monkeypatch.setattr("slo_bench.predictors.lengths.online_predictor.TrainerProcess.teach", teach)
    texts = [f"narrate dragons engines please {n}" for n in range(60)]
    load = workload(60, gap_s=0.02, tokens=7, texts=texts)
    measurement, _ = run(
        load,
        MockConfig(ttft_s=0.001, itl_s=0.0005),
        values_field="vllm_xargs",
        length_predictor=f"learned({lengths}, model=a, online=50)",
        lengths_folder=tmp_path / "followed",
    )
    assert taught.is_set()
    assert [row.output_tokens for row in lessons[0]] == [7] * 50
    # All lie in the copy's queue; the predictor itself is as it was.
    assert len(read_queue(tmp_path / "followed" / QUEUE)) == 60
    assert not (lengths / QUEUE).exists()
    assert PredictorConfig.load(lengths).generation == 0
    rows = [row for row in measurement.result.timeline.timeseries if row.metric == "lengths"]
    entities = {row.entity for row in rows}
    assert entities == {"as told", "as told, within one", "without correction"}
    as_told = [row.value for row in rows if row.entity == "as told"]
    plain = [row.value for row in rows if row.entity == "without correction"]
    assert len(as_told) == len(plain) == 2  # fifty answers, and the rest
    assert plain == [0, 0]
    assert as_told[-1] > 0.5
    assert np.isfinite(measurement.result.records.finish_s).all()


def test_predictor_without_online_hears_no_answer_lengths(
    workload, run, lengths, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        OnlineLengthPredictor, "came", lambda *words: pytest.fail("it heard something")
    )
    measurement, _ = run(
        workload(3, texts=["name apples"] * 3),
        values_field="vllm_xargs",
        length_predictor=f"learned({lengths}, model=a)",
        lengths_folder=tmp_path / "followed",
    )
    assert not (tmp_path / "followed").exists()
    assert measurement.result.timeline.timeseries == ()


def test_online_predictor_needs_a_folder(workload, run, lengths):
    with pytest.raises(SloBenchError, match="needs a folder to learn in"):
        run(
            workload(3, texts=["name apples"] * 3),
            values_field="vllm_xargs",
            length_predictor=f"learned({lengths}, model=a, online=50)",
        )
