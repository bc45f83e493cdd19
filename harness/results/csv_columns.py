"""Columns of a million rows to CSV text, digit by digit in numpy.

Formatting a row with `%` costs some 3 µs; drawing all rows' digits at once costs about a third of
that, which matters because a cell's records are written for every run. Times are decimals with six
places (microseconds), NaN is an empty field.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.csv_text import guarded

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
