"""`slo-bench tune` on a real server: one setting crashes it, one refuses, one is best."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = pytest.mark.backends

# Answers end within 200 tokens: with room for 1,024 all are served, with room for 64 none is. The
# third value makes the server end as it starts: it is no number, or more than the model can.
SPACES = {
    "vllm": ("max-model-len", "many", "invalid"),
    "sglang": ("context-length", "9000", "greater than the derived context_length (4096)"),
}
LOAD = """
model = {model}
workload = "sharegpt"
prompt_tokens = "fixed(100)"
output_tokens = "fixed(8)"
slo = "e2e=1000"
requests = 100
seeds = 1

[client]
send_delay_limit_s = 1000.0
"""
EXPERIMENT = (
    """
systems = {backend}
backend = {backend}"""
    + LOAD
    + """
[tune]
objectives = "goodput"
rate_rps = 5
sampler = "grid"
confirm = false

[tune.search]
"server.{option}" = ["64", "1024", "{crash}"]
"""
)


@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_tune_finds_the_best_setting_of_a_real_server(backend, installed, tiny_model, tmp_path):
    installed(backend)
    option, crash, says = SPACES[backend]
    file, out = tmp_path / "tune.toml", tmp_path / "out"
    words = {"backend": json.dumps(backend), "model": json.dumps(str(tiny_model(backend)))}
    file.write_text(EXPERIMENT.format(**words, option=option, crash=crash))
    done = CliRunner().invoke(app, ["tune", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads((out / "tune.json").read_text())
    trials = {row["configuration"][f"server.{option}"]: row for row in report["trials"]}
    assert {name: row["state"] for name, row in trials.items()} == {
        "64": "failed",
        "1024": "finished",
        crash: "failed",
    }
    assert "not one of the first 20 of 100 requests was served" in trials["64"]["reason"]
    assert trials["1024"]["values"][0] > 0
    assert report["best"] == [trials["1024"]["number"]]
    assert crash in trials[crash]["reason"]
    assert "its log is" in trials[crash]["reason"]
    logs = [path.read_text() for path in (out / "servers").rglob("*.log")]
    assert len(logs) == 3
    assert any(says in log and crash in log for log in logs)
    (winner,) = report["winners"]
    assert f"--server-arg=--{option}" in winner["commands"][1]
    assert 'origin":"measured"' in (out / "report.html").read_text()


# A small batch has the least TPOT, so that the winner is not the default.
SIMULATED_FIRST = (
    '\nsystems = "vllm"'
    + LOAD.replace("fixed(100)", "uniform(50,150)")
    + """
[tune]
objectives = "tpot_p99"
rate_rps = 200
sampler = "grid"
confirm_backend = "vllm"

[tune.search]
max_num_seqs = [2, 3]
"""
)


@pytest.mark.weekly
def test_tune_measures_the_simulated_winner_beside_the_default(installed, tiny_model, tmp_path):
    installed("vllm")
    file, out = tmp_path / "tune.toml", tmp_path / "out"
    file.write_text(SIMULATED_FIRST.format(model=json.dumps(str(tiny_model("vllm")))))
    done = CliRunner().invoke(app, ["tune", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads((out / "tune.json").read_text())
    (best,) = report["best"]
    rows = {(row["backend"], row["configuration"]): row for row in report["confirmed"]}
    assert set(rows) == {
        (where, which) for where in ("simulated", "vllm") for which in ("default", f"trial {best}")
    }
    for (where, _), row in rows.items():
        assert row["problem"] is None
        assert row["requests"] == 5 * 100
        if where == "vllm" and row["low"] is None:
            continue  # a busy machine sent late in all runs but one, which have no interval
        assert row["low"] < row["value"] < row["high"], where
    assert rows["vllm", f"trial {best}"]["verdict"]
    logs = sorted((out / "confirm" / "vllm").rglob("*.log"))
    assert len(logs) == 2
    (chosen,) = [row["configuration"] for row in report["trials"] if row["number"] == best]
    assert chosen == {"max_num_seqs": 2}
    limited = [re.search(r"'max_num_seqs': 2\b", log.read_text()) is not None for log in logs]
    assert limited.count(True) == 1
    page = (out / "report.html").read_text()
    assert "vllm" in page
    assert 'origin":"simulated"' in page
