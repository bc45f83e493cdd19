"""Servers that die, hang or return behind a gateway: no request is sent twice, none has no end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.servers.gateway import GatewayPlan, serving
from slo_bench.harness.servers.gateway.instances import RoutedServerGroup
from slo_bench.harness.servers.gateway.replies import CollectedReply
from slo_bench.harness.servers.gateway.suspects import Suspects
from slo_bench.harness.servers.http.http_server import HttpRequest

PATIENCE_S = 30
ROUTERS = ["round-robin", "load-aware"]


class Mortal:
    """A server on connections that stay; it dies of POISON, drops DROP and is silent while hung."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.hung = threading.Event()
        self.ends_slowly = False  # its other connections stay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = self._listener.accept()
                self._open.append(wire)
                threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), wire, wire.makefile("rb") as lines:
            while head := lines.readline():
                length = 0
                while (line := lines.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                body = lines.read(length)
                while self.hung.is_set():
                    time.sleep(0.005)
                if head.startswith(b"POST"):
                    self.bodies.append(body)
                if b"POISON" in body:
                    self.die()
                if b"DROP" in body or b"POISON" in body:
                    wire.shutdown(socket.SHUT_RDWR)
                    return
                wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def die(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in () if self.ends_slowly else self._open:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def mortals() -> Iterator[list[Mortal]]:
    servers = [Mortal() for _ in range(3)]
    yield servers
    for server in servers:
        server.hung.clear()
        with contextlib.suppress(OSError):
            server.die()


@contextlib.contextmanager
def before(servers, router="round-robin", **plan):
    endpoints = [Endpoint.parse(server.url) for server in servers]
    with serving(GatewayPlan(endpoints, router, **plan)) as url:
        yield url


def post(url: str, prompt: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    with contextlib.closing(wire):
        wire.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 2}))
        answer = wire.getresponse()
        return answer.status, answer.read()


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def eventually(holds) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def reached(servers, word: str) -> int:
    return sum(word.encode() in body for server in servers for body in server.bodies)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "reused"])
def test_a_request_that_was_read_is_not_sent_again(mortals, router, warm):
    with before(mortals, router) as url:
        if warm:
            assert [post(url, "warm")[0] for _ in range(6)] == [200] * 6
        assert post(url, "DROP")[0] == 502
        assert reached(mortals, "DROP") == 1
        assert 'reason="lost"} 1' in metrics(url)


def test_a_server_that_drops_connections_again_and_again_has_one_watch():
    [server] = servers = [Mortal()]

    async def drop_often() -> int:
        loop_tasks = asyncio.all_tasks()
        well = asyncio.Event()

        def say(line: str) -> None:
            if line.endswith("up again"):
                well.set()

        group = RoutedServerGroup([Endpoint.parse(server.url)], "round-robin", say=say)
        for number in range(5):
            reply = CollectedReply()
            await group.work(HttpRequest("POST", "/x", [], b"DROP %d" % number), reply)
            assert reply.status == 502
            await well.wait()
            well.clear()
        await asyncio.sleep(0)  # for those that were cancelled
        watches = len(asyncio.all_tasks() - loop_tasks)
        group.close()
        return watches

    assert asyncio.run(drop_often()) == 1
    assert reached(servers, "DROP") == 5
    server.die()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_request_that_took_a_server_down_is_refused_afterwards(mortals, router):
    with before(mortals, router) as url:
        assert [post(url, "warm")[0] for _ in range(6)] == [200] * 6
        assert post(url, "POISON")[0] == 502

        def refused() -> bool:
            status, body = post(url, "POISON")
            assert status == 502
            return b"servers went down with this request" in body

        eventually(lambda: "up{" in metrics(url) and "} 0" in metrics(url))
        eventually(refused)
        assert reached(mortals, "POISON") <= 2
        assert [post(url, "other")[0] for _ in range(4)] == [200] * 4


def test_a_death_is_seen_although_idle_connections_stay(mortals):
    """A process that ends closes its connections one by one; the health is asked on a new one."""
    for server in mortals:
        server.ends_slowly = True
        server.hung.set()
    with before(mortals) as url:
        with ThreadPoolExecutor(9) as clients:
            answers = clients.map(post, [url] * 9, ["warm"] * 9)
            eventually(lambda: metrics(url).count('role="serve"} 3\n') == 3)  # in flight
            for server in mortals:
                server.hung.clear()
            assert [status for status, _ in answers] == [200] * 9
        post(url, "POISON")
        eventually(lambda: b"servers went down with this request" in post(url, "POISON")[1])
        assert reached(mortals, "POISON") <= 2


def test_a_server_that_hangs_ends_its_requests_and_returns(mortals):
    servers = mortals[:2]
    with before(servers, hung_after_s=3.0) as url:
        assert [post(url, "warm")[0] for _ in range(2)] == [200] * 2
        servers[0].hung.set()
        eventually(lambda: f'up{{instance="{servers[0].url}",role="serve"}} 0' in metrics(url))
        assert [post(url, "other")[0] for _ in range(4)] == [200] * 4
        assert 'reason="hung"} 1' in metrics(url)
        servers[0].hung.clear()
        eventually(lambda: f'up{{instance="{servers[0].url}",role="serve"}} 1' in metrics(url))


def test_a_request_at_a_server_that_hangs_is_answered(mortals):
    [server] = servers = mortals[:1]
    with before(servers, hung_after_s=3.0) as url:
        assert post(url, "warm")[0] == 200
        server.hung.set()
        status, body = post(url, "waits")
        assert status == 502
        assert b"was lost" in body


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(st.sampled_from(["fine", "DROP", "POISON"]), min_size=1, max_size=8),
    router=st.sampled_from(ROUTERS),
)
def test_each_request_reaches_a_server_at_most_once_in_any_order_of_deaths(words, router):
    servers = [Mortal() for _ in range(3)]
    try:
        with before(servers, router) as url:
            for number, word in enumerate(words):
                status, _ = post(url, f"{word}-{number}-end")
                assert status in ((200, 503) if word == "fine" else (502, 503))
                assert reached(servers, f"{word}-{number}-end") <= 1
    finally:
        for server in servers:
            with contextlib.suppress(OSError):
                server.die()


def request(body: str) -> HttpRequest:
    return HttpRequest("POST", "/v1/completions", [], body.encode())


def test_one_that_was_alone_is_guilty_and_one_among_others_after_two_deaths():
    suspects = Suspects(2)
    suspects.blame([request("alone")])
    assert suspects.guilty(request("alone"))
    suspects.blame([request("a"), request("b")])
    assert not suspects.guilty(request("a"))
    suspects.blame([request("a"), request("c")])
    assert [suspects.guilty(request(name)) for name in "abc"] == [True, False, False]


def test_suspects_are_those_present_at_the_server():
    suspects = Suspects(2)
    same = request("x")
    with suspects.at(0, same), suspects.at(1, request("y")):
        assert suspects.present(0) == (same,)
    assert suspects.present(0) == suspects.present(1) == ()
