"""A simulated cell once more, watched: run again from its experiment, and written for Perfetto.

A run folder holds no log of events. It need not: the same experiment gives the same bytes, so the
cell is simulated again with instances that keep a log.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.workload import Workload
from ..core.records import Outcome, Result
from ..engine.loop.traced import InstanceLog, State, Trace
from ..experiments.execution.cells import (
    CellSpec,
    placed,
    predicted_output_tokens,
    simulated,
    workload_of,
)
from ..experiments.experiment import Experiment
from ..servers.launch.backend_names import SIMULATED

Event = dict[str, Any]

_STEPS, _REQUESTS = 1, 1000  # thread numbers: the steps of an instance, and from where requests are


@dataclass(frozen=True)
class CellTrace:
    """A cell with everything that happened in it."""

    spec: CellSpec
    workload: Workload
    result: Result
    trace: Trace

    @property
    def lanes_per_instance(self) -> int:
        """Logs that belong to one instance: with pipeline parallelism one for each lane."""
        return placed(self.spec.placement).placement.lanes


def cell_names(folder: Path) -> list[str]:
    """The cells of a run folder's experiment, in order.

    Raises:
        SloBenchError: the folder holds no experiment, or one that cannot be read.
    """
    return [spec.cell for spec in _cells(folder)]


def measured_on(folder: Path, cell: str) -> str | None:
    """The backend that measured a cell of a run folder; None where it was simulated.

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
    """Run one cell of a run folder again, watched.

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
    trace = Trace()
    predicted = predicted_output_tokens(spec, workload)
    result = simulated(spec, workload, predicted, progress=progress, trace=trace)
    return CellTrace(spec, workload, result, trace)


def _cells(folder: Path) -> tuple[CellSpec, ...]:
    kept = folder / "experiment.toml"
    if not kept.is_file():
        raise SloBenchError(f"{kept} is missing; is {folder} a run folder?")
    return Experiment.load(kept).plan().cells


# ---------------------------------------------------------------- Perfetto


def write_perfetto(cell: CellTrace, path: Path) -> Path:
    """Write the cell as Chrome trace events (JSON), which ui.perfetto.dev and chrome://tracing
    open; packed where the name ends with `.gz`.

    A process is an instance. In it are its steps, counters, and one track for each place that
    requests occupy one after the other. Times are microseconds on the workload's clock. Format:
    "Trace Event Format", Google, 2016.

    Raises:
        SloBenchError: the file cannot be written.
    """
    return write_events(events(cell), path)


def write_events(found: Iterable[Event], path: Path) -> Path:
    """Write trace events; packed where the name ends with `.gz`.

    Raises:
        SloBenchError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        with _opened(partial, packed=path.suffix == ".gz") as write:
            write('{"displayTimeUnit":"ms","traceEvents":[')
            for place, event in enumerate(found):
                write(",\n" if place else "\n")
                write(json.dumps(event, separators=(",", ":")))
            write("\n]}\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SloBenchError(f"cannot write {path}: {error.strerror or error}") from error
    return path


@contextlib.contextmanager
def _opened(path: Path, *, packed: bool) -> Iterator[Callable[[str], object]]:
    with path.open("wb") as file:
        if not packed:
            yield lambda text: file.write(text.encode())
            return
        # No name and no time of day: the same cell gives the same bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packer:
            yield lambda text: packer.write(text.encode())


def events(cell: CellTrace) -> Iterator[Event]:
    """The trace events of a cell: names of tracks, steps, counters, requests."""
    for index, log in sorted(cell.trace.instances.items()):
        name = f"instance {index // cell.lanes_per_instance}"
        if cell.lanes_per_instance > 1:
            name += f" lane {index % cell.lanes_per_instance}"
        yield named_event("process_name", index, 0, name)
        yield named_event("thread_name", index, _STEPS, "steps")
        yield from _steps(index, log)
        yield from _requests(cell, index, log)


def named_event(kind: str, process: int, thread: int, name: str) -> Event:
    """What a process or a thread is called."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def slice_event(
    name: str, process: int, thread: int, begin_s: float, end_s: float, args: Mapping[str, object]
) -> Event:
    """A stretch of time on a track."""
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
        told: dict[str, object] = {
            "decoding": step.decode_seqs,
            "KV tokens of decoding": step.kv_tokens,
            "prefill tokens": tokens,
            "prefilling": [chunk.request for chunk in step.chunks],
        }
        if step.swap_s:
            told["KV transfer (s)"] = step.swap_s
        yield slice_event(name, process, _STEPS, step.begin_s, step.end_s, told)
        counted = {"decoding": step.decode_seqs, "prefilling": len(step.chunks)}
        counters = (("batch", counted), ("waiting", {"requests": step.waiting}))
        for counter, values in (*counters, ("KV blocks in use", {"blocks": step.kv_blocks})):
            yield {
                "name": counter,
                "ph": "C",
                "pid": process,
                "ts": round(step.begin_s * 1e6, 3),
                "args": values,
            }


def _requests(cell: CellTrace, process: int, log: InstanceLog) -> Iterator[Event]:
    """Requests in the order of their arrival, each on the first track that is free by then."""
    records = cell.result.records
    here = np.array(sorted(log.moves), dtype=np.int64)
    here = here[records.outcome[here] == Outcome.FINISHED]
    in_order = here[np.argsort(records.arrival_s[here], kind="stable")].tolist()
    times = ((float(records.arrival_s[r]), float(records.finish_s[r])) for r in in_order)
    for request, (track, named) in zip(in_order, free_tracks(process, times), strict=True):
        yield from named
        arrival_s, finish_s = float(records.arrival_s[request]), float(records.finish_s[request])
        about = {
            "request": request,
            "prompt tokens": int(cell.workload.prompt_tokens[request]),
            "output tokens": int(cell.workload.output_tokens[request]),
        }
        yield slice_event(f"request {request}", process, track, arrival_s, finish_s, about)
        moves = log.moves[request]
        yield slice_event("queue", process, track, arrival_s, moves[0].time_s, {})
        for move, following in pairwise(moves):
            if move.state is not State.DONE:
                name = move.state.value
                yield slice_event(name, process, track, move.time_s, following.time_s, {})


def free_tracks(
    process: int, times: Iterable[tuple[float, float]]
) -> Iterator[tuple[int, list[Event]]]:
    """For stretches in the order in which they begin, the first track that is free by then, and
    the events that name it where it is new.
    """
    free: list[tuple[float, int]] = []
    tracks = 0
    for begin_s, end_s in times:
        named: list[Event] = []
        if free and free[0][0] <= begin_s:
            track = heapq.heappop(free)[1]
        else:
            track = _REQUESTS + tracks
            tracks += 1
            named = [named_event("thread_name", process, track, f"requests {tracks}")]
        heapq.heappush(free, (end_s, track))
        yield track, named
