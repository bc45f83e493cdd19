"""Sending processes: each gets its share, says when it is ready, and starts when told.

Programs of their own, not `multiprocessing`, for the reasons given in `harness.workers`. All read
the same clock: `time.perf_counter` counts from the machine's start, in every process alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np

from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..engines.over_http.bodies import Bodies
from ..engines.over_http.columns import Part
from ..engines.over_http.drive import Limits, Progress
from ..engines.over_http.endpoint import Endpoint
from ..engines.over_http.options import Api, HttpOptions, Prompts
from .sender import send_share
from .shares import Share

_READY_S = 60.0
_GRACE_S = 120.0  # after the time limit, to read what came
_AHEAD_S = 0.2

_Said = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]


def send_side_by_side(
    workload: Workload,
    endpoints: Sequence[Endpoint],
    options: HttpOptions,
    router: str,
    processes: int,
    bodies: Path,
    limits: Limits,
    progress: Progress | None,
) -> list[Part]:
    """Send a workload from several processes.

    Raises:
        SloBenchError: one of them failed.
    """
    folder = bodies.parent
    _write_workload(workload, folder / "workload.npz")
    order = {
        "endpoints": [dataclasses.asdict(endpoint) for endpoint in endpoints],
        # Names of environment variables, never what they hold.
        "options": _plain(options),
        "router": router,
        "processes": processes,
    }
    (folder / "order.json").write_text(json.dumps(order), "utf-8")
    said: _Said = queue.SimpleQueue()
    children: list[_Child] = []
    try:
        for index in range(processes):
            children.append(_Child(folder, index, said))
        until_s = perf_counter() + _READY_S
        for _ in children:
            _next(said, until_s)  # that it is ready
        start_s = perf_counter() + _AHEAD_S
        for child in children:
            child.tell(repr(start_s))
        until_s = start_s + limits.time_s + _GRACE_S
        ended = [0] * processes
        left = processes
        while left:
            index, message = _next(said, until_s)
            if "done" in message:
                left -= 1
            else:
                ended[index] = message["ended"]
            if progress is not None:
                progress(sum(ended), max(0.0, perf_counter() - start_s))
    finally:
        for child in children:
            child.stop()
    return [Part.load(folder / f"part-{index}.npz") for index in range(processes)]


def _start(folder: Path, index: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


class _Child:
    """A sending process, and the thread that listens to it."""

    def __init__(self, folder: Path, index: int, said: _Said) -> None:
        self.process = _start(folder, index)
        self._index = index
        self._said = said
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        message: dict[str, Any] = {}
        for line in self.process.stdout:
            message = json.loads(line)
            self._said.put((self._index, message))
        if "done" not in message:
            self._said.put((self._index, None))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it died of is heard of otherwise
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _next(said: _Said, until_s: float) -> tuple[int, dict[str, Any]]:
    """Who says what next."""
    try:
        index, message = said.get(timeout=max(0.0, until_s - perf_counter()))
    except queue.Empty:
        raise SloBenchError("a sending process says nothing more; all were stopped") from None
    if message is None:
        raise SloBenchError("a sending process died; its error stands above")
    if "error" in message:
        raise SloBenchError(message["error"])
    return index, message


def _plain(options: HttpOptions) -> dict[str, Any]:
    plain = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    plain["headers"] = dict(options.headers)
    plain["body"] = dict(options.body)
    plain["tokenizer"] = None if options.tokenizer is None else str(options.tokenizer)
    return plain


def _options(plain: dict[str, Any]) -> HttpOptions:
    low, high = plain["token_ids"]
    tokenizer = plain["tokenizer"]
    return HttpOptions(
        **{
            **plain,
            "api": Api(plain["api"]),
            "prompts": Prompts(plain["prompts"]),
            "token_ids": (low, high),
            "tokenizer": None if tokenizer is None else Path(tokenizer),
        }
    )


def _write_workload(workload: Workload, path: Path) -> None:
    """All columns but texts, which the bodies hold already."""
    arrays: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for f in dataclasses.fields(workload):
        value = getattr(workload, f.name)
        if isinstance(value, np.ndarray):
            arrays[f.name] = value
        elif f.name == "prefix_blocks" and value is not None:
            arrays["block_counts"] = np.array([len(blocks) for blocks in value])
            flat = [hash_ & 0xFFFFFFFFFFFFFFFF for blocks in value for hash_ in blocks]
            arrays["blocks"] = np.array(flat, dtype=np.uint64)
        elif f.name not in ("texts", "prefix_blocks"):
            plain[f.name] = value
    np.savez(path, plain=np.array(json.dumps(plain)), **arrays)


def _read_workload(path: Path) -> Workload:
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    plain = json.loads(str(arrays.pop("plain")))
    for name in ("class_names", "model_names"):
        plain[name] = tuple(plain[name])
    if "blocks" in arrays:
        plain["prefix_blocks"] = list(_blocks(arrays.pop("blocks"), arrays.pop("block_counts")))
    return Workload(**arrays, **plain)


def _blocks(flat: Any, counts: Any) -> Iterator[tuple[int, ...]]:
    end = 0
    for count in counts.tolist():
        yield tuple(flat[end : end + count].tolist())
        end += count


def _work(folder: Path, index: int, orders: IO[str], answers: IO[str]) -> None:
    """The child's side."""

    def say(message: object) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    said_s = 0.0

    def progress(ended: int, clock_s: float) -> None:
        nonlocal said_s
        if clock_s - said_s > 0.2:
            said_s = clock_s
            say({"ended": ended})

    def start_s() -> float:
        say({"ready": True})
        return float(orders.readline())

    order = json.loads((folder / "order.json").read_text("utf-8"))
    bodies = Bodies.read(folder / "bodies")
    try:
        part = send_share(
            _read_workload(folder / "workload.npz"),
            [Endpoint(**endpoint) for endpoint in order["endpoints"]],
            _options(order["options"]),
            order["router"],
            Share(index, order["processes"]),
            bodies,
            start_s=start_s,
            progress=progress,
        )
    except SloBenchError as error:
        say({"error": str(error)})
        return
    part.save(folder / f"part-{index}.npz")
    say({"done": True})


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), sys.stdin, sys.stdout)
