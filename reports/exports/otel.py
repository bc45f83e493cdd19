"""Metrics and spans of a run as OTLP/JSON (https://opentelemetry.io/docs/specs/otlp/).

Written to a file, an object a line, as the collector's file exporter writes and its receiver
`otlpjsonfile` reads; or sent to a collector over HTTP. A request is a trace: a span by the
conventions for generative AI, and below it queue, prefill and decode. So is a cell. Metrics are
gauges, one for each column of `cells.csv`. Times count from the run's beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from ...harness.results.read_run import detail_file, read_table
from ...harness.results.run_columns import REQUEST_COLUMNS
from ...workloads.errors import SloBenchError
from ...workloads.readers.agents import CELL_ATTRIBUTE
from .cells_export import ExportedCell, ExportedRun, Parameter, exported_run

Json = dict[str, Any]

_AT_ONCE = 500  # spans in a message
_LIMIT_S = 30.0
_SCOPE = {"name": "slo_bench"}
_INTERNAL, _CLIENT = 1, 3  # kinds of spans
_OK, _ERROR = 1, 2  # codes of a span's status


def export(folder: Path, destination: str | None) -> str:
    """Write to the file `destination`, by default otel.jsonl in the run folder, or send to a
    collector such as http://127.0.0.1:4318.
    """
    run = exported_run(folder)
    where = destination or str(folder / "otel.jsonl")
    if where.startswith(("http://", "https://")):
        spans = _send(run, where.rstrip("/"))
    else:
        spans = _write(run, Path(where))
    return f"{len(run.cells)} cells with {spans:,} spans as OTLP/JSON to {where}"


def _write(run: ExportedRun, file: Path) -> int:
    spans = 0
    try:
        with file.open("w", encoding="utf-8") as out:
            for _, message, n in _messages(run):
                out.write(json.dumps(message, allow_nan=False) + "\n")
                spans += n
    except OSError as error:
        raise SloBenchError(f"{file} cannot be written: {error.strerror}") from None
    return spans


def _send(run: ExportedRun, url: str) -> int:
    spans = 0
    with httpx.Client(timeout=_LIMIT_S) as client:
        for path, message, n in _messages(run):
            try:
                client.post(f"{url}/v1/{path}", json=message).raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = str(error).partition("\n")[0]
                raise SloBenchError(f"no collector takes OTLP at {url}/v1/{path}: {why}") from None
            spans += n
    return spans


def _messages(run: ExportedRun) -> Iterator[tuple[str, Json, int]]:
    """Messages with the signal (a path of OTLP over HTTP) and their number of spans."""
    for cell in run.cells:
        spans = list(_spans(run, cell))
        for first in range(0, len(spans), _AT_ONCE):
            some = spans[first : first + _AT_ONCE]
            scope = {"scopeSpans": [{"scope": _SCOPE, "spans": some}]}
            yield "traces", {"resourceSpans": [_with_resource(run, scope)]}, len(some)
    yield "metrics", {"resourceMetrics": [_with_resource(run, {"scopeMetrics": _metrics(run)})]}, 0


def _with_resource(run: ExportedRun, content: Json) -> Json:
    attributes: dict[str, Parameter] = {
        "service.name": "slo-bench",
        "service.version": str(run.results.environment.get("slo_bench", "")),
        "slo_bench.run": run.name,
    }
    return {"resource": {"attributes": _attributes(attributes)}, **content}


def _attributes(values: dict[str, Parameter]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Parameter) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _nanos(seconds: float) -> str:
    return str(int(seconds * 1_000_000) * 1000)


def _metrics(run: ExportedRun) -> list[Json]:
    """A gauge for each metric, with a point for each cell."""
    points: dict[str, list[Json]] = {}
    for cell in run.cells:
        labels = _attributes({CELL_ATTRIBUTE: cell.name, **_named(cell)})
        for name, value in cell.metrics.items():
            point = {"timeUnixNano": _nanos(run.created_s), "asDouble": value, "attributes": labels}
            points.setdefault(name, []).append(point)
    gauges = [
        {"name": f"slo_bench.{name}", "unit": _unit(name), "gauge": {"dataPoints": data_points}}
        for name, data_points in points.items()
    ]
    return [{"scope": _SCOPE, "metrics": gauges}]


def _unit(name: str) -> str:
    """In UCUM, as OpenTelemetry writes units."""
    if name.endswith("_rps"):
        return "{request}/s"
    return {"s": "s", "j": "J", "w": "W"}.get(name.rpartition("_")[2], "1")


def _named(cell: ExportedCell) -> dict[str, Parameter]:
    return {f"slo_bench.{name}": value for name, value in cell.parameters.items()}


def _spans(run: ExportedRun, cell: ExportedCell) -> Iterator[Json]:
    key = f"{run.results.path.resolve()}/{run.created_s}/{cell.name}"
    whole_s = cell.metrics.get("makespan_s", 0.0)
    status = _OK if cell.metrics.get("valid", 1.0) else _ERROR
    yield _span(run, key, "", cell.name, (0.0, whole_s), _named(cell), status=status)
    if not run.results.keeps_requests:
        return
    path = detail_file(run.results.path / "requests", cell.name)
    requests = read_table(path, REQUEST_COLUMNS, ("prompt_tokens",), words=("outcome",))
    for number, row in enumerate(requests.to_dict("records")):
        yield from _request(run, f"{key}/{number}", cell, row)


def _request(run: ExportedRun, key: str, cell: ExportedCell, row: dict[Any, Any]) -> Iterator[Json]:
    begin_s, finish_s = float(row["arrival_s"]), float(row["finish_s"])
    model = str(cell.parameters.get("model", ""))
    done = math.isfinite(finish_s)
    attributes: dict[str, Parameter] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        CELL_ATTRIBUTE: cell.name,
        "slo_bench.outcome": str(row["outcome"]),
        "slo_bench.slo_met": bool(row["slo_met"]),
    }
    for name, column in (("input", "prompt_tokens"), ("output", "output_tokens")):
        tokens = float(row.get(column, math.nan))
        if math.isfinite(tokens):
            attributes[f"gen_ai.usage.{name}_tokens"] = int(tokens)
    span_s = (begin_s, finish_s if done else begin_s)
    status = _OK if done else _ERROR
    yield _span(run, key, "", f"chat {model}", span_s, attributes, kind=_CLIENT, status=status)
    times = [begin_s, *(float(row[name]) for name in ("first_scheduled_s", "first_token_s"))]
    times.append(finish_s)
    for name, part_s in zip(("queue", "prefill", "decode"), pairwise(times), strict=True):
        if all(map(math.isfinite, part_s)):
            yield _span(run, key, name, name, part_s, {})


def _span(
    run: ExportedRun,
    key: str,
    part: str,
    name: str,
    span_s: tuple[float, float],
    attributes: dict[str, Parameter],
    *,
    kind: int = _INTERNAL,
    status: int = _OK,
) -> Json:
    """A span of the trace `key`: the whole of it, or a `part`, which is below the whole."""
    span: Json = {
        "traceId": sha256(key.encode()).hexdigest()[:32],
        "spanId": sha256(f"{key}#{part}".encode()).hexdigest()[:16],
        "name": name,
        "kind": kind,
        "startTimeUnixNano": _nanos(run.created_s + span_s[0]),
        "endTimeUnixNano": _nanos(run.created_s + max(span_s)),
        "attributes": _attributes(attributes),
        "status": {"code": status},
    }
    return span | ({"parentSpanId": sha256(f"{key}#".encode()).hexdigest()[:16]} if part else {})
