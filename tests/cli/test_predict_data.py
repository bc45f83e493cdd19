"""Data of predictors: models and units of lengths that do not fit."""

import pytest

from slo_bench.cli.options.predict_data import ReadData, check_units, with_known_models
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.labelled_prompts import APPROXIMATE, LabelledPrompt

ROW = LabelledPrompt("Why?", 1, 5, "held-out", "held-out")
DATA = ReadData([ROW], "output_tokens of the data", [], frozenset({"held-out"}))


def test_a_files_name_is_the_only_model_of_a_predictor():
    found = with_known_models(DATA, ["gpt4"])
    assert [row.model for row in found.rows] == ["gpt4"]
    assert not found.notes


def test_an_unknown_model_is_warned_of():
    (note,) = with_known_models(DATA, ["gpt4", "llama"]).notes
    assert note.startswith("WARNING: the predictor knows no model held-out (the file's name")
    assert "gpt4=FILE" in note
    named = ReadData([ROW], DATA.labels, [])  # the row says so
    assert "knows no model held-out," in with_known_models(named, ["gpt4"]).notes[0]


def test_lengths_must_be_counted_alike():
    check_units(DATA.labels, DATA)
    with pytest.raises(SloBenchError, match="cannot be compared: give data without output_tokens"):
        check_units(f"answers counted by {APPROXIMATE.name}", DATA)
    rough = ReadData([ROW], f"answers counted by {APPROXIMATE.name}", [])
    with pytest.raises(SloBenchError, match="give --label-tokenizer"):
        check_units(DATA.labels, rough)
