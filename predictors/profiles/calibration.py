"""Factors that make the linear layers of a profile's tables those of a real run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...workloads.arrays import Floats

_MOST_FACTOR = 1e3


@dataclass(frozen=True)
class Calibration:
    """What a run of the machine showed: factors on the linear layers (and all-reduces) of a step.

    Attributes:
        origin: the runs that it was learned from.
        tokens: tokens of a step at which the factors hold, ascending; straight in between, by the
            logarithm of the tokens, and constant beyond.
        factors: real / table, one for each of `tokens`.
        requests: of those runs.
        steps: between events of the logs, or simulated (closed loops).
        digests: of the logs that the factors have seen, as `RealLog.digest`.
        num_gpu_blocks: KV blocks, as the engine counts them; 0: not known.
        block_size: tokens of one; 0: not known.
        before_percent: errors of the mean of each metric on those runs before, in percent.
        after_percent: the same with the factors.
        held_out_percent: errors on requests that the factors have not seen, by metric: the largest
            of mean, p50, p90 and p99 of either half in time, with the factors of the other
            (closed loops: mean over the rows of a half); `steps`: of their times, in old files.
    """

    origin: tuple[str, ...]
    tokens: tuple[float, ...]
    factors: tuple[float, ...]
    requests: int = 0
    steps: int = 0
    digests: tuple[str, ...] = ()
    num_gpu_blocks: int = 0
    block_size: int = 0
    before_percent: Mapping[str, float] = field(default_factory=dict)
    after_percent: Mapping[str, float] = field(default_factory=dict)
    held_out_percent: Mapping[str, float] = field(default_factory=dict)

    def at(self, tokens: Floats) -> Floats:
        """The factor of steps with `tokens` tokens (at least 1)."""
        return np.asarray(hats(self.tokens, tokens) @ np.array(self.factors), dtype=np.float64)

    def plain(self) -> dict[str, Any]:
        """Fields with a value, as TOML and JSON have them."""
        entry: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                entry[name] = list(value)
            elif isinstance(value, Mapping):
                entry[name] = dict(value)
            elif value:
                entry[name] = value
        return entry

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Calibration:
        """From a header's section.

        Raises:
            TypeError: a field is unknown or missing.
            ValueError: a value is not what it must be.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in entry.items()
        }
        if isinstance(values.get("held_out_percent"), float):
            values["held_out_percent"] = {"steps": values["held_out_percent"]}
        calibration = cls(**values)
        for name in ("requests", "steps", "num_gpu_blocks", "block_size"):
            count = getattr(calibration, name)
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} of a calibration must be a whole number from 0 on")
        for name in ("origin", "digests"):
            if not all(isinstance(text, str) for text in getattr(calibration, name)):
                raise ValueError(f"{name} of a calibration must be texts")
        for name in ("before_percent", "after_percent", "held_out_percent"):
            if not all(math.isfinite(off) for off in dict(getattr(calibration, name)).values()):
                raise ValueError(f"{name} of a calibration must be a number for each metric")
        tokens, factors = (
            np.array(v, dtype=np.float64) for v in (calibration.tokens, calibration.factors)
        )
        if not len(tokens) or tokens.shape != factors.shape or (np.diff(tokens) <= 0).any():
            raise ValueError("calibration needs ascending tokens, and a factor for each")
        if not (tokens[0] >= 1 and np.isfinite(tokens).all()):
            raise ValueError("tokens of a calibration must be 1 or more")
        if not ((factors > 0) & (factors <= _MOST_FACTOR)).all():
            raise ValueError(f"factors of a calibration must be above 0, at most {_MOST_FACTOR:g}")
        return dataclasses.replace(calibration, tokens=tuple(tokens), factors=tuple(factors))


def hats(knots: tuple[float, ...], tokens: Floats) -> Floats:
    """Weights of the factors at `knots` in the factor at `tokens`; shape (tokens, knots)."""
    log_knots, corner = np.log(np.array(knots)), np.eye(len(knots))
    return np.stack([np.interp(np.log(tokens), log_knots, row) for row in corner], axis=-1)
