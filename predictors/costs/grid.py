"""Preemption costs as a lookup table: what a policy loads, with nothing but numpy."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.file_cache import depends_on, file_cache
from ...workloads.parsing import parse_json

FORMAT = 1
_AXES = ("tokens", "sequences", "kv_tokens")
_ARRAYS = (*_AXES, "step_s", "swap_out_s", "swap_in_s")


@dataclass(frozen=True)
class Swap:
    """One direction: seconds to start a copy, and seconds for the KV of a token."""

    latency_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        """Seconds to move the KV of that many tokens; 0 for none."""
        return self.latency_s + tokens * self.s_per_token if tokens > 0 else 0.0


@dataclass(frozen=True)
class CostGrid:
    """Seconds of a step by tokens prefilled x decoding sequences x KV tokens of each.

    `step_s` has shape (tokens, sequences, kv_tokens); the axes ascend and begin with 0. Times are
    interpolated linearly between points and extrapolated linearly beyond the last. `about` names
    the source of the grid.
    """

    tokens: Floats
    sequences: Floats
    kv_tokens: Floats
    step_s: Floats
    swap_out: Swap
    swap_in: Swap
    about: Mapping[str, Any] = field(default_factory=dict)
    _at: tuple[list[float], ...] = field(init=False, repr=False, compare=False)
    _flat: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Lists: a lookup reads eight numbers, and numpy is slow at reading single ones.
        axes = tuple(getattr(self, name).tolist() for name in _AXES)
        object.__setattr__(self, "_at", axes)
        object.__setattr__(self, "_flat", self.step_s.ravel().tolist())

    def step_seconds(self, tokens: int, sequences: int = 0, kv_tokens: int = 0) -> float:
        """Seconds of a step that prefills `tokens` while `sequences` decode over `kv_tokens` KV
        tokens in all.
        """
        each = kv_tokens / sequences if sequences else 0.0
        index, corners = 0, [(0, 1.0)]
        for axis, value in zip(self._at, (tokens, sequences, each), strict=True):
            k = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
            share = (value - axis[k]) / (axis[k + 1] - axis[k])
            index = index * len(axis) + k
            corners = [(c * len(axis), w) for c, w in corners]
            if share:
                corners = [
                    *((c, w * (1 - share)) for c, w in corners),
                    *((c + 1, w * share) for c, w in corners),
                ]
        flat = self._flat
        return max(0.0, sum(w * flat[index + c] for c, w in corners))

    def write(self, path: Path) -> None:
        """Write an uncompressed NumPy archive; docs/measurements/profiles.md lists its arrays.

        Raises:
            SloBenchError: the file cannot be written.
        """
        swaps = (self.swap_out, self.swap_in)
        arrays = {
            **{name: getattr(self, name) for name in (*_AXES, "step_s")},
            "swap_out_s": np.array([swaps[0].latency_s, swaps[0].s_per_token]),
            "swap_in_s": np.array([swaps[1].latency_s, swaps[1].s_per_token]),
            "about": np.array(json.dumps({"format": FORMAT, **self.about})),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
        except OSError as error:
            raise SloBenchError(f"cannot write the cost grid {path}: {error.strerror}") from error


def read_cost_grid(path: Path | str) -> CostGrid:
    """The grid in a file; read once for as long as the file stays the same.

    Raises:
        FileFormatError: it is no cost grid.
    """
    return _read(Path(path))


@file_cache(maxsize=8)
def _read(path: Path) -> CostGrid:
    depends_on(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from None
    try:
        with np.load(BytesIO(content), allow_pickle=False) as file:
            about = parse_json(str(file["about"]))
            arrays = {name: np.asarray(file[name], dtype=np.float64) for name in _ARRAYS}
    except (ValueError, KeyError, EOFError, BadZipFile, NotImplementedError) as error:
        raise FileFormatError(
            path,
            None,
            f"not a cost grid ({error}); `slo-bench profile fit --like adaptivellm` makes one",
        ) from None
    if not isinstance(about, dict) or about.pop("format", None) != FORMAT:
        raise FileFormatError(path, None, f"not a cost grid of format {FORMAT}")
    _check(path, arrays)
    out, into = arrays.pop("swap_out_s"), arrays.pop("swap_in_s")
    return CostGrid(
        **arrays, swap_out=Swap(*out.tolist()), swap_in=Swap(*into.tolist()), about=about
    )


def _check(path: Path, arrays: Mapping[str, Floats]) -> None:
    axes = [arrays[name] for name in _AXES]
    shape = tuple(len(axis) for axis in axes)
    if arrays["step_s"].shape != shape:
        raise FileFormatError(
            path, None, f"step_s has the shape {arrays['step_s'].shape}, its axes have {shape}"
        )
    for name, axis in zip(_AXES, axes, strict=True):
        if axis.ndim != 1 or len(axis) < 2 or axis[0] != 0 or (np.diff(axis) <= 0).any():
            raise FileFormatError(path, None, f"{name} must ascend from 0 and have two values")
    for name in ("step_s", "swap_out_s", "swap_in_s"):
        values = arrays[name]
        if not np.isfinite(values).all() or (values < 0).any():
            raise FileFormatError(path, None, f"{name} must hold seconds from 0 on")
        if name != "step_s" and values.shape != (2,):
            raise FileFormatError(path, None, f"{name} must be latency and seconds per token")
