"""What a server may say when it is attached to: a list of models, or one line that says why not."""

import gzip
import json

import pytest

from slo_bench.harness.load_generator import listed_models as lists
from slo_bench.harness.load_generator.http import Endpoint
from slo_bench.harness.load_generator.listed_models import entry_of, listed_models
from slo_bench.workloads.errors import SloBenchError

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def ok(body, *headers):
    lines = b"".join(b"%b\r\n" % line for line in headers)
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (lines, len(body), body)


def models(value):
    return ok(json.dumps(value).encode())


def endless(peer):
    peer.sendall(CHUNKED)
    while True:
        peer.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")


def endless_head(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        peer.sendall(b"a: b\r\n" * 1000)


def silent(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    peer.recv(1)


ODD = {
    "nested": (ok(b"[" * 100_000), "nested too deeply"),
    "a list": (models([1]), "no JSON object"),
    "data: object": (models({"data": {"a": 1}}), "no list of models"),
    "data: number": (models({"data": 5}), "no list of models"),
    "data: string": (models({"data": "ab"}), "no list of models"),
    "data: strings": (models({"data": ["ab"]}), "no list of models"),
    "surrogate": (ok(rb'{"data":[{"id":"\ud800"}]}'), "half a character"),
    "id: number": (models({"data": [{"id": 5}]}), "is no text"),
    "id: long": (models({"data": [{"id": "a" * 5000}]}), "at most 4096"),
    "no JSON": (ok(b"hello"), "Expecting value"),
    "compressed": (ok(gzip.compress(b"[]"), b"content-encoding: gzip"), "no JSON object"),
    "compressed otherwise": (ok(b"x", b"content-encoding: br"), "is compressed (br)"),
    "no gzip": (ok(b"{}", b"content-encoding: gzip"), "is no gzip"),
    "HTTP/2": (bytes.fromhex("000006040000000000000300000064"), "speaks HTTP/2 alone"),
    "status": (b"HTTP/1.1 abc OK\r\n\r\n", "no HTTP"),
    "101": (
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        "changes the protocol",
    ),
    "bad chunk": (CHUNKED + b"zz\r\n", "no HTTP"),
    "cut": (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "closed before the end"),
    "endless": (endless, "more than 16 MiB"),
    "endless head": (endless_head, "more than 16 MiB"),
    "silent": (silent, "no whole answer within"),
    "nothing": (b"", "closed before the end"),
}


@pytest.mark.parametrize("says", ODD)
def test_malformed_server_answer_is_one_line_with_its_address(scripted_server, monkeypatch, says):
    if says == "silent":
        monkeypatch.setattr(lists, "_ANSWER_S", 0.2)
    answer, problem = ODD[says]
    url = scripted_server(answer, close=True)
    with pytest.raises(SloBenchError) as refused:
        listed_models(Endpoint.parse(url))
    message = str(refused.value)
    assert message.startswith(f"no OpenAI-compatible server answers at {url}: GET /v1/models: ")
    assert problem in message
    assert len(message) < 300
    assert "\n" not in message


def test_api_key_does_not_follow_a_redirect(scripted_server):
    other = scripted_server(models({"data": []}))
    moved = b"HTTP/1.1 302 Found\r\nlocation: %b/v1/models\r\ncontent-length: 0\r\n\r\n"
    url = scripted_server(moved % other.encode())
    with pytest.raises(SloBenchError, match="status 302; redirects are not followed"):
        listed_models(Endpoint.parse(url), {"authorization": "Bearer secret"})
    assert len(scripted_server.asked) == 1


def test_server_without_a_model_list_has_no_model_name(scripted_server):
    absent = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    assert listed_models(Endpoint.parse(scripted_server(absent))) == []
    named = scripted_server(CHUNKED + b'1b\r\n{"data":[{"id":"a model"}]}\r\n0\r\n\r\n')
    key = {"authorization": "Bearer k"}
    assert listed_models(Endpoint.parse(named), key) == [{"id": "a model"}]
    assert b"authorization: Bearer k" in scripted_server.asked[-1]


NAMED = {
    "the only one": ([{"id": "org/chat"}], "org/chat"),
    "with an adapter": ([{"id": "base"}, {"id": "lora", "parent": "base"}], "base"),
    "by its root": ([{"id": "other"}, {"id": "alias", "root": "FOLDER"}], "alias"),
    "by its end": ([{"id": "other"}, {"id": "tiny"}], "tiny"),
    "by its name": ([{"id": "other"}, {"id": "FOLDER"}], "FOLDER"),
    "none is listed": ([], None),
}


@pytest.mark.parametrize("how", NAMED)
def test_folder_stands_for_the_model_that_the_server_lists(tmp_path, how):
    folder = tmp_path / "tiny"
    folder.mkdir()
    listed, expected = json.loads(json.dumps(NAMED[how]).replace("FOLDER", str(folder)))
    assert entry_of(Endpoint.parse("http://h"), listed, str(folder)).get("id") == expected


def test_folder_beside_several_models_is_an_error_that_names_them(tmp_path):
    listed = [{"id": "one"}, {"id": "two"}]
    with pytest.raises(SloBenchError, match=r"serves 2 models \(one, two\).*--tokenizer"):
        entry_of(Endpoint.parse("http://h"), listed, str(tmp_path))
    assert entry_of(Endpoint.parse("http://h"), listed, "two") == {"id": "two"}
    assert entry_of(Endpoint.parse("http://h"), listed, "another") == {}
