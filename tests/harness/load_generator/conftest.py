"""A small workload, and servers to send it to. Times are never asserted: machines are busy."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from slo_bench.harness.load_generator.http import Endpoint, HttpOptions
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload


@pytest.fixture
def workload():
    """`n` requests, `gap_s` apart, of 8 prompt and `tokens` output tokens."""

    def make(n=6, *, gap_s=0.01, tokens=5, **columns):
        return Workload(np.arange(n) * gap_s, np.full(n, 8), np.full(n, tokens), **columns)

    return make


@pytest.fixture
def run():
    """Measure a workload on one mock; the result, and what the mock says happened, by row."""

    def run_it(workload, config=None, *, router="round-robin", **options):
        # A late client is another matter, and has its own tests.
        options = {"send_delay_limit_s": 60.0, "rate_limit_share": 1.0, "processes": 1, **options}
        with serving(config or MockConfig(ttft_s=0.005, itl_s=0.002)) as server:
            measurement = measure(
                workload, [Endpoint.parse(server.url)], HttpOptions(**options), router=router
            )
            try:
                truths = server.truths()
            except SloBenchError:  # it died, as it was told to
                truths = []
        return measurement, {int(t.request_id.removeprefix("slo-bench-")): t for t in truths}

    return run_it


@pytest.fixture
def json_server():
    """An address where `answer(path, body)` gives the status and the JSON of each answer, or the
    bytes of its events, and the requests so far.
    """
    servers = []

    def serve(answer):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                requests.append((self.path, body))
                status, reply = answer(self.path, body)
                streams = isinstance(reply, bytes)
                content = reply if streams else json.dumps(reply).encode()
                self.send_response(status)
                kind = "text/event-stream" if streams else "application/json"
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", requests

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
