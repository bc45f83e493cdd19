"""A captured server: what passes is unchanged, what is written is true, and a replay is alike."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from slo_bench import Experiment
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.servers.gateway.capture import asking_for_usage, capturing
from slo_bench.harness.servers.gateway.captured_prompts import PromptBlocks
from slo_bench.harness.servers.gateway.captured_rows import CaptureFile, Exchange
from slo_bench.harness.servers.http.http_server import (
    HttpRequest,
    Reply,
    in_thread,
    refuse,
    respond,
    respond_json,
    serve,
)
from slo_bench.harness.servers.mock import InjectedFault, MockConfig
from slo_bench.harness.servers.mock import serving as mock
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.readers.formats import detect_format, read

PATIENCE_S = 30
QUICK = MockConfig(ttft_s=0.002, itl_s=0.001)
CHAT = "/v1/chat/completions"
SYSTEM = "You answer briefly, and say so where you do not know. " * 6


def send(url: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    wire.request(
        "GET" if body is None else "POST", path, None if body is None else content, headers
    )
    with contextlib.closing(wire), wire.getresponse() as answer:
        return answer.status, answer.read()


class Captured:
    """A capture before a server; `rows` ends it."""

    def __init__(self, url: str, path: Path, *, share: bool = False) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        blocks = PromptBlocks(16, b"salt" * 4, numbered=share)
        self.file = CaptureFile(path, blocks, share=share)
        self._stack.callback(self.file.close)
        self.url = self._stack.enter_context(capturing(Endpoint.parse(url), self.file))

    def rows(self) -> list[dict[str, Any]]:
        self._stack.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def captured(tmp_path: Path) -> Iterator[Callable[..., Captured]]:
    captures: list[Captured] = []

    def up(url: str, **options: bool) -> Captured:
        captures.append(Captured(url, tmp_path / f"capture-{len(captures)}.jsonl", **options))
        return captures[-1]

    yield up
    for capture in captures:
        capture.rows()


@contextlib.contextmanager
def server(answer: Callable[[HttpRequest, Reply], None]) -> Iterator[str]:
    async def handle(request: HttpRequest, reply: Reply) -> None:
        answer(request, reply)

    with in_thread("server", lambda ready: serve(handle, ready=ready)) as up:
        yield up.url


def streamed(reply: Reply, *events: object) -> None:
    reply.begin(200, b"OK", [(b"content-type", b"text/event-stream")])
    for event in events:
        reply.pieces([f"data: {json.dumps(event)}\n\n".encode()])
    reply.pieces([b"data: [DONE]\n\n"])
    reply.end()


def talk(url: str, sessions: int = 3, turns: int = 3) -> None:
    """Conversations with one system prompt."""
    for session in range(sessions):
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            message = f"question {session} {turn} " + "of many words " * 9
            messages.append({"role": "user", "content": message})
            body = {"model": "mock", "messages": messages, "max_tokens": 20 + turn, "stream": True}
            status, answer = send(url, CHAT, body)
            assert status == 200
            events = [json.loads(e[6:]) for e in answer.decode().split("\n\n") if e[6:7] == "{"]
            text = "".join(e["choices"][0]["delta"]["content"] for e in events)
            messages.append({"role": "assistant", "content": text})


def test_paths_and_answers_pass_unchanged(captured):
    requests = [
        ("/health", None),
        ("/v1/models", None),
        ("/v1/none", {}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "a b", "max_tokens": 3, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}),
        (CHAT, {"messages": [], "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/embeddings", {"input": ["a", "b c"]}),
        ("/v1/completions", b"no JSON"),
    ]
    with mock(QUICK) as straight, mock(QUICK) as behind:
        capture = captured(behind.url)
        for path, body in requests:
            assert send(capture.url, path, body) == send(straight.url, path, body), path
        assert b"vllm:num_requests_running" in send(capture.url, "/metrics")[1]
        rows = capture.rows()
    assert [row["path"] for row in rows] == [path for path, body in requests[3:]]
    assert [row["outcome"] for row in rows] == ["ok"] * 5 + ["error"]


def test_usage_is_asked_for_and_taken_out_of_any_form():
    body = b'{"n":1e400, "stream": true}\n'
    asking = asking_for_usage(HttpRequest("POST", CHAT, [(b"Accept-Encoding", b"br")], body))
    assert asking is not None
    assert asking.body == b'{"n":1e400, "stream": true,"stream_options":{"include_usage":true}}'
    assert asking.headers == []
    for unasked in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        assert asking_for_usage(HttpRequest("POST", CHAT, [], json.dumps(unasked).encode())) is None


def test_usage_of_other_forms_is_taken_out_of_streams(captured):
    token = {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": None}
    last = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1},
    }

    def answer(request: HttpRequest, reply: Reply) -> None:
        assert request.json()["stream_options"] == {"include_usage": True}
        streamed(reply, token, last)

    with server(answer) as url:
        capture = captured(url)
        _, body = send(capture.url, CHAT, {"messages": [], "stream": True})
        [row] = capture.rows()
    assert b"usage" not in body
    assert body.count(b"choices") == 2
    assert (row["prompt_tokens"], row["output_tokens"]) == (9, 1)


def test_fingerprint_that_vllm_moves_to_the_usage_is_where_it_was(captured):
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}

    def answer(request: HttpRequest, reply: Reply) -> None:
        if "stream_options" in request.json():
            streamed(reply, finish, finish, {**usage, "system_fingerprint": "f"})
        else:
            each = json.dumps(finish)[:-1] + ',"system_fingerprint":"f"}'
            reply.begin(200, b"OK", [(b"content-type", b"text/event-stream")])
            reply.pieces([f"data: {each}\n\ndata: {each}\n\ndata: [DONE]\n\n".encode()])
            reply.end()

    with server(answer) as url:
        body = {"messages": [], "stream": True}
        assert send(captured(url).url, CHAT, body) == send(url, CHAT, body)


def test_server_that_knows_no_stream_options_gets_the_request_as_it_was(captured):
    bodies = []

    def answer(request: HttpRequest, reply: Reply) -> None:
        bodies.append(request.json())
        if "stream_options" in bodies[-1]:
            refuse(reply, 422, "extra fields: stream_options")
        else:
            streamed(reply, {"choices": [{"index": 0, "text": "x y", "finish_reason": "stop"}]})

    with server(answer) as url:
        capture = captured(url)
        for _ in range(2):
            status, _ = send(
                capture.url, "/v1/completions", {"prompt": "what is this", "stream": True}
            )
            assert status == 200
        rows = capture.rows()
    assert ["stream_options" in body for body in bodies] == [True, False, False]
    assert [row["estimated"] for row in rows] == ["output_tokens prompt_tokens"] * 2


def test_client_that_leaves_and_server_that_fails_are_marked(captured):
    with mock(MockConfig(ttft_s=0.001, itl_s=60)) as slow:
        capture = captured(slow.url)
        parts = urlsplit(capture.url)
        wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
        wire.request("POST", CHAT, json.dumps(body))
        answer = wire.getresponse()
        assert answer.readline()
        answer.close()
        wire.close()
        [row] = capture.rows()
    assert (row["outcome"], row["output_tokens"]) == ("cancelled", 1)
    with mock(MockConfig(ttft_s=0.001, itl_s=0.001, fault=InjectedFault.BROKEN)) as broken:
        capture = captured(broken.url)
        assert send(capture.url, CHAT, body)[0] == 500
        [row] = capture.rows()
    assert (row["outcome"], row["http_status"], row["output_tokens"]) == ("error", 500, 0)
    with mock(MockConfig(ttft_s=0.001, itl_s=0.001, fault=InjectedFault.CUT)) as cut:
        capture = captured(cut.url)
        with pytest.raises(http.client.IncompleteRead):
            send(capture.url, CHAT, body)
        [row] = capture.rows()
    assert (row["outcome"], row["output_tokens"]) == ("lost", 2)
    capture = captured(cut.url)
    assert send(capture.url, CHAT, body)[0] == 502
    [row] = capture.rows()
    assert (row["outcome"], row["http_status"]) == ("error", 502)


def test_row_is_on_disk_before_the_capture_ends(captured):
    with mock(QUICK) as up:
        capture = captured(up.url)
        send(capture.url, "/v1/completions", {"prompt": "a b", "max_tokens": 3})
        while not capture.file.outcomes["ok"]:
            pass
        assert json.loads(capture.path.read_text())["output_tokens"] == 3


def test_rows_that_wait_when_the_capture_ends_are_written(captured, monkeypatch):
    append, go_on = CaptureFile._append, threading.Event()

    def append_late(file: CaptureFile, exchange: Exchange) -> None:
        go_on.wait(PATIENCE_S)
        append(file, exchange)

    monkeypatch.setattr(CaptureFile, "_append", append_late)
    with mock(QUICK) as behind:
        capture = captured(behind.url)
        for _ in range(3):
            send(capture.url, "/v1/completions", {"prompt": "a b", "max_tokens": 2})
        # More rows wait than can be written while the server's thread is waited for.
        monkeypatch.setattr("slo_bench.harness.servers.http.http_server._START_S", 0.01)
        threading.Timer(0.2, go_on.set).start()
        assert len(capture.rows()) == 3
    assert not capture.file.lost


def test_capture_replayed_in_simulation_has_its_lengths_sessions_and_hit_rate(captured, tmp_path):
    with mock(QUICK) as up:
        capture = captured(up.url)
        talk(capture.url)
        rows = capture.rows()
    assert detect_format(capture.path) == "jsonl"
    workload = read(capture.path).workload
    assert workload.prompt_tokens.tolist() == [row["prompt_tokens"] for row in rows]
    assert workload.session.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert workload.follows.tolist() == [-1, 0, 1, -1, 3, 4, -1, 6, 7]
    result = Experiment(
        systems=["vllm"],
        workload=str(capture.path),
        replay_speeds=[1.0],
        seeds=1,
    ).run(tmp_path / "run")
    requests = result.requests(result.cells["cell"][0])
    assert requests["prompt_tokens"].tolist() == workload.prompt_tokens.tolist()
    assert requests["output_tokens"].tolist() == [20, 21, 22] * 3
    # A turn has the blocks that the one before it filled, the first those of the system prompt.
    shared = len(SYSTEM.split()) // 16
    for row, request in enumerate(requests.to_dict("records")):
        before = workload.follows[row]
        held = workload.prompt_tokens[before] + workload.output_tokens[before] - 1
        blocks = held // 16 if before >= 0 else shared * bool(row)
        assert abs(request["cached_tokens"] // 16 - blocks) <= 1, row


def test_arrivals_count_from_the_first_request_though_it_ends_last(captured):
    ends = threading.Event()

    async def handle(request: HttpRequest, reply: Reply) -> None:
        if b"slow" in request.body:
            arrived.set()
            await asyncio.to_thread(ends.wait, PATIENCE_S)
        choices = [{"text": "x", "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        respond_json(reply, {"choices": choices, "usage": usage})

    arrived = threading.Event()
    with in_thread("server", lambda ready: serve(handle, ready=ready)) as up:
        capture = captured(up.url)
        words = (capture.url, "/v1/completions", {"prompt": "slow"})
        slow = threading.Thread(target=send, args=words)
        slow.start()
        assert arrived.wait(PATIENCE_S)
        send(capture.url, "/v1/completions", {"prompt": "quick"})
        ends.set()
        slow.join()
        quick_row, slow_row = capture.rows()
    assert slow_row["arrival_s"] == 0 < quick_row["arrival_s"]
    assert len(read(capture.path).workload) == 2


def test_keys_before_the_version_of_a_path_are_not_written(captured):
    with mock(QUICK) as up:
        capture = captured(up.url)
        for path in ("/sk-key/v1/completions?key=sk-key", "/sk-key/completions", "/v1/completions"):
            send(capture.url, path, {"prompt": "a b", "max_tokens": 2})
        rows = capture.rows()
    assert [row["path"] for row in rows] == ["/v1/completions", "/completions", "/v1/completions"]
    assert "sk-key" not in capture.path.read_text()


def test_row_that_the_disk_has_no_room_for_leaves_no_part(captured, monkeypatch):
    with mock(QUICK) as up:
        capture = captured(up.url)
        send(capture.url, "/v1/completions", {"prompt": "a b", "max_tokens": 2})
        while not capture.file.outcomes["ok"]:
            pass
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:20]))
        send(capture.url, "/v1/completions", {"prompt": "a b", "max_tokens": 2})
        while not capture.file.lost:
            pass
        monkeypatch.undo()
        send(capture.url, "/v1/completions", {"prompt": "a b", "max_tokens": 2})
        rows = capture.rows()
    assert len(rows) == 2
    assert "only 20 of" in capture.file.lost[0]


def test_nothing_of_content_or_names_is_written(captured):
    with mock(MockConfig(ttft_s=0.001, itl_s=0.001, model="secret-model")) as up:
        captures = [captured(up.url), captured(up.url, share=True)]
        for capture in captures:
            for _ in range(2):
                body = {"model": "secret-model", "user": "somebody", "prompt": "secret words " * 9}
                send(capture.url, "/v1/completions", body, authorization="Bearer secret-key")
        full, shared = [capture.rows() for capture in captures]
    text = captures[0].path.read_text()
    assert "words" not in text
    assert "somebody" not in text
    assert "secret-key" not in text
    assert full[0]["session_by"] == "user"
    assert "secret" not in captures[1].path.read_text()
    assert [row["model"] for row in shared] == ["model-1"] * 2
    assert [row["hash_ids"][0] for row in shared] == [0, 0]
    assert not {"path", "http_status", "whole_s", "session_by", "first_byte_s"} & {*shared[0]}


def test_response_that_continues_another_by_its_id_has_its_context(captured):
    def answer(request: HttpRequest, reply: Reply) -> None:
        body = request.json()
        number = 1 + bool(body.get("previous_response_id"))
        text = {"type": "output_text", "text": "an answer of some words"}
        message = {"type": "message", "role": "assistant", "content": [text]}
        usage = {"input_tokens": 64 * number, "output_tokens": 16}
        content = {"id": f"resp_{number}", "object": "response", "status": "completed"}
        respond_json(reply, {**content, "output": [message], "usage": usage})

    with server(answer) as url:
        capture = captured(url)
        send(capture.url, "/v1/responses", {"model": "m", "input": "first " * 40})
        more = {"model": "m", "input": "second " * 40, "previous_response_id": "resp_1"}
        send(capture.url, "/v1/responses", more)
        first, second = capture.rows()
    assert second["session_by"] == "previous_response_id"
    assert (second["session"], second["follows"]) == (first["session"], 0)
    assert second["hash_ids"][:5] == first["hash_ids"] + first["answer_hash_ids"]


def test_file_that_is_there_is_not_overwritten(captured, tmp_path):
    (tmp_path / "capture-0.jsonl").write_text("mine")
    with pytest.raises(SloBenchError, match="name another with --out"):
        Captured("http://127.0.0.1:1", tmp_path / "capture-0.jsonl")


def test_usage_that_counts_the_prompt_too_is_no_output_length(captured):
    tokens = [{"choices": [{"index": 0, "delta": {"content": f" {k}"}}]} for k in range(3)]
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12}}

    def answer(request: HttpRequest, reply: Reply) -> None:
        streamed(reply, *tokens, usage)

    with server(answer) as url:
        capture = captured(url)
        send(capture.url, CHAT, {"messages": [], "stream": True, "max_tokens": 3})
        [row] = capture.rows()
    assert (row["prompt_tokens"], row["output_tokens"]) == (9, 3)
    assert "output_tokens" in row["estimated"]


def test_compressed_answer_passes_as_it_is_and_is_read(captured):
    content = {"choices": [{"text": "x", "finish_reason": "stop"}]}
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    packed = gzip.compress(json.dumps({**content, **usage}).encode())

    def answer(request: HttpRequest, reply: Reply) -> None:
        reply.begin(200, b"OK", [(b"content-encoding", b"gzip")])
        reply.pieces([packed])
        reply.end()

    with server(answer) as url:
        capture = captured(url)
        assert send(capture.url, "/v1/completions", {"prompt": "a"})[1] == packed
        [row] = capture.rows()
    assert (row["prompt_tokens"], row["output_tokens"]) == (5, 7)


def test_odd_bodies_and_answers_leave_rows_that_can_be_read(captured):
    bodies = [
        {"model": ["a"], "messages": [{"role": 3, "content": {"a": 1}}], "metadata": "m"},
        {"messages": [None, {"role": "user", "content": [1, {"type": "text", "text": 5}]}]},
        {"prompt": [-1, 2**70], "max_tokens": 10**30, "user": 5, "session_id": {}},
        {"input": {"a": 1}, "previous_response_id": "resp_none"},
    ]
    odd = iter((b"", b"{", b'{"choices":3}', b'{"usage":{"prompt_tokens":-5}}') * 2)
    with mock(QUICK) as up:
        whole = captured(up.url)
        send(whole.url, "/v1/completions", {"prompt": [1, 2, 3]})
        with server(lambda request, reply: respond(reply, next(odd), "text/plain")) as url:
            capture = captured(url)
            for path in ("/v1/responses", "/v1/completions"):
                for body in bodies:
                    assert send(capture.url, path, body)[0] == 200
            rows = capture.rows()
    assert [row["outcome"] for row in rows] == ["error"] * 8
    assert not capture.file.lost
    both = capture.path.read_text() + json.dumps(whole.rows()[0]) + "\n"
    capture.path.write_text(both)
    assert len(read(capture.path).workload) == 1


def test_plain_text_error_passes(captured):
    with server(lambda request, reply: respond(reply, b"busy", "text/plain", 503)) as url:
        capture = captured(url)
        assert send(capture.url, CHAT, {"messages": []}) == (503, b"busy")
        [row] = capture.rows()
    assert row["outcome"] == "error"
