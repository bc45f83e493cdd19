"""`slo-bench profile run --backend vllm|sglang`: fitted to the server's own step log; no times."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.predictors.profiles.profile_format import read_profile

pytestmark = pytest.mark.backends


@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_profile_run_of_a_server_can_be_simulated(backend, installed, tmp_path):
    installed(backend)
    # Answers are in proportion to the context.
    model = make_model(tmp_path / "tiny", {**model_fields(), "max_position_embeddings": 512})
    out = tmp_path / "server.toml"
    words = ["profile", "run", "--backend", backend, "--model", str(model)]
    done = CliRunner().invoke(app, [*words, "--out", str(out), "--budget", "60"])
    assert done.exit_code == 0, done.output
    profile = read_profile(out)
    assert profile.best == "sums"
    assert profile.gpu == "cpu"
    steps = profile.tables["steps"]
    assert len(steps) > 100
    assert (steps["chunks"] > 0).any()
    assert (steps["n_decode"] > 1).any()
    assert list((tmp_path / "server.run" / "servers").glob("*.steps.jsonl"))
    if backend == "vllm":  # swaps and recomputations, timed by the server
        ways = profile.tables["transfers"].words["direction"]
        assert {"to-host", "to-gpu"} == set(ways)
        assert (ways == "to-host").sum() == (ways == "to-gpu").sum() > 10
        assert "host" in profile.links
        assert "recomputation: " in done.output
    words = ["run", "--profile", str(out), "--system", "vllm", "--workload", "alpaca"]
    words += ["--rates", "1", "--requests", "20", "--seeds", "1", "--no-report"]
    ran = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.output
