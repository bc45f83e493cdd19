"""Shared prefixes: block hashes made on demand, prompts that continue others, hot prefixes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from .arrays import Floats, Ints, Mask
from .call_parser import positive
from .errors import SloBenchError
from .lengths import MOST_TOKENS, PairLengths, TokenPairs, normal_cumulative, normal_quantile
from .streams import Streams

BLOCK_SIZE = 16
MOST_PREFIXES = 1_000_000


class PrefixRows(Sequence[tuple[int, ...]]):
    """Prefix hashes row by row, made on demand by `row`; `__len__` is the number of rows."""

    @abstractmethod
    def row(self, row: int) -> tuple[int, ...]:
        """The hashes of one request's full blocks, in their order."""

    @overload
    def __getitem__(self, row: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, row: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, row: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(row, slice):
            return [self.row(index) for index in range(*row.indices(len(self)))]
        return self.row(row)


@dataclass(frozen=True)
class SessionBlocks(PrefixRows):
    """The block hashes of requests in sessions, as numbers: row -> tuple, made on demand.

    All requests begin with the same `system_blocks` blocks; then the i-th block of a session is the
    same in all its turns. `first[row]` is the session's first own block, `length[row]` how many
    full blocks the row has, including the system prompt.
    """

    first: Ints
    length: Ints
    system_blocks: int

    @classmethod
    def of(cls, session: Ints, tokens: Ints, system_tokens: int, block_size: int) -> SessionBlocks:
        """Rows of the same `session` share; the blocks of a row cover `tokens[row]`."""
        system_blocks = system_tokens // block_size
        length = tokens // block_size
        _, inverse = np.unique(session, return_inverse=True)
        session_blocks = np.zeros(int(inverse.max()) + 1 if len(inverse) else 0, dtype=np.int64)
        np.maximum.at(session_blocks, inverse, np.maximum(length - system_blocks, 0))
        first = system_blocks + np.concatenate(([0], np.cumsum(session_blocks)[:-1]))
        return cls(first[inverse], length, system_blocks)

    def __len__(self) -> int:
        return len(self.first)

    def row(self, row: int) -> tuple[int, ...]:
        first, length = int(self.first[row]), int(self.length[row])
        if length <= self.system_blocks:
            return tuple(range(length))
        return (*range(self.system_blocks), *range(first, first + length - self.system_blocks))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Ints) -> SessionBlocks:
        """The blocks of the given rows, in their order."""
        return SessionBlocks(self.first[rows], self.length[rows], self.system_blocks)


@dataclass(frozen=True)
class HotPrefixBlocks(PrefixRows):
    """Rows that begin with one of several prefixes of `shared` blocks each and go on alone.

    `prefix[row]` is the number of the row's prefix, `first[row]` its first block after it,
    `length[row]` how many full blocks it has.
    """

    prefix: Ints
    first: Ints
    length: Ints
    shared: int

    def __len__(self) -> int:
        return len(self.prefix)

    def row(self, row: int) -> tuple[int, ...]:
        begin, first = int(self.prefix[row]) * self.shared, int(self.first[row])
        own_blocks = int(self.length[row]) - self.shared
        return (*range(begin, begin + self.shared), *range(first, first + own_blocks))


@dataclass(frozen=True)
class SharedPairs:
    """Drawn lengths with the sessions (one number: of all) and blocks they share."""

    pairs: TokenPairs
    session: Ints
    blocks: PrefixRows


@dataclass(frozen=True)
class Continuations:
    """Some prompts continue an earlier request; lengths and arrivals keep their distributions.

    A share of requests continues one that came a lognormal gap before; a session's prompts are
    alike in length (`turn_correlation`, of the normal scores) and ordered so that they grow. A
    turn begins with as much of the previous prompt and answer as fits into it, and all prompts
    begin with the same system blocks. What fits into a cache decides what is then hit.
    """

    share: float
    turn_correlation: float
    gap_median_s: float
    gap_sigma: float
    system_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("share", "turn_correlation"):
            if not 0 <= getattr(self, name) <= 1:
                raise SloBenchError(f"{name} must lie in 0..1 but is {getattr(self, name)}")
        positive(self.gap_median_s, "gap_median_s")

    def draw(self, lengths: PairLengths, arrival_s: Floats, streams: Streams) -> SharedPairs:
        """Lengths and blocks of requests that arrive at these times."""
        n = len(arrival_s)
        rng = streams.rng("continuations")
        gap_s = self.gap_median_s * np.exp(self.gap_sigma * rng.standard_normal(n))
        continues = rng.random(n) < self.share
        parent = _parents(arrival_s, arrival_s - gap_s, continues)
        root, turn = _roots(parent)
        u = lengths.uniforms(n, streams.rng("lengths"))
        common = streams.rng("sessions").standard_normal(n)[root]
        r = self.turn_correlation
        z = math.sqrt(r) * common + math.sqrt(1 - r) * normal_quantile(u[:, 1])
        shared_u = np.where(np.bincount(root, minlength=n)[root] > 1, normal_cumulative(z), u[:, 1])
        in_turn, in_length = np.lexsort((turn, root)), np.lexsort((shared_u, root))
        u[in_turn, 1] = np.clip(shared_u[in_length], 0, np.nextafter(1, 0))
        pairs = lengths.at(u)
        tokens = pairs.prompt_tokens.copy()
        child = np.flatnonzero(parent >= 0)
        before = parent[child]
        total = tokens[before] + pairs.output_tokens[before]
        # Blocks may only cover an answer if the next turn really holds all of it.
        held = pairs.prompt_tokens[child] >= total
        tokens[before[held]] = total[held]
        system_tokens = self.system_blocks * self.block_size
        blocks = SessionBlocks.of(root, tokens, system_tokens, self.block_size)
        return SharedPairs(pairs, root, blocks)


@dataclass(frozen=True)
class HotPrefixes:
    """Every prompt begins with one of `prefixes` texts of `tokens` tokens, the k-th most popular of
    which comes in proportion to k to the power of −`exponent` (Zipf); drawn lengths are what
    follows it. Full blocks of a prefix are shared.
    """

    prefixes: int
    tokens: int
    exponent: float
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        for name, limit in (("prefixes", MOST_PREFIXES), ("tokens", MOST_TOKENS)):
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise SloBenchError(
                    f"{name} of hot-prefixes must lie in 1..{limit:,} but is {value!s:.20}"
                )
        if not 0 <= self.exponent <= 100:
            raise SloBenchError(
                f"exponent of hot-prefixes must lie in 0..100 but is {self.exponent:g}"
            )

    def draw(self, lengths: PairLengths, arrival_s: Floats, streams: Streams) -> SharedPairs:
        """Lengths and blocks of requests that arrive at these times."""
        n = len(arrival_s)
        drawn = lengths.draw(n, streams.rng("lengths"))
        pairs = replace(drawn, prompt_tokens=drawn.prompt_tokens + self.tokens)
        popularity = np.arange(1, self.prefixes + 1, dtype=np.float64) ** -self.exponent
        edges = np.cumsum(popularity)
        u = streams.rng("prefixes").random(n) * edges[-1]
        prefix = np.minimum(np.searchsorted(edges, u, side="right"), self.prefixes - 1)
        shared, length = self.tokens // self.block_size, pairs.prompt_tokens // self.block_size
        ends = self.prefixes * shared + np.cumsum(length - shared)
        blocks = HotPrefixBlocks(prefix, ends - (length - shared), length, shared)
        return SharedPairs(pairs, np.full(1, -1), blocks)


def _parents(arrival_s: Floats, wanted_s: Floats, continues: Mask) -> Ints:
    """For each request that continues one, the last free request at or before the wanted time."""
    parent = np.full(len(arrival_s), -1, dtype=np.int64)
    has_child = np.zeros(len(arrival_s), dtype=bool)
    child = np.flatnonzero(continues)
    want = np.searchsorted(arrival_s, wanted_s[child], side="right") - 1
    for _ in range(64):
        keep = (want >= 0) & (want < child)
        child, want = child[keep], want[keep]
        free = np.flatnonzero(~has_child[want])
        _, first = np.unique(want[free], return_index=True)
        won = free[first]
        parent[child[won]] = want[won]
        has_child[want[won]] = True
        left = np.ones(len(child), dtype=bool)
        left[won] = False
        child, want = child[left], want[left] - 1
        if not len(child):
            break
    return parent


def _roots(parent: Ints) -> tuple[Ints, Ints]:
    """The first request of each one's session and how many came before it, by pointer doubling."""
    ancestor = np.where(parent >= 0, parent, np.arange(len(parent)))
    turn = (parent >= 0).astype(np.int64)
    while True:
        further = ancestor[ancestor]
        if (further == ancestor).all():
            return ancestor, turn
        turn = turn + turn[ancestor]
        ancestor = further
