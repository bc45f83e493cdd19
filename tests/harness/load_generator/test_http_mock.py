import json
import urllib.error
import urllib.request

import numpy as np
import pytest

from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving, serving_apart
from slo_bench.workloads.errors import SloBenchError


def ask(url, **body):
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def test_mock_slots_serve_in_order_and_fixed_time(workload, run):
    """An M/D/c queue: two slots, 60 ms each, whatever the length."""
    lengths = np.array([1, 5, 2, 7, 3, 4])
    config = MockConfig(ttft_s=0.02, slots=2, service_s=0.06)
    load = workload(6, gap_s=0.004)
    load.output_tokens[:] = load.max_output_tokens[:] = lengths
    _, truths = run(load, config)
    order = [truths[row] for row in range(6)]
    started = [t.started_s for t in order]
    assert started == sorted(started)
    ends = [t.last_token_s for t in order]
    for row in range(2, 6):  # each begins when the one two before it ends
        assert started[row] >= min(ends[row - 2], ends[row - 1]) - 1e-3
    spent = np.array(ends) - np.array(started)
    assert (spent[lengths > 1] > 0.0595).all()
    assert [t.tokens for t in order] == lengths.tolist()


def test_mock_answers_models_health_and_metrics():
    with serving_apart(MockConfig(ttft_s=0, itl_s=0, model="m")) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "m"
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            assert b"vllm:num_requests_running 0.0" in answer.read()
        whole = json.loads(ask(f"{server.url}/v1/completions", prompt="a b", max_tokens=2))
        assert whole["choices"][0]["text"] == " tok tok"
        assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(f"{server.url}/v2/completions", prompt="a")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{server.url}/v1/completions", data=b"{")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_s": -1},
        {"slots": 0},
        {"answer_tokens": 0},
        {"tokens_per_chunk": 0},
        {"ttft_s": 1, "service_s": 0.5},
    ],
)
def test_mock_config_refuses_impossible_values(wrong):
    with pytest.raises(SloBenchError, match="must"):
        MockConfig(**wrong)


def test_disconnected_client_frees_its_mock_slot():
    with serving(MockConfig(ttft_s=0.05, itl_s=0, slots=1, fault=InjectedFault.STALL)) as server:
        import socket

        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 9, "stream": True}).encode()
        with socket.create_connection((host, int(port))) as left:
            left.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body))
            left.sendall(body)
            assert left.recv(10)
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            assert b"waiting 0.0" in answer.read()
