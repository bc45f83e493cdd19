"""Units of KV in files that several processes share: host memory above, a disk below.

A unit is a run of KV blocks of all layers, named by the hash of its tokens and all before them
(the global KV store of BanaServe, §4.3.3). A tier is a folder, for host memory one in `/dev/shm`.
A unit appears there whole, by rename, and is never written again, so that reading needs no lock;
whoever has opened it reads on when it is moved or removed. A process that dies leaves nothing
behind but a draft, which the next one removes: the lock is the kernel's, and goes with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ....predictors.specs import GIB
from ....workloads.errors import SloBenchError

_ABOUT = "about.json"
_DRAFT = ".draft"


@dataclass(frozen=True)
class TierFolder:
    """Where a tier keeps its units, and how many bytes they may have."""

    folder: Path
    capacity_bytes: int

    @classmethod
    def parse(cls, text: str) -> TierFolder:
        """`FOLDER=GIB`.

        Raises:
            SloBenchError: it is not that.
        """
        folder, _, size = text.rpartition("=")
        try:
            gib = float(size)
        except ValueError:
            gib = math.nan
        if not folder or not 0 < gib < math.inf:
            raise SloBenchError(
                f"a tier of the KV store is a folder and its size in GiB, as in /dev/shm/kv=2, "
                f"but is {text!r}"
            )
        return cls(Path(folder), round(gib * GIB))


@dataclass(frozen=True)
class UnitShape:
    """A unit is [layers, 2, blocks, KV heads, block tokens, head_dim]: keys, then values."""

    layers: int
    blocks: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements in it."""
        rows = self.layers * 2 * self.blocks * self.kv_heads * self.block_size
        return rows * self.head_dim

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the file of one unit."""
        each: int = self.dtype.itemsize
        return self.numel * each

    def mapped(self, path: str, *, new: bool = False) -> torch.Tensor:
        """The file as a tensor; `new`: it is made, and what is written into the tensor is its
        content.
        """
        if new:  # what a mapping finds no room for would end the process
            with Path(path).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.size_bytes)
        elif Path(path).stat().st_size < self.size_bytes:
            raise SloBenchError(f"a unit of the KV store is cut short: {path}; remove it")
        flat = torch.from_file(path, shared=new, size=self.numel, dtype=self.dtype)
        heads = (self.kv_heads, self.block_size, self.head_dim)
        return flat.view(self.layers, 2, self.blocks, *heads)


class Tiers:
    """The files. The least recently used units go one tier down, then out.

    Raises:
        SloBenchError: a folder holds units of another model or shape, or cannot be written.
    """

    def __init__(self, tiers: Sequence[TierFolder], shape: UnitShape, model: str) -> None:
        """`tiers`: fastest first. `model`: names the weights (`fingerprint`)."""
        if not any(tier.capacity_bytes >= shape.size_bytes for tier in tiers):
            raise SloBenchError(
                f"a KV store must hold at least one unit of {shape.size_bytes:,} bytes"
            )
        self.shape = shape
        self._tiers = [t for t in tiers if t.capacity_bytes >= shape.size_bytes]
        self._last_ns = 0
        about = json.dumps({"model": model, "unit": [str(v) for v in vars(shape).values()]})
        try:
            for tier in self._tiers:
                tier.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                for tier in self._tiers:
                    _agree(tier.folder / _ABOUT, about)
                    _tidy(tier.folder)
        except OSError as error:
            raise SloBenchError(f"the KV store cannot be made: {error}") from None

    def __contains__(self, unit: int) -> bool:
        return any((tier.folder / str(unit)).exists() for tier in self._tiers)

    def open(self, unit: int) -> int | None:
        """A file descriptor from which the unit can be read whatever becomes of it; None: it is
        not here. Others read it as `path_of` the descriptor.
        """
        for tier in self._tiers:
            with contextlib.suppress(FileNotFoundError):
                return os.open(tier.folder / str(unit), os.O_RDONLY)
        return None

    def draft(self, unit: int) -> Path:
        """Where to write a unit that is not here yet."""
        return self._tiers[0].folder / f"{unit}.{os.getpid()}{_DRAFT}"

    def keep(self, units: Iterable[int]) -> None:
        """Written drafts become units; those that are here already the most recently used.

        In order: of these the last is the last to go.
        """
        with self._locked():
            for unit in units:
                self._place(unit)
            for level in range(len(self._tiers)):
                self._make_room(level)

    def places(self) -> list[list[int]]:
        """Units in each tier, least recently used first."""
        return [[int(path.name) for path in self._in(level)] for level in range(len(self._tiers))]

    def _place(self, unit: int) -> None:
        there = self._tiers[0].folder / str(unit)
        draft = self.draft(unit)
        lower = [tier.folder / str(unit) for tier in self._tiers[1:]]
        if not there.exists():
            if draft.exists():
                draft.rename(there)
            else:
                held = [path for path in lower if path.exists()]
                if not held:
                    return  # gone in the meantime
                _copied(held[0], there)
        draft.unlink(missing_ok=True)
        for path in lower:
            path.unlink(missing_ok=True)
        self._used(there)

    def _used(self, path: Path) -> None:
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        os.utime(path, ns=(self._last_ns, self._last_ns))

    def _make_room(self, level: int) -> None:
        tier, each = self._tiers[level], self.shape.size_bytes
        paths = self._in(level)
        for path in paths[: max(0, len(paths) - tier.capacity_bytes // each)]:
            if level + 1 < len(self._tiers):
                _copied(path, self._tiers[level + 1].folder / path.name)
            path.unlink()

    def _in(self, level: int) -> list[Path]:
        paths = [p for p in self._tiers[level].folder.iterdir() if _is_unit(p.name)]
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._tiers[0].folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def path_of(descriptor: int) -> str:
    """Where any process of this user finds a file that this one has opened."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _is_unit(name: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", name) is not None


def _copied(source: Path, target: Path) -> None:
    """Whole or not at all; as recently used as the source."""
    draft = target.with_name(f"{target.name}.{os.getpid()}{_DRAFT}")
    shutil.copyfile(source, draft)
    shutil.copystat(source, draft)
    draft.rename(target)


def _agree(path: Path, about: str) -> None:
    if not path.exists():
        path.write_text(about, "utf-8")
    elif path.read_bytes() != about.encode():
        raise SloBenchError(
            f"{path.parent} holds KV of another model, dtype or block size; choose another folder "
            "for the KV store, or remove it"
        )


def _tidy(folder: Path) -> None:
    """Remove what processes that are gone had begun to write."""
    for path in folder.glob(f"*{_DRAFT}"):
        if not Path("/proc", path.name.split(".")[1]).exists():
            path.unlink(missing_ok=True)
