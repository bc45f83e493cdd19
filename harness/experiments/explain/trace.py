"""Events of a cell, also as a trace for Perfetto.

A run folder holds no log of events. The same experiment gives the same bytes, so a simulated cell
is simulated again with instances that keep a log. Of a measured cell only the client's times are
known.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ....workloads.errors import SloBenchError, UnknownNameError
from ....workloads.whole_file import whole_file_packed
from ....workloads.workload import Workload
from ...core.records.request_records import Outcome, Result
from ...engine.loop.traced_instance import EngineTrace, InstanceLog, Place, Stop
from ...servers.launch.backend_names import SIMULATED
from ..execution.cell_specs import CellSpec
from ..execution.cells import predicted_output_tokens, simulated, workload_of
from ..experiment import Experiment, RunResult
from .latency_breakdown import LatencySpan, SpanKind
from .stages import visits

Event = dict[str, Any]

_STEPS, _REQUESTS = 1, 1000  # thread numbers: the steps of an instance, and from where requests are


@dataclass(frozen=True)
class CellTrace:
    """A simulated cell with the log of its events."""

    spec: CellSpec
    workload: Workload
    result: Result
    trace: EngineTrace

    def events(self) -> Iterator[Event]:
        """Trace events of the cell: names of tracks, steps, counters, requests."""
        drawn = self._drawn()
        for index, log in sorted(self.trace.instances.items()):
            yield _named_event("process_name", index, 0, self.trace.names[index])
            yield _named_event("thread_name", index, _STEPS, "steps")
            yield from _steps(index, log)
            yield from _request_events(index, drawn.get(index, []))

    def _drawn(self) -> dict[int, list[_DrawnRequest]]:
        """Finished requests by instance, in the order in which they came to it."""
        records, drawn = self.result.records, dict[int, list[_DrawnRequest]]()
        for request in np.flatnonzero(records.outcome == Outcome.FINISHED).tolist():
            if self.trace.log_of(request) is None:
                continue  # an embedder's
            span_s = float(records.arrival_s[request]), float(records.finish_s[request])
            for stop, end_s in visits(self.trace, request, *span_s):
                if stop.place is Place.INSTANCE:
                    drawn.setdefault(stop.log, []).append(self._visit(request, stop, end_s))
        return {
            index: sorted(requests, key=lambda drawn: drawn.begin_s)
            for index, requests in drawn.items()
        }

    def _visit(self, request: int, stop: Stop, end_s: float) -> _DrawnRequest:
        here = self.trace.log(stop.log).moves.get(request, ())
        moves = [move for move in here if stop.time_s <= move.time_s < end_s]
        at_s = [*(move.time_s for move in moves), end_s]
        names = ["queue", *(move.state.value for move in moves)]
        return _DrawnRequest(
            request,
            stop.time_s,
            end_s,
            int(self.workload.prompt_tokens[request]),
            int(self.workload.output_tokens[request]),
            list(zip(names, [stop.time_s, *at_s[:-1]], at_s, strict=True)),
        )


def cell_names(folder: Path) -> list[str]:
    """Names of the cells of a run folder's experiment, in order.

    Raises:
        SloBenchError: the folder holds no experiment, or one that cannot be read.
    """
    return [spec.cell for spec in _cells(folder)]


def measured_on(folder: Path, cell: str) -> str | None:
    """Return the backend that measured a cell of a run folder; None if it was simulated.

    Raises:
        UnknownNameError: the experiment has no such cell.
        SloBenchError: the folder holds no experiment, or one that cannot be read.
    """
    specs = {spec.cell: spec for spec in _cells(folder)}
    if cell not in specs:
        raise UnknownNameError("cell", cell, specs)
    backend = str(specs[cell].columns.get("backend", SIMULATED))
    return None if backend == SIMULATED else backend


def replay(
    folder: Path, cell: str, *, progress: Callable[[int, float], None] | None = None
) -> CellTrace:
    """Simulate one cell of a run folder again with a log of its events.

    Raises:
        UnknownNameError: the experiment has no such cell.
        SloBenchError: the cell was measured, not simulated, or cannot be run again.
    """
    backend = measured_on(folder, cell)
    if backend is not None:
        raise SloBenchError(
            f"{cell} was measured on {backend}; only simulated cells can be run again and watched"
        )
    spec = next(spec for spec in _cells(folder) if spec.cell == cell)
    workload = workload_of(spec)
    trace = EngineTrace()
    predicted = predicted_output_tokens(spec, workload)
    result = simulated(spec, workload, predicted, progress=progress, trace=trace)
    return CellTrace(spec, workload, result, trace)


def _cells(folder: Path) -> tuple[CellSpec, ...]:
    kept = folder / "experiment.toml"
    if not kept.is_file():
        raise SloBenchError(f"{kept} is missing; is {folder} a run folder?")
    return Experiment.load(kept).plan().cells


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was measured on a real server, from the client's records of its requests.

    `requests` has one row for each request, in their order.
    """

    cell: str
    requests: pd.DataFrame

    @classmethod
    def read(cls, folder: Path, cell: str) -> MeasuredCell:
        """Read a cell from a run folder.

        Raises:
            UnknownNameError: no requests of such a cell were kept.
        """
        return cls(cell, RunResult(folder).requests(cell))

    def phases(self, request: int) -> list[LatencySpan]:
        """Phases of a finished request from its scheduled arrival to its last token."""
        row = self.requests.iloc[request]
        at_s = [float(row["arrival_s"]), float(row["first_token_s"]), float(row["finish_s"])]
        parts = [SpanKind.UNTIL_ANSWER, SpanKind.ANSWER]
        sent_s = float(row.get("sent_s", np.nan))
        if at_s[0] < sent_s < at_s[1]:
            at_s.insert(1, sent_s)
            parts.insert(0, SpanKind.CLIENT)
        spans = zip(at_s[:-1], at_s[1:], parts, strict=True)
        return [LatencySpan(begin, end, part) for begin, end, part in spans if end > begin]

    def events(self) -> Iterator[Event]:
        """Trace events: a process for each instance, its requests on tracks."""
        ended = self.requests[self.requests["outcome"] == "finished"]
        for instance, group in ended.groupby(ended["instance"].clip(lower=0)):
            process = int(str(instance))
            yield _named_event("process_name", process, 0, f"instance {process} (measured)")
            rows = group.sort_values("arrival_s", kind="stable").index.tolist()
            yield from _request_events(process, map(self._drawn, rows))

    def _drawn(self, request: int) -> _DrawnRequest:
        row = self.requests.iloc[request]
        return _DrawnRequest(
            request,
            float(row["arrival_s"]),
            float(row["finish_s"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
            [(span.part.value, span.begin_s, span.end_s) for span in self.phases(request)],
        )


def write_events(events: Iterable[Event], path: Path) -> Path:
    """Write Chrome trace events (JSON), which ui.perfetto.dev and chrome://tracing open; compressed
    if the name ends with `.gz`.

    A process is an instance. In it are its steps, counters, and tracks of requests, each of which
    has one request at a time. Times are microseconds on the workload's clock. Format: "Trace Event
    Format", Google, 2016.

    Raises:
        SloBenchError: the file cannot be written.
    """
    with whole_file_packed(path) as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for place, event in enumerate(events):
            separator = ",\n" if place else "\n"
            out.write((separator + json.dumps(event, separators=(",", ":"))).encode())
        out.write(b"\n]}\n")
    return path


def _named_event(kind: str, process: int, thread: int, name: str) -> Event:
    """Event that names a process or a thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice_event(
    name: str, process: int, thread: int, begin_s: float, end_s: float, args: Mapping[str, object]
) -> Event:
    """Event that fills a span of time on a track."""
    begin_us = round(begin_s * 1e6, 3)
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": begin_us,
        "dur": round(end_s * 1e6 - begin_us, 3),
        "args": args,
    }


def _steps(process: int, log: InstanceLog) -> Iterator[Event]:
    for step in log.steps:
        tokens = sum(chunk.tokens for chunk in step.chunks)
        name = "KV transfer"
        if step.chunks:
            name = "prefill + decode" if step.decode_seqs else "prefill"
        elif step.decode_seqs:
            name = f"decode × {step.repeats}" if step.repeats > 1 else "decode"
        step_figures: dict[str, object] = {
            "decoding": step.decode_seqs,
            "KV tokens of decoding": step.kv_tokens,
            "prefill tokens": tokens,
            "prefilling": [chunk.request for chunk in step.chunks],
        }
        if step.swap_s:
            step_figures["KV transfer (s)"] = step.swap_s
        yield _slice_event(name, process, _STEPS, step.begin_s, step.end_s, step_figures)
        counted = {"decoding": step.decode_seqs, "prefilling": len(step.chunks)}
        counters = (("batch", counted), ("waiting", {"requests": step.waiting}))
        for counter, values in (*counters, ("KV blocks in use", {"blocks": step.num_gpu_blocks})):
            yield {
                "name": counter,
                "ph": "C",
                "pid": process,
                "ts": round(step.begin_s * 1e6, 3),
                "args": values,
            }


class _DrawnRequest(NamedTuple):
    request: int
    begin_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    spans: list[tuple[str, float, float]]  # name, begin and end in seconds


def _request_events(process: int, requests: Iterable[_DrawnRequest]) -> Iterator[Event]:
    """Requests in the order of their arrival, each on the first track that is free by then."""
    free: list[tuple[float, int]] = []
    tracks = 0
    for request, begin_s, end_s, prompt_tokens, output_tokens, spans in requests:
        if free and free[0][0] <= begin_s:
            track = heapq.heappop(free)[1]
        else:
            track = _REQUESTS + tracks
            tracks += 1
            yield _named_event("thread_name", process, track, f"requests {tracks}")
        heapq.heappush(free, (end_s, track))
        about = {
            "request": request,
            "prompt tokens": prompt_tokens,
            "output tokens": output_tokens,
        }
        yield _slice_event(f"request {request}", process, track, begin_s, end_s, about)
        for name, span_begin_s, span_end_s in spans:
            yield _slice_event(name, process, track, span_begin_s, span_end_s, {})
