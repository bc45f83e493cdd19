"""Messages between processes over torch.distributed: a length, then the bytes of the message.
Messages hold tensors, plain values and the classes named here; nothing else is loaded.
"""

from __future__ import annotations

import io
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .attention import Partial
from .batch import Batch, Decodes, PrefillChunk
from .config import DecoderConfig, Rope
from .errors import WorkerError
from .packed import InUse, Packed
from .pipeline import Traffic, TransferTotals
from .tiers import UnitShape
from .weights import Layer, Linear

_TOLD = [
    Batch,
    TransferTotals,
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


def join(store: Path, rank: int, size: int, timeout_s: float) -> None:
    """Become one of `size` processes of this machine that know each other by the file `store`.

    They listen on loopback alone; by itself gloo takes the address of the machine's name.

    Raises:
        WorkerError: the others did not come in time.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"process {rank} of {size} found no others: {error}") from None


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


def receive(source: int) -> Any:
    """Receive a message that `send` sent.

    Raises:
        WorkerError: the other process has ended, or no message came in time.
    """
    length = torch.zeros(1, dtype=torch.int64)
    try:
        dist.recv(length, source)
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
        with torch.serialization.safe_globals(_TOLD):
            return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # whatever torch makes of broken bytes
        raise WorkerError(f"what came is no message of a worker: {error}") from None
