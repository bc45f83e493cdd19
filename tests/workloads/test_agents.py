"""Agents: graphs of requests, drawn and read, with growing prefixes."""

import json

import numpy as np
import pytest

from slo_bench.harness.engine.cluster.cluster_arrivals import Arrivals
from slo_bench.harness.load_generator.send_job import Share, rows_elsewhere
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.readers.formats import detect_format, read
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload, take
from slo_bench.workloads.writer import write_csv

DRAWN = (
    "agents(steps=5, spawn=0.5, subagents=uniform(1,3), subagent_steps=2, tool_s=3, "
    "think_tokens=50, system_prompt_tokens=64)"
)


def drawn(sessions=DRAWN, requests=400, **more):
    source = load_source("synthetic", prompt_tokens="200", output_tokens="100", sessions=sessions)
    return source.make(rate_rps=4, requests=requests, **more)


def test_agent_steps_wait_for_sub_agents_and_contexts_grow():
    workload = drawn()
    joined = [r for r in workload if r.joins]
    assert joined
    for r in workload:
        if r.follows is None:
            assert (r.prompt_tokens, r.class_name) == (64 + 200, "agent")
            continue
        before = workload[r.follows]
        assert r.session == before.session
        assert r.output_tokens == 100 + 50
        if r.class_name == "subagent" and before.class_name == "agent":
            assert (r.prompt_tokens, r.think_s) == (264, 0)
            assert r.prefix_blocks[:4] == before.prefix_blocks[:4]  # the system prompt alone
            assert r.prefix_blocks[4] != before.prefix_blocks[4]
            continue
        # What was thought stands in no later prompt; answers of sub-agents do.
        message = 100 * len(r.joins) or 200
        assert r.prompt_tokens == before.prompt_tokens + 100 + message
        assert r.prefix_blocks[: len(before.prefix_blocks)] == before.prefix_blocks
        assert len(before.prefix_blocks) == before.prompt_tokens // 16
        assert r.think_s == (0 if r.joins else 3)
        assert all(workload[row].class_name == "subagent" for row in r.joins)


def test_agents_arrive_at_the_request_rate():
    workload = drawn("agents(steps=4, spawn=0.5, subagents=2, subagent_steps=3, tool_s=1)", 6_000)
    later = workload.arrival_s[1_000:]
    assert 5_000 / (later[-1] - later[0]) == pytest.approx(4, rel=0.07)


def test_agents_of_a_seed_repeat_and_contexts_are_bounded(tmp_path):
    for name in ("a.csv", "b.csv"):
        write_csv(drawn(seed=3), tmp_path / name)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    short = drawn("agents(steps=50, max_context_tokens=2000)")
    assert (short.prompt_tokens + short.output_tokens).max() <= 2000
    with pytest.raises(SloBenchError, match="spawn must lie"):
        drawn("agents(spawn=2)")


def test_csv_file_keeps_joins(tmp_path):
    workload = drawn(requests=100)
    write_csv(workload, tmp_path / "agents.csv")
    again = read(tmp_path / "agents.csv").workload
    assert again.joins == workload.joins
    assert again.follows.tolist() == workload.follows.tolist()
    (tmp_path / "bad.csv").write_text("prompt_tokens,output_tokens,follows,joins\n1,1,-1,0\n")
    with pytest.raises(SloBenchError, match="joins must name earlier rows"):
        read(tmp_path / "bad.csv")


def graph(n, follows, joins):
    return Workload(
        np.zeros(n),
        np.full(n, 10),
        np.full(n, 2),
        follows=np.array(follows),
        joins=joins,
        think_s=np.full(n, 1.0),
    )


FORKED = graph(5, [-1, 0, 0, 0, -1], [(), (), (), (1, 2), ()])


def test_joined_row_arrives_after_its_last_awaited_answer():
    arrivals = Arrivals(FORKED)
    assert [arrivals.pop().id, arrivals.pop().id] == [0, 4]
    arrivals.ended(0, 5.0, True)
    assert [arrivals.pop().id, arrivals.pop().id] == [1, 2]
    arrivals.ended(2, 7.0, True)
    assert arrivals.next_s() == np.inf
    arrivals.ended(1, 9.0, True)
    assert (arrivals.next_s(), arrivals.pop().id) == (10.0, 3)


def test_joined_row_is_cancelled_once_if_an_awaited_one_fails():
    arrivals = Arrivals(FORKED)
    arrivals.ended(0, 5.0, True)
    arrivals.ended(1, 6.0, False)
    assert arrivals.cancelled == [3]
    arrivals.ended(2, 7.0, True)
    assert arrivals.cancelled == [3]
    assert Arrivals(FORKED, skip=np.array([0])).cancelled == [3, 2, 1]


def test_joined_rows_stay_in_one_share_and_are_taken_whole():
    two_roots = graph(4, [-1, -1, 0, -1], [(), (), (1,), ()])
    shares = [set(range(4)) - set(rows_elsewhere(two_roots, Share(k, 2)).tolist()) for k in (0, 1)]
    assert any({0, 1, 2} <= share for share in shares)
    left = take(FORKED, np.array([0, 2, 3]), np.zeros(3))
    assert left.follows.tolist() == [-1, 0, 0]
    assert left.joins == [(), (), (1,)]
    with pytest.raises(SloBenchError, match="request 1 joins 0"):
        graph(2, [-1, -1], [(), (0,)])


def call(t, prompt, output, hashes, api_time=1.0):
    return {"t": t, "type": "s", "in": prompt, "out": output, "hash_ids": hashes} | {
        "api_time": api_time
    }


WEKA = {
    "id": "x",
    "models": ["claude"],
    "block_size": 64,
    "requests": [
        call(0.0, 128, 20, [1, 2]),
        {
            "t": 2.0,
            "type": "subagent",
            "requests": [call(0.5, 64, 5, [9]), call(3.5, 128, 5, [9, 8])],
        },
        {"t": 2.0, "type": "subagent", "requests": [call(0.0, 70, 5, [1, 7], 2.0)]},
        call(8.0, 200, 10, [1, 2, 3, 4]),
        call(12.0, 256, 10, [1, 2, 3, 5]),
    ],
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("absolute", [False, True])
def test_weka_trace_is_read(tmp_path, indent, absolute):
    task = json.loads(json.dumps(WEKA))
    for row in task["requests"] if absolute else ():
        for inner in row.get("requests", ()):
            inner["t"] += row["t"]
    path = tmp_path / "task.json"
    path.write_text("\n".join([json.dumps(task, indent=indent)] * 2))
    assert detect_format(path) == "weka"
    trace = read(path)
    assert (len(trace.tasks), trace.block_size) == (2, 64)
    steps = trace.tasks[0]
    assert [(s.prompt_tokens, s.waits_for, s.delay_s, s.kind) for s in steps] == [
        (128, (), 0.0, 0),
        (64, (0,), 1.5, 1),
        (128, (1,), 2.0, 1),
        (70, (0,), 1.0, 1),
        (200, (0, 2, 3), 1.5, 0),  # the slower sub-agent ended at 6.5
        (256, (4,), 3.0, 0),
    ]
    assert steps[4].blocks == [1, 2, 3]  # the last is not full
    workload = load_source(path).make(rate_rps=1, requests=12)
    assert workload.joins is not None
    first, second = (request.prefix_blocks[0] for request in workload if request.follows is None)
    assert first != second  # numbers of one file of a task


def otlp(spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def span(name, parent, start_s, end_s, operation, tokens=None):
    values = {"gen_ai.operation.name": {"stringValue": operation}}
    if tokens:
        values["gen_ai.usage.input_tokens"] = {"intValue": str(tokens[0])}
        values["gen_ai.usage.output_tokens"] = {"intValue": tokens[1]}
    return {
        "traceId": "t",
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str(int((1e9 + start_s) * 1e9)),
        "endTimeUnixNano": str(int((1e9 + end_s) * 1e9)),
        "attributes": [{"key": key, "value": value} for key, value in values.items()],
    }


# Names of the same in other conventions: of the kind of a span, its values, and of token counts.
CONVENTIONS = {
    "OpenTelemetry": {},
    "OpenInference": {
        "gen_ai.operation.name": "openinference.span.kind",
        **{"chat": "LLM", "invoke_agent": "AGENT", "execute_tool": "TOOL"},
        "gen_ai.usage.input_tokens": "llm.token_count.prompt",
        "gen_ai.usage.output_tokens": "llm.token_count.completion",
    },
    "OpenLLMetry": {
        "gen_ai.operation.name": "traceloop.span.kind",
        **{"chat": "", "invoke_agent": "agent", "execute_tool": "tool"},
        "gen_ai.usage.input_tokens": "llm.usage.prompt_tokens",
        "gen_ai.usage.output_tokens": "llm.usage.completion_tokens",
    },
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_opentelemetry_spans_of_agents_are_read(tmp_path, convention):
    spans = [
        span("main", "", 0, 20, "invoke_agent"),
        span("a", "main", 0, 2, "chat", (100, 20)),
        span("tool", "main", 2, 9, "execute_tool"),
        span("sub", "tool", 3, 9, "invoke_agent"),  # below a tool
        span("s1", "sub", 3, 5, "chat", (50, 10)),
        span("s2", "sub", 6, 9, "chat", (90, 10)),
        span("side", "main", 4, 6, "chat", (30, 3)),  # beside the tool
        span("b", "main", 10, 12, "chat", (160, 20)),
    ]
    path = tmp_path / "spans.jsonl"
    text = "\n".join(json.dumps(otlp([entry])) for entry in spans)
    for name, other in CONVENTIONS[convention].items():
        text = text.replace(f'"{name}"', f'"{other}"')
    path.write_text(text)
    assert detect_format(path) == "otel"
    (steps,) = read(path).tasks
    rows = [(s.prompt_tokens, s.waits_for, round(s.delay_s, 6), s.kind) for s in steps]
    assert rows == [
        (100, (), 0.0, 0),
        (50, (0,), 1.0, 1),
        (90, (1,), 1.0, 1),
        (30, (0,), 2.0, 0),
        (160, (3, 2), 1.0, 0),
    ]
    assert steps[2].blocks[: len(steps[1].blocks)] == steps[1].blocks
    assert not set(steps[1].blocks) & set(steps[0].blocks)


def test_span_around_that_of_its_request_is_no_second_request(tmp_path):
    """As where a client and its server, or a framework and its library, write spans of a call."""
    spans = [
        span("main", "", 0, 20, "invoke_agent"),
        span("root", "root", 0, 1, "chat", (4, 4)),  # some name a root as its own parent
        span("whole", "main", 0, 8, "chat", (150, 30)),  # the sum of two
        span("first", "whole", 0, 2, "chat", (100, 20)),
        span("server", "first", 0.1, 2, "chat", (100, 20)),
        span("second", "whole", 5, 8, "chat", (50, 10)),
        span("failed", "main", 9, 9.5, "chat", (50, 0)),
        span("alone", "main", 10, 12, "chat", (70, 7)),
        span("sub", "alone", 10, 12, "invoke_agent"),  # an agent's requests are its own
        span("third", "sub", 11, 12, "chat", (8, 1)),
        span("asks", "main", 13, 19, "chat", (90, 9)),
        span("tool", "asks", 14, 18, "execute_tool"),  # as are a tool's
        span("fourth", "tool", 15, 17, "chat", (6, 2)),
        span("guarded", "main", 19, 20, "chat", (60, 40)),
        span("guard", "guarded", 19, 19.2, "chat", (5, 1)),  # has too few tokens to be the same
    ]
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(otlp(spans)))
    recorded = read(path)
    (steps,) = recorded.tasks
    assert sorted(step.prompt_tokens for step in steps) == [4, 5, 6, 8, 50, 60, 70, 90, 100]
    assert "1 of 12 requests without tokens left out" in recorded.notes
    assert "2 spans around the spans of their requests left out" in recorded.notes


def test_opentelemetry_spans_of_a_server_keep_their_times(tmp_path):
    """As vLLM writes them with --otlp-traces-endpoint: a trace a request, no operation."""
    spans = []
    for number, (start_s, prompt, output) in enumerate([(3, 40, 9), (1, 20, 5), (9, 60, 2)]):
        entry = span(f"s{number}", "", start_s, start_s + 1, "", (prompt, output))
        entry["traceId"] = f"t{number}"
        entry["attributes"] = [
            {"key": f"gen_ai.usage.{name}", "value": {"intValue": str(tokens)}}
            for name, tokens in (("prompt_tokens", prompt), ("completion_tokens", output))
        ]
        spans.append(entry)
    path = tmp_path / "server.json"
    path.write_text(json.dumps(otlp(spans)))
    source = load_source(path)
    assert source.has_arrivals
    workload = source.make()
    assert workload.arrival_s.tolist() == [0, 2, 8]
    assert workload.prompt_tokens.tolist() == [20, 40, 60]
    assert workload.output_tokens.tolist() == [5, 9, 2]
    again = load_source(path, redraw_arrivals=True)
    assert again.make(rate_rps=1, requests=2).prompt_tokens.tolist() == [20, 40]


@pytest.mark.parametrize(
    "odd",
    [
        {"endTimeUnixNano": float("inf")},
        {"attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": 1e999}}]},
    ],
)
def test_span_with_a_number_that_is_none_is_refused(tmp_path, odd):
    path = tmp_path / "spans.json"
    entry = {**span("a", "", 0, 1, "chat", (20, 5)), **odd}
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [entry]}]}]}))
    with pytest.raises(SloBenchError, match=r"spans\.json"):
        load_source(path)


def test_spans_whose_ids_are_no_text_are_read(tmp_path):
    path = tmp_path / "spans.json"
    entries = [
        {**span("a", "", k, k + 1, "chat", (20 + k, 5)), "traceId": [k], "spanId": {"id": k}}
        for k in range(2)
    ]
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": entries}]}]}))
    workload = load_source(path).make(rate_rps=1, requests=2)
    assert workload.prompt_tokens.tolist() == [20, 21]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"block_size": 0, "requests": []}', "block_size must be a number"),
        ('{"block_size": 16, "requests": [{"t": -1}]}', "t must be seconds from 0 on"),
        ('{"block_size": 16, "requests": [{"t": 0, "in": "x"}]}', "in must be a number of tokens"),
        ('{"block_size": 16, "requests": []}', "has no request"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}', "is no OTLP/JSON"),
    ],
)
def test_damaged_agent_trace_is_refused(tmp_path, text, problem):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(SloBenchError, match=problem):
        load_source(path)
