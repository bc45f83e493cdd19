import socket

import pytest

from slo_bench.harness.servers.http import http_server
from slo_bench.harness.servers.http.allowed_hosts import AllowedHosts

HERE = ("", "localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:8")
EVIL = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "0.0.0.0:8000", "[fe80::1]:80", "192.168.1.2", "localhost@evil.example",
        "[::1].evil.example")  # fmt: skip


@pytest.mark.parametrize("names", [(), None])
def test_loopback_server_answers_its_own_names_alone(names):
    hosts = AllowedHosts("127.0.0.1", names)
    assert [host for host in HERE if not hosts.allows(host)] == []
    assert [host for host in EVIL if hosts.allows(host)] == []
    assert hosts.allows("gateway") is (names is None)


def test_server_answers_the_names_that_are_allowed():
    hosts = AllowedHosts("127.0.0.1", ("Bench.Example",))
    assert hosts.allows("bench.example:8443")
    assert hosts.allows("BENCH.EXAMPLE.")
    assert not hosts.allows("evil.bench.example")


def test_server_at_all_addresses_answers_numbers_and_the_name_of_the_machine():
    hosts = AllowedHosts("0.0.0.0")
    assert hosts.allows("192.168.1.2:8000")
    assert hosts.allows(f"{socket.gethostname()}:8000")
    assert not hosts.allows("evil.example")
    assert AllowedHosts("box.example").allows("box.example:1")


def ask(url, host):
    address = url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), 60) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % host)
        return int(b"".join(iter(lambda: wire.recv(65536), b"")).split()[1])


def test_request_with_the_name_of_a_web_page_is_refused():
    async def answer(request, reply):
        http_server.respond(reply, b"the report", "text/plain")

    async def run(ready):
        clients = http_server.Clients(hosts=AllowedHosts("127.0.0.1", ("bench.example",)))
        await http_server.serve(answer, clients=clients, ready=ready)

    with http_server.in_thread("server", run) as served:
        statuses = [ask(served.url, host) for host in (b"localhost", b"evil.example", b"evil")]
        assert statuses == [200, 403, 403]
        assert ask(served.url, b"bench.example") == 200
