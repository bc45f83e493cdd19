"""Several servers behind one address: streams, headers, errors, losses, disconnects, routing."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import socket
import socketserver
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.servers.gateway import GatewayPlan, serving, serving_apart, upstream
from slo_bench.harness.servers.http import http_server
from slo_bench.harness.servers.http.http_limits import HttpLimits
from slo_bench.harness.servers.mock import MockConfig
from slo_bench.harness.servers.mock import serving as mock
from slo_bench.workloads.errors import SloBenchError

PATIENCE_S = 30
OVER = (1 << 20) + 1  # bytes
QUICK = MockConfig(ttft_s=0.002, itl_s=0.001)


class Client:
    """One connection to the gateway; open until the test ends."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
        self.opened.append(self)

    def get(self, path: str) -> tuple[int, bytes]:
        self.wire.request("GET", path)
        answer = self.wire.getresponse()
        return answer.status, answer.read()

    def post(
        self, path: str, body: object, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self.wire.request("POST", path, json.dumps(body), headers)
        answer = self.wire.getresponse()
        return answer, answer.read()

    def complete(self, **fields: object) -> int:
        answer, _ = self.post("/v1/completions", {"prompt": "a b", "max_tokens": 2, **fields})
        return answer.status


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().wire.close()


@pytest.fixture
def gateway() -> Iterator[Callable[..., str]]:
    """The address of a gateway before some addresses."""
    with contextlib.ExitStack() as stack:

        def up(*urls: str, **plan: object) -> str:
            endpoints = [Endpoint.parse(url) for url in urls]
            return stack.enter_context(serving(GatewayPlan(endpoints, **plan)))

        yield up


@pytest.fixture
def mocks() -> Iterator[Callable[..., list]]:
    with contextlib.ExitStack() as stack:

        def up(n: int, config: MockConfig = QUICK) -> list:
            return [stack.enter_context(mock(config)) for _ in range(n)]

        yield up


def served(server) -> int:
    return len(server.truths())


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def raw_server(answer: Callable[[socket.socket], None]) -> contextlib.AbstractContextManager[str]:
    """A server of a few lines; `answer` has the connection after the request's head."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                received = self.request.recv(65536)
                if not received:
                    return
                head += received
            answer(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    @contextlib.contextmanager
    def up() -> Iterator[str]:
        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
                thread.join()

    return up()


def test_gateway_serves_models_health_and_completions(gateway, mocks):
    client = Client(gateway(*(m.url for m in mocks(2))))
    assert json.loads(client.get("/v1/models")[1])["data"][0]["id"] == "mock"
    assert client.get("/health") == (200, b"")
    answer, body = client.post("/v1/chat/completions", {"messages": [], "max_tokens": 3})
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert answer.headers["content-type"] == "application/json"
    _, body = client.post("/v1/embeddings", {"input": ["a b", "c"]})
    assert len(json.loads(body)["data"]) == 2


def test_gateway_passes_a_servers_refusal_on(gateway, mocks):
    client = Client(gateway(*(m.url for m in mocks(1))))
    assert client.get("/nowhere")[0] == 404
    answer, body = client.post("/v1/completions", ["no object"])
    assert answer.status == 400
    assert "no JSON object" in json.loads(body)["error"]["message"]
    assert client.complete() == 200  # on the same connection


def test_gateway_router_counts_completions_only(gateway, mocks):
    servers = mocks(2)
    client = Client(gateway(*(m.url for m in servers)))
    for _ in range(3):
        client.get("/v1/models")
        client.post("/tokenize", {"prompt": "a"})
        assert client.complete() == 200
        assert client.complete() == 200
    assert [served(m) for m in servers] == [3, 3]
    text = client.get("/metrics")[1].decode()
    for server in servers:
        assert f'answers_total{{instance="{server.url}",role="serve"}} 3' in text
    assert "slo_bench_gateway_in_flight" in text


def test_gateway_prefix_aware_routes_a_prefix_to_one_instance(gateway, mocks):
    servers = mocks(3)
    client = Client(gateway(*(m.url for m in servers), router="prefix-aware"))
    for turn in range(1, 5):
        for name in ("one", "two"):
            text = f"{name} " * 100
            messages = [{"role": "user", "content": text}] * turn
            client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    ids = list(range(64))
    for k in range(4):
        assert client.complete(prompt=[*ids, *range(k, k + 20)]) == 200
    counts = sorted(served(m) for m in servers)
    assert sum(counts) == 12
    assert all(count % 4 == 0 for count in counts)


def test_gateway_least_loaded_counts_running_requests(gateway):
    counts = [0, 0]
    all_under_way = threading.Barrier(6)

    def answer(server: int, wire: socket.socket) -> None:
        counts[server] += 1
        all_under_way.wait(PATIENCE_S)
        wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with raw_server(partial(answer, 0)) as first_url, raw_server(partial(answer, 1)) as second_url:
        url = gateway(first_url, second_url, router="least-loaded")
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(lambda _: Client(url).complete(), range(6))) == {200}
    assert counts == [3, 3]


def test_gateway_passes_stream_events_as_they_come(gateway):
    go_on: queue.Queue[bytes] = queue.Queue()

    def answer(wire: socket.socket) -> None:
        wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-odd: yes\r\n")
        wire.sendall(b"Transfer-Encoding: chunked\r\nconnection: x-hop\r\nx-hop: 1\r\n\r\n")
        while piece := go_on.get(timeout=PATIENCE_S):
            wire.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        wire.sendall(b"0\r\n\r\n")

    with raw_server(answer) as url:
        client = Client(gateway(url)).wire
        client.request("POST", "/v1/completions", b"{}")
        response = client.getresponse()
        assert response.headers["x-odd"] == "yes"
        assert "x-hop" not in response.headers
        for piece in (b"data: one\n\n", b"data: t", b"wo\n\ndata: three\n\n"):
            go_on.put(piece)
            assert response.read1() == piece  # before the next one exists
        go_on.put(b"")
        assert response.read() == b""


def test_gateway_passes_headers_and_query_to_the_server(gateway):
    heads: queue.Queue[bytes] = queue.Queue()

    class Keeps(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines = list(iter(self.rfile.readline, b"\r\n"))
            heads.put(b"".join(lines))
            self.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Keeps) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_address[1]
        client = Client(gateway(f"http://127.0.0.1:{port}"))
        answer, _ = client.post(
            "/v1/completions?a=b", {}, Authorization="Bearer k", **{"Proxy-Authorization": "no"}
        )
        server.shutdown()
        thread.join()
    assert answer.status == 204
    head = heads.get(timeout=PATIENCE_S)
    assert head.startswith(b"POST /v1/completions?a=b HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in head
    assert f"host: 127.0.0.1:{port}\r\n".encode() in head
    assert b"Proxy" not in head
    assert head.lower().count(b"host:") == head.lower().count(b"content-length:") == 1


def test_gateway_skips_a_dead_instance(gateway, mocks):
    servers = mocks(3)
    client = Client(gateway(*(m.url for m in servers)))
    assert [client.complete() for _ in range(3)] == [200] * 3
    servers[1].stop()
    assert [client.complete() for _ in range(8)] == [200] * 8
    assert f'up{{instance="{servers[1].url}",role="serve"}} 0' in client.get("/metrics")[1].decode()
    servers[0].stop()
    servers[2].stop()
    eventually(lambda: client.complete() == 503)
    answer, body = client.post("/v1/completions", {"prompt": "a"})
    assert answer.status == 503
    assert "no instance is up" in json.loads(body)["error"]["message"]
    assert client.get("/health")[0] == 503


def test_gateway_chooses_a_recovered_instance_again(gateway):
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    class Well(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(ok)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = allow_reuse_address = True

    with Server(("127.0.0.1", 0), Well, bind_and_activate=False) as server:
        server.server_bind()  # nobody else can take the port, and nobody answers yet
        client = Client(gateway(f"http://127.0.0.1:{server.server_address[1]}"))
        assert client.complete() == 503
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        eventually(lambda: client.complete() == 200)
        server.shutdown()
        thread.join()


def test_gateway_answers_502_for_a_server_lost_before_its_answer(gateway):
    with raw_server(lambda wire: None) as url:
        answer, body = Client(gateway(url)).post("/v1/completions", {})
        assert answer.status == 502
        assert url in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("framing", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_gateway_cuts_off_the_client_of_a_cut_answer(gateway, framing):
    def answer(wire: socket.socket) -> None:
        wire.sendall(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n5\r\nhello\r\n")

    with raw_server(answer) as url:
        client = Client(gateway(url)).wire
        client.request("POST", "/v1/completions", b"{}")
        response = client.getresponse()
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead):
            response.read()


def test_gateway_passes_an_answer_ended_by_closing(gateway):
    with raw_server(lambda wire: wire.sendall(b"HTTP/1.0 200 OK\r\n\r\nall of it")) as url:
        assert Client(gateway(url)).post("/v1/completions", {})[1] == b"all of it"


@pytest.mark.parametrize("closes", [True, False])
def test_gateway_ends_an_answer_that_said_its_end_without_a_last_chunk(
    gateway, monkeypatch, closes
):
    monkeypatch.setattr(upstream, "CLOSE_LIMIT_S", 0.1)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    def answer(wire: socket.socket) -> None:
        wire.sendall(head + b"e\r\ndata: [DONE]\n\n\r\n")
        if not closes:
            wire.recv(1)  # until the gateway closes

    with raw_server(answer) as url:
        client = Client(gateway(url))
        for _ in range(2):  # the server is not called down
            answered, body = client.post("/v1/completions", {})
            assert (answered.status, body) == (200, b"data: [DONE]\n\n")


def test_gateway_cancels_the_request_of_a_disconnected_client(gateway, mocks):
    [server] = mocks(1, MockConfig(ttft_s=0.01, itl_s=0.05))
    client = Client(gateway(server.url)).wire
    body = {"prompt": "a", "max_tokens": 10_000, "stream": True}
    client.request("POST", "/v1/completions", json.dumps(body))
    response = client.getresponse()
    assert response.read1().startswith(b"data: ")
    running = f"{server.url}/metrics"

    def count() -> bytes:
        with urllib.request.urlopen(running) as answer:
            return answer.read().split(b"\n")[0]

    assert count() == b"vllm:num_requests_running 1.0"
    response.close()
    client.close()
    eventually(lambda: count() == b"vllm:num_requests_running 0.0")


def test_gateway_holds_the_server_back_for_a_slow_reader(gateway):
    sent = 0

    def answer(wire: socket.socket) -> None:
        nonlocal sent
        wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (120 << 20))
        for _ in range(120):
            wire.sendall(bytes(1 << 20))
            sent += 1

    with raw_server(answer) as url:
        client = Client(gateway(url)).wire
        client.request("POST", "/v1/completions", b"{}")
        response = client.getresponse()
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            time.sleep(0.5)
        assert sent < 60  # of 120: what sockets and buffers hold
        total = 0
        while piece := response.read(1 << 20):
            total += len(piece)
        assert total == 120 << 20


def test_gateway_serves_http_1_0_and_pipelined_requests(gateway, mocks):
    [server] = mocks(1)
    parts = urlsplit(gateway(server.url))
    body = b'{"prompt": "a", "max_tokens": 2, "stream": true}'
    ask = b"POST /v1/completions HTTP/1.%d\r\ncontent-length: %d\r\n\r\n%b"
    with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as wire:
        wire.sendall(ask % (0, len(body), body))
        received = b"".join(iter(lambda: wire.recv(65536), b""))
    assert b"chunked" not in received
    assert received.endswith(b"data: [DONE]\n\n")
    with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as wire:
        wire.sendall((ask % (1, len(body), body)) * 3 + b"HEAD /v1/models HTTP/1.1\r\n\r\n")
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 4 or not received.endswith(b"\r\n\r\n"):
            received += wire.recv(65536)
    assert received.count(b"[DONE]") == 3
    assert b"object" not in received[received.rindex(b"HTTP/1.1") :]


def test_gateway_refuses_malformed_http_and_ignores_upgrade(gateway, mocks):
    parts = urlsplit(gateway(*(m.url for m in mocks(1))))
    for request, status in (
        (b"nonsense\r\n\r\n", b"400"),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", b"400"),
        (b"GET //host/health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"200"),
    ):
        with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as wire:
            wire.sendall(request)
            received = b"".join(iter(lambda: wire.recv(65536), b""))
        assert received.split()[1] == status


def test_gateway_closes_all_connections_on_exit(mocks):
    [server] = mocks(1, MockConfig(ttft_s=PATIENCE_S))
    with serving(GatewayPlan([Endpoint.parse(server.url)])) as url:
        client = Client(url).wire
        client.request("POST", "/v1/completions", b'{"prompt": "a"}')
        eventually(lambda: served(server) == 1)
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        client.getresponse()
    with pytest.raises(ConnectionRefusedError):
        Client(url).get("/health")
    assert not [thread for thread in threading.enumerate() if thread.name == "gateway"]


def test_gateway_plan_refuses_impossible_settings(mocks):
    [server] = mocks(1)
    endpoint = Endpoint.parse(server.url)
    with (
        pytest.raises(SloBenchError, match="sideways"),
        serving(GatewayPlan([endpoint], "sideways")),
    ):
        pass
    with pytest.raises(SloBenchError, match="needs a server"), serving(GatewayPlan([])):
        pass
    with (
        pytest.raises(SloBenchError, match=f"no gateway at 127.0.0.1:{endpoint.port}.*in use"),
        serving(GatewayPlan([endpoint]), port=endpoint.port),
    ):
        pass


def test_gateway_process_serves_and_ends(mocks):
    servers = mocks(2)
    plan = GatewayPlan(tuple(Endpoint.parse(m.url) for m in servers), "least-loaded")
    assert GatewayPlan.from_plain(json.loads(json.dumps(plan.to_plain()))) == plan
    with serving_apart(plan) as url:
        assert [Client(url).complete() for _ in range(3)] == [200] * 3
    with pytest.raises(ConnectionRefusedError):
        Client(url).get("/health")


@pytest.fixture
def limited(mocks):
    """Runs a gateway with limits before a mock, and yields its host and port."""

    @contextlib.contextmanager
    def opened(**limits):
        plan = GatewayPlan([Endpoint.parse(m.url) for m in mocks(1)])
        with serving(plan, limits=HttpLimits(**limits)) as url:
            parts = urlsplit(url)
            yield parts.hostname, parts.port

    return opened


def address_of(url):
    parts = urlsplit(url)
    return parts.hostname, parts.port


def answered(wire):
    """Status of the answer; None: closed without one."""
    received = b"".join(iter(lambda: wire.recv(65536), b""))
    return int(received.split()[1]) if received else None


def head(length, close=True):
    ending = b"connection: close\r\n" if close else b""
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (
        ending,
        length,
    )


@pytest.mark.parametrize(
    ("limits", "sent", "status"),
    [
        ({"request_s": 0.05}, b"POST /v1/completions HTTP/1.1\r\nx: y", 408),
        ({"body_bytes": 1 << 20}, head(OVER) + b" " * OVER, 413),
        ({"bodies_bytes": 1 << 20}, head(OVER) + b" " * OVER, 503),
        ({"idle_s": 0.05}, b"", None),
    ],
    ids=["request", "body", "bodies", "idle"],
)
def test_gateway_refuses_clients_beyond_its_limits(limited, limits, sent, status):
    with limited(**limits) as address, socket.create_connection(address, PATIENCE_S) as wire:
        wire.sendall(sent)
        assert answered(wire) == status


def test_a_whole_request_before_garbage_is_answered_and_garbage_ends_the_connection(limited):
    with limited() as address, socket.create_connection(address, PATIENCE_S) as wire:
        wire.sendall(head(2, close=False) + b"{}" + b"GARBAGE\0\r\n\r\n")
        answers = b"".join(iter(lambda: wire.recv(65536), b""))
        assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"400"]


def test_half_closed_client_gets_its_answers_and_the_connection_ends(limited):
    with limited() as address, socket.create_connection(address, PATIENCE_S) as wire:
        wire.sendall(2 * (head(2, close=False) + b"{}") + head(9))
        wire.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: wire.recv(65536), b""))
        assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"200"]
        assert answers.count(b"total_tokens") == 2


def test_half_closed_client_hears_an_interim_answer_where_the_answer_takes_long(mocks, monkeypatch):
    monkeypatch.setattr(http_server, "_PROBE_S", 0.01)
    [server] = mocks(1, MockConfig(ttft_s=0.2))
    with serving(GatewayPlan([Endpoint.parse(server.url)])) as url:
        with socket.create_connection(address_of(url), PATIENCE_S) as wire:
            wire.sendall(head(2) + b"{}")
            wire.shutdown(socket.SHUT_WR)
            answers = b"".join(iter(lambda: wire.recv(65536), b""))
        interim, _, answer = answers.rpartition(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert interim
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_request_of_a_client_that_closes_before_its_answer_begins_is_cancelled(mocks, monkeypatch):
    monkeypatch.setattr(http_server, "_PROBE_S", 0.01)
    [server] = mocks(1, MockConfig(ttft_s=PATIENCE_S))
    with serving(GatewayPlan([Endpoint.parse(server.url)])) as url:
        with socket.create_connection(address_of(url), PATIENCE_S) as wire:
            wire.sendall(head(2, close=False) + b"{}")
            eventually(server.truths)
        eventually(lambda: counted(address_of(url)).get("total cancelled") == 1)


def test_gateway_connection_limit_frees_closed_connections(limited):
    with limited(connections=1) as address:
        for _ in range(2):
            first = socket.create_connection(address, PATIENCE_S)
            with first, socket.create_connection(address, PATIENCE_S) as second:
                assert answered(second) == 503
                first.sendall(head(2) + b"{}")
                assert answered(first) == 200


def test_gateway_answer_that_does_not_begin_in_time_fails(limited):
    body = json.dumps({"prompt": "a b", "max_tokens": 60_000, "stream": False}).encode()
    limits = {"first_byte_s": 0.05}
    with limited(**limits) as address, socket.create_connection(address, PATIENCE_S) as wire:
        wire.sendall(head(len(body)) + body)
        assert answered(wire) == 504


def counted(wire_address):
    with socket.create_connection(wire_address, PATIENCE_S) as wire:
        wire.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = b"".join(iter(lambda: wire.recv(65536), b"")).decode()
    pattern = r'^slo_bench_gateway_requests_(\w+)(?:\{\w+="(\w+)"\})? (\d+)$'
    samples = re.findall(pattern, text, re.MULTILINE)
    return {f"{name} {label}".strip(): int(count) for name, label, count in samples}


def test_gateway_counts_each_request_once(limited):
    endless = json.dumps({"prompt": "a", "max_tokens": 60_000, "stream": True}).encode()
    with limited(body_bytes=1 << 20) as address:
        for sent in (head(2) + b"{}", head(OVER) + b" " * OVER):
            with socket.create_connection(address, PATIENCE_S) as wire:
                wire.sendall(sent)
                answered(wire)
        with socket.create_connection(address, PATIENCE_S) as wire:  # two; the first never ends
            wire.sendall(2 * (head(len(endless), close=False) + endless))
            assert wire.recv(1)
        eventually(lambda: counted(address).get("total cancelled") == 2)
        counters = counted(address)
        assert (counters["total 200"] - 1, counters["refused_total 413"]) == (
            counters["received_total"] - 4,
            1,
        )


def test_gateway_with_a_key_refuses_clients_without_it(mocks):
    plan = GatewayPlan([Endpoint.parse(m.url) for m in mocks(1)])
    body = {"prompt": "a b", "max_tokens": 2}
    with serving(plan, api_key="s3cret") as url:
        statuses = {
            key: Client(url).post("/v1/completions", body, **headers)[0].status
            for key, headers in {
                "none": {},
                "wrong": {"authorization": "Bearer x"},
                "right": {"authorization": "Bearer s3cret"},
            }.items()
        }
        assert statuses == {"none": 401, "wrong": 401, "right": 200}
        assert Client(url).get("/health")[0] == 200
        assert Client(url).get("/metrics")[0] == 401


def test_gateway_on_all_interfaces_needs_a_key(mocks):
    plan = GatewayPlan([Endpoint.parse(m.url) for m in mocks(1)])
    with pytest.raises(SloBenchError, match="give it an API key"), serving(plan, host="0.0.0.0"):
        pass
