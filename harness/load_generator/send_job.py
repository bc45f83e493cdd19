"""Sending processes: each receives its share of requests, reports that it is ready, and starts at a
given time.

All of one machine read the same clock: `time.perf_counter` counts from its start, in every process
alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ...workloads.child_process import ChildProcess, Parent
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from .http.bodies import Bodies
from .http.columns import SenderResult
from .http.drive import ClientLimits, Progress
from .http.endpoint import Endpoint
from .http.options import Api, HttpOptions, PromptFormat
from .sender import send_share
from .shares import Share, processes_for

_READY_S = 60.0
_GRACE_S = 120.0  # after the time limit, to read what came
_AHEAD_S = 0.2

_Said = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]


@dataclass(frozen=True)
class SendJob:
    """A workload to be sent by `count` processes."""

    workload: Workload
    endpoints: Sequence[Endpoint]
    options: HttpOptions
    router: str
    count: int
    bodies: Bodies
    limits: ClientLimits

    def files(self) -> dict[str, bytes]:
        """Files that a sending process reads, except the bodies."""
        order = {
            "endpoints": [dataclasses.asdict(endpoint) for endpoint in self.endpoints],
            # Names of environment variables, never what they hold.
            "options": _plain(self.options),
            "router": self.router,
            "processes": self.count,
        }
        return {
            "order.json": json.dumps(order).encode(),
            "workload.npz": _packed_workload(self.workload),
        }


@dataclass(frozen=True)
class SendResult:
    """Result of one sending process; None if it died. `machine` is empty for this machine.

    `offset_s` is by how much that machine's clock was ahead of ours when the level began, and
    `clock_error_s` by how much the moments that it says may be wrong.
    """

    part: SenderResult | None
    machine: str = ""
    offset_s: float = 0.0
    clock_error_s: float = 0.0


class Senders(Protocol):
    """Set of sending processes on one or several machines."""

    def count(self, workload: Workload) -> int:
        """Number of sending processes for the workload."""
        ...

    def send(self, order: SendJob, progress: Progress | None) -> list[SendResult]:
        """Send, on one schedule; one answer for each process.

        Raises:
            SloBenchError: it cannot be sent at all.
        """
        ...


class ThisMachine:
    """Sending processes on this machine."""

    def count(self, workload: Workload) -> int:
        """Number of sending processes, at most one per core."""
        return processes_for(workload)

    def send(self, order: SendJob, progress: Progress | None) -> list[SendResult]:
        """Send a level from the processes of this machine."""
        folder = order.bodies.path.parent
        for name, content in order.files().items():
            (folder / name).write_bytes(content)
        with Processes(folder, range(order.count)) as processes:
            start_s = perf_counter() + _AHEAD_S

            def told(ended: int) -> None:
                if progress is not None:
                    progress(ended, max(0.0, perf_counter() - start_s))

            parts = processes.send(start_s, order.limits.time_s, told)
        return [SendResult(parts.get(share)) for share in range(order.count)]


class Processes:
    """Sending processes of this machine, one for each of `shares`; all ready when the block begins.

    `folder` holds the files of an `SendJob` and the bodies.

    Raises:
        SloBenchError: one of them cannot send.
    """

    def __init__(self, folder: Path, shares: Sequence[int]) -> None:
        self._folder = folder
        self._shares = shares
        self._said: _Said = queue.SimpleQueue()
        self._children = contextlib.ExitStack()
        self._processes: list[ChildProcess] = []

    def __enter__(self) -> Processes:
        try:
            for share in self._shares:
                child = self._children.enter_context(start_sender(self._folder, share))
                child.listen(partial(self._hear, share))
                self._processes.append(child)
            until_s = perf_counter() + _READY_S
            for _ in self._processes:
                _, message = _next(self._said, until_s)
                if message is None:
                    raise SloBenchError("a sending process died; its error is printed above")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self._children.close()

    def _hear(self, share: int, message: dict[str, Any] | None) -> None:
        self._said.put((share, message))

    def send(
        self, start_s: float, time_s: float, told: Callable[[int], None]
    ) -> dict[int, SenderResult]:
        """Send from `start_s` on, for at most `time_s`; return the results of the shares that did
        not die.

        `told` hears now and then how many requests have ended.
        """
        for child in self._processes:
            child.send(start_s)
        until_s = start_s + time_s + _GRACE_S
        ended = dict.fromkeys(self._shares, 0)
        left, died = set(self._shares), set()
        while left:
            share, message = _next(self._said, until_s)
            if message is None:
                if share in left:
                    died.add(share)
                    left.discard(share)
            elif "done" in message:
                left.discard(share)
            else:
                ended[share] = message["ended"]
            told(sum(ended.values()))
        return {
            share: SenderResult.load(self._folder / f"part-{share}.npz")
            for share in self._shares
            if share not in died
        }


def start_sender(folder: Path, share: int) -> ChildProcess:
    """Start one sending process."""
    return ChildProcess(__name__, str(folder), str(share))


def _next(said: _Said, until_s: float) -> tuple[int, dict[str, Any] | None]:
    """Return the next message and its process; None if the process died."""
    try:
        index, message = said.get(timeout=max(0.0, until_s - perf_counter()))
    except queue.Empty:
        raise SloBenchError("a sending process says nothing more; all were stopped") from None
    if message is not None and "error" in message:
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
            "prompt_format": PromptFormat(plain["prompt_format"]),
            "token_ids": (low, high),
            "tokenizer": None if tokenizer is None else Path(tokenizer),
        }
    )


def _packed_workload(workload: Workload) -> bytes:
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
    packed = io.BytesIO()
    np.savez(packed, plain=np.array(json.dumps(plain)), **arrays)
    return packed.getvalue()


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


def _work(folder: Path, index: int, parent: Parent) -> None:
    """Main function of a sending process."""
    said_s = 0.0

    def progress(ended: int, clock_s: float) -> None:
        nonlocal said_s
        if clock_s - said_s > 0.2:
            said_s = clock_s
            parent.send({"ended": ended})

    def start_s() -> float:
        parent.send({"ready": True})
        when_s: float = next(parent.messages())
        parent.exit_with()  # sending stops when the parent process has ended
        return when_s

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
        parent.send({"error": str(error)})
        return
    part.save(folder / f"part-{index}.npz")
    parent.send({"done": True})


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), Parent())
