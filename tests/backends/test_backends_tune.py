"""`slo-bench tune` on a real server: one setting crashes it, one refuses, one is best."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = pytest.mark.backends

# Answers end within 200 tokens: with room for 1,024 all are served, with room for 64 none is, and
# the third value is no number, so that the server ends as it starts.
EXPERIMENT = """
systems = "vllm"
backend = "vllm"
model = {model}
workload = "sharegpt"
prompt_tokens = "fixed(100)"
output_tokens = "fixed(8)"
slo = "e2e=1000"
requests = 100
seeds = 1

[client]
late_limit_s = 1000.0

[tune]
objectives = "goodput"
rate_rps = 5
sampler = "grid"
confirm = false

[tune.search]
"server.max-model-len" = ["64", "1024", "many"]
"""


def test_the_best_setting_of_a_real_server(installed, tiny_model, tmp_path):
    installed("vllm")
    file, out = tmp_path / "tune.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(model=json.dumps(str(tiny_model("vllm")))))
    done = CliRunner().invoke(app, ["tune", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads((out / "tune.json").read_text())
    trials = {row["configuration"]["server.max-model-len"]: row for row in found["trials"]}
    assert {name: row["state"] for name, row in trials.items()} == {
        "64": "finished",
        "1024": "finished",
        "many": "failed",
    }
    assert trials["64"]["values"] == [0.0]
    assert trials["1024"]["values"][0] > 0
    assert found["best"] == [trials["1024"]["number"]]
    assert "many" in trials["many"]["reason"]
    assert "its log is" in trials["many"]["reason"]
    logs = [path.read_text() for path in (out / "servers").rglob("*.log")]
    assert len(logs) == 3
    assert any("invalid" in log and "many" in log for log in logs)
    (winner,) = found["winners"]
    assert "--server-arg=--max-model-len" in winner["commands"][1]
    assert 'origin":"measured"' in (out / "report.html").read_text()
