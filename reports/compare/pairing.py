"""The requests of two sides at one load, seed by seed, and whether they are the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...workloads.request import Slo
from .matching import MatchedRuns
from .results import Cell, Clock, Floats, RequestResults, RunSample


@dataclass(frozen=True)
class SeedSamples:
    """Samples of A and B for one seed of a level; None if one of them lacks the seed.

    `requests` are B's, those of the warm-up too. The rest is true where either lacks the seed.
    """

    a: RunSample | None
    b: RunSample | None
    requests: int
    same_prompts: bool = True
    same_requests: bool = True  # row by row, and the same of them count
    same_bounds: bool = True


@dataclass(frozen=True)
class LevelSamples:
    """The seeds of a level that are compared: those of both sides where requests are `paired`, one
    by one. `lost` seeds of one side are left out then; `shared` are those of both.
    """

    seeds: Sequence[SeedSamples]
    shared: Sequence[SeedSamples]
    paired: bool
    lost: int

    @property
    def a(self) -> list[RunSample]:
        """A's samples."""
        return [seed.a for seed in self.seeds if seed.a is not None]

    @property
    def b(self) -> list[RunSample]:
        """B's samples."""
        return [seed.b for seed in self.seeds if seed.b is not None]

    @property
    def finished(self) -> bool:
        """Whether a request of either side finished."""
        return any(sample.finished for sample in (*self.a, *self.b))


def samples_of(level: MatchedRuns, clock: Clock, slo: Slo | None) -> LevelSamples:
    """The samples of a level; of no more than one seed are the requests held at a time."""
    cells_a = {cell.seed: cell for cell in level.a}
    cells_b = {cell.seed: cell for cell in level.b}
    seeds = [
        _seed(cells_a.get(seed), cells_b.get(seed), clock, slo)
        for seed in sorted({*cells_a, *cells_b})
    ]
    # Goodput divides alike on both sides: by the makespan where one of them has no rate.
    sides = [side for seed in seeds for side in (seed.a, seed.b) if side is not None]
    if not all(side.window.offered for side in sides):
        seeds = [replace(seed, a=_by_makespan(seed.a), b=_by_makespan(seed.b)) for seed in seeds]
    shared = [seed for seed in seeds if seed.a is not None and seed.b is not None]
    paired = bool(shared) and all(seed.same_requests for seed in shared)
    lost = len(seeds) - len(shared) if paired else 0
    return LevelSamples(shared if paired else seeds, shared, paired, lost)


def _by_makespan(side: RunSample | None) -> RunSample | None:
    return side and replace(side, window=replace(side.window, offered=False))


def _seed(cell_a: Cell | None, cell_b: Cell | None, clock: Clock, slo: Slo | None) -> SeedSamples:
    a = None if cell_a is None else cell_a.read()
    b = None if cell_b is None else cell_b.read()
    alone = SeedSamples(
        a=None if a is None else a.sample(clock, slo),
        b=None if b is None else b.sample(clock, slo),
        requests=0 if b is None else len(b),
    )
    if a is None or b is None:
        return alone
    prompts = _same_prompts(a, b)
    return replace(
        alone,
        same_prompts=prompts,
        same_requests=prompts and bool(np.array_equal(a.counted, b.counted)),
        same_bounds=_same_bounds(a, b),
    )


def _same_prompts(a: RequestResults, b: RequestResults) -> bool:
    if len(a) != len(b) or not np.array_equal(a.prompt_tokens, b.prompt_tokens):
        return False
    if a.expected_output_tokens is None or b.expected_output_tokens is None:
        return True
    return bool(np.array_equal(a.expected_output_tokens, b.expected_output_tokens))


def _same_bounds(a: RequestResults, b: RequestResults) -> bool:
    if a.bounds_s is None or b.bounds_s is None:
        return a.bounds_s is b.bounds_s

    def bounds(bounds_s: Floats) -> Floats:
        return np.where(np.isnan(bounds_s), np.inf, bounds_s)  # no bound, either way

    return all(
        np.array_equal(bounds(a.bounds_s[name]), bounds(b.bounds_s[name])) for name in a.bounds_s
    )
