"""Fields of single requests: read, counted, sent, and refused where nothing is known."""

import base64
import json
import struct
import zlib

import pytest

from slo_bench import Experiment
from slo_bench.harness.load_generator.http.http_options import Api, HttpOptions
from slo_bench.harness.load_generator.http.wire_requests import BodyMaker
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.readers.formats import read
from slo_bench.workloads.source import load_source

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SCHEMA = {"response_format": {"type": "json_object"}}


def data(tmp_path, *rows, name="data.jsonl"):
    path = tmp_path / name
    lines = ({"prompt": "Hello there", "output_tokens": 5, **row} for row in rows)
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def sent(path, api=Api.CHAT):
    workload = read(path).workload
    maker = BodyMaker(workload, HttpOptions(api=api))
    return [maker.body(request) for request in workload]


def test_request_bodies_are_merged_and_counted(tmp_path):
    path = data(tmp_path, {"body": {"tools": TOOLS, "temperature": 0.5}}, {"body": SCHEMA}, {})
    tools, schema, plain = sent(path)
    assert tools == plain | {"tools": TOOLS, "temperature": 0.5}
    assert schema == plain | SCHEMA
    counted = read(path).workload.prompt_tokens.tolist()
    assert counted == [-(-(11 + len(json.dumps(TOOLS))) // 4), 3, 3]


def test_images_become_parts_of_the_last_message(tmp_path):
    url = "https://example.org/a.png"
    row = {"images": ["3x2", url], "prompt_tokens": 99}
    (body,) = sent(data(tmp_path, row))
    text, noise, linked = body["messages"][-1]["content"]
    assert text == {"type": "text", "text": "Hello there"}
    assert linked == {"type": "image_url", "image_url": {"url": url}}
    png = base64.b64decode(noise["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert struct.unpack(">II", png[16:24]) == (3, 2)
    length = struct.unpack(">I", png[33:37])[0]
    assert len(zlib.decompress(png[41 : 41 + length])) == 2 * (1 + 3 * 3)
    assert sent(data(tmp_path, row)) == [body]
    assert read(data(tmp_path, row)).workload.prompt_tokens.tolist() == [99]
    with pytest.raises(SloBenchError, match="request 0 has messages or images; they need --api"):
        sent(data(tmp_path, row), Api.COMPLETIONS)


def test_mix_keeps_request_bodies(tmp_path):
    path = data(tmp_path, {"body": SCHEMA})
    mixed = load_source(f"mix(a={path}:1, b=sharegpt:1)").make(rate_rps=1, requests=20)
    classes = {request.class_name: request.body for request in mixed}
    assert classes == {"a": SCHEMA, "b": None}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"body": [1]}, "body must be a JSON object"),
        ({"body": {"stream": False}}, "body has stream, which the load generator sets"),
        ({"body": {"messages": "x"}}, "messages must be a list of objects"),
        ({"images": ["big"], "prompt_tokens": 9}, "images must be a list of URLs and sizes"),
        ({"images": ["3x2"]}, "give prompt_tokens"),
    ],
)
def test_damaged_request_body_is_refused_with_its_line(tmp_path, row, problem):
    with pytest.raises(SloBenchError, match=f"(?s){problem}.*line 2|line 2.*{problem}"):
        read(data(tmp_path, {}, row))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"body": SCHEMA}, "requests have response_format"),
        ({"images": ["3x2"], "prompt_tokens": 9}, "requests have images"),
    ],
)
def test_bodies_without_known_lengths_are_refused_in_simulation(tmp_path, row, problem):
    def run(request_row, name):
        path = data(tmp_path, request_row, name=name)
        experiment = Experiment(systems="vllm", workload=str(path), rates=1, requests=3, seeds=1)
        return experiment.run(tmp_path / f"run-{name}", jobs=1).rows()[0]

    with pytest.raises(SloBenchError, match=problem):
        run(row, "refused.jsonl")
    assert run({"body": {"tools": TOOLS}}, "tools.jsonl")["finished"] == 3
