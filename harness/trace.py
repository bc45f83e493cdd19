"""A simulated cell once more, watched: run again from its experiment, and written for Perfetto.

A run folder holds no log of events. It need not: the same experiment gives the same bytes, so the
cell is simulated again with instances that keep a log.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..workloads.errors import SloBenchError, UnknownNameError
from ..workloads.workload import Workload
from .cells import CellSpec, configured, placed, predicted_output_tokens, workload_of
from .core.records import Outcome, Result
from .engines.traced import InstanceLog, State, Trace
from .experiment import Experiment
from .simulate import simulate

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
        return self.spec.placement.pp


def cell_names(folder: Path) -> list[str]:
    """The cells of a run folder's experiment, in order.

    Raises:
        SloBenchError: the folder holds no experiment, or one that cannot be read.
    """
    return [spec.cell for spec in _cells(folder)]


def replay(
    folder: Path, cell: str, *, progress: Callable[[int, float], None] | None = None
) -> CellTrace:
    """Run one cell of a run folder again, watched.

    Raises:
        UnknownNameError: the experiment has no such cell.
        SloBenchError: the cell was measured, not simulated, or cannot be run again.
    """
    specs = {spec.cell: spec for spec in _cells(folder)}
    if cell not in specs:
        raise UnknownNameError("cell", cell, specs)
    spec = specs[cell]
    backend = spec.columns.get("backend", "simulated")
    if backend != "simulated":
        raise SloBenchError(
            f"{cell} was measured on {backend}; only simulated cells can be run again and watched"
        )
    place = placed(spec.placement)
    workload = workload_of(spec)
    trace = Trace()
    result = simulate(
        workload,
        configured(spec.system, spec.knobs),
        place.placement,
        place.step_time.model,
        instances=spec.instances,
        router=spec.router,
        oversize=spec.oversize,
        embedder=place.embedder,
        predicted_output_tokens=predicted_output_tokens(spec, workload),
        progress=progress,
        trace=trace,
    )
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
    partial = path.with_name(f".{path.name}.part")
    try:
        with _opened(partial, packed=path.suffix == ".gz") as write:
            write('{"displayTimeUnit":"ms","traceEvents":[')
            for place, event in enumerate(events(cell)):
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
        yield _named("process_name", index, 0, name)
        yield _named("thread_name", index, _STEPS, "steps")
        yield from _steps(index, log)
        yield from _requests(cell, index, log)


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, process: int, thread: int, begin_s: float, end_s: float, args: Mapping[str, object]
) -> Event:
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
        yield _slice(name, process, _STEPS, step.begin_s, step.end_s, told)
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
    free: list[tuple[float, int]] = []
    tracks = 0
    for request in here[np.argsort(records.arrival_s[here], kind="stable")].tolist():
        arrival_s, finish_s = float(records.arrival_s[request]), float(records.finish_s[request])
        if free and free[0][0] <= arrival_s:
            track = heapq.heappop(free)[1]
        else:
            track = _REQUESTS + tracks
            tracks += 1
            yield _named("thread_name", process, track, f"requests {tracks}")
        heapq.heappush(free, (finish_s, track))
        about = {
            "request": request,
            "prompt tokens": int(cell.workload.prompt_tokens[request]),
            "output tokens": int(cell.workload.output_tokens[request]),
        }
        yield _slice(f"request {request}", process, track, arrival_s, finish_s, about)
        moves = log.moves[request]
        yield _slice("queue", process, track, arrival_s, moves[0].time_s, {})
        for move, following in pairwise(moves):
            if move.state is not State.DONE:
                yield _slice(move.state.value, process, track, move.time_s, following.time_s, {})
