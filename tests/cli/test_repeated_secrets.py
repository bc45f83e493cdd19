"""A server that repeats the key and a secret header in all it answers: neither is shown or kept."""

from __future__ import annotations

import base64
import contextlib
import gzip
import itertools
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from slo_bench.cli.main import main
from slo_bench.cli.standard_streams import prepare
from slo_bench.workloads import masking

KEY = "sk-plain/987654=tail"
TOKEN = "tok-quail-55555"
TRACES = (  # of any form that the server sends
    *("quail-5", "NsayW", b"9876".hex()),
    *(base64.b64encode(bytes(n) + KEY.encode()).decode()[4:-4][:12] for n in range(3)),
)
NUMBER = re.compile(r"(?<![\d.])987654(?!\d)")  # of the key, and not of a longer one


def traces_of(text):
    return [*(trace for trace in TRACES if trace in text), *NUMBER.findall(text)]


class Echo(BaseHTTPRequestHandler):
    """Answers each generation in another way, all with the headers of the request in them."""

    protocol_version = "HTTP/1.1"
    ways = ("text", "tokens", "status", "event", "page", "finish", "escaped", "redirect", "kind")
    numbers = itertools.count()
    first = "text"

    def output(self):
        authorization = str(self.headers.get("authorization"))
        token = str(self.headers.get("x-tok"))
        forms = [authorization, token, quote(authorization, safe=""), authorization.encode().hex()]
        forms += [json.dumps(authorization)[1:-1].replace("/", "\\/")]
        forms += [base64.b64encode(authorization.encode()).decode()]
        return "Incorrect API key: " + " ".join(forms)

    def send(self, status, kind, body, **headers):
        self.send_response(status)
        for name, value in {"content-type": kind, **headers}.items():
            self.send_header(name, value)
        self.send_header("x-echo", self.output())
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def send_events(self, deltas, finish="stop"):
        events = [{"choices": [{"index": 0, "text": text}]} for text in deltas]
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.send(200, "text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def do_GET(self):
        if self.path.endswith("/models"):
            models = [{"id": "tiny", "root": self.output()}, {"id": self.output()}]
            self.send(200, "application/json", json.dumps({"object": "list", "data": models}))
        elif self.path.endswith("/metrics"):
            name = self.output().replace('"', "'").replace("\\", "")
            self.send(200, "text/plain", f'vllm:num_requests_running{{model_name="{name}"}} 1\n')
        else:
            self.send(404, "text/plain", self.output())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        number = next(self.numbers)
        way = self.first if number < 3 else self.ways[number % len(self.ways)]
        output = self.output()
        if way == "text":
            self.send_events([output, " ", output])
        elif way == "tokens":
            self.send_events(list(output))
        elif way == "status":
            self.send(401, "application/json", json.dumps({"error": {"message": output}}))
        elif way == "event":
            self.send(200, "text/event-stream", f"data: {json.dumps({'error': output})}\n\n")
        elif way == "page":
            self.send(200, "text/html", f"<html><title>{output}</title></html>")
        elif way == "finish":
            self.send_events(["a", "b"], finish=output)
        elif way == "escaped":
            escapes = "".join(f"\\u{ord(character):04x}" for character in " " * 150 + output)
            self.send(400, "application/json", f'{{"error": {{"message": "{escapes}"}}}}')
        elif way == "redirect":
            self.send(307, "text/plain", "", location=f"/login?{'x' * 180}&key={KEY}")
        else:
            self.send(200, f"application/{KEY}", output)

    def log_message(self, *words):
        pass


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setattr(Echo, "numbers", itertools.count())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def slo_bench(tmp_path, monkeypatch, capfd):
    """What a command prints, on standard streams as the program has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setattr(masking, "_patterns", {})
    monkeypatch.setattr(masking, "_pattern", None)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["slo-bench", *map(str, words)])
        streams = sys.stdout, sys.stderr
        prepare()
        with contextlib.suppress(SystemExit):
            main()
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        captured = capfd.readouterr()
        return captured.out + captured.err

    return call


def traces_in(folder):
    """Files with one of the secrets, in any of the forms."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("latin-1")
        yield from (f"{path}: {trace}" for trace in traces_of(text))


ASKED = ("--api-key-env", "MY_KEY", "--header", "x-tok=$MY_TOKEN", "--workload", "synthetic",
         "--prompt-tokens", "64", "--output-tokens", "8", "--seeds", "1")  # fmt: skip


@pytest.mark.parametrize("first", ["text", "status", "escaped"])
def test_secret_that_a_server_repeats_is_in_no_output_and_no_file(
    slo_bench, echo, tmp_path, monkeypatch, first
):
    monkeypatch.setattr(Echo, "first", first)
    run = ["run", "--base-url", echo, *ASKED, "--rates", "40", "--requests", "40"]
    printed = slo_bench(*run, "--records", "csv", "--export", "vllm", "-o", "out")
    printed += slo_bench("explain", "out", "slowest")
    printed += slo_bench("report", "out", "--out", "again.html")
    printed += slo_bench("export", "out", "--to", "otel")
    printed += slo_bench("observe", echo, "--api-key-env", "MY_KEY", "--duration", "0.1")
    if first != "text":
        printed += slo_bench("capacity", "--base-url", echo, *ASKED, "-o", "c")
        printed += slo_bench("profile", "run", "--base-url", echo, *ASKED[:4], "-o", "p")
    assert traces_of(printed) == [], printed
    (tmp_path / "printed").write_text(printed)
    assert list(traces_in(tmp_path)) == []
    if first == "text":
        assert (tmp_path / "out" / "cells.csv").is_file(), printed
        assert masking.MASK in "".join(
            (gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()).decode()
            for p in (tmp_path / "out" / "requests").iterdir()
        )
    else:
        assert masking.MASK in printed


def test_password_of_an_address_is_not_printed(slo_bench):
    slo_bench("run", "--rates", "2", "--requests", "20", "--seeds", "1", "--no-report", "-o", "r")
    printed = slo_bench(
        "export", "r", "--to", "otel", "--destination", "http://me:open-sesame1@127.0.0.1:9"
    )
    assert "no collector takes OTLP" in printed
    assert "sesame" not in printed
