"""The result of one run at one rate: how many requests met their SLO, and whether the backlog
grew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

BATCHES = 20
WARMUP_SHARE = 0.1
COOLDOWN_SHARE = 0.03
_FIRST_SHARE = 0.2  # of the requests; their latencies show how the system fills
_GROWTH_SIGMAS = 3.5
_LEAST_GROWTH = 8  # requests; fewer is how any queue goes up and down


@dataclass(frozen=True)
class LevelSample:
    """Result of one run at one rate.

    The counted requests, in order of arrival, are cut into batches of equal size. `backlog` has one
    more entry than there are batches: at the edges of the batches, the number of requests in the
    system above that expected if latencies stayed as at the start. `bound_s` is the time for which
    a growing backlog may stay undetected (the tightest latency bound of a typical request; 0
    without bounds). `wall_s` is the duration of the run.
    """

    rate_rps: float
    seed: int
    requests: int  # all that were sent
    batch_met: tuple[int, ...]
    batch_requests: tuple[int, ...]
    backlog: tuple[int, ...]
    bound_s: float = 0.0
    wall_s: float = 0.0
    invalid_because: str | None = None

    @property
    def valid(self) -> bool:
        """Whether anything can be concluded: not where the client was late."""
        return self.invalid_because is None

    @property
    def met(self) -> int:
        """Counted requests that met their SLO."""
        return sum(self.batch_met)

    @property
    def counted(self) -> int:
        """Requests that count: not those of the start and the end of the run."""
        return sum(self.batch_requests)

    @property
    def attainment(self) -> float:
        """Share of the counted requests that met their SLO."""
        return self.met / self.counted


def sample_from_plain(plain: Mapping[str, Any]) -> LevelSample:
    """The inverse of `vars(sample)`, from JSON, which has lists in place of tuples."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return LevelSample(**fields)


class LevelRunner(Protocol):
    """Runs a load at a given rate: a simulator, a server, or a formula."""

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """Offer `requests` requests at `rate_rps`, starting with nothing in the system.

        Runs with different seeds must be independent of each other.
        """
        ...


def sample_of(
    *,
    rate_rps: float,
    seed: int,
    arrival_s: Floats,
    end_s: Floats,
    met: Mask,
    bound_s: float = 0.0,
    warmup_s: float = 0.0,
    whole: bool = False,
    wall_s: float = 0.0,
    invalid_because: str | None = None,
) -> LevelSample:
    """From the times of every request to a sample.

    The first 10 % of the requests, in order of arrival, do not count, since a system that starts
    empty flatters; nor do the last 3 %, which are served while nothing arrives any more.

    Args:
        rate_rps: what was offered.
        seed: of the run.
        arrival_s: when each request arrived, in any order; NaN if it never did (it counts, missed).
        end_s: when it left the system, however it did; NaN if it is still there.
        met: whether it met its SLO.
        bound_s: see `LevelSample`.
        warmup_s: what arrives before does not count either.
        whole: count every request from `warmup_s` on (a trace that is its own whole truth).
        wall_s: what the run took.
        invalid_because: why nothing can be concluded (the client was late), or None.

    Raises:
        SloBenchError: too few requests are left to count.
    """
    order = np.argsort(arrival_s, kind="stable")  # NaN comes last
    arrival_s, met = arrival_s[order], met[order]
    n = len(arrival_s)
    first, last = (0, n) if whole else (math.ceil(n * WARMUP_SHARE), n - int(n * COOLDOWN_SHARE))
    first = max(first, int(np.searchsorted(arrival_s, warmup_s, side="left")))
    if last - first < BATCHES:
        raise SloBenchError(
            f"{max(0, last - first)} of {n} requests are left to count after the warm-up, "
            f"at least {BATCHES} are needed; give more requests for a run or a shorter warm-up"
        )
    edges = np.linspace(first, last, BATCHES + 1).round().astype(np.int64)
    arrived = np.nan_to_num(arrival_s, nan=np.inf)
    ended = np.nan_to_num(end_s[order], nan=np.inf)
    moments = arrived[np.minimum(edges, n - 1)]
    known = np.isfinite(moments)
    moments[~known] = moments[known][-1] if known.any() else 0.0
    there = np.searchsorted(arrived, moments, side="right") - np.searchsorted(
        np.sort(ended), moments, side="right"
    )
    backlog = np.rint(there - _filling(arrived, ended, moments)).astype(np.int64)
    return LevelSample(
        rate_rps=rate_rps,
        seed=seed,
        requests=n,
        batch_met=tuple(np.add.reduceat(met[:last], edges[:-1], dtype=np.int64).tolist()),
        batch_requests=tuple(np.diff(edges).tolist()),
        backlog=tuple(backlog.tolist()),
        bound_s=bound_s,
        wall_s=wall_s,
        invalid_because=invalid_because,
    )


def _filling(arrived: Floats, ended: Floats, moments: Floats) -> Floats:
    """How many would be there at each moment, if all stayed as long as the first ones."""
    known = np.isfinite(arrived)
    arrived, ended = arrived[known], ended[known]
    ends = ended[np.isfinite(ended)]
    last_s = max(float(ends.max(initial=0.0)), float(moments.max(initial=0.0)))
    first = math.ceil(len(arrived) * _FIRST_SHARE)
    stays = np.sort(np.minimum(ended, last_s)[:first] - arrived[:first])
    ages = (moment - arrived[arrived <= moment] for moment in moments)
    gone = (np.searchsorted(stays, age, side="right") for age in ages)
    return np.array([float((1 - g / first).sum()) for g in gone])


def grows(samples: Sequence[LevelSample]) -> bool:
    """Whether the runs of one level show a backlog that grows without end.

    In a system that keeps up, what a batch of arrivals adds to the backlog is taken off by later
    ones: the changes sum up to no more than the backlog's own spread. In one that does not, they
    are about independent and have a mean above zero, which a one-sided t test finds.
    """
    changes = np.concatenate([np.diff(sample.backlog) for sample in samples]).astype(float)
    if changes.sum() < _LEAST_GROWTH * len(samples):
        return False
    error = float(changes.std(ddof=1)) / math.sqrt(len(changes))
    return bool(changes.mean() > _GROWTH_SIGMAS * error)


def design_effect(samples: Sequence[LevelSample], groups: int = 5) -> float:
    """By how much correlation within runs inflates the variance of their attainment; at least 1.

    Batch means: neighbouring batches are merged to `groups`, and the variance of their attainment
    is held against that of as many independent requests.
    """
    excess = expected = 0.0
    for sample in samples:
        share = sample.attainment
        if not 0 < share < 1:
            continue
        met = np.add.reduceat(np.array(sample.batch_met), np.arange(0, BATCHES, BATCHES // groups))
        of = np.add.reduceat(
            np.array(sample.batch_requests), np.arange(0, BATCHES, BATCHES // groups)
        )
        excess += float(((met - of * share) ** 2 / of).sum())
        expected += (groups - 1) * share * (1 - share)
    return max(1.0, excess / expected) if expected else 1.0
