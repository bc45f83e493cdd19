"""A server of one folder (`stand_in`) is run, searched for its capacity and served."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

POINTS, KIND = "stand_in_cpu-1.0.dist-info/entry_points.txt", "stand_in_kind.py"
FOLDER = Path(__file__).parents[1] / "stand_in"
LOAD = ("--model", "m", "--seeds", "1", "--prompt-tokens", "16", "--output-tokens", "4")
PATIENT = ("--send-delay-limit", "10")  # machines that run tests are busy
RUN = ("run", "--backend", "stand-in", *LOAD, "--rates", "40", "-n", "20", *PATIENT, "--no-report")


@pytest.fixture
def slo_bench_beside(tmp_path, monkeypatch):
    """The command line where the folder is on Python's path: exit code, stdout and stderr."""
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def call(*words: object, folder: Path = FOLDER) -> tuple[int, str, str]:
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-c", "from slo_bench.cli.main import main; main()", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        return done.returncode, done.stdout, done.stderr

    return call


def row_of(table: Path) -> dict[str, str]:
    with table.open() as file:
        [row] = csv.DictReader(file)
    return row


def test_stand_in_is_run_with_its_options_and_metrics(slo_bench_beside, tmp_path):
    words = ("--system", "stand-in", "--set", "stand-in.max_num_seqs=4", "--out", "out")
    code, _, err = slo_bench_beside(*RUN, *words)
    assert code == 0, err
    row = row_of(tmp_path / "out" / "cells.csv")
    assert (row["backend"], row["finished"], row["server_output_tokens"]) == (
        "stand-in",
        "20",
        "80",
    )
    [meta] = (tmp_path / "out" / "servers").glob("*.meta.json")
    assert json.loads(meta.read_text())["engine_kwargs"]["max_num_seqs"] == 4
    assert "--slots 4" in (tmp_path / "out" / "servers" / "stand-in.log").read_text()


def test_stand_in_is_searched_for_its_capacity(slo_bench_beside, tmp_path):
    search = ("--rates", "40,400", "-n", "100", "--max-time", "2", *PATIENT, "--slo", "e2e=0.1")
    words = ("capacity", "--backend", "stand-in", "--system", "stand-in", *LOAD, *search)
    code, out, err = slo_bench_beside(*words, "--no-report", "--json")
    assert code == 0, err
    [capacity] = json.loads(out)
    assert capacity["system"] == "stand-in"
    assert capacity["levels"]


def test_stand_in_is_served(started_serve, monkeypatch):
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    words = ("stand-in", "--backend", "stand-in", "--model", "m", "--instances", "2")
    with started_serve(*words) as up:
        body = json.dumps({"model": "m", "prompt": [1, 2], "max_tokens": 3}).encode()
        request = urllib.request.Request(f"{up.url}/v1/completions", body)
        with urllib.request.urlopen(request) as answer:
            assert answer.read().count(b'"text"') == 3
        assert sum(up.counts("answers_total")) == 1


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (POINTS, "stand-in = stand_in_kind:STAND_IN", "backend must be 'simulated', 'openai', "),
        (POINTS, "stand-in = stand_in_kind:SYSTEM", "unknown system 'stand-in'"),
        (KIND, '    distributions=("stand-in-cpu",),', "stand-in is not installed"),
        (KIND, '    name="stand-in",', "cannot be loaded: TypeError: "),
    ],
)
def test_stand_in_without_a_registration_is_refused(
    slo_bench_beside, tmp_path, file, line, message
):
    folder = tmp_path / "stand_in"
    shutil.copytree(FOLDER, folder)
    path = folder / file
    text = path.read_text()
    assert line in text
    path.write_text(text.replace(f"{line}\n", ""))
    code, _, err = slo_bench_beside(*RUN, "--system", "stand-in", folder=folder)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--system", "edf"), "edf cannot run on stand-in: no policy runs inside it"),
        (("--system", "stand-in", "--tp", "2"), "this server has one GPU"),
        (("--system", "stand-in", "--step-log"), "Stand-in has no plugin that logs its steps"),
        (
            ("--system", "stand-in", "--kv-offload-gib", "1"),
            "kv_offload_gib (--kv-offload-gib) has no effect with backend stand-in",
        ),
    ],
)
def test_what_the_stand_in_lacks_is_refused(slo_bench_beside, option, message):
    code, _, err = slo_bench_beside(*RUN, *option)
    assert code == 2
    assert message in err
