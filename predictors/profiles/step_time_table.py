"""Step time looked up in measured tables: linear layers by tokens, attention by what is in a batch.

Attention is interpolated linearly along every axis and goes on straight beyond the last point. A
step that only decodes is then a piecewise linear function of its KV tokens, so that spans of such
steps have a closed form, stretch by stretch (docs/measurements/profiles.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import stretches
from ..roofline import DecodeLine

Floats = NDArray[np.float64]

# A tile of a matrix multiplication holds 16 rows or more: between two sizes no further apart than
# that, time does not grow evenly but is already that of the larger size.
TILE_TOKENS = 16
# FlashAttention splits the sequences of a decode step unless its thread blocks fill this share of
# the places on the GPU (`num_splits_heuristic`; with a CUDA graph, at the padded size).
SPLIT_SHARE = 0.8


@dataclass(frozen=True)
class Curve:
    """Seconds by a count; `counts` ascend."""

    counts: Floats
    seconds: Floats

    def __call__(self, count: float) -> float:
        """Seconds at `count`: of the next size where that is close, else straight between and
        beyond the sizes; never negative.
        """
        counts, seconds = self.counts, self.seconds
        if len(counts) == 1:
            return float(seconds[0])
        k = min(max(int(np.searchsorted(counts, count)), 1), len(counts) - 1)
        if counts[k - 1] < count <= counts[k] <= counts[k - 1] + TILE_TOKENS:
            return float(seconds[k])
        return float(_between(counts, seconds, count))


@dataclass(frozen=True)
class DecodeGrid:
    """Attention of a step that only decodes: seconds by sequences and their mean KV tokens."""

    sequences: Floats
    kv_tokens: Floats
    seconds: Floats  # [sequences, kv_tokens]


@dataclass(frozen=True)
class MixedGrid:
    """Attention of a step with prefill: seconds by chunk, the KV before it, decoding sequences
    and their mean KV tokens. The first of `sequences` may be 0: prefill alone.
    """

    chunk_tokens: Floats
    context_tokens: Floats
    sequences: Floats
    kv_tokens: Floats
    seconds: Floats  # [chunk, context, sequences, kv]


@dataclass(frozen=True)
class Host:
    """Host overhead of a step.

    `step_s` seconds go before every step; `launch_s` more before one that is launched kernel by
    kernel. A step with prompts takes at least `prefill_s`, where it is launched kernel by kernel
    and the host takes longer than the GPU. Steps of up to `graph_tokens` tokens (0: none) are
    replayed from a CUDA graph instead, whose sizes are those that vLLM captures.
    """

    step_s: float = 0.0
    launch_s: float = 0.0
    graph_tokens: int = 0
    prefill_s: float = 0.0

    def graph_size(self, tokens: int) -> int:
        """The captured size that a step with `tokens` tokens is padded to; `tokens` itself without
        one.
        """
        if tokens > self.graph_tokens or tokens <= 2:
            return tokens
        if tokens <= 4:
            return 4
        multiple = 8 if tokens <= 256 else 16
        return min(self.graph_tokens, -(-tokens // multiple) * multiple)


class Line(NamedTuple):
    """Time of a decode-only step of one number of sequences, by the KV tokens of the batch.

    Equal sequences: `base_s[k]` + `slope_s[k]` * tokens up to `ends[k]`. `unsplit`: each sequence
    is read by one thread block a KV head, so that unequal ones take their tail longer.
    """

    ends: list[float]  # the last is infinite
    base_s: list[float]
    slope_s: list[float]
    unsplit: bool


class Tables(NamedTuple):
    """What a `TableStepTime` looks up, in the order of its arguments."""

    linear: Curve
    per_sequence: Curve
    decode: DecodeGrid
    mixed: MixedGrid
    host: Host


class TableStepTime:
    """`StepTime` from measured tables.

    Args:
        linear: seconds of everything that depends on the tokens of a batch, all layers.
        per_sequence: seconds of everything that depends on its sequences (output head, sampler).
        decode: attention of all layers where nothing is prefilled.
        mixed: attention of all layers where something is.
        host: what the host adds.
        resident: how many sequences the GPU attends to at once: two thread blocks on a
            multiprocessor, one a KV head. Tables are measured with equal sequences; where this is
            known, unequal ones take longer (`tail_s`). 0: not known, lengths do not matter.

    Several chunks in a step count as the one chunk that has as many (query, KV) pairs and, where
    that is possible, as many tokens.
    """

    def __init__(
        self,
        linear: Curve,
        per_sequence: Curve,
        decode: DecodeGrid,
        mixed: MixedGrid,
        host: Host | None = None,
        resident: float = 0.0,
    ) -> None:
        self.host = host or Host()
        self._least_prefill_s = self.host.prefill_s
        self.resident = resident
        self._linear = linear
        self._per_sequence = per_sequence
        self._decode = decode
        self._mixed = mixed
        self._chunks = mixed.chunk_tokens.tolist()
        self._contexts = mixed.context_tokens.tolist()
        self._inner_contexts = self._contexts[1:-1]
        self._context_widths = np.diff(mixed.context_tokens).tolist()
        self._kvs = mixed.kv_tokens.tolist()
        self._row = len(self._kvs)
        self._stride = len(self._contexts) * self._row
        # Looked up instead of searched for: where lengths stand in the mixed grid.
        self._chunk_cells = _chunk_cells(tuple(self._chunks), self._stride)
        self._kv_columns = _kv_columns(tuple(self._kvs))
        self._kv_shares = (1 / np.diff(mixed.kv_tokens)).tolist()
        self._fixed_s: dict[int, float] = {}
        self._sequence_s: dict[int, float] = {}
        self._lines: dict[int, Line] = {}
        self._cubes: dict[int, tuple[list[float], list[float]]] = {}
        self._lone_s_per_token = self._lone()
        self._full_s_per_token = self._full()
        self.wants_lengths = bool(resident) and (
            0 < self._full_s_per_token < self._lone_s_per_token
        )

    @property
    def tables(self) -> Tables:
        """What the times are looked up in."""
        return Tables(self._linear, self._per_sequence, self._decode, self._mixed, self.host)

    def step_s(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        tail_s: float = 0.0,
    ) -> float:
        if not chunks:
            line = self._lines.get(decode_seqs) or self._line(decode_seqs)
            ends, base_s, slope_s, unsplit = line
            k = bisect_right(ends, decode_kv_tokens)
            equal_s = base_s[k] + slope_s[k] * decode_kv_tokens
            return equal_s + tail_s if unsplit else equal_s
        if len(chunks) == 1:
            context, tokens = chunks[0]
            length = tokens
            before = float(context)
        else:
            tokens, length, before = as_one_chunk(chunks)
        tokens += decode_seqs
        sequences = decode_seqs + len(chunks)
        fixed_s = self._fixed_s.get(tokens) or self._fixed(tokens)
        per_sequence_s = self._sequence_s.get(sequences) or self._sequences(sequences)
        mixed_s = self._attention(decode_seqs, decode_kv_tokens, length, before)
        seconds = fixed_s + per_sequence_s + mixed_s + tail_s
        least_s = self._least_prefill_s
        return seconds if seconds > least_s else least_s

    def tail_s(self, begins: Sequence[int], total: int) -> float:
        """Seconds that unequal sequences take longer than equal ones (`LengthAwareStepTime`).

        A sequence that is not split is read at r seconds a token at best, all bytes at c: with k
        sequences left, a token of each takes max(r, k c). So lengths l_1 >= l_2 >= ... take
        sum_k (l_k - l_(k+1)) max(r, k c); of it the same sum for equal lengths is taken away.
        """
        lone_s, full_s = self._lone_s_per_token, self._full_s_per_token
        n = len(begins)
        alone = int(lone_s / full_s)  # so many sequences do not use the whole bandwidth
        if n > alone:
            last = float(begins[alone])
        else:
            alone = n
            last = total / n
        # Summed by parts; lengths are a number minus `begins`.
        return (
            full_s * sum(begins[1:alone])
            + (lone_s - alone * full_s) * last
            - (lone_s - full_s) * begins[0]
        )

    def span_s(
        self, decode_seqs: int, decode_kv_tokens: int, steps: int, tail_s: float = 0.0
    ) -> float:
        """Seconds of several decode steps: a closed form for each stretch with one slope."""
        here, first_s, growth_s = self._stretch(decode_seqs, decode_kv_tokens, tail_s)
        if steps <= here:
            return steps * first_s + growth_s * (steps * (steps - 1) * 0.5)
        return stretches.span_s(self._stretches(decode_seqs, decode_kv_tokens, tail_s), steps)

    def steps_within(
        self, decode_seqs: int, decode_kv_tokens: int, duration_s: float, tail_s: float = 0.0
    ) -> int:
        """Fewest decode steps that take `duration_s`; agrees with `span_s` to the last bit."""
        if duration_s <= 0:
            return 0
        here, first_s, growth_s = self._stretch(decode_seqs, decode_kv_tokens, tail_s)
        if growth_s >= 0 and here * first_s > duration_s:  # all but always here
            steps = stretches.crossing(first_s, growth_s, 0.0, duration_s)
            if steps <= here:
                return steps
        return stretches.steps_within(
            self._stretches(decode_seqs, decode_kv_tokens, tail_s), duration_s
        )

    def _stretches(
        self, sequences: int, kv_tokens: int, tail_s: float
    ) -> Iterator[stretches.Stretch]:
        """Steps that only decode, as stretches in which they grow evenly."""
        while True:
            stretch = self._stretch(sequences, kv_tokens, tail_s)
            yield stretch
            kv_tokens += stretch[0] * sequences

    def _stretch(self, sequences: int, kv_tokens: int, tail_s: float) -> stretches.Stretch:
        """The linear stretch that begins at this point."""
        ends, base_s, slope_s, unsplit = self._lines.get(sequences) or self._line(sequences)
        k = bisect_right(ends, kv_tokens)
        first_s = base_s[k] + slope_s[k] * kv_tokens
        if unsplit:
            first_s += tail_s
        end = ends[k]
        here = stretches.ENDLESS if end == inf else -int((kv_tokens - end) // sequences)
        return here, first_s, slope_s[k] * sequences

    def decode_line(self, decode_seqs: int, decode_kv_tokens: int) -> DecodeLine:
        """As `LinearStepTime.decode_line`."""
        line = self._lines.get(decode_seqs) or self._line(decode_seqs)
        ends, base_s, slope_s, unsplit = line
        k = bisect_right(ends, decode_kv_tokens)
        return base_s[k], slope_s[k], ends[k - 1] if k else 0.0, ends[k], unsplit

    # ---------------------------------------------------------------- parts of a step

    def _fixed(self, tokens: int) -> float:
        """Seconds of linear layers and host in a step with that many tokens."""
        host = self.host
        seconds = self._linear(host.graph_size(tokens)) + host.step_s
        if tokens > host.graph_tokens:
            seconds += host.launch_s
        self._fixed_s[tokens] = seconds
        return seconds

    def _sequences(self, sequences: int) -> float:
        self._sequence_s[sequences] = seconds = self._per_sequence(sequences)
        return seconds

    def _line(self, sequences: int) -> Line:
        """Seconds of a decode-only step with that many sequences, piecewise linear in its KV."""
        grid = self._decode
        attention_s = _between(grid.sequences, grid.seconds, sequences)
        knots = grid.kv_tokens * sequences
        fixed_s = self._fixed(sequences) + self._sequences(sequences)
        padded = self.host.graph_size(sequences)
        unsplit = self.wants_lengths and padded >= SPLIT_SHARE * self.resident
        if unsplit:
            # From the number on at which sequences are split no more, they are read alone.
            token_s = max(self._full_s_per_token, self._lone_s_per_token / sequences)
            full = grid.seconds[-1]
            start_s = float(
                full[0] - self._full_s_per_token * grid.sequences[-1] * grid.kv_tokens[0]
            )
            attention_s = np.maximum(attention_s, start_s + token_s * knots)
        slopes = np.diff(attention_s) / np.diff(knots)
        line = Line(
            [*knots[1:-1].tolist(), inf],
            (fixed_s + attention_s[:-1] - slopes * knots[:-1]).tolist(),
            slopes.tolist(),
            unsplit,
        )
        self._lines[sequences] = line
        return line

    def _full(self) -> float:
        """Seconds per KV token of the largest batch that only decodes: at full bandwidth."""
        grid = self._decode
        if len(grid.kv_tokens) < 2:
            return 0.0
        full = grid.seconds[-1]
        return float((full[-1] - full[0]) / np.ptp(grid.kv_tokens) / grid.sequences[-1])

    def _lone(self) -> float:
        """Seconds per KV token of one sequence that the GPU reads serially.

        Attention kernels read a sequence serially unless they split it, and kernels for mixed
        batches do not split: the time of the smallest chunk with one sequence shows it. 0 if not
        measured.
        """
        grid = self._mixed
        alone = np.flatnonzero(grid.sequences == 1)
        if not len(alone) or len(grid.kv_tokens) < 2:
            return 0.0
        seconds = grid.seconds[0, 0, alone[0]]
        return max(0.0, float((seconds[-1] - seconds[0]) / np.ptp(grid.kv_tokens)))

    def _attention(self, sequences: int, kv_tokens: int, chunk: int, context: float) -> float:
        """Attention of a step with prefill, between the points of the mixed grid."""
        cube, rise = self._cubes.get(sequences) or self._cube(sequences)
        cells, stride = self._chunk_cells, self._stride
        index, fa = cells[chunk] if chunk < len(cells) else _chunk_cell(self._chunks, stride, chunk)
        fc = 0.0
        if sequences:
            kv = kv_tokens / sequences
            columns = self._kv_columns
            whole = kv_tokens // sequences
            c = columns[whole] if whole < len(columns) else columns[-1]
            fc = (kv - self._kvs[c]) * self._kv_shares[c]
            index += c
        fb = 0.0
        row = self._row
        if context:
            b = bisect_left(self._inner_contexts, context)
            fb = (context - self._contexts[b]) / self._context_widths[b]
            index += b * row
        near = cube[index] + fc * rise[index]
        if fb:
            near += fb * (cube[index + row] + fc * rise[index + row] - near)
        if fa:
            index += stride
            far = cube[index] + fc * rise[index]
            if fb:
                far += fb * (cube[index + row] + fc * rise[index + row] - far)
            near += fa * (far - near)
        return near if near > 0 else 0.0

    def _cube(self, sequences: int) -> tuple[list[float], list[float]]:
        """The mixed grid at that many decoding sequences, flattened, and how much each value rises
        to the next.
        """
        grid = self._mixed
        by_sequences = np.moveaxis(grid.seconds, 2, 0)
        cube = _between(grid.sequences, by_sequences, sequences).ravel()
        rise = np.diff(cube, append=cube[-1])
        self._cubes[sequences] = cube.tolist(), rise.tolist()
        return self._cubes[sequences]


def _chunk_cell(chunks: Sequence[float], stride: int, chunk: float) -> tuple[int, float]:
    """Where in a cube the chunk length below begins, and the share of the way to the next."""
    a = min(max(bisect_left(chunks, chunk), 1), len(chunks) - 1)
    share = (chunk - chunks[a - 1]) / (chunks[a] - chunks[a - 1])
    # A tile holds more tokens than the least chunk measured.
    return (a - 1) * stride, max(0.0, share)


@cache
def _chunk_cells(chunks: tuple[float, ...], stride: int) -> list[tuple[int, float]]:
    """Of every length up to the longest; models of one grid share it."""
    lengths, ends = np.arange(int(chunks[-1]) + 1), np.array(chunks)
    after = np.clip(np.searchsorted(ends, lengths), 1, len(ends) - 1)
    begins = ends[after - 1]
    shares = np.maximum(0.0, (lengths - begins) / (ends[after] - begins))
    return list(zip(((after - 1) * stride).tolist(), shares.tolist(), strict=True))


@cache
def _kv_columns(ends: tuple[float, ...]) -> list[int]:
    """Of every number of KV tokens up to the last, the column of the grid that begins below."""
    below = np.searchsorted(ends, np.arange(int(ends[-1]) + 1), side="right") - 1
    columns: list[int] = np.clip(below, 0, len(ends) - 2).tolist()
    return columns


def as_one_chunk(chunks: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """Tokens of several chunks, and the length and context of the one that stands for them."""
    pairs = 0.0
    tokens = 0
    for context, chunk in chunks:
        pairs += chunk * (context + 0.5 * chunk)
        tokens += chunk
    before = pairs / tokens - 0.5 * tokens
    return (tokens, round(sqrt(2 * pairs)), 0.0) if before < 0 else (tokens, tokens, before)


def _between(points: Floats, values: Floats, x: float) -> Floats:
    """`values` at `x` along their first axis; straight on beyond the ends, never negative."""
    if len(points) == 1:
        return np.asarray(values[0])
    k = min(max(int(np.searchsorted(points, x)), 1), len(points) - 1)
    share = (x - points[k - 1]) / (points[k] - points[k - 1])
    return np.asarray(np.maximum(0.0, values[k - 1] + share * (values[k] - values[k - 1])))
