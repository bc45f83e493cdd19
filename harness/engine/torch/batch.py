"""One iteration as tensors: which tokens, where their KV goes, and what each attends to.

Decoding sequences come first, one token each, then the chunks of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sequence import Sequence

Ints = NDArray[np.int64]
_DENSE = 0.5  # share of blocks in use from which a stretch of the cache is read as it lies


@dataclass(frozen=True)
class Decodes:
    """KV blocks that decoding sequences attend to, as pairs of a sequence and one of its blocks.

    `where` picks the pairs' blocks out of the cache: a slice, read in place, if the blocks are
    close together, else their ids. `owner[i]` is the sequence of pair i, `seat[i]` its place in a
    table of `width` blocks a sequence (the very last seat is for blocks that no sequence owns).
    `mask` is 0 for visible tokens and -inf for others: [pairs × KV heads, 1, block tokens].
    """

    count: int
    width: int
    where: slice | Tensor
    owner: Tensor
    seat: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Elsewhere:
    """What the decoding sequences in `rows` attend to in blocks that worker `rank` has."""

    rank: int
    rows: Tensor
    decodes: Decodes


@dataclass(frozen=True)
class PrefillChunk:
    """Rows `begin` to `end` of the batch are a stretch of one prompt after `context` tokens.

    `blocks` hold them all and what came before; None: nothing came before. `mask` is [tokens, all
    tokens], None: each sees itself and those before it.
    """

    begin: int
    end: int
    context: int
    blocks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Batch:
    """`slots` are rows of a layer's keys (or values), seen as [blocks × heads × tokens, head_dim];
    `logit_rows` the rows whose next token is computed.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    decodes: Decodes | None
    chunks: Seq[PrefillChunk]
    logit_rows: Tensor | None  # None: all rows
    elsewhere: Seq[Elsewhere] = ()


@dataclass(frozen=True)
class Piece:
    """Part of a prompt to compute: `tokens` of it after `before`, and `padding` behind them that
    is computed for nothing.
    """

    sequence: Sequence
    before: int
    tokens: int
    padding: int = 0

    @property
    def end(self) -> int:
        """Tokens that have KV afterwards, padding included."""
        return self.before + self.tokens + self.padding

    @property
    def last(self) -> bool:
        """Does the next token follow from it?"""
        return self.before + self.tokens == len(self.sequence.tokens)


@dataclass(frozen=True)
class Layout:
    """What batches must know of a cache and its model."""

    kv_heads: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def batch(self, decodes: Seq[Sequence], pieces: Seq[Piece]) -> Batch:
        """The tensors of one iteration; every sequence's table must hold its new tokens."""
        size = self.block_size
        tokens = [s.tokens[-1] for s in decodes]
        lengths = np.array([len(s.tokens) for s in decodes], dtype=np.int64)
        positions = [lengths - 1]
        last = [s.blocks[(len(s.tokens) - 1) // size - s.offloaded_blocks] for s in decodes]
        blocks = [np.array(last, dtype=np.int64)]
        chunks, logit_rows, n_rows = [], list(range(len(decodes))), len(decodes)
        for piece in pieces:
            assert piece.sequence.offloaded is None, (
                "a sequence is whole while its prompt is computed"
            )
            tokens += piece.sequence.tokens[piece.before : piece.before + piece.tokens]
            tokens += [0] * piece.padding
            places = np.arange(piece.before, piece.end)
            positions.append(places)
            blocks.append(np.array(piece.sequence.blocks, dtype=np.int64)[places // size])
            chunks.append(self._chunk(piece, n_rows))
            n_rows += piece.tokens + piece.padding
            if piece.last:
                logit_rows.append(n_rows - piece.padding - 1)
        places = np.concatenate(positions)
        heads = np.concatenate(blocks)[:, None] * self.kv_heads + np.arange(self.kv_heads)
        slots = heads * size + (places % size)[:, None]
        return Batch(
            tokens=torch.tensor(tokens, device=self.device),
            positions=self._tensor(places),
            slots=self._tensor(slots.ravel()),
            decodes=self._here(decodes, lengths) if decodes else None,
            chunks=chunks,
            logit_rows=None
            if len(logit_rows) == n_rows
            else self._tensor(np.array(logit_rows, dtype=np.int64)),
            elsewhere=self._elsewhere(decodes, lengths),
        )

    def _here(self, sequences: Seq[Sequence], lengths: Ints) -> Decodes:
        offloaded = np.array([s.offloaded_blocks for s in sequences])
        return self._decodes([s.blocks for s in sequences], lengths - offloaded * self.block_size)

    def _elsewhere(self, sequences: Seq[Sequence], lengths: Ints) -> list[Elsewhere]:
        rows: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            if sequence.offloaded is not None:
                rows.setdefault(sequence.offloaded.rank, []).append(row)
        return [
            Elsewhere(
                rank,
                torch.tensor(part_rows, device=self.device),
                self._decodes(
                    [_offloaded(sequences[row]) for row in part_rows], lengths[part_rows]
                ),
            )
            for rank, part_rows in rows.items()
        ]

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _decodes(self, tables: Seq[Seq[int]], lengths: Ints) -> Decodes:
        """`lengths`: tokens from the beginning of each table to the end of its sequence."""
        size = self.block_size
        held = np.array([len(table) for table in tables])
        pairs = int(held.sum())
        ids = np.fromiter(chain.from_iterable(tables), np.int64, pairs)
        owner = np.repeat(np.arange(len(tables)), held)
        place = np.arange(pairs) - np.repeat(np.cumsum(held) - held, held)
        width = int(held.max())
        seat = owner * width + place
        first = place * size  # position of the block's first token
        end = lengths[owner] - first
        begin = np.zeros_like(end)
        if self.window is not None:
            begin = np.maximum(0, end - self.window)
        where: slice | Tensor
        low, high = int(ids.min()), int(ids.max()) + 1
        if pairs >= _DENSE * (high - low) and np.bincount(ids - low).max() == 1:
            where = slice(low, high)

            def spread(values: Ints, elsewhere: int = 0) -> Ints:
                """A value for each block from `low` to `high`."""
                whole = np.full(high - low, elsewhere, np.int64)
                whole[ids - low] = values
                return whole

            owner, seat = spread(owner), spread(seat, len(tables) * width)
            end, begin = spread(end), spread(begin)
        else:
            where = self._tensor(ids)
        offset = np.arange(size)
        visible = offset < end[:, None]
        if self.window is not None:
            visible &= offset >= begin[:, None]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf)).repeat(self.kv_heads, axis=0)
        return Decodes(
            count=len(tables),
            width=width,
            where=where,
            owner=self._tensor(owner),
            seat=self._tensor(seat),
            mask=torch.from_numpy(mask).to(self.device, self.dtype).unsqueeze(1),
        )

    def _chunk(self, piece: Piece, first_row: int) -> PrefillChunk:
        end = piece.end
        narrow = self.window is not None and end > self.window
        if not piece.before and not narrow:
            return PrefillChunk(first_row, first_row + end, 0, None, None)
        there = torch.arange(end, device=self.device)
        here = torch.arange(piece.before, end, device=self.device).unsqueeze(1)
        mask = there <= here
        if self.window is not None:
            mask &= there > here - self.window
        count = -(-end // self.block_size)
        blocks = torch.tensor(piece.sequence.blocks[:count], device=self.device)
        return PrefillChunk(first_row, first_row + end - piece.before, piece.before, blocks, mask)


def _offloaded(sequence: Sequence) -> list[int]:
    assert sequence.offloaded is not None
    return sequence.offloaded.blocks
