"""Routing by the load that real vLLM servers report."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.backends

PATIENCE_S = 300


def ask(url: str, tokens: int, **more: object) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    body = {"model": "tiny", "prompt": list(range(10, 400)), "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, **more}
    wire.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return wire


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.weekly
def test_load_aware_chooses_the_server_with_less_kv_in_use(started_serve, installed, tiny_model):
    installed("vllm")
    words = ["vllm", "--backend", "vllm", "--model", tiny_model("vllm"), "--served-name", "tiny"]
    words += [
        "--instances",
        2,
        "--router",
        "load-aware",
        "--num-gpu-blocks",
        200,
        "--block-size",
        32,
    ]
    with started_serve(*words) as up:
        assert up.values("load") == [0, 0]
        long = ask(up.url, 3600, stream=True)  # half of the KV cache in the end
        assert long.getresponse().read1().startswith(b"data: ")
        # It has begun: nobody waits anywhere, and without a measured load the first would be next.
        eventually(lambda: up.values("load")[0] > 0)
        assert up.values("load")[1] == 0
        short = ask(up.url, 4)
        assert short.getresponse().status == 200
        assert up.counts("dispatched_total") == [1, 1]
        short.close()
        long.close()
        eventually(lambda: up.counts("in_flight") == [0, 0])
