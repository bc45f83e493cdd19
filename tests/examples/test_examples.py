"""Every script in examples/ runs as it stands, is short, and says what it is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
PRINTED = {
    "capacity_search": "vllm: ",
    "own_policy": "attainment",
    "own_trace": "240 requests",
    "read_results": "misses",
    "tune_a_parameter": "best: ",
}
NAMES = [example.stem for example in EXAMPLES]


def test_every_example_has_an_expected_output():
    assert set(NAMES) == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_example_runs(example, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", example, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert PRINTED[example.stem] in ran.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_example_is_short_and_documented(example):
    text = example.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 40


def test_uellm_tuning_file_runs(slo_bench, tmp_path):
    file = EXAMPLES[0].with_name("uellm_tuning.toml")
    assert tomllib.loads(file.read_text())["tune"]["trials"] == 160
    short = ["--trials", 3, "--requests", 100, "--seeds", 1, "--jobs", 1]
    code, out, err = slo_bench("tune", file, *short, "--no-report", "--out", tmp_path / "study")
    assert code == 0, err
    assert "slo_weight" in out
    study = tomllib.loads((tmp_path / "study" / "tune.toml").read_text())
    assert study["tune"]["trials"] == 3
    assert study["tune"]["search"] == tomllib.loads(file.read_text())["tune"]["search"]
    assert json.loads((tmp_path / "study" / "tune.json").read_text())
