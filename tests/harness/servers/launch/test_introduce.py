"""Servers that exchange KV meet before requests come, and a meeting that fails is repeated."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slo_bench.harness.servers.launch.server_process import ServerError, ServerProcess
from slo_bench.harness.servers.vllm.nixl_handshake import nixl_handshake

KEPT = {"remote_block_ids": [[7]]}


class Stub:
    """What `nixl_handshake` needs of a server; `down` is what it finds when it looks after it."""

    api_key, log_begin = "", 0
    endpoint = ServerProcess.endpoint
    http = ServerProcess.http
    with_log = ServerProcess.with_log

    def __init__(self, name: str, url: str, log: Path) -> None:
        self.name = name
        self.url = url
        self.log = log
        self.down = False

    def check(self) -> None:
        if self.down:
            raise ServerError(f"{self.name} has died")


@contextmanager
def answering(name: str, log: Path, statuses: list[int]) -> Iterator[tuple[Any, list[Any]]]:
    """A server that answers with each of `statuses`, then with the last of them."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            content = json.dumps({"kv_transfer_params": KEPT}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Stub(name, f"http://127.0.0.1:{server.server_port}", log), bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nixl_handshake_is_repeated_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("slo_bench.harness.servers.vllm.nixl_handshake._AGAIN_S", 0.01)
    log = tmp_path / "s.log"
    messages: list[str] = []
    with (
        answering("p", log, [200]) as (prefill, firsts),
        answering("d", log, [500, 500, 200]) as (decode, seconds),
    ):
        nixl_handshake(prefill, decode, "tiny", 300, messages.append)
    assert len(firsts) == len(seconds) == 3  # each time with KV of its own
    assert len(messages) == 2
    assert all("500" in line for line in messages)
    assert firsts[0]["max_tokens"] == 1
    assert firsts[0]["kv_transfer_params"]["do_remote_decode"]
    assert seconds[-1]["kv_transfer_params"] == KEPT
    assert seconds[-1]["model"] == "tiny"


def test_nixl_handshake_that_never_succeeds_names_the_log(tmp_path):
    log = tmp_path / "s.log"
    log.write_text("Error: no route\n")
    with answering("p", log, [200]) as (prefill, _), answering("d", log, [500]) as (decode, _):
        with pytest.raises(ServerError, match=r"no KV came from p to d within 0 s .*500.*log"):
            nixl_handshake(prefill, decode, "tiny", 0, print)
        prefill.down = True
        with pytest.raises(ServerError, match="p has died"):
            nixl_handshake(prefill, decode, "tiny", 300, print)
