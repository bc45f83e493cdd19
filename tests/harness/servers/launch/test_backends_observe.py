"""`slo-bench observe` on a real vLLM under load; no times, which the machine decides."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = pytest.mark.backends
REQUESTS = 60


def send(url, answered, over):
    """Requests one after another, until enough are answered and the watching is over."""
    body = {"model": "tiny", "prompt": "Tell me a story about " * 40, "max_tokens": 24}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    headers = {"content-type": "application/json"}
    while not over.is_set():
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
        answered.append(1)


@pytest.mark.weekly
def test_observe_a_vllm_server_under_load(installed, tiny_model, started_serve, tmp_path):
    installed("vllm")
    model = str(tiny_model("vllm"))
    out = tmp_path / "out"
    with started_serve("vllm", "--model", model, "--served-name", "tiny") as server:
        answered, over = [], threading.Event()
        clients = [
            threading.Thread(target=send, args=(server.url, answered, over), daemon=True)
            for _ in range(6)
        ]
        for client in clients:
            client.start()
        while len(answered) < 6:
            over.wait(0.1)
        words = ["observe", server.url, "--model", model, "--slo", "ttft=5,tpot=1", "--json"]
        words += ["--set", "max_num_seqs=256"]  # which its metrics do not tell
        done = CliRunner().invoke(
            app, [*words, "--duration", "40", "--interval", "0.8", "--out", str(out)]
        )
        over.set()
        for client in clients:
            client.join()
    assert done.exit_code == 0, done.exception or done.output
    report = json.loads(done.stdout)
    assert (report["engine"], report["model"]) == ("vllm", "tiny")
    assert 1 <= report["running_peak"] <= 6
    assert report["kv_cache_tokens"] > 0
    assert report["output"]["mean_tokens"] == pytest.approx(24, rel=0.05)
    assert report["prefix_cache_hit_share"] > 0.1  # all prompts are alike
    assert report["capacity_band_rps"][0] < report["capacity_band_rps"][1]
    assert (out / "profile.toml").is_file()
    assert (out / "experiment.toml").is_file()
