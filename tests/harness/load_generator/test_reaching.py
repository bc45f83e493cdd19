"""Servers behind Unix sockets, certificates of their own and headers of the user's."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import threading

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator import routed_load
from slo_bench.harness.load_generator.http import (
    Api,
    Endpoint,
    HttpOptions,
    RequestFault,
    drive,
    heartbeats,
)
from slo_bench.harness.load_generator.http.wire_requests import Bodies, WireRequests
from slo_bench.harness.load_generator.routed_load import connections_note, measure
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.workloads.errors import SloBenchError

ANSWER = b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
LENIENT = {"send_delay_limit_s": 60.0, "rate_limit_share": 1.0, "processes": 1}


@pytest.fixture
def listening():
    """A server that gives `REPLY`, on a socket as the arguments of `serve` say; its port."""
    ends = []

    async def connected(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                writer.write(REPLY)
        writer.close()

    def serve(path=None, tls=None):
        started, state = threading.Event(), {}

        async def main():
            state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()
            if path is None:
                server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
                state["port"] = server.sockets[0].getsockname()[1]
            else:
                server = await asyncio.start_unix_server(connected, path)
            started.set()
            await state["stop"].wait()
            server.close()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        started.wait(10)
        ends.append((state, thread))
        return state.get("port")

    yield serve
    for state, thread in ends:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join()


def test_server_on_a_unix_socket_is_measured(workload, listening, tmp_path):
    listening(path=str(tmp_path / "s"))
    endpoint = Endpoint.parse(f"unix:{tmp_path}/s")
    measurement = measure(workload(3), [endpoint], HttpOptions(**LENIENT))
    assert (measurement.result.records.outcome == Outcome.FINISHED).all()


def test_missing_unix_socket_is_a_fault_of_the_connection(workload, tmp_path):
    endpoint = Endpoint.parse(f"unix:{tmp_path}/none")
    measurement = measure(workload(3), [endpoint], HttpOptions(**LENIENT))
    assert measurement.faults() == {RequestFault.CONNECT: 3}


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=here"
    extended = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words.split(), *extended], check=True, capture_output=True)
    return cert, key


def test_certificate_of_ones_own_needs_its_authority_or_insecure(workload, listening, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    port = listening(tls=context)
    options = HttpOptions(**LENIENT)
    refused = measure(workload(2), [Endpoint("127.0.0.1", port, True)], options)
    assert refused.faults() == {RequestFault.TLS: 2}
    assert "--ca-file FILE" in refused.details[0]
    assert "--insecure" in refused.details[0]
    for how in ({"ca_file": str(certificate[0])}, {"insecure": True}):
        endpoint = Endpoint("127.0.0.1", port, True, **how)
        measurement = measure(workload(2), [endpoint], options)
        assert (measurement.result.records.outcome == Outcome.FINISHED).all()


def test_plain_http_behind_https_is_told(workload):
    with serving(MockConfig()) as server:
        endpoint = Endpoint.parse(server.url.replace("http:", "https:"))
        measurement = measure(workload(2), [endpoint], HttpOptions(**LENIENT))
    assert measurement.faults() == {RequestFault.TLS: 2}
    assert "http:// in place of https://" in measurement.details[0]


def test_certificate_for_another_name_says_that_the_address_is_wrong(
    workload, listening, certificate
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    port = listening(tls=context)
    endpoint = Endpoint("localhost", port, True, ca_file=str(certificate[0]))
    measurement = measure(workload(2), [endpoint], HttpOptions(**LENIENT))
    assert "give the name that is in the certificate as address" in measurement.details[0]


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_file_of_authorities_that_cannot_be_read_is_an_error(tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SloBenchError, match=r"--ca-file .* cannot be read"):
        Endpoint("h", 443, True, ca_file=str(path)).tls_context()


def test_file_of_keys_that_cannot_be_written_is_named_by_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path))
    with pytest.raises(SloBenchError, match="SSLKEYLOGFILE names cannot be read: Is a directory"):
        Endpoint("h", 443, True).tls_context()


def head_of(workload, tmp_path, url="http://h/v1", **options):
    options = HttpOptions(**options)
    bodies = Bodies.write(workload, options, tmp_path / "bodies")
    try:
        head, body = WireRequests(workload, [Endpoint.parse(url)], options, bodies).of(0, 0)
    finally:
        bodies.close()
    lines = head.decode().split("\r\n")
    fields = [line.partition(": ") for line in lines[1:-2]]
    return lines[0], [(name, value) for name, _, value in fields], body


def test_own_headers_replace_those_of_the_load_generator(workload, tmp_path):
    headers = {"Host": "a.example", "Accept": "*/*", "X-Request-Id": "50%", "User-Agent": "me"}
    first, fields, body = head_of(workload(1), tmp_path, headers=headers, url="http://h/v1?a=%20")
    assert first == "POST /v1/completions?a=%20 HTTP/1.1"
    names = [name for name, _ in fields]
    assert len(names) == len(set(names))
    assert dict(fields) == {
        "host": "a.example",
        "user-agent": "me",
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "x-request-id": "50%",
        "content-length": str(len(body)),
    }


def test_messages_have_the_version_and_both_forms_of_the_key(workload, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "sesame")
    first, fields, _ = head_of(workload(1), tmp_path, api=Api.MESSAGES, api_key_env="A_KEY")
    assert first == "POST /v1/messages HTTP/1.1"
    assert dict(fields)["x-api-key"] == "sesame"
    assert dict(fields)["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "Connection"])
def test_headers_that_frame_a_request_are_refused(name):
    with pytest.raises(SloBenchError, match="cannot be chosen"):
        HttpOptions(headers={name: "1"}).header_fields()


@pytest.mark.parametrize(
    ("options", "absent", "present"),
    [
        ({"body": {"max_tokens": ""}}, {"max_tokens"}, {"min_tokens"}),
        (
            {"rename_fields": {"max_tokens": "max_completion_tokens"}},
            {"max_tokens"},
            {"max_completion_tokens"},
        ),
        ({"body": {"max_completion_tokens": 9}}, {"max_tokens"}, {"max_completion_tokens"}),
    ],
)
def test_fields_of_the_body_are_left_out_and_renamed(workload, tmp_path, options, absent, present):
    _, _, body = head_of(workload(1), tmp_path, **options)
    names = set(json.loads(body))
    assert not names & absent
    assert present <= names


def test_limit_of_open_files_fails_requests_on_our_side(workload, run, monkeypatch):
    monkeypatch.setattr(drive, "sockets_left", lambda: 2)
    measurement, _ = run(workload(6, gap_s=0.0), MockConfig(ttft_s=1.0, itl_s=0.0))
    assert measurement.faults() == {RequestFault.CLIENT: 4}
    assert measurement.invalid_because == "4 requests failed on our side"
    assert "ulimit -n" in "".join(measurement.details.values())


def test_limit_of_open_files_is_named_before_a_level_that_needs_more(workload, monkeypatch):
    monkeypatch.setattr(routed_load, "sockets_left", lambda: 20)
    options = HttpOptions(processes=2)
    assert connections_note(workload(40, gap_s=0.0), options) == ""
    assert connections_note(workload(400, gap_s=0.03), options) == ""  # 34 a second
    note = connections_note(workload(41, gap_s=0.0), options)
    assert note.startswith("41 requests of the level arrive within a second")
    assert "leaves 40 connections to 2 processes" in note
    closed = connections_note(workload(90, concurrency=60), options)
    assert closed.startswith("60 requests of the level are open at once")


def test_run_names_the_limit_of_open_files_before_its_level(slo_bench, monkeypatch):
    monkeypatch.setattr(routed_load, "sockets_left", lambda: 3)
    with serving(MockConfig(ttft_s=0.0, itl_s=0.0)) as server:
        _, _, problems = slo_bench(
            *("run", "--base-url", server.url, "--workload", "synthetic", "--prompt-tokens", "8"),
            *("--output-tokens", "1", "--requests", "9", "--seeds", "1", "--rates", "100"),
            *("--send-delay-limit", "60", "--out", "o", "--no-report"),
        )
    assert "leaves 3 connections to 1 process" in problems


HEARTBEATS = (
    b": ping\n\n",
    b"data:\n\n",
    b"event: ping\ndata: {}\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":""}}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
)
TOKENS = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"","reasoning_content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":null,"tool_calls":[{"index":0}]}}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n',
    b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
    b"data: [DONE]\n\n",
)


def test_stream_ends_with_done_as_an_event_and_not_within_a_text():
    for end in (b"data: [DONE]\n\n", b"e\r\ndata: [DONE]\n\n\r\n", TOKENS[0] + b"data:[DONE]"):
        assert heartbeats.is_end(end)
    for piece in (b'data: {"choices":[{"text":"[DONE]', b'"data: [DONE]', TOKENS[0]):
        assert not heartbeats.is_end(piece)


@pytest.mark.parametrize("piece", HEARTBEATS)
def test_heartbeats_are_no_data(piece):
    assert heartbeats.is_empty(piece)
    assert heartbeats.is_empty(b"%x\r\n%b\r\n" % (len(piece), piece))


@pytest.mark.parametrize("piece", TOKENS)
def test_tokens_and_ends_are_data(piece):
    assert not heartbeats.is_empty(piece)
    assert not heartbeats.is_empty(HEARTBEATS[0] + piece)
    assert not heartbeats.is_empty(HEARTBEATS[5] + piece)


def test_request_that_gets_heartbeats_alone_is_stalled(workload, scripted_server):
    def beats(peer):
        peer.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        peer.settimeout(0.05)
        while True:
            peer.sendall(b"%x\r\n%b\r\n" % (len(HEARTBEATS[3]), HEARTBEATS[3]))
            try:
                if not peer.recv(1):
                    return
            except TimeoutError:
                pass

    url = scripted_server(beats)
    options = HttpOptions(**LENIENT, stall_limit_s=0.3, api=Api.CHAT)
    measurement = measure(workload(2), [Endpoint.parse(url)], options)
    assert measurement.faults() == {RequestFault.STALLED: 2}
    assert np.isnan(measurement.columns.first_token_s).all()
