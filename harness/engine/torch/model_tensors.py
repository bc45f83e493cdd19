"""The tensors of a model folder: safetensors, in one file or in shards. Nothing is executed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....predictors.families import Modules
from ....workloads.parsing import parse_json
from .torch_errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors by name, each read once. `unread` tells what a model had no use for."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._file_of = _files(folder)
        self._read: set[str] = set()

    def root(self, modules: Modules) -> str:
        """What stands before the names of all modules but the head's."""
        roots = (r for r in modules.roots if f"{r}{modules.tokens}.weight" in self._file_of)
        return next(roots, modules.roots[0])

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor, on the device, in the dtype of the model.

        Raises:
            ModelError: it is missing, has another shape, or its file is damaged.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self._folder} has no weight {name!r}, which its config.json needs")
        with _opened(file) as opened:
            tensor: Tensor = opened.get_tensor(name)
        if list(tensor.shape) != list(shape):
            raise ModelError(
                f"{file}: {name} has the shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
        self._read.add(name)
        return tensor.to(self._device, self._dtype)

    def unread(self, but: Iterable[str] = ()) -> list[str]:
        """Names of tensors that were never read, except those that end in one of `but`."""
        ends = tuple(but)
        return sorted(n for n in self._file_of if n not in self._read and not n.endswith(ends))


def _files(folder: Path) -> dict[str, Path]:
    """File of each tensor, by name."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _sharded(folder, index)
    if not single.is_file():
        other = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt")]), None)
        hint = f"; {other.name} is a pickle, which is not read: convert it" if other else ""
        raise ModelError(f"{folder} has no {_SINGLE} and no {_INDEX}{hint}")
    return dict.fromkeys(_names(single), single)


def _sharded(folder: Path, index: Path) -> dict[str, Path]:
    try:
        file_names = parse_json(index.read_text("utf-8"))["weight_map"]
        file_of = {str(name): folder / str(file) for name, file in file_names.items()}
        for shard in map(str, file_names.values()):
            if Path(shard).name != shard or len(shard.encode()) > 255:
                raise ValueError(f"{shard!r} must be the name of a file in the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of shards: {error}") from None
    for file in sorted(set(file_of.values())):
        if not file.is_file():
            raise ModelError(f"{folder} lacks the shard {file.name}, which {index.name} names")
        held = set(_names(file))
        lost = next((n for n, f in file_of.items() if f == file and n not in held), None)
        if lost is not None:
            raise ModelError(f"{file} does not hold {lost!r}, though {index.name} says so")
    return file_of


def _names(file: Path) -> list[str]:
    with _opened(file) as opened:
        return list(opened.keys())


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short: {error}") from None
