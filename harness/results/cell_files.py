"""The files of one cell: its requests, its timeline, values over time, mispredicted lengths.

A table is drawn as CSV text digit by digit in numpy: formatting a row with `%` costs some 3 µs,
drawing the digits of all rows at once about a third of that. Times are decimals with six places
(microseconds), NaN is an empty field.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.csv_text import guarded
from ...workloads.extras import need
from ...workloads.request import SLO_COLUMNS
from ...workloads.whole_file import whole_file, write_whole
from ...workloads.workload import Workload
from ..core.records.judging import Judged
from ..core.records.request_records import Misprediction, Outcome, Records, Timeline, TimeseriesRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]

ROWS_AT_ONCE = 25_000  # what is drawn at once stays in the processor's cache
_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Choice:
    """A column of names, given as an index into the few names there are."""

    index: Ints
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.index)


Column = Floats | Ints | Mask | Choice


@dataclass(frozen=True)
class _Drawn:
    """The characters of one column, and a mask of those that are written to the file."""

    characters: Bytes  # rows × width
    kept: Mask


def _four_digits() -> Bytes:
    values = np.arange(10_000)
    return np.stack([values // 10**k % 10 + ord("0") for k in (3, 2, 1, 0)], axis=1).astype(
        np.uint8
    )


_FOUR_DIGITS = _four_digits()


def _digits(values: Ints, width: int) -> Bytes:
    """`values` ≥ 0 as decimal digits with leading zeros, `width` of them."""
    groups = []
    for _ in range(-(-width // 4)):
        values, group = np.divmod(values, 10_000)
        groups.append(_FOUR_DIGITS[group])
    drawn: Bytes = groups[0] if len(groups) == 1 else np.concatenate(groups[::-1], axis=1)
    return drawn[:, drawn.shape[1] - width :]


def _whole(values: Ints) -> _Drawn:
    """Draw integers without leading zeros."""
    negative = values < 0
    size = np.abs(values)
    width = len(str(int(size.max(initial=0))))
    kept = np.empty((len(values), width + 1), dtype=np.bool_)
    kept[:, 0] = negative
    for place in range(width - 1):
        np.greater_equal(size, 10 ** (width - 1 - place), out=kept[:, place + 1])
    kept[:, width] = True
    characters = np.empty((len(values), width + 1), dtype=np.uint8)
    characters[:, 0] = ord("-")
    characters[:, 1:] = _digits(size, width)
    return _Drawn(characters, kept)


def _decimals(values: Floats) -> _Drawn:
    """Seconds with six decimals; empty for NaN, `inf` for infinity."""
    finite = np.isfinite(values)
    ticks = np.rint(np.where(finite, values, 0.0) * _MICROSECONDS).astype(np.int64)
    size = np.abs(ticks)
    seconds, fraction = np.divmod(size, _MICROSECONDS)
    whole = _whole(seconds)
    whole.kept[:, 0] = ticks < 0
    n = len(values)
    point = np.full((n, 1), ord("."), dtype=np.uint8)
    characters = np.concatenate([whole.characters, point, _digits(fraction, 6)], axis=1)
    kept = np.concatenate([whole.kept, np.ones((n, 7), dtype=np.bool_)], axis=1)
    if not finite.all():
        kept[~finite] = False
        for sign, text in ((np.inf, b"inf"), (-np.inf, b"-inf")):
            rows = values == sign
            characters[rows, : len(text)] = np.frombuffer(text, dtype=np.uint8)
            kept[rows, : len(text)] = True
    return _Drawn(characters, kept)


def _named(column: Choice) -> _Drawn:
    encoded = [_quoted(name).encode() for name in column.names]
    width = max(map(len, encoded), default=0)
    table = np.zeros((len(encoded), width), dtype=np.uint8)
    for row, name in enumerate(encoded):
        table[row, : len(name)] = np.frombuffer(name, dtype=np.uint8)
    lengths = np.array([len(name) for name in encoded])
    kept = np.arange(width)[None, :] < lengths[:, None]
    return _Drawn(table[column.index], kept[column.index])


def _quoted(text: str) -> str:
    text = guarded(text)
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _drawn(column: Column, rows: slice) -> _Drawn:
    if isinstance(column, Choice):
        return _named(Choice(column.index[rows], column.names))
    part = column[rows]
    if part.dtype.kind == "f":
        return _decimals(part.astype(np.float64))
    return _whole(part.astype(np.int64))


def _literal(text: bytes, rows: int) -> _Drawn:
    characters = np.broadcast_to(np.frombuffer(text, dtype=np.uint8), (rows, len(text)))
    return _Drawn(characters, np.broadcast_to(np.True_, characters.shape))


def _is_constant(column: Column) -> bool:
    values = column.index if isinstance(column, Choice) else column
    return bool((values == values[0]).all() or (values != values).all())


def _text(drawn: _Drawn) -> bytes:
    return drawn.characters[drawn.kept].tobytes()


def csv_blocks(columns: Mapping[str, Column]) -> Iterator[bytes]:
    """The header, then the rows in blocks.

    Args:
        columns: by name, all equally long; booleans become 1 and 0.
    """
    yield (",".join(map(_quoted, columns)) + "\n").encode()
    n = len(next(iter(columns.values())))
    if n == 0:
        return
    # What is the same in every row is drawn once, together with the commas around it.
    pieces: list[Column | bytes] = []
    for place, column in enumerate(columns.values(), start=1):
        fixed = _is_constant(column)
        text = _text(_drawn(column, slice(0, 1))) if fixed else b""
        text += b"\n" if place == len(columns) else b","
        if not fixed:
            pieces.append(column)
        if pieces and isinstance(pieces[-1], bytes):
            pieces[-1] += text
        else:
            pieces.append(text)
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, n))
        drawn = [
            _literal(piece, rows.stop - rows.start)
            if isinstance(piece, bytes)
            else _drawn(piece, rows)
            for piece in pieces
        ]
        yield _text(
            _Drawn(
                np.concatenate([d.characters for d in drawn], axis=1),
                np.concatenate([d.kept for d in drawn], axis=1),
            )
        )


def gzip_csv(columns: Mapping[str, Column]) -> Iterator[bytes]:
    """`csv_blocks` as a gzip stream without a time stamp: the same columns give the same bytes."""
    packer = zlib.compressobj(level=1, wbits=31)
    for block in csv_blocks(columns):
        yield packer.compress(block)
    yield packer.flush()


def request_columns(workload: Workload, records: Records, judged: Judged) -> dict[str, Column]:
    """The per-request table. Class, model, session and priority only where the workload has any."""
    columns: dict[str, Column] = {
        "id": np.arange(len(workload), dtype=np.int64),
        "arrival_s": records.arrival_s,
        "prompt_tokens": workload.prompt_tokens,
        "expected_output_tokens": workload.output_tokens,
    }
    if any(workload.class_names):
        columns["class"] = Choice(workload.class_index, workload.class_names)
    if any(workload.model_names):
        columns["model"] = Choice(workload.model_index, workload.model_names)
    if (workload.session >= 0).any():
        columns["session"] = workload.session
    if workload.priority.any():
        columns["priority"] = workload.priority
    if workload.request_type.any():
        columns["request_type"] = workload.request_type
        columns["num_inputs"] = workload.num_inputs
    return columns | {
        **{name: getattr(workload, name) for name in SLO_COLUMNS.values()},
        "first_scheduled_s": records.first_scheduled_s,
        "first_token_s": records.first_token_s,
        "finish_s": records.finish_s,
        "outcome": Choice(records.outcome, [outcome.name.lower() for outcome in Outcome]),
        "output_tokens": records.output_tokens,
        "cached_tokens": records.cached_tokens,
        "preemptions_swap": records.preemptions_swap,
        "preemptions_recompute": records.preemptions_recompute,
        "instance": records.instance,
        "slo_met": judged.met,
    }


def write_details(
    folder: Path,
    cell: str,
    requests: Mapping[str, Column],
    timeline: Timeline,
    *,
    records: str,
) -> None:
    """Put the per-request table and the timeline of one cell on disk.

    `records` is `csv`, `parquet` (needs pyarrow) or `none` for no per-request table.
    """
    if records == "csv":
        write_whole(folder / "requests" / f"{cell}.csv.gz", gzip_csv(requests))
    elif records == "parquet":
        _write_parquet(folder / "requests" / f"{cell}.parquet", requests)
    moments: dict[str, Column] = {
        "time_s": timeline.time_s,
        "waiting": timeline.waiting,
        "running": timeline.running,
        "kv_cache_usage": timeline.kv_cache_usage,
    }
    write_whole(folder / "timelines" / f"{cell}.csv.gz", gzip_csv(moments))
    if timeline.timeseries:
        columns = _timeseries_columns(timeline.timeseries)
        write_whole(folder / "timeseries" / f"{cell}.csv.gz", gzip_csv(columns))


def _timeseries_columns(rows: Sequence[TimeseriesRow]) -> dict[str, Column]:
    time_s, metric, entity, value = zip(*rows, strict=True)
    return {
        "time_s": np.array(time_s, dtype=np.float64),
        "metric": choice_of(metric),
        "entity": choice_of(entity),
        "value": np.array(value, dtype=np.float64),
    }


def choice_of(names: Sequence[str]) -> Choice:
    """The column of these names, one for each row."""
    place = {name: position for position, name in enumerate(dict.fromkeys(names))}
    return Choice(np.array([place[name] for name in names]), list(place))


def write_mispredictions(folder: Path, cell: str, queued: Sequence[Misprediction]) -> None:
    """Write the requests of one cell with mispredicted lengths, if there are any."""
    if queued:
        lines = (
            json.dumps(dataclasses.asdict(misprediction)).encode() + b"\n"
            for misprediction in queued
        )
        write_whole(folder / "mispredictions" / f"{cell}.jsonl", lines)


def _write_parquet(path: Path, columns: Mapping[str, Column]) -> None:
    need("parquet", str(path))
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = len(columns["id"])

    # Arrays are made of buffers because pa.array() imports pandas, which takes longer than
    # writing the file.
    def array(values: NDArray[Any]) -> object:
        kind = pa.from_numpy_dtype(values.dtype)
        if values.dtype == np.bool_:
            values = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(np.ascontiguousarray(values))])

    def names(column: Choice) -> object:
        encoded = [name.encode() for name in column.names]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        texts = pa.StringArray.from_buffers(
            len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
        )
        return pa.DictionaryArray.from_arrays(array(column.index.astype(np.int32)), texts)

    table = pa.table(
        {
            name: names(column) if isinstance(column, Choice) else array(column)
            for name, column in columns.items()
        }
    )
    times = [name for name, column in columns.items() if _is_time(column)]
    with whole_file(path) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in columns if name not in times],
            column_encoding=dict.fromkeys(times, "BYTE_STREAM_SPLIT"),
        )


def _is_time(column: Column) -> bool:
    return not isinstance(column, Choice) and column.dtype.kind == "f"
