"""What a reader hands back, and the last steps all readers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..workload import Workload
from .table import FileTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class WorkloadTrace:
    """A file as a workload; the first arrival is 0.

    `notes` say what was dropped, assumed or approximated. Without `has_arrivals` the file has
    lengths only, and all arrivals are 0.
    """

    workload: Workload
    notes: tuple[str, ...]
    format: str
    has_arrivals: bool = True


@dataclass(frozen=True)
class Kept:
    """Rows that were served, and a note on those that were not."""

    rows: Ints
    notes: tuple[str, ...]


def served(prompt_tokens: Ints, output_tokens: Ints, table: FileTable) -> Kept:
    """Drop requests without any output: they failed at the origin.

    Raises:
        FileFormatError: a request got an answer without a prompt, or none got any.
    """
    for row in np.flatnonzero((prompt_tokens < 1) & (output_tokens > 0)):
        raise table.fail(int(row), "a request with an answer must have a prompt token at least")
    rows = np.flatnonzero(output_tokens > 0)
    if not len(rows):
        raise table.fail(0, "no request in the trace has an output token")
    dropped = len(output_tokens) - len(rows)
    share = f"{dropped} of {len(output_tokens)} requests with no output token left out"
    return Kept(rows, (share,) if dropped else ())


def in_order(
    name: str,
    format_name: str,
    arrival_s: Floats,
    rows: Ints,
    columns: Mapping[str, NDArray[Any]],
    sequences: Mapping[str, Sequence[Any]] | None = None,
    notes: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> WorkloadTrace:
    """A trace of the given rows, sorted by arrival (ties in file order), from 0 on.

    `columns` and `sequences` have all rows of the file, under their names in `Workload`.
    """
    order = rows[np.argsort(arrival_s[rows], kind="stable")]
    if (np.diff(order) < 0).any():
        notes = (*notes, "the rows were not in order of arrival and have been sorted")
    if "follows" in columns:
        where = np.full(len(arrival_s) + 1, -1, dtype=np.int64)
        where[order] = np.arange(len(order))
        columns = {**columns, "follows": where[columns["follows"]]}
    arrival_s = arrival_s[order]
    picked: dict[str, Any] = {
        key: [values[row] for row in order] for key, values in (sequences or {}).items()
    }
    picked |= {key: column[order] for key, column in columns.items()}
    workload = Workload(
        arrival_s=arrival_s - arrival_s[0],
        name=name,
        **picked,
        **(settings or {}),
    )
    return WorkloadTrace(workload, notes, format_name)
