"""Every reader of what somebody else wrote, with good files to begin from.

A target takes bytes and must return or raise `SloBenchError`; anything else is a find.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slo_bench import Experiment, write_report
from slo_bench.harness.engines.over_http.answers import Raw, read_answer
from slo_bench.harness.engines.over_http.chunks import unchunk
from slo_bench.harness.engines.over_http.connection import Connection
from slo_bench.harness.engines.over_http.endpoint import Endpoint
from slo_bench.harness.engines.over_http.exchange import Exchange
from slo_bench.harness.engines.over_http.faults import Fault
from slo_bench.harness.engines.over_http.spool import Spool
from slo_bench.harness.engines.over_http.tokenizer import Vocabulary
from slo_bench.harness.gateway.front import Front
from slo_bench.harness.gateway.messages import Asked, Kept, Reply, say
from slo_bench.harness.gateway.upstream import LostError, Upstream, _Connection, _StaleError
from slo_bench.harness.load import rates_text
from slo_bench.harness.logs import read_log
from slo_bench.harness.mock_server.config import MockConfig
from slo_bench.harness.mock_server.protocol import MockProtocol
from slo_bench.harness.mock_server.service import Service
from slo_bench.harness.step_log import read_steps
from slo_bench.harness.store import read_rows
from slo_bench.harness.toml_text import read_toml
from slo_bench.predictors.costs.grid import CostGrid, Swap, read_cost_grid
from slo_bench.predictors.device_map import read_device_map
from slo_bench.predictors.model_config import read_model
from slo_bench.predictors.profiles.importers import Asked as AskedProfile
from slo_bench.predictors.profiles.importers import import_profile
from slo_bench.predictors.profiles.profile import Source, read_profile, write_profile
from slo_bench.predictors.profiles.whole_steps import Step, profile_of_steps
from slo_bench.reports.compare.comparing import read_results
from slo_bench.reports.compare.gate import parse_regression
from slo_bench.reports.published import load_published
from slo_bench.reports.read import read_requests, read_run, read_timeline
from slo_bench.tuner.capacity.memory import read_capacity
from slo_bench.workloads.answered import read_answered
from slo_bench.workloads.arrivals import parse_arrivals
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.lengths import parse_lengths
from slo_bench.workloads.mix import parse_mix
from slo_bench.workloads.models import parse_models
from slo_bench.workloads.readers import FORMATS, read
from slo_bench.workloads.sessions import parse_pauses, parse_sessions
from slo_bench.workloads.slo import parse_slo

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A reader; `seeds` are files that it accepts."""

    name: str
    seeds: Sequence[bytes] = field(repr=False)
    read: Read
    slow: bool = False  # a report is built for each: fewer examples


def every_target(folder: Path) -> list[Target]:
    """All of them; `folder` is for their files."""
    return [
        *_traces(folder),
        *_texts(),
        *_tables(folder),
        *_profiles(folder),
        *_run_folder(folder),
        *_http(),
    ]


def _file(folder: Path, name: str, read_path: Callable[[Path], object]) -> Read:
    """What reads the bytes from a file of that name."""
    path = folder / name

    def read_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read_path(path)

    path.parent.mkdir(parents=True, exist_ok=True)
    return read_bytes


# -------------------------------------------------------------------- traces and prompts

_JSON_LINE = {
    "mooncake": {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    "bailian": {
        **{"timestamp": 1.5, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]},
        **{"chat_id": 1, "turn": 1, "type": "text"},
    },
    "jsonl": {"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 3, "hash_ids": [7, 8]},
    "custom": {"prompt": "Why?", "output_tokens": 3, "prompt_tokens": 2},
    "longbench": {"context": "Long.", "input": "Why?", "answers": ["So."]},
    "lengths-jsonl": {"prompt_tokens": 3, "output_tokens": 4},
}
TRACES = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"
    b"2023-11-16 18:17:04.0319600,396,109\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
    "csv": b"arrival_s,prompt_tokens,output_tokens,class,session,follows,think_s,ttft_slo_s,"
    b"prefix_blocks,prefix_block_tokens,priority,kind,n_texts,model\n"
    b"0,64,4,a,1,-1,0,1.5,0-3,16,0,generate,1,m\n1.5,20,5,b,1,0,2,,0 9,16,1,embed,2,n\n",
    **{name: 2 * (json.dumps(row).encode() + b"\n") for name, row in _JSON_LINE.items()},
    "sharegpt": json.dumps(
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}] * 2
    ).encode(),
    "alpaca": json.dumps([{"instruction": "Say", "input": "it", "output": "it"}] * 2).encode(),
}


def _traces(folder: Path) -> list[Target]:
    found = [
        Target(
            f"trace {name}",
            [content],
            _file(folder / "traces", f"{name}.txt", lambda path, name=name: read(path, name)),
        )
        for name, content in TRACES.items()
    ]
    assert set(TRACES) == set(FORMATS)
    packed = [gzip.compress(content, mtime=0) for content in TRACES.values()]
    seeds = [*TRACES.values(), *packed]
    found.append(Target("trace of any format", seeds, _file(folder / "traces", "any", read)))
    prompts = [TRACES["sharegpt"], TRACES["alpaca"], TRACES["custom"]]
    prompts.append(b'{"prompt": "a", "answer": "b", "model": "m"}\n')
    found.append(
        Target("prompts", prompts, _file(folder / "traces", "prompts.json", read_answered))
    )
    return found


# -------------------------------------------------------------------- what options say

_TEXTS: dict[str, tuple[Callable[[str], object], Sequence[str]]] = {
    "slo": (parse_slo, ["ttft=1,tpot=0.15", "e2e=uniform(1,350)", "a:ttft=0.5; b:deadline=60"]),
    "arrivals": (parse_arrivals, ["poisson", "gamma(cv=2)", "concurrency(16)", "ramp(1,3)"]),
    "lengths": (parse_lengths, ["12", "uniform(1,350)", "lognormal(median=100,sigma=1)"]),
    "mix": (parse_mix, ["mix(chat=synthetic(prompt=10,output=uniform(1,5)):7, code=alpaca:3)"]),
    "models": (parse_models, ["fleet(llama-3.1-8b*4, qwen2.5-3b*4)", "zipf(1.1, a, b)"]),
    "sessions": (
        parse_sessions,
        ["sessions", "sessions(turns=4,think_s=0,closed=true)"],
    ),
    "pauses": (parse_pauses, ["geometric(10)", "5", "0"]),
    "rates": (rates_text, ["2,4,8", "2:16:2"]),
    "regression": (parse_regression, ["5%", "0.1"]),
    "address": (Endpoint.parse, ["http://127.0.0.1:8000/v1", "https://[::1]:80/x", "a:1"]),
}


def _texts() -> list[Target]:
    def reader(parse: Callable[[str], object]) -> Read:
        return lambda data: parse(data.decode("utf-8", "surrogateescape"))

    return [
        Target(f"option {name}", [text.encode() for text in seeds], reader(parse))
        for name, (parse, seeds) in _TEXTS.items()
    ]


# -------------------------------------------------------------------- TOML, JSON, logs

EXPERIMENT = b"""name = "x"
systems = ["vllm", "sarathi"]
workload = ["synthetic(prompt=64,output=8)", "azure-conv"]
rates = [1, 2.5]
requests = 10
seeds = 1
slo = "ttft=1,tpot=0.1"
tp = [1, 2]
gpu = "a100-80g"
[knobs.sarathi]
chunk_tokens = [256, 512]
[client]
base_urls = ["http://127.0.0.1:1"]
headers = { "x" = "y" }
"""
_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LOG = {
    "arrival_s": 0.5,
    "queued_s": 0.5,
    "prompt_tokens": 10,
    "output_tokens": 4,
    "first_token_s": 1.0,
    "last_token_s": 2.0,
}
_VLLM = {
    "request_throughput": 1.0,
    "model_id": "m",
    "request_rate": 2.0,
    "ttfts": [0.1, 0.2],
    "itls": [[0.1, 0.1], [0.1]],
    "output_lens": [3, 2],
    "input_lens": [5, 6],
    "errors": ["", ""],
    "start_times": [1.0, 2.0],
    "duration": 4.0,
}
_GUIDELLM = {
    "args": {"model": "m"},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "constant", "rate": 2.0}, "backend": {"model": "m"}},
            "start_time": 0.0,
            "end_time": 10.0,
            "requests": {
                "successful": [
                    {
                        "prompt_tokens": 5,
                        "output_tokens": 3,
                        "info": {
                            "timings": {
                                "request_start": 1.0,
                                "targeted_start": 0.9,
                                "first_token_iteration": 1.2,
                                "last_token_iteration": 1.5,
                                "request_end": 1.6,
                            }
                        },
                    }
                ]
            },
        }
    ],
}
_AIPERF = {
    "metadata": {"request_start_ns": 10**18, "request_end_ns": 10**18 + 10**9},
    "metrics": {
        "request_latency": {"value": 500.0, "unit": "ms"},
        "time_to_first_token": {"value": 100.0, "unit": "ms"},
        "output_sequence_length": {"value": 5, "unit": "tokens"},
        "input_sequence_length": {"value": 5, "unit": "tokens"},
    },
}
_STEPS = (
    b'{"event": "step", "time_s": 1.0, "decode_seqs": 2, "decode_kv_tokens": 30, '
    b'"chunks": [[0, 8]]}\n{"event": "done", "time_s": 1.5, "left": true}\n'
)
_MAP = {
    "model": "llama-3-8b",
    "lanes": 1,
    "stages": [
        {"device": "a", "gpu": "a100-80g", "layers": 16, "link": "nvlink3"},
        {"device": "b", "gpu": {"like": "a100-80g", "memory_gib": 40}, "layers": 16},
    ],
}
_PUBLISHED = b'title = "A paper"\n[[row]]\nwhat = "goodput"\npublished = 1.5\nunit = "req/s"\n'
_DISTSERVE = {
    "meta-llama/Meta-Llama-3-8B": {
        "1": {
            "prefill": [1, 2, 3],
            "decoding_smallbs": [1, 2, 3],
            "decoding_largebs": [1, 2, 3],
            "decoding_large_small_bs_threshold": 9,
        }
    }
}
_SPLITWISE = (
    b"model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\n"
    b"llama2-70b,a100-80gb,8,512,1,128,50,30\n"
)
_TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 0}]}


def _tables(folder: Path) -> list[Target]:
    def doc(value: object) -> bytes:
        return json.dumps(value).encode()

    def lines(value: object) -> bytes:
        return 2 * (doc(value) + b"\n")

    def load(path: Path) -> object:
        return Experiment.load(path)

    files: list[tuple[str, str, Callable[[Path], object], list[bytes]]] = [
        ("toml", "any.toml", read_toml, [EXPERIMENT]),
        ("experiment.toml", "experiment.toml", load, [EXPERIMENT]),
        ("published table", "p.toml", lambda p: load_published(str(p)), [_PUBLISHED]),
        ("model config.json", "m/config.json", read_model, [doc(_CONFIG)]),
        ("device map", "map.json", _fresh(read_device_map), [doc(_MAP)]),
        ("request log", "log.jsonl", read_log, [lines(_LOG)]),
        ("step log", "steps.jsonl", read_steps, [_STEPS]),
        ("vllm result", "v.json", read_results, [doc(_VLLM), lines(_VLLM)]),
        ("guidellm result", "g.json", read_results, [doc(_GUIDELLM)]),
        ("aiperf result", "a.jsonl", read_results, [lines(_AIPERF)]),
        (
            "tokenizer.json",
            "t/tokenizer.json",
            _vocabulary,
            [doc(_TOKENIZER)],
        ),
        ("distserve profile", "d.json", _imported("distserve", "llama-3-8b"), [doc(_DISTSERVE)]),
        ("splitwise profile", "s.csv", _imported("splitwise", None), [_SPLITWISE]),
    ]
    return [
        Target(name, seeds, _file(folder / "tables", file, read_path))
        for name, file, read_path, seeds in files
    ]


def _vocabulary(path: Path) -> object:
    return Vocabulary.read(path.parent)


def _fresh(read_name: Any) -> Callable[[Path], object]:
    def read_path(path: Path) -> object:
        read_name.cache_clear()
        return read_name(str(path))

    return read_path


def _imported(source: str, model: str | None) -> Callable[[Path], object]:
    return lambda path: import_profile(source, path, AskedProfile(model=model))


# -------------------------------------------------------------------- profiles


def _profiles(folder: Path) -> list[Target]:
    steps = [
        Step(n, 100 * n, [(0, 64 * n)] if n % 2 else [], 0.01 + 0.001 * n) for n in range(1, 41)
    ]
    profile = profile_of_steps(
        steps, model="llama-3-8b", gpu="a100-80g", source=Source("a test", "here")
    )
    header = write_profile(profile, folder / "profile")
    found = [_beside(header.parent, path, read_profile) for path in sorted(header.parent.iterdir())]
    grid, axis = folder / "grid.npz", np.array([0.0, 8.0])
    CostGrid(axis, axis, axis, np.ones((2, 2, 2)), Swap(0.1, 0.1), Swap(0.1, 0.1)).write(grid)
    return [
        *found,
        Target("cost grid", [grid.read_bytes()], _file(folder, "grid.npz", read_cost_grid)),
    ]


def _beside(folder: Path, path: Path, read_folder: Callable[[Path], object]) -> Target:
    """The reader of a folder in which one file is another."""
    good = path.read_bytes()

    def read_bytes(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return read_folder(folder)
        finally:
            path.write_bytes(good)

    return Target(f"{path.name} of a profile", [good], read_bytes)


# -------------------------------------------------------------------- run folders


def _run_folder(folder: Path) -> list[Target]:
    whole = folder / "run"
    shutil.rmtree(whole, ignore_errors=True)
    Experiment(systems=["vllm", "orca"], rates=[2, 4], seeds=1, requests=20, records="csv").run(
        whole, jobs=1
    )
    (whole / "capacity.json").write_text(
        json.dumps({"targets": [0.9], "tolerance": 0.02, "searches": []}), "utf-8"
    )
    cell = read_rows(whole / "cells.csv")[0]["cell"]

    def report(path: Path) -> object:
        return write_report([path], folder / "report.html")

    def cells(path: Path) -> object:
        read_rows(path / "cells.csv")
        return read_run(path)

    def requests(path: Path) -> object:
        read_requests(path, str(cell))
        read_results(path)
        return read_log(path, str(cell))

    def resumed(path: Path) -> object:
        """A folder that is gone on with: what is there must be its own."""
        return Experiment.load(path / "experiment.toml").run(path, jobs=1, resume=True)

    def packed(name: str, read_path: Callable[[Path], object]) -> Target:
        """The content of a gzip file is edited, not its packing."""
        path = whole / name
        good = gzip.decompress(path.read_bytes())

        def read_bytes(data: bytes) -> object:
            path.write_bytes(gzip.compress(data, mtime=0, compresslevel=1))
            try:
                return read_path(whole)
            finally:
                path.write_bytes(gzip.compress(good, mtime=0))

        return Target(f"content of {name.partition('/')[0]}", [good], read_bytes)

    def plain(name: str, what: str, read_path: Callable[[Path], object], slow: bool) -> Target:
        path = whole / name
        good = path.read_bytes()

        def read_bytes(data: bytes) -> object:
            kept = {p: p.read_bytes() for p in whole.iterdir() if p.is_file()}
            path.write_bytes(data)
            try:
                return read_path(whole)
            finally:
                for one, content in kept.items():
                    one.write_bytes(content)
                path.write_bytes(good)

        return Target(what, [good], read_bytes, slow)

    request_file, timeline_file = f"requests/{cell}.csv.gz", f"timelines/{cell}.csv.gz"
    return [
        plain("cells.csv", "cells.csv", cells, False),
        plain("environment.json", "environment.json", read_run, False),
        plain("capacity.json", "capacity.json", read_capacity, False),
        plain(request_file, "requests", requests, False),
        packed(request_file, requests),
        packed(timeline_file, lambda path: read_timeline(path, str(cell))),
        plain("cells.csv", "report from cells.csv", report, True),
        plain("experiment.toml", "report from experiment.toml", report, True),
        plain("environment.json", "report from environment.json", report, True),
        plain("capacity.json", "report from capacity.json", report, True),
        plain("cells.csv", "resumed from cells.csv", resumed, True),
    ]


# -------------------------------------------------------------------- HTTP

_EVENT = b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}\n\n'
_LAST = (
    b'data: {"choices": [{"text": " b", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


def _chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WHOLE = b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}}'
ANSWERS = [
    _HEAD + _chunked(_EVENT, _LAST),
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_WHOLE), _WHOLE),
    b"HTTP/1.1 503 No\r\ncontent-length: 18\r\n\r\n" + b'{"error": {"message": "no"}}'[:18],
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + _EVENT + _LAST,
]
_BODY = b'{"model": "m", "prompt": [1, 2], "max_tokens": 3, "stream": true}'
REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-request-id: 1\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_BODY), _BODY),
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\nGET /metrics HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + _chunked(b'{"model": "m", "input": [[1], [2]]}'),
]


def _torn(data: bytes) -> list[bytes]:
    """In pieces, as a network might hand it over; where they end hangs on the bytes alone."""
    pieces, at, state = [], 0, sum(data[:64])
    while at < len(data):
        state = (1103515245 * state + 12345) % 2**31
        size = (1, 7, 40, 2000)[state >> 16 & 3]
        pieces.append(data[at : at + size])
        at += size
    return pieces


class _Wire(asyncio.Transport):
    """A connection whose other end is nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.written = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def setsockopt(self, *options: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _Pool:
    """What a client's connection tells of."""

    def __init__(self) -> None:
        self.idle: list[Connection] = []
        self.heard: list[Exchange] = []
        self.ended = self.heard.append

    def request_of(self, row: int) -> list[bytes]:
        return [b""]

    def lost(self, connection: Connection) -> None:
        pass

    def connect(self, exchange: Exchange) -> None:
        self.ended(exchange)


def _client(data: bytes) -> object:
    pool, wire = _Pool(), _Wire()
    connection = Connection(pool)  # type: ignore[arg-type]
    connection.connection_made(wire)
    exchange = Exchange(0, 0, 0.0, False)
    exchange.connections = 2
    connection.send(exchange)
    for piece in _torn(data):
        if not wire.closed and not pool.heard:
            connection.data_received(piece)
    if not pool.heard:
        connection.connection_lost(None)
    assert pool.heard == [exchange], "an exchange ends exactly once"
    spool = Spool()
    spool.keep(exchange)
    answer = read_answer(spool.raw(exchange, embeds=False), keep_text=True)
    spool.close()
    assert len(answer.token_s) <= 1 << 24
    return answer


def _chunks(data: bytes) -> object:
    pieces = _torn(data)
    found = unchunk(pieces, array("d", range(len(pieces))))
    assert sum(map(len, found.pieces)) <= len(data)
    return found


def _answer(data: bytes) -> object:
    pieces = _torn(data)
    stamps, lengths = array("d", range(len(pieces))), array("I", map(len, pieces))
    found = None
    for embeds in (False, True):
        found = read_answer(Raw(200, Fault.NONE, "", stamps, lengths, data, embeds))
        assert len(found.token_s) <= 1 << 24
    read_answer(Raw(500, Fault.NONE, "", stamps, lengths, data, False))
    return found


def _gateway_to_server(data: bytes) -> object:
    async def exchange() -> Kept:
        upstream, kept, wire = Upstream(Endpoint.parse("http://127.0.0.1:1")), Kept(), _Wire()
        connection = _Connection(upstream)
        connection.connection_made(wire)
        asked = asyncio.ensure_future(connection.exchange([b""], kept))
        await asyncio.sleep(0)
        for piece in _torn(data):
            if not wire.closed:
                connection.data_received(piece)
        connection.connection_lost(None)
        try:
            await asked
        except (LostError, _StaleError):
            return kept
        kept.json()
        return kept

    return asyncio.run(exchange())


def _gateway_to_client(data: bytes) -> object:
    async def answer(asked: Asked, reply: Reply) -> None:
        asked.json()
        asked.wire(Endpoint.parse("http://127.0.0.1:1"))
        say(reply, 200, "OK", b"x", "text/plain")

    async def serve() -> None:
        wire = _Wire()
        front = Front(answer, set())
        front.connection_made(wire)
        for piece in _torn(data):
            if not wire.closed:
                front.data_received(piece)
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        front.connection_lost(None)

    return asyncio.run(serve())


def _mock(data: bytes) -> object:
    async def serve() -> None:
        wire = _Wire()
        service = Service(MockConfig(), asyncio.get_running_loop())
        mock = MockProtocol(service, lambda: None)
        mock.connection_made(wire)
        for piece in _torn(data):
            if not wire.closed:
                mock.data_received(piece)
        mock.connection_lost(None)

    return asyncio.run(serve())


def _http() -> list[Target]:
    stream = _EVENT + _EVENT + _LAST
    return [
        Target("chunked body", [_chunked(_EVENT, _LAST)], _chunks),
        Target("event stream", [stream, _WHOLE], _answer),
        Target("answer to the load generator", ANSWERS, _client),
        Target("answer to the gateway", ANSWERS, _gateway_to_server),
        Target("request to the gateway", REQUESTS, _gateway_to_client),
        Target("request to the mock server", REQUESTS, _mock),
    ]


ALLOWED = (SloBenchError,)
__all__ = ["ALLOWED", "Target", "every_target"]
