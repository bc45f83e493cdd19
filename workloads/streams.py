"""Random streams by purpose: what one draws never shifts what another draws."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from .errors import SloBenchError


@dataclass(frozen=True)
class Streams:
    """Generators of one seed, each by the name of its purpose.

    The lengths of a seed are then the same whatever the arrival rate or process, and so are the
    SLOs (common random numbers between the cells of an experiment).

    Raises:
        SloBenchError: the seed is negative.
    """

    seed: int
    scope: str = ""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SloBenchError(f"seed must not be negative but is {self.seed}")

    def rng(self, purpose: str) -> np.random.Generator:
        """A new generator, at the beginning of the purpose's stream."""
        key = zlib.crc32((self.scope + purpose).encode())
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(key,)))

    def within(self, scope: str) -> Streams:
        """Streams of the same seed, apart from these and from every other scope's."""
        return Streams(self.seed, f"{self.scope}{scope}/")
