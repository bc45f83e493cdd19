"""Recorded tasks of agents: Weka's traces (AgentX) and OpenTelemetry's spans of generative AI.

- Weka (https://github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md): one JSON object
  a task with `block_size` and `requests`; a request has `t` (s from the task's start), `in`, `out`,
  `hash_ids` and, in newer files, `api_time` (s); one of type `subagent` has `requests` of its own.
- OpenTelemetry (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), as OTLP/JSON:
  spans with `gen_ai.usage.input_tokens` (vLLM's own: `prompt_tokens`; OpenInference's:
  `llm.token_count.prompt`; OpenLLMetry's: `llm.usage.prompt_tokens`) are requests, `invoke_agent`
  spans are agents, nested by parent id; a trace is a task. Where each is one request, as a server
  writes them, they are a trace of requests with the times at which they began.

Both record when requests began and ended. A request waits for those of its agent and of its
sub-agents that had ended when it began and that no other had waited for; so requests that ran side
by side do so again. Its delay is the time between their end and its beginning.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError
from ..lengths import MOST_TOKENS
from ..parsing import number, parse_json
from ..prefixes import BLOCK_SIZE
from ..sessions import AGENT, SUBAGENT, TASK_BITS, Step, Task
from .table_reader import FileTable, Kept, WorkloadTrace, in_order, lines

_CALLS = ("chat", "text_completion", "generate_content")
_AGENTS = ("invoke_agent", "invoke_workflow")
_APART = (*_AGENTS, "execute_tool", "tool")  # requests within are not those around
_TOKENS = {
    "in": (
        *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        *("llm.token_count.prompt", "llm.usage.prompt_tokens"),
    ),
    "out": (
        *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
        *("llm.token_count.completion", "llm.usage.completion_tokens"),
    ),
}
# What OpenInference and OpenLLMetry call kinds of spans, in OpenTelemetry's words.
_KINDS = {"llm": "chat", "agent": "invoke_agent", "workflow": "invoke_workflow"}
CELL_ATTRIBUTE = "slo_bench.cell"  # of the spans of a run that was exported
_CONTEXT_BITS = 24  # of a block's number in a task: above them its context


@dataclass
class _Call:
    """A recorded request; `blocks` None: not recorded."""

    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int] | None = None


@dataclass
class _Agent:
    """What an agent did: requests and sub-agents."""

    start_s: float
    items: list[_Call | _Agent] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """The end of its last request."""
        return max((item.end_s for item in self.items), default=self.start_s)


@dataclass(frozen=True)
class RecordedTasks:
    """Tasks of a file, and the tokens of their prefix blocks."""

    tasks: list[Task]
    block_size: int
    notes: tuple[str, ...]


class _Graph:
    """Makes the steps of one task."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.steps: Task = []
        self._path = path
        self._ends: list[float] = []
        self._block_size = block_size
        self._contexts = 0

    def add(self, agent: _Agent, before: tuple[int, ...], kind: int) -> tuple[int, ...]:
        """Add what an agent did after `before`; the steps that end it."""
        unawaited: list[tuple[float, tuple[int, ...], bool]] = []  # end, steps, own request
        own_step: int | None = None  # its last request that had ended
        awaited = before
        held: tuple[int, int, int] | None = None  # of the last request: context, prompt, answer
        for item in sorted(agent.items, key=lambda entry: entry.start_s):
            ended = [entry for entry in unawaited if entry[0] <= item.start_s]
            if ended:
                unawaited = [entry for entry in unawaited if entry[0] > item.start_s]
                own_step = next((s[0] for _, s, mine in reversed(ended) if mine), own_step)
                awaited = tuple(step for _, steps, _ in ended for step in steps)
            first = () if own_step is None else (own_step,)
            waits = (*first, *(step for step in awaited if step not in first))
            if isinstance(item, _Agent):
                last = self.add(item, waits, SUBAGENT)
                if last != waits:
                    unawaited.append((item.end_s, last, False))
                continue
            held, blocks = self._blocks(item, held)
            after_s = max((self._ends[step] for step in waits), default=0.0)
            delay_s = max(0.0, item.start_s - after_s)
            self.steps.append(
                Step(item.prompt_tokens, item.output_tokens, waits, delay_s, kind, blocks)
            )
            self._ends.append(item.end_s)
            unawaited.append((item.end_s, (len(self.steps) - 1,), True))
        return tuple(step for _, steps, _ in unawaited for step in steps) or awaited

    def _blocks(
        self, call: _Call, held: tuple[int, int, int] | None
    ) -> tuple[tuple[int, int, int], list[int]]:
        """Recorded blocks; else those of a context that grows as long as prompts do."""
        if call.blocks is not None:
            return (0, 0, 0), call.blocks[: call.prompt_tokens // self._block_size]
        if held is None or call.prompt_tokens < held[1] + held[2]:
            self._contexts += 1
            held = (self._contexts, 0, 0)
        base = held[0] << _CONTEXT_BITS
        n = (call.prompt_tokens + call.output_tokens) // self._block_size
        if base >> TASK_BITS or n >> _CONTEXT_BITS:
            raise FileFormatError(
                self._path,
                None,
                f"a task has more than {1 << TASK_BITS - _CONTEXT_BITS:,} contexts, or one of more "
                f"than {self._block_size << _CONTEXT_BITS:,} tokens",
            )
        blocks = list(range(base, base + n))
        return (held[0], call.prompt_tokens, call.output_tokens), blocks


def first_object(path: Path, first: str) -> Mapping[str, Any]:
    """The JSON object that begins with the line `first`; empty if it is none."""
    try:
        return dict(parse_json(first))
    except ValueError:
        if len(first) > 200:  # an object over several lines begins with a short one
            return {}
        return next(_objects(path), {})


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects one after the other, over any number of lines."""
    text, position = "".join(lines(path)), 0
    decoder = json.JSONDecoder()
    while (position := _skip_space(text, position)) < len(text):
        try:
            document, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, position) + 1
            raise FileFormatError(path, line, f"not readable as JSON: {error}") from None
        if not isinstance(document, dict):
            raise FileFormatError(path, None, "must hold JSON objects, one for each task")
        yield document


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def read_weka(path: Path) -> RecordedTasks:
    """Read Weka's tasks, in the order of the file.

    Raises:
        FileFormatError: one cannot be read, or there is no request.
    """
    tasks: list[Task] = []
    sizes: set[int] = set()
    for place, task in enumerate(_objects(path)):
        where = _Place(path, f"object {place + 1}")
        size, scope = task.get("block_size"), task.get("hash_id_scope", "local")
        if not isinstance(size, int) or not 1 <= size <= 1 << 16:
            raise where.fail("block_size must be a number of tokens")
        sizes.add(size)
        graph = _Graph(path, size)
        graph.add(_weka_agent(where, task, 0.0, scope == "global"), (), AGENT)
        tasks.append(graph.steps)
    if len(sizes) > 1:
        raise FileFormatError(path, None, f"tasks have several block sizes: {sorted(sizes)}")
    notes = ("models that the trace names are not used", "sub-agents are the class subagent")
    _check_some(path, tasks)
    return RecordedTasks([steps for steps in tasks if steps], sizes.pop(), notes)


def _check_some(path: Path, tasks: list[Task]) -> None:
    if not any(tasks):
        raise FileFormatError(path, None, "has no request with prompt and output tokens")


@dataclass(frozen=True)
class _Place:
    """Where in a file something stands."""

    path: Path
    where: str

    def fail(self, problem: str) -> FileFormatError:
        return FileFormatError(self.path, None, f"{self.where}: {problem}")


def _weka_agent(where: _Place, table: Mapping[str, Any], offset_s: float, shared: bool) -> _Agent:
    rows = table.get("requests")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise where.fail("requests must be a list of objects")
    agent = _Agent(offset_s)
    for place, row in enumerate(rows):
        here = replace(where, where=f"{where.where}, request {place}")
        start_s = offset_s + _seconds(here, row, "t", None)
        if row.get("type") == "subagent":
            inner = row.get("requests") or [{}]
            first = _seconds(here, inner[0], "t", start_s) if inner[0] else start_s
            # Raw traces count from the sub-agent's start, published ones from the task's.
            relative = first < start_s - offset_s
            agent.items.append(_weka_agent(here, row, start_s if relative else 0.0, shared))
            agent.items[-1].start_s = start_s
            continue
        prompt, output = (_tokens(here, row, name) for name in ("in", "out"))
        if prompt and output:
            end_s = start_s + _seconds(here, row, "api_time", 0.0)
            agent.items.append(_Call(start_s, end_s, prompt, output, _hashes(here, row, shared)))
    return agent


def _hashes(where: _Place, row: Mapping[str, Any], shared: bool) -> list[int] | None:
    """Blocks alike in one task, or in all (below 0)."""
    hashes = row.get("hash_ids")
    if hashes is None:
        return None
    if not isinstance(hashes, list) or not all(
        type(block_hash) is int and 0 <= block_hash < 1 << TASK_BITS for block_hash in hashes
    ):
        raise where.fail("hash_ids must be a list of whole numbers")
    return [~block_hash for block_hash in hashes] if shared else hashes


def _seconds(where: _Place, row: Mapping[str, Any], name: str, default: float | None) -> float:
    value = row.get(name, default)
    seconds = number(value)
    if not 0 <= seconds < math.inf:
        raise where.fail(f"{name} must be seconds from 0 on, not {value!r:.40}")
    return seconds


def _tokens(where: _Place, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise where.fail(f"{name} must be a number of tokens, not {value!r:.40}")
    return value


@dataclass
class _Span:
    trace: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]

    @property
    def operation(self) -> str:
        """OpenTelemetry's name of the operation; that of another convention's kind, or empty."""
        kinds = ("openinference.span.kind", "traceloop.span.kind")
        kind = next((str(self.attributes[key]) for key in kinds if key in self.attributes), "")
        named = self.attributes.get("gen_ai.operation.name")
        return str(named or _KINDS.get(kind.lower(), kind.lower()))

    @property
    def calls(self) -> bool:
        """Whether it is of a request."""
        if not self.operation:
            return any(key in self.attributes for key in _TOKENS["in"])
        return self.operation in _CALLS


def read_otel(path: Path) -> WorkloadTrace | RecordedTasks:
    """Read spans as tasks, in the order of their traces; as a trace where each is one request.

    Raises:
        FileFormatError: they cannot be read, or there is no request.
    """
    spans = {key: span for document in _objects(path) for key, span in _spans(path, document)}
    cells = {cell for span in spans.values() if (cell := span.attributes.get(CELL_ATTRIBUTE))}
    if len(cells) > 1:
        raise FileFormatError(
            path,
            None,
            f"holds the requests of {len(cells)} cells of a run, which came at the same times: "
            f"run with --records csv and replay one, requests/{min(map(str, cells))}.csv.gz",
        )
    traces: dict[str, _Agent] = {}
    agents: dict[tuple[str, str], _Agent] = {}
    for (trace, name), span in sorted(spans.items(), key=lambda entry: entry[1].start_s):
        root = traces.setdefault(trace, _Agent(span.start_s))
        if span.operation in _AGENTS:
            agents[trace, name] = _Agent(span.start_s)
    calls = {
        key: (_count(path, span, _TOKENS["in"]), _count(path, span, _TOKENS["out"]))
        for key, span in spans.items()
        if key not in agents and span.calls
    }
    served = {key: counts for key, counts in calls.items() if all(counts)}
    within: Counter[tuple[str, str]] = Counter()  # output tokens of the requests next inside
    for inner, (_, output) in served.items():
        above = takewhile(
            lambda key: spans[key].operation not in _APART, _ancestors(spans, spans[inner])
        )
        if (around := next((key for key in above if key in served), inner)) != inner:
            within[around] += output
    outer = {key for key, output in within.items() if 2 * output >= served[key][1]}
    for key, span in spans.items():
        here = next((agents[a] for a in _ancestors(spans, span) if a in agents), traces[key[0]])
        if key in agents:
            here.items.append(agents[key])
        elif key in served and key not in outer:
            here.items.append(_Call(span.start_s, span.end_s, *served[key]))
    tasks: list[Task] = []
    starts_s: list[float] = []
    for root in traces.values():
        # A trace that is one agent is that agent.
        while len(root.items) == 1 and isinstance(root.items[0], _Agent):
            root = root.items[0]
        graph = _Graph(path, BLOCK_SIZE)
        graph.add(_from_zero(root, root.start_s), (), AGENT)
        if graph.steps:
            tasks.append(graph.steps)
            starts_s.append(min((item.start_s for item in root.items), default=root.start_s))
    unserved = len(calls) - len(served)
    left_out = (
        *([f"{unserved} of {len(calls)} requests without tokens left out"] if unserved else []),
        *([f"{len(outer)} spans around the spans of their requests left out"] if outer else []),
    )
    notes = (
        "models that the spans name are not used; sub-agents are the class subagent",
        "a prompt that is as long as the agent's last prompt and answer begins with them",
        *left_out,
    )
    _check_some(path, tasks)
    if all(len(task) == 1 for task in tasks):
        return _trace(path, [task[0] for task in tasks], starts_s, left_out)
    return RecordedTasks(tasks, BLOCK_SIZE, notes)


def _trace(
    path: Path, steps: list[Step], starts_s: list[float], notes: tuple[str, ...]
) -> WorkloadTrace:
    """Single requests as a trace, at their times."""
    values = {
        name: np.array([getattr(step, name) for step in steps], dtype=np.int64)
        for name in ("prompt_tokens", "output_tokens")
    }
    note = "no trace has several requests: they arrive when they did"
    kept = Kept(np.arange(len(steps)), (note, *notes))
    return in_order(FileTable(path, {}, [0] * len(steps)), np.array(starts_s), values, kept)


def _from_zero(agent: _Agent, zero_s: float) -> _Agent:
    """The same on the task's clock."""
    items = [
        _from_zero(item, zero_s)
        if isinstance(item, _Agent)
        else replace(item, start_s=item.start_s - zero_s, end_s=item.end_s - zero_s)
        for item in agent.items
    ]
    return _Agent(agent.start_s - zero_s, items)


def _ancestors(spans: Mapping[tuple[str, str], _Span], span: _Span) -> Iterator[tuple[str, str]]:
    """The spans above a span, the nearest first."""
    visited = set()
    key = (span.trace, span.parent)
    while key in spans and key not in visited:
        yield key
        visited.add(key)
        key = (span.trace, spans[key].parent)


def _spans(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], _Span]]:
    """Spans of an OTLP object by trace and id."""
    try:
        if "resourceSpans" not in table and {"resourceMetrics", "resourceLogs"} & table.keys():
            return  # other signals, which a collector may write to the same file
        for resource in table["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for entry in scope["spans"]:
                    attributes = {
                        attribute["key"]: next(iter(attribute["value"].values()), None)
                        for attribute in entry.get("attributes", ())
                    }
                    span = _Span(
                        str(entry["traceId"]),
                        str(entry.get("parentSpanId") or ""),
                        int(entry["startTimeUnixNano"]) / 1e9,
                        int(entry["endTimeUnixNano"]) / 1e9,
                        attributes,
                    )
                    yield (span.trace, str(entry["spanId"])), span
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FileFormatError(path, None, f"is no OTLP/JSON with spans: {error!r:.80}") from None


def _count(path: Path, span: _Span, names: tuple[str, ...]) -> int:
    value = next((span.attributes[name] for name in names if name in span.attributes), 0)
    try:
        tokens = int(value)
    except (TypeError, ValueError, OverflowError):
        tokens = -1
    if not 0 <= tokens <= MOST_TOKENS:
        raise FileFormatError(
            path, None, f"{names[0]} must be a number of tokens, not {value!r:.40}"
        )
    return tokens
