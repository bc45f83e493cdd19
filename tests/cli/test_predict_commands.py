"""`slo-bench predict-train` and `predict-eval` as they are typed, and a run that is told by one."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app, main
from slo_bench.cli.options.predict_data import read_data
from slo_bench.workloads.errors import SloBenchError

pytestmark = pytest.mark.torch


_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).parents[1] / "predictors" / "tiny_models.py"
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
answered, write_jsonl = tiny_models.answered, tiny_models.write_jsonl

NEEDED = "learnt predictors need the extra torch (torch, transformers, peft, scikit-learn)"
MODULES = ("torch", "transformers", "peft", "safetensors", "sklearn")
there = all(importlib.util.find_spec(module) is not None for module in MODULES)
needs_torch = pytest.mark.skipif(not there, reason=NEEDED)


def typed(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def refused(monkeypatch, capsys, *arguments):
    """The one line that is printed; exit code 2."""
    monkeypatch.setattr(sys, "argv", ["slo-bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def trained(folder):
    base = tiny_models.make_model(folder / "base")
    data = write_jsonl(folder / "talks.jsonl", answered(256))
    arguments = ["--base", base, "--lora-r", 4, "--epochs", 7, "--learning-rate", 8e-3]
    typed("predict-train", data, "--out", folder / "lengths", "--batch", 16, *arguments)
    return folder / "lengths"


@needs_torch
def test_predict_eval_prints_text_json_and_page(trained, folder):
    new = write_jsonl(folder / "new.jsonl", answered(80, seed=4))
    page = folder / "page.html"
    rows = folder / "rows.csv"
    text = typed("predict-eval", trained, new, "--html", page, "--predictions", rows)
    with rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 80
    verb_buckets = {"name": 0, "list": 2, "explain": 4, "narrate": 7}  # buckets of `TELLING`
    assert np.mean([row["bucket"] == row["predicted_bucket"] for row in written]) > 0.7
    assert all(
        abs(int(row["bucket"]) - verb_buckets[row["prompt"].split()[0]]) < 2 for row in written
    )
    for part in (
        "LoRA",
        "majority per",
        "prompt length",
        "TF-IDF",
        "exact",
        "99.51 %",
        "Leak check",
    ):
        assert part in text
    report = json.loads(typed("predict-eval", trained, new, folder / "talks.jsonl", "--json"))
    ours = [row for row in report["scores"] if row["predictor"] == "LoRA"]
    assert [row["corpus"] for row in ours] == ["new", "talks"]
    assert [row["transfer"] for row in ours] == [True, False]
    assert ours[0]["exact"] > 0.7
    assert report["leak_exact"]["new"] > 0.9  # "word word word": its count is its length
    # Of what it was trained on only the share kept back is judged.
    rows = json.loads((trained / "predictor.json").read_text())["training"]["rows"]
    assert ours[1]["rows"] == rows["test"]
    assert report["left_out"]["talks"] == 256 - rows["test"]
    assert {latency["batch"] for latency in report["latencies"]} == {1, 32}
    assert sum(map(sum, report["confusion"])) == ours[1]["rows"]  # transfer stands apart
    html = page.read_text()
    assert 'id="figure-reliability"' in html
    assert 'id="figure-confusion"' in html


@needs_torch
def test_predict_eval_prequential_learns_from_the_stream(trained, folder):
    drifted = answered(120, seed=9, telling={"short": 40, "old": 300})
    data = write_jsonl(folder / "drift.jsonl", drifted)
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    report = json.loads(typed("predict-eval", trained, data, "--prequential", 40, "--json"))
    assert [window["rows"] for window in report["windows"]] == [40, 40, 40]
    assert report["windows"][0]["update"]["rows"] == 40
    assert report["windows"][-1]["corrected"] >= report["windows"][-1]["as_trained"]
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    page = folder / "drift.html"
    shown = typed(
        "predict-eval", trained, data, "--prequential", 60, "--baseline", trained, "--html", page
    )
    assert {"trained", "online,", "baseline"} <= set(shown.split())
    html = page.read_text()
    assert 'id="figure-drift"' in html
    assert "1–60" in html


@needs_torch
def test_predict_eval_baseline_trained_on_the_data_is_refused(trained, folder, monkeypatch, capsys):
    data = write_jsonl(folder / "seen.jsonl", answered(256))
    baseline = ["predict-eval", trained, data, "--baseline", trained]
    assert "would flatter" in refused(monkeypatch, capsys, *baseline, "--prequential", 40)
    assert "--prequential" in refused(monkeypatch, capsys, *baseline)


@needs_torch
def test_predict_train_continue_from_updates_or_keeps_the_predictor(trained, folder, tmp_path):
    mine = Path(shutil.copytree(trained, tmp_path / "lengths"))
    data = write_jsonl(tmp_path / "new.jsonl", answered(120, seed=9, telling={"old": 300}))
    updated = CliRunner().invoke(app, ["predict-train", str(data), "--continue-from", str(mine)])
    assert updated.exit_code == 0
    assert "update with 120 new answers" in updated.stderr
    generation = json.loads((mine / "predictor.json").read_text())["generation"]
    assert generation == int("taken" in updated.stderr)
    assert (mine / f"weights-{generation}.safetensors").is_file()


# Also where whoever runs the tests passes on that it is ignored, as a shell does in the background.
HEARS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from slo_bench.cli.main import main
main()
"""


@needs_torch
def test_predict_train_interrupted_by_ctrl_c_can_be_resumed(tmp_path):
    base = tiny_models.make_model(tmp_path / "base")
    data = write_jsonl(tmp_path / "talks.jsonl", answered(256))
    arguments = ["predict-train", data, "--base", base, "--lora-r", "2", "--epochs", "6"]
    arguments = [*map(str, arguments), "--threads", "1", "--out", str(tmp_path / "lengths")]
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("epoch 1"):
            process.send_signal(signal.SIGINT)
            break
    error = process.communicate(timeout=300)[1]
    assert (process.returncode, "Traceback" in error) == (130, False)
    kept = re.search(r"(\d+) steps are kept in .* go on with the same command and --resume", error)
    assert kept is not None
    assert int(kept[1]) > 0
    done = CliRunner().invoke(app, [*arguments, "--resume"])
    assert done.exit_code == 0
    assert (tmp_path / "lengths" / "predictor.json").is_file()


@needs_torch
def test_run_uses_lengths_of_a_trained_predictor(trained, folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_jsonl(folder / "served.jsonl", answered(60, seed=6))
    base = ["run", "--system", "sjf", "--workload", folder / "served.jsonl", "--rates", "2"]
    base += ["--seeds", 1, "--requests", 60, "--no-report", "--jobs", 1]
    for name, kind in (("learned", "learned"), ("words", "tfidf")):
        predictor = f"{kind}({trained}, model=a)"
        typed(*base, "--length-predictor", predictor, "--out", folder / name)
        (row,) = csv.DictReader((folder / name / "cells.csv").read_text().splitlines())
        assert float(row["length_bucket_accuracy"]) > 0.5
    # What came out of a run teaches the predictor.
    rows = typed("predict-eval", trained, f"a={folder / 'learned'}", "--json")
    assert json.loads(rows)["scores"][0]["rows"] > 40


@needs_torch
def test_predict_commands_refuse_wrong_arguments_in_one_line(
    trained, folder, monkeypatch, capsys, tmp_path
):
    data = folder / "talks.jsonl"
    new = ("predict-train", data, "--base", folder / "base", "--out")
    for arguments, message in (
        (("predict-train", data), "give --out DIR for a new predictor, or --continue-from DIR"),
        ((*new, trained), "holds a predictor already"),
        ((*new, tmp_path / "x", "--head", "sigmoid"), "head must be one"),
        (
            ("predict-train", data, "--out", tmp_path / "x", "--base", tmp_path),
            "it has no config.json",
        ),
        ((*new, tmp_path / "x", "--buckets", "0,a"), "--buckets '0,a'"),
        (("predict-eval", trained, data, "--base", tmp_path), "it has no config.json"),
        (("predict-train", trained, "--out", tmp_path / "x"), "is no run folder"),
        (
            ("run", "--length-predictor", tmp_path, "--rates", "1"),
            "there is no predictor in",
        ),
    ):
        error = refused(monkeypatch, capsys, *arguments)
        assert error.startswith("error: ")
        assert message in error
        assert "Traceback" not in error


def test_predictor_input_never_contains_the_answer(tmp_path):
    data = write_jsonl(tmp_path / "plain.jsonl", answered(30))
    with pytest.raises(SloBenchError, match="column 'output' holds the answer"):
        read_data([str(data)], "prompt,output", None, None)


@needs_torch
def test_predict_train_counts_answers_by_tokenizer_where_no_count_is_given(
    trained, folder, tmp_path
):
    data = tmp_path / "texts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"list apples {number}", "output": "apples " * (number % 40 + 1)})
            + "\n"
            for number in range(60)
        )
    )
    report = json.loads(
        typed("predict-eval", trained, data, "--label-tokenizer", folder / "base", "--json")
    )
    assert report["scores"][0]["rows"] == 60
    assert report["leak_exact"]["texts"] > 0.9
