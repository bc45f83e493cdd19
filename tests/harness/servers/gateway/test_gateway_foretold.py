"""A gateway that says how long answers will be: what is predicted, told, heard and counted."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socketserver
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from slo_bench.harness.core.wire import PredictedLength, predicted_length_from_wire
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.load_generator.http.length_prediction import LengthPrediction
from slo_bench.harness.servers.gateway import GatewayPlan, serving
from slo_bench.harness.servers.gateway.foretold_lengths import LengthPredictionPlan, foretells
from slo_bench.harness.servers.gateway.states import last_said
from slo_bench.workloads.errors import SloBenchError

PATIENCE_S = 20
FIELD = "vllm_xargs"


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Keeps what it is asked; answers with as many tokens as `tokens` says."""

    daemon_threads = True
    finish = "stop"
    tokens = 5

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
        usage = {"prompt_tokens": 3, "completion_tokens": self.server.tokens}
        if body.get("stream"):
            events = [{"choices": [{"index": 0, "text": "x"}]}] * self.server.tokens
            events.append({"choices": [{"text": "", "finish_reason": self.server.finish}]})
            payload = (
                "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            )
            kind = "text/event-stream"
        else:
            choice = {"index": 0, "text": "x", "finish_reason": self.server.finish}
            payload, kind = json.dumps({"choices": [choice], "usage": usage}), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload.encode())

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


class Words(LengthPrediction):
    """Says a token for each character; keeps what it is asked and what it hears."""

    learns = True

    def __init__(self, each_s=0.0):
        super().__init__(self.slowly)
        self.each_s = each_s
        self.batches = []
        self.learnt = []

    def slowly(self, requests):
        self.batches.append(list(requests))
        time.sleep(self.each_s)
        if any(request.text == "broken" for request in requests):
            raise SloBenchError("cannot read this")
        return [
            (PredictedLength(len(request.text), 2 * len(request.text)), request.text)
            for request in requests
        ]

    def came(self, text, output_tokens):
        self.learnt.append((text, output_tokens))

    def samples(self):
        yield "generation", "", 7


@pytest.fixture
def up():
    """A gateway with a predictor before a server: its address and the server."""
    with contextlib.ExitStack() as stack:

        def made(predictor):
            server = stack.enter_context(Server())
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            plan = LengthPredictionPlan(GatewayPlan([Endpoint.parse(server.url)]), FIELD, predictor)
            return stack.enter_context(serving(plan)), server

        yield made


def ask(url, path="/v1/completions", **body):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read()


def counts(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    samples = re.findall(r'lengths_requests_total{outcome="(\w+)"} (\d+)', text)
    return {name: int(n) for name, n in samples if int(n)}, text


def eventually(holds):
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_gateway_adds_the_predicted_length_and_keeps_the_body(up):
    url, server = up(Words())
    body = {"prompt": "four", "max_tokens": 9, FIELD: {"e2e_slo_s": 3.5}, "seed": 1}
    ask(url, **body)
    [received] = server.asked
    assert predicted_length_from_wire(received[FIELD]) == (4, 8)
    assert received.pop(FIELD)["e2e_slo_s"] == body.pop(FIELD)["e2e_slo_s"]
    assert received == body
    outcomes, text = counts(url)
    assert outcomes == {"predicted": 1}
    assert "slo_bench_gateway_lengths_batches_total 1" in text
    assert "slo_bench_gateway_lengths_generation 7" in text
    assert float(re.search(r'lengths_seconds{quantile="0.99"} (\S+)', text)[1]) > 0


def test_gateway_keeps_a_length_that_the_client_predicted(up):
    words = Words()
    url, server = up(words)
    values = PredictedLength(30, 40).to_wire()
    ask(url, prompt="four", **{FIELD: values})
    assert server.asked[0][FIELD] == values
    assert not words.batches
    assert counts(url)[0] == {"told_already": 1}


def test_gateway_predicts_nothing_for_requests_without_text(up):
    words = Words()
    url, server = up(words)
    ask(url, prompt=[1, 2, 3])
    ask(url, "/v1/embeddings", input="a")
    assert server.asked == [{"prompt": [1, 2, 3]}, {"input": "a"}]
    assert not words.batches
    assert counts(url)[0] == {"without_text": 1}


def test_gateway_predicts_waiting_requests_in_one_batch(up):
    words = Words(each_s=0.3)
    url, server = up(words)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ask(url, prompt="x" * (n + 1)), range(8)))
    sizes = [len(batch) for batch in words.batches]
    assert sum(sizes) == 8
    assert len(sizes) < 8
    predictions = {
        len(body["prompt"]): predicted_length_from_wire(body[FIELD]) for body in server.asked
    }
    assert predictions == {n: (n, 2 * n) for n in range(1, 9)}


def test_gateway_serves_without_lengths_if_the_predictor_fails(up):
    url, server = up(Words())
    ask(url, prompt="broken")
    ask(url, prompt="four")
    assert FIELD not in server.asked[0]
    assert predicted_length_from_wire(server.asked[1][FIELD]) == (4, 8)
    assert counts(url)[0] == {"failed": 1, "predicted": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_gateway_tells_the_predictor_complete_answer_lengths(up, stream):
    words = Words()
    url, server = up(words)
    ask(url, prompt="four", stream=stream)
    server.finish = "length"  # cut off: nobody knows how long it would have been
    ask(url, prompt="cut", stream=stream)
    ask(url, prompt="exact", stream=stream, ignore_eos=True)
    eventually(lambda: len(words.learnt) == 2)
    assert words.learnt == [("four", 5), ("exact", 5)]
    assert counts(url)[0] == {"predicted": 3, "cut_off": 1}


def test_gateway_predicts_a_constant_for_all(up):
    url, server = up(foretells("constant(64)", lambda line: None))
    ask(url, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert predicted_length_from_wire(server.asked[0][FIELD]) == (64, 64)


@pytest.mark.parametrize("text", ["oracle", "noisy(accuracy=0.5)"])
def test_gateway_refuses_oracle_predictors(text):
    with pytest.raises(SloBenchError, match="cannot predict before real answers"):
        foretells(text, lambda line: None)


def test_last_said_is_the_text_of_the_last_message():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    assert last_said({"messages": messages}) == "one"
    parts = [{"type": "text", "text": "two"}, {"type": "image_url"}]
    assert last_said({"messages": [*messages, {"role": "user", "content": parts}]}) == "two"
    assert last_said({"prompt": ["three"]}) == "three"
    assert last_said({"prompt": [[1, 2]]}) == last_said({"prompt": ["a", "b"]}) == ""
    assert last_said({"messages": [{"role": "system", "content": "s"}]}) == last_said({}) == ""
