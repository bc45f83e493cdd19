"""Servers with roles: the simulator's controller dispatches, takes back and sends on."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from slo_bench.harness.core.wire import DROPPED, OFFLOADED
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.policies.ascendra.ascendra_controller import Ascendra
from slo_bench.harness.servers.gateway import GatewayPlan, mechanism_counts, serving, serving_apart
from slo_bench.harness.servers.mock import InjectedFault, MockConfig
from slo_bench.harness.servers.mock import serving as mock

PATIENCE_S = 30
QUICK = MockConfig(ttft_s=0.002, itl_s=0.001)
SILENT = MockConfig(ttft_s=10 * PATIENCE_S)
GIVES_BACK = MockConfig(fault=InjectedFault.OFFLOADED)
BODY = {"prompt": "a b", "max_tokens": 3, "stream": True}


@pytest.fixture
def gateway() -> Iterator[Callable[..., str]]:
    """The address of a gateway before servers, by role."""
    with contextlib.ExitStack() as stack:

        def up(policy: Ascendra, lp: list[str], hp: list[str]) -> str:
            return stack.enter_context(serving(plan(policy, lp, hp)))

        yield up


def plan(policy: Ascendra, lp: list[str], hp: list[str]) -> GatewayPlan:
    endpoints = tuple(Endpoint.parse(url) for url in (*lp, *hp))
    return GatewayPlan(endpoints, controller=policy, roles=("lp",) * len(lp) + ("hp",) * len(hp))


@pytest.fixture
def server() -> Iterator[Callable[[MockConfig], str]]:
    """The address of a mock."""
    with contextlib.ExitStack() as stack:
        yield lambda config=QUICK: stack.enter_context(mock(config)).url


@pytest.fixture
def asking() -> Iterator[Callable[[str], http.client.HTTPResponse]]:
    """Ask, and come back with the head of the answer; what is unread is closed at the end."""
    with contextlib.ExitStack() as stack:

        def ask(url: str, **fields: object) -> http.client.HTTPResponse:
            wire = open_wire(url)
            stack.callback(wire.close)
            send(wire, **fields)
            return wire.getresponse()

        yield ask


def open_wire(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)


def send(wire: http.client.HTTPConnection, **fields: object) -> None:
    wire.request("POST", "/v1/completions", json.dumps({**BODY, **fields}))


def complete(url: str, **fields: object) -> tuple[int, bytes]:
    wire = open_wire(url)
    try:
        send(wire, **fields)
        answer = wire.getresponse()
        return answer.status, answer.read()
    finally:
        wire.close()


def counts(url: str, name: str) -> list[int]:
    """A metric of all servers, in their order."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return [int(n) for n in re.findall(rf"^slo_bench_gateway_{name}{{.*}} (\d+)$", text, re.M)]


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextlib.contextmanager
def recorder() -> Iterator[tuple[str, list[dict]]]:
    """A server that keeps what it is asked."""
    bodies: list[dict] = []

    class Keeps(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            bodies.append(json.loads(self.rfile.read(length)))
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with answering(Keeps) as url:
        yield url, bodies


@contextlib.contextmanager
def answering(handler: type) -> Iterator[str]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = allow_reuse_address = True

    with Server(("127.0.0.1", 0), handler) as tcp_server:
        thread = threading.Thread(target=tcp_server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{tcp_server.server_address[1]}"
        finally:
            tcp_server.shutdown()
            thread.join()


def test_hp_instance_without_a_prompt_gets_the_ticket(gateway, server):
    url = gateway(Ascendra(), [server(), server()], [server(SILENT)])
    first = open_wire(url)
    send(first)  # to the HP instance, which does not begin
    eventually(lambda: counts(url, "in_flight") == [0, 0, 1])
    for _ in range(3):
        assert complete(url)[0] == 200
    assert counts(url, "dispatched_total") == [2, 1, 1]  # LP instances in turn
    first.close()
    eventually(lambda: counts(url, "in_flight") == [0, 0, 0])
    second = open_wire(url)
    send(second)
    eventually(lambda: counts(url, "dispatched_total") == [2, 1, 2])
    second.close()


def test_hp_instance_asks_for_a_ticket_from_its_first_token(gateway, server, asking):
    url = gateway(Ascendra(), [server(), server()], [server(MockConfig(ttft_s=0.01, itl_s=0.05))])
    for n in (1, 2, 3):
        response = asking(url, max_tokens=10_000)
        assert response.read1().startswith(b"data: ")
        assert counts(url, "dispatched_total") == [0, 0, n]
        assert counts(url, "in_flight") == [0, 0, n]


def test_all_requests_begin_at_lp_instances_without_tickets(gateway, server):
    url = gateway(Ascendra(n_lp=1, tickets=False), [server()], [server()])
    assert [complete(url)[0] for _ in range(3)] == [200] * 3
    assert counts(url, "dispatched_total") == [3, 0]


@pytest.mark.parametrize("stream", [True, False])
def test_offloaded_request_is_answered_by_another_server(gateway, server, stream):
    url = gateway(Ascendra(tickets=False), [server(GIVES_BACK), server()], [server()])
    for _ in range(4):
        status, body = complete(url, stream=stream)
        assert status == 200
        assert body.count(b" tok") == 3
        assert OFFLOADED.encode() not in body
    assert counts(url, "dispatched_total") == [2, 2, 0]
    assert counts(url, "offloaded_total") == [2, 0, 0]
    assert mechanism_counts(url) == {"offloads": 2}
    assert counts(url, "taken_over_total") == [0, 0, 2]
    assert counts(url, "answers_total") == [0, 2, 2]


def test_offloaded_request_carries_its_waiting_time(gateway, server):
    with recorder() as (hp, bodies):
        url = gateway(Ascendra(n_lp=1, tickets=False), [server(GIVES_BACK)], [hp])
        assert complete(url, vllm_xargs={"ttft_slo_s": 0.5}) == (200, b"{}")
    [body] = bodies
    waited_s = body["vllm_xargs"].pop("waited_s")
    assert 0 < waited_s < PATIENCE_S
    assert body == {**BODY, "vllm_xargs": {"ttft_slo_s": 0.5}}


def test_request_is_offloaded_within_its_group(gateway, server):
    lp = [server(GIVES_BACK), server()]
    url = gateway(Ascendra(n_lp=1, tickets=False), lp, [server(), server()])
    for _ in range(4):
        assert complete(url)[0] == 200
    assert counts(url, "dispatched_total") == [2, 2, 0, 0]  # groups take turns
    assert counts(url, "taken_over_total") == [0, 0, 2, 0]


def test_offload_goes_to_the_shortest_queue(gateway, server, asking):
    policy = Ascendra(n_lp=1, n_hp=2, tickets=False)
    url = gateway(policy, [server(GIVES_BACK)], [server(SILENT), server()])
    waits = open_wire(url)
    send(waits)
    eventually(lambda: counts(url, "in_flight") == [0, 1, 0])
    assert [complete(url)[0] for _ in range(3)] == [200] * 3
    assert counts(url, "taken_over_total") == [0, 1, 3]
    waits.close()


def test_request_that_a_server_has_read_is_sent_to_no_other(gateway, server):
    class Dies(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            self.wfile.write(head + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:")

    with answering(Dies) as lost:
        url = gateway(Ascendra(n_lp=1, tickets=False), [lost], [server()])
        status, body = complete(url)
        assert status == 502
        assert "was lost" in json.loads(body)["error"]["message"]
        assert counts(url, "losses_total") == [1, 0]
        assert counts(url, "taken_over_total") == [0, 0]


def test_request_lost_in_mid_answer_ends_with_an_error(gateway, server, asking):
    cut = MockConfig(ttft_s=0.002, itl_s=0.001, fault=InjectedFault.CUT)
    url = gateway(Ascendra(n_lp=1, tickets=False), [server(cut)], [server()])
    response = asking(url, max_tokens=9)
    assert response.status == 200
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    assert counts(url, "taken_over_total") == [0, 0]


def test_refusal_of_a_server_is_the_answer(gateway, server):
    broken = MockConfig(fault=InjectedFault.REFUSED_IN_STREAM)
    url = gateway(Ascendra(n_lp=1, tickets=False), [server(broken)], [server()])
    status, body = complete(url)
    assert status == 200
    assert b"cannot be served" in body
    too_many = server(MockConfig(fault=InjectedFault.TOO_MANY))
    busy = gateway(Ascendra(n_lp=1, tickets=False), [too_many], [server()])
    assert complete(busy)[0] == 429


def test_offloaded_request_without_another_server_is_dropped(gateway, server):
    with recorder() as (gone, _):
        pass
    url = gateway(Ascendra(n_lp=1, tickets=False), [server(GIVES_BACK)], [gone])
    status, body = complete(url)
    assert status == 503
    assert json.loads(body)["error"]["message"].startswith(DROPPED)


def test_gateway_answers_503_while_no_server_is_up(gateway, server):
    with recorder() as (gone, _):
        pass
    url = gateway(Ascendra(n_lp=1), [gone], [gone])
    assert complete(url)[0] == 503
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S)


def test_gateway_process_has_the_same_controller(server):
    policy = Ascendra(n_lp=1, tickets=False, hp_batch_tokens=512)
    gateway_plan = plan(policy, [server(GIVES_BACK)], [server()])
    assert GatewayPlan.from_plain(json.loads(json.dumps(gateway_plan.to_plain()))) == gateway_plan
    with serving_apart(gateway_plan) as url:
        assert complete(url)[0] == 200
        assert counts(url, "taken_over_total") == [0, 1]


def test_load_aware_gateway_reads_metrics_of_servers(server):
    loaded = """vllm:prompt_tokens_total 1
vllm:generation_tokens_total 1
vllm:kv_cache_usage_perc 0.9
"""

    class Loaded(socketserver.StreamRequestHandler):
        looks = 0

        def handle(self) -> None:
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.startswith(b"GET /metrics"):
                    Loaded.looks += 1
            body = loaded.encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    with answering(Loaded) as full:
        gateway_plan = GatewayPlan([Endpoint.parse(url) for url in (full, server())], "load-aware")
        with serving(gateway_plan) as url:
            complete(url)  # nothing is known yet: to the first
            assert counts(url, "dispatched_total") == [1, 0]
            eventually(lambda: Loaded.looks > 1)
            assert [complete(url)[0] for _ in range(3)] == [200] * 3
            assert counts(url, "dispatched_total") == [1, 3]
            with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
                loads = re.findall(rb"^slo_bench_gateway_load{.*} (\S+)$", answer.read(), re.M)
            assert float(loads[0]) >= 0.9
