"""Each request passes through a prefill server, then a decode server."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slo_bench.harness.core.wire import LOAD_KV, STORE_KV
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.servers.gateway import GatewayPlan, serving
from slo_bench.harness.servers.gateway.split import KvTransferMode, transfer_of
from slo_bench.workloads.errors import UnknownNameError

PATIENCE_S = 30


class Recorder:
    """A server that keeps what it was asked, and answers `given`."""

    def __init__(self, name: str) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.given: tuple[int, dict] = (200, {"from": name})
        self.url = ""


@contextmanager
def recorder(name: str) -> Iterator[Recorder]:
    recording = Recorder(name)

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            recording.asked.append((self.path, json.loads(body)))
            self.say(*recording.given)

        def do_GET(self) -> None:
            self.say(200, {"from": name})

        def say(self, status: int, answer: dict) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        recording.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield recording
        server.shutdown()
        thread.join()


@pytest.fixture
def split() -> Iterator[tuple[Recorder, Recorder]]:
    with recorder("prefill") as prefill, recorder("decode") as decode:
        yield prefill, decode


@contextmanager
def gateway(
    split: tuple[Recorder, Recorder],
    transfer: KvTransferMode = KvTransferMode.FILES,
    router: str = "round-robin",
) -> Iterator[str]:
    prefill, decode = (Endpoint.parse(server.url) for server in split)
    with serving(GatewayPlan([decode], router, prefill=[prefill], transfer=transfer)) as url:
        yield url


def post(url: str, body: object) -> dict:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("router", ["round-robin", "load-aware"])
def test_split_request_prefills_first_and_names_its_files(split, router):
    prefill, decode = split
    body = {"prompt": "a b", "max_tokens": 9, "min_tokens": 9, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    with gateway(split, router=router) as url:
        for _ in range(2):
            assert post(f"{url}/v1/completions", body) == {"from": "decode"}
        with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
            loads = re.findall(rb'^slo_bench_gateway_load{.*role="(\w+)"', answer.read(), re.M)
    assert loads == ([b"prefill", b"decode"] if router == "load-aware" else [])
    names = set()
    for (path, first), (_, then) in zip(prefill.asked, decode.asked, strict=True):
        assert path == "/v1/completions"
        name = first.pop("kv_transfer_params")[STORE_KV]
        assert then.pop("kv_transfer_params") == {LOAD_KV: name}
        names.add(name)
        assert first == {"prompt": "a b", "max_tokens": 1, "stream": False, "temperature": 0}
        assert then == body
    assert len(names) == 2  # no two transfers share their files


def test_split_request_with_nixl_passes_transfer_parameters(split):
    prefill, decode = split
    where = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_port": 5}
    prefill.given = (200, {"kv_transfer_params": where})
    with gateway(split, KvTransferMode.NIXL) as url:
        post(f"{url}/v1/chat/completions", {"messages": [], "max_completion_tokens": 9})
    [(_, first)] = prefill.asked
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["max_completion_tokens"] == first["max_tokens"] == 1
    [(_, then)] = decode.asked
    assert then == {
        "messages": [],
        "max_completion_tokens": 9,
        "kv_transfer_params": where,
    }


def test_refusal_of_the_prefill_server_is_the_answer(split):
    prefill, decode = split
    prefill.given = (400, {"error": {"message": "too long"}})
    with gateway(split) as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{url}/v1/completions", {"prompt": "a"})
        assert refused.value.code == 400
        assert json.load(refused.value) == prefill.given[1]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(f"{url}/v1/completions", b"no JSON")
    assert not decode.asked


def test_requests_without_decode_go_to_prefill_servers(split):
    prefill, decode = split
    with gateway(split) as url:
        assert post(f"{url}/v1/embeddings", {"input": "a"}) == {"from": "prefill"}
        assert post(f"{url}/tokenize", {"prompt": "a"}) == {"from": "prefill"}
    assert [path for path, _ in prefill.asked] == ["/v1/embeddings", "/tokenize"]
    assert not decode.asked


def test_split_gateway_answers_503_without_prefill_or_decode(split):
    prefill, _ = split
    gone = Recorder("gone")
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen; nobody else can take the port
        gone.url = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        with gateway((prefill, gone)) as url:
            for _ in range(2):
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    post(f"{url}/v1/completions", {"prompt": "a"})
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)
    assert len(prefill.asked) == 1  # once it is known, nobody computes for nothing


def test_transfer_mode_is_found_by_name():
    assert transfer_of("files") is KvTransferMode.FILES
    with pytest.raises(UnknownNameError, match="did you mean nixl"):
        transfer_of("nix")
