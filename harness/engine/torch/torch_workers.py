"""Worker processes on this machine and their messages; rank 0 is the process that started them.

A message over torch.distributed is a length, then bytes. It holds tensors, plain values and the
classes in `_MESSAGE_CLASSES`; nothing else is loaded.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ....workloads.child_process import start_module
from .attention import Partial
from .batch import Batch, Decodes, PrefillChunk
from .cache import InUse, Packed
from .decoder_config import DecoderConfig, Rope
from .pipeline import Traffic
from .tiers import UnitShape
from .torch_errors import WorkerError
from .weights import Layer, Linear

HERE = 0
_ECHOES = 5
_LOOK_S = 0.02  # how often the start of the others is looked at


class Workers:
    """Context manager that runs worker processes on this machine.

    Args:
        count: number of processes.
        timeout_s: longest time for their start and for an answer.
        cores: the core of each; empty: any.

    Raises:
        WorkerError: a worker did not start in time.
    """

    def __init__(self, count: int, timeout_s: float = 120.0, cores: Sequence[int] = ()) -> None:
        self.count = count
        self._cores = cores
        self._timeout_s = timeout_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.busy_s: dict[int, float] = {}  # CPU seconds of each when it answered last

    def __enter__(self) -> Workers:
        self._folder = tempfile.TemporaryDirectory(prefix="slo-bench-workers-")
        store_file = Path(self._folder.name) / "store"
        size = self.count + 1
        try:
            for rank in range(1, size):
                argv = [str(store_file), str(rank), str(size), str(self._timeout_s)]
                argv += [str(core) for core in self._cores[rank - 1 : rank]]
                self.processes.append(start_module(f"{__package__}.torch_worker", *argv))
            join(store_file, HERE, size, self._timeout_s, self._ended)
        except BaseException:
            for process in self.processes:
                process.kill()
            self._stop()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is None and problem == (None, None, None):
                try:
                    send(rank, None)
                except WorkerError:
                    break
        leave()
        self._stop()

    def _ended(self) -> str | None:
        """Which worker has ended, and how."""
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                return f"process {rank} ended with code {process.returncode}"
        return None

    def _stop(self) -> None:
        for process in self.processes:
            try:
                process.wait(5.0 if process.poll() is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    @property
    def ranks(self) -> range:
        """Ranks of all workers."""
        return range(1, self.count + 1)

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers."""
        return [process.pid for process in self.processes]

    def of(self, owner: int) -> ModelWorkers:
        """The same for one of several models of a run."""
        return ModelWorkers(self, owner)

    def forget(self) -> None:
        """No model is anywhere any more.

        Raises:
            WorkerError: a worker has ended.
        """
        for rank in self.ranks:
            self.tell(rank, (None, "", ()))
            self.answer(rank)

    def echo_s(self, payload: torch.Tensor) -> float:
        """Seconds for a tensor to the first worker and back: the median of several times."""
        times_s = []
        for _ in range(_ECHOES):
            begin_s = time.perf_counter()
            self.of(HERE).ask(self.ranks[0], "echo", payload)
            times_s.append(time.perf_counter() - begin_s)
        return statistics.median(times_s)

    def answer(self, rank: int) -> Any:
        """Receive the answer to the last message of a worker.

        Raises:
            WorkerError: the worker has ended or does not answer.
        """
        try:
            self.busy_s[rank], reply = receive(rank)
        except WorkerError:
            self._check(rank)
            raise
        return reply

    def tell(self, rank: int, message: Any) -> int:
        """Send without waiting for an answer; the bytes sent."""
        self._check(rank)
        return send(rank, message)

    def _check(self, rank: int) -> None:
        code = self.processes[rank - 1].poll()
        if code is not None:
            raise WorkerError(f"worker {rank} has ended with exit code {code}; its KV is lost")


@dataclass(frozen=True)
class ModelWorkers:
    """The workers as one model sees them: what lives there of another does not concern it."""

    workers: Workers
    owner: int = 0

    @property
    def ranks(self) -> range:
        """Ranks of all workers."""
        return self.workers.ranks

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of `torch_worker.TorchWorker` there.

        Raises:
            WorkerError: it has ended, or does not answer.
        """
        self.tell(rank, method, *arguments)
        return self.answer(rank)

    def tell(self, rank: int, method: str, *arguments: Any) -> None:
        """Call it without waiting for the answer."""
        self.workers.tell(rank, (self.owner, method, arguments))

    def answer(self, rank: int) -> Any:
        """What it answered to the last call."""
        return self.workers.answer(rank)


_MESSAGE_CLASSES = [
    Batch,
    PrefillChunk,
    DecoderConfig,
    Decodes,
    InUse,
    Layer,
    Linear,
    Packed,
    Partial,
    Rope,
    Traffic,
    UnitShape,
    frozenset,
    slice,
]


def join(
    store: Path,
    rank: int,
    size: int,
    timeout_s: float,
    ended: Callable[[], str | None] = lambda: None,
) -> None:
    """Become one of `size` processes of this machine that know each other by the file `store`.

    They listen on loopback alone; by itself gloo takes the address of the machine's name. `ended`
    says which of the others has ended, if one has.

    Raises:
        WorkerError: the others did not come in time, or one ended.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = dist.FileStore(str(store), size)
    # They meet before the group is made: after a group that failed, a process can make no other.
    meeting.set(f"here {rank}", "")
    everyone = [f"here {other}" for other in range(size)]
    begin_s = time.monotonic()
    while not meeting.check(everyone):
        why = ended()
        if why is None and time.monotonic() - begin_s > timeout_s:
            why = f"they did not start within {timeout_s:g} s"
        if why is not None:
            raise WorkerError(f"process {rank} of {size} found no others: {why}")
        time.sleep(_LOOK_S)
    try:
        dist.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"process {rank} of {size} found no others: {ended() or error}") from None


def leave() -> None:
    """Leave the process group that `join` entered."""
    if dist.is_initialized():
        dist.destroy_process_group()


def send(to: int, message: Any) -> int:
    """Send a message and return its bytes.

    Raises:
        WorkerError: the other process has ended.
    """
    file = io.BytesIO()
    torch.save(message, file)
    content = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(content)]), to)
        dist.send(content, to)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"worker {to} cannot be reached: {error}") from None
    return len(content)


def receive(source: int, within: timedelta | None = None) -> Any:
    """Receive a message that `send` sent.

    Args:
        source: the rank that sends it.
        within: longest time until it begins; None: the time for an answer, as `join` was told.

    Raises:
        WorkerError: the other process has ended, or no message came in time.
    """
    length = torch.zeros(1, dtype=torch.int64)
    try:
        if within is None:
            dist.recv(length, source)
        else:
            begun: Any = dist.irecv(length, source)
            begun.wait(within)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(content, source)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"worker {source} does not answer: {error}") from None
    return loaded(content.numpy().tobytes())


def loaded(content: bytes) -> Any:
    """The message in these bytes: tensors, plain values and the classes above; no code is run.

    Raises:
        WorkerError: they are no such message.
    """
    try:
        with torch.serialization.safe_globals(_MESSAGE_CLASSES):
            return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # whatever torch makes of broken bytes
        raise WorkerError(f"what came is no message of a worker: {error}") from None
