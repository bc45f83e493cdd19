"""A workload as the plain CSV that `readers.formats` reads back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from .arrays import Floats
from .csv_text import guarded
from .errors import SloBenchError
from .request import SLO_COLUMNS
from .whole_file import whole_file_packed
from .workload import Workload


def write_csv(workload: Workload, path: Path) -> None:
    """Write all columns that say anything; gzip if the name ends in .gz. Same bytes every time.

    The file appears whole or not at all. Texts are not written.

    Raises:
        SloBenchError: the workload is a closed loop of fixed concurrency, which a table of
            requests cannot hold, or the file cannot be written.
    """
    if workload.concurrency is not None:
        raise SloBenchError(
            "a closed loop (concurrency) has no arrival times to write; give the lengths to a run "
            'with arrivals = "concurrency(…)" instead'
        )
    columns = _columns(workload)
    with whole_file_packed(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=False):
            writer.writerow([guarded(c) if isinstance(c, str) else c for c in row])
        text.detach()  # flushed, and left open


def _columns(workload: Workload) -> dict[str, Iterable[object]]:
    columns: dict[str, Iterable[object]] = {
        "arrival_s": workload.arrival_s.tolist(),
        "prompt_tokens": workload.prompt_tokens.tolist(),
        "output_tokens": workload.output_tokens.tolist(),
    }
    if (workload.max_output_tokens != workload.output_tokens).any():
        columns["max_output_tokens"] = workload.max_output_tokens.tolist()
    for name, index, names in (
        ("class", workload.class_index, workload.class_names),
        ("model", workload.model_index, workload.model_names),
    ):
        if any(names):
            columns[name] = [names[k] for k in index.tolist()]
    for name in ("session", "follows"):
        if (getattr(workload, name) >= 0).any():
            columns[name] = getattr(workload, name).tolist()
    if any(workload.joins or ()):
        columns["joins"] = [" ".join(map(str, others)) for others in workload.joins or ()]
    for name in ("priority", "think_s", "request_type"):
        if getattr(workload, name).any():
            columns[name] = getattr(workload, name).tolist()
    if (workload.num_inputs != 1).any():
        columns["num_inputs"] = workload.num_inputs.tolist()
    for name in SLO_COLUMNS.values():
        column: Floats = getattr(workload, name)
        if np.isfinite(column).any():
            columns[name] = ["" if s == np.inf else s for s in column.tolist()]
    if workload.prefix_blocks is not None:
        columns["prefix_blocks"] = (" ".join(_runs(b)) for b in workload.prefix_blocks)
        columns["prefix_block_size"] = (workload.prefix_block_size for _ in count())
    return columns


def _runs(blocks: tuple[int, ...]) -> Iterator[str]:
    """Consecutive numbers in the form `0-13`, `20`."""
    index = 0
    while index < len(blocks):
        first = index
        while index + 1 < len(blocks) and blocks[index + 1] == blocks[index] + 1:
            index += 1
        yield f"{blocks[first]}-{blocks[index]}" if index > first else f"{blocks[first]}"
        index += 1
