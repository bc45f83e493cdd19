"""Whether a run shows the long run: its batches, its backlog, and the drift of its attainment.

A run is stationary if throughput keeps up with the offered load and attainment does not depend on
the length of the run. Both are tested on batches of requests in order of arrival. A run that is
short against its SLOs or its requests' time in the system cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.blocks import WorkloadBlocks
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..core.records.quantile_sketch import QuantileSketch
from ..core.records.request_records import EndedBlock, Outcome, Records

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

BATCHES = 20
LEAST_REQUESTS = 10 * BATCHES  # of a run, for any statement
WARMUP_SHARE = 0.1
COOLDOWN_SHARE = 0.03
SETTLED_HORIZONS = 5.0  # time for which requests arrive, over the SLO's horizon
_HORIZON_QUANTILE = 0.99
_FIRST_SHARE = 0.2  # of the requests; their latencies show how the system fills
_GROWTH_SIGMAS = 3.5
_LEAST_GROWTH = 8  # requests; fewer is how any queue goes up and down
MOST_GROWTH = 0.01  # of the arrivals
_GROUPS = 10  # of batches
_DRIFT_SIGMAS = 5.0  # with 8 degrees of freedom: by chance in 1 of 1,000 runs
_LEAST_DRIFT = 0.02  # of attainment, between the halves of a run


@dataclass(frozen=True, kw_only=True)
class RunBatches:
    """The counted requests of a run, in order of arrival, cut into batches of equal size.

    `backlog` has one more entry than there are batches: at the edges of the batches, the number of
    requests in the system above that expected if latencies stayed as at the start; `waiting` is the
    same for the requests without a first token (empty where first tokens are not known).
    `starved` counts the requests of the first fifth that still wait for it at the last edge (that
    are still in the system, where it is not known).
    `horizon_s` is the time within which a request that waits misses its SLO (0 without latency
    bounds), `stay_s` the mean time in the system of the counted requests, `window_s` the time in
    which they arrive.
    """

    batch_met: tuple[float, ...]
    batch_requests: tuple[int, ...]
    backlog: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    starved: int = 0
    horizon_s: float = 0.0
    stay_s: float = 0.0
    window_s: float = math.inf

    @property
    def met(self) -> float:
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

    @property
    def settle_s(self) -> float:
        """The least `window_s` with which a run can be taken for the long run."""
        return SETTLED_HORIZONS * max(self.horizon_s, self.stay_s)

    @property
    def settled(self) -> bool:
        """Whether the run is long against the SLO's horizon and the requests' time in the system.

        Before, a system that is overloaded has not missed an SLO yet.
        """
        return self.window_s >= self.settle_s


def batches_of(
    *,
    arrival_s: Floats,
    end_s: Floats,
    met: Mask,
    first_token_s: Floats | None = None,
    horizon_s: float = 0.0,
    warmup_s: float = 0.0,
    whole: bool = False,
) -> RunBatches:
    """Cut a run into batches.

    The first 10 % of the requests, in order of arrival, do not count, since a system that starts
    empty flatters; nor do the last 3 %, which are served while nothing arrives any more. Where
    `horizon_s` is longer, and a third of the run remains, what arrives within it of the first and
    of the last arrival does not count.

    Args:
        arrival_s: arrival of each request, in any order; NaN if it never arrived (it counts,
            missed).
        end_s: when it left the system, however it did; NaN if it is still there.
        met: whether it met its SLO.
        first_token_s: when it got its first token; NaN if it got none.
        horizon_s: see `RunBatches`.
        warmup_s: requests that arrive before do not count either.
        whole: count every request from `warmup_s` on (a trace that is its own whole truth).

    Raises:
        SloBenchError: too few requests are left to count.
    """
    order = np.argsort(arrival_s, kind="stable")  # NaN comes last
    arrival_s, met = arrival_s[order], met[order]
    n = len(arrival_s)
    edges = batch_edges(arrival_s, horizon_s=horizon_s, warmup_s=warmup_s, whole=whole)
    first, last = int(edges[0]), int(edges[-1])
    arrived = np.nan_to_num(arrival_s, nan=np.inf)
    moments = arrived[np.minimum(edges, n - 1)]
    finite = np.isfinite(moments)
    moments[~finite] = moments[finite][-1] if finite.any() else 0.0
    waiting: tuple[int, ...] = ()
    served_s = end_s[order]
    if first_token_s is not None:
        served_s = np.fmin(first_token_s, end_s)[order]
        waiting = _excess(arrived, served_s, moments)
    early = math.ceil(np.isfinite(arrival_s).sum() * _FIRST_SHARE)
    stays_s = (end_s[order] - arrival_s)[first:last]
    stays_s = stays_s[np.isfinite(stays_s)]
    return RunBatches(
        batch_met=tuple(np.add.reduceat(met[:last], edges[:-1], dtype=np.int64).tolist()),
        batch_requests=tuple(np.diff(edges).tolist()),
        backlog=_excess(arrived, end_s[order], moments),
        waiting=waiting,
        starved=int((~(served_s[:early] <= moments[-1])).sum()),
        horizon_s=horizon_s,
        stay_s=float(stays_s.mean()) if len(stays_s) else 0.0,
        window_s=float(moments[-1] - moments[0]),
    )


def batch_edges(
    arrival_s: Floats, *, horizon_s: float = 0.0, warmup_s: float = 0.0, whole: bool = False
) -> NDArray[np.int64]:
    """First request of each batch, and the end of the last one; arguments as in `batches_of`.

    `arrival_s` ascends, NaN last.

    Raises:
        SloBenchError: too few requests are left to count.
    """
    n = len(arrival_s)
    first, last = 0, n
    known_s = arrival_s[np.isfinite(arrival_s)]

    def before(time_s: float) -> int:
        return int(np.searchsorted(known_s, time_s))

    if not whole:
        ends_s = (float(known_s[0]), float(known_s[-1])) if len(known_s) else None
        first, last = _counted(n, ends_s, before, horizon_s)
    return _edges(n, max(first, before(warmup_s)), last)


def _counted(
    n: int, ends_s: tuple[float, float] | None, before: Callable[[float], int], horizon_s: float
) -> tuple[int, int]:
    """The first request that counts and the one after the last, of `n` between two times."""
    first, last = math.ceil(n * WARMUP_SHARE), n - int(n * COOLDOWN_SHARE)
    if ends_s is not None and ends_s[1] - ends_s[0] > 3 * horizon_s:
        inner = before(ends_s[0] + horizon_s), before(ends_s[1] - horizon_s)
        if min(last, inner[1]) - max(first, inner[0]) >= BATCHES:  # else as in shorter runs
            first, last = max(first, inner[0]), min(last, inner[1])
    return first, last


def _edges(n: int, first: int, last: int) -> NDArray[np.int64]:
    """Cut `first` to `last` of `n` requests into batches."""
    if last - first < BATCHES:
        raise SloBenchError(
            f"{max(0, last - first)} of {n} requests are left to count after the warm-up, "
            f"at least {BATCHES} are needed; give more requests for a run or a shorter warm-up"
        )
    return np.linspace(first, last, BATCHES + 1).round().astype(np.int64)


class BatchFold:
    """`batches_of` a long run whose requests come in blocks, in order of arrival.

    All but one thing is exact: how many requests would be in the system if all stayed as long as
    the first ones is computed from their stays to within `quantile_sketch.RELATIVE_ERROR`.
    """

    def __init__(
        self, workload: WorkloadBlocks, *, horizon_s: float = 0.0, warmup_s: float = 0.0
    ) -> None:
        """Arguments as those of `batches_of`.

        Raises:
            SloBenchError: too few requests are left to count.
        """
        self._workload = workload
        self._horizon_s = horizon_s
        n, ends_s = len(workload), (workload.first_s, workload.last_s)
        first, last = _counted(n, ends_s, workload.before, horizon_s)
        self._edges = _edges(n, max(first, workload.before(warmup_s)), last)
        self._moments = workload.arrivals_at(np.minimum(self._edges, n - 1))
        self._early = math.ceil(n * _FIRST_SHARE)
        self._met = np.zeros(BATCHES, dtype=np.int64)
        self._arrived, self._left, self._served = np.zeros((3, BATCHES + 1), dtype=np.int64)
        self._early_stays, self._early_waits = QuantileSketch(), QuantileSketch()
        self._starved = self._stays = 0
        self._stay_s = 0.0

    def add(self, block: EndedBlock, met: Mask) -> None:
        """Add requests, and whether each met its SLO."""
        records = block.records
        arrival_s, end_s = records.arrival_s, left_s(records)
        served_s = np.fmin(records.first_token_s, end_s)
        edge_rows = np.clip(self._edges - block.first_row, 0, len(arrival_s))
        self._met += np.diff(np.append(0, np.cumsum(met))[edge_rows])
        self._arrived += np.searchsorted(arrival_s, self._moments, side="right")
        self._left += _until(end_s, self._moments)
        self._served += _until(served_s, self._moments)
        stays_s = (end_s - arrival_s)[edge_rows[0] : edge_rows[-1]]
        stays_s = stays_s[np.isfinite(stays_s)]
        self._stays += len(stays_s)
        self._stay_s += float(stays_s.sum())
        early = slice(0, max(0, self._early - block.first_row))
        self._starved += int((~(served_s[early] <= self._moments[-1])).sum())
        self._early_stays.add((end_s - arrival_s)[early])
        self._early_waits.add((served_s - arrival_s)[early])

    def batches(self) -> RunBatches:
        """The batches of all requests."""
        backlog = self._arrived - self._left - self._filling(self._early_stays)
        waiting = self._arrived - self._served - self._filling(self._early_waits)
        return RunBatches(
            batch_met=tuple(self._met.tolist()),
            batch_requests=tuple(np.diff(self._edges).tolist()),
            backlog=tuple(np.rint(backlog).astype(int).tolist()),
            waiting=tuple(np.rint(waiting).astype(int).tolist()),
            starved=self._starved,
            horizon_s=self._horizon_s,
            stay_s=self._stay_s / self._stays if self._stays else 0.0,
            window_s=float(self._moments[-1] - self._moments[0]),
        )

    def _filling(self, stays: QuantileSketch) -> Floats:
        """See the function of this name."""
        there = np.zeros(len(self._moments))
        if not len(stays):
            return there
        for arrival_s in self._workload.draw_arrivals():
            begins = np.searchsorted(arrival_s, self._moments - stays.most())
            ends = np.searchsorted(arrival_s, self._moments, side="right")
            for k in np.flatnonzero(ends > begins).tolist():
                ages_s = self._moments[k] - arrival_s[begins[k] : ends[k]]
                there[k] += stays.shares_above(ages_s).sum()
        return there


def _until(times_s: Floats, moments_s: Floats) -> NDArray[np.int64]:
    """How many of `times_s` have come by each of the moments, which ascend."""
    after = np.searchsorted(moments_s, times_s)
    return np.cumsum(np.bincount(after, minlength=len(moments_s) + 1))[: len(moments_s)]


def requests_in(window_s: float, rate_rps: float, horizon_s: float) -> int:
    """Number of requests in a run whose counted requests arrive in about `window_s`."""
    uncounted_s = max(window_s / (1 - WARMUP_SHARE - COOLDOWN_SHARE) - window_s, 2 * horizon_s)
    return math.ceil((window_s + uncounted_s) * rate_rps)


def _excess(arrived: Floats, ended: Floats, moments: Floats) -> tuple[int, ...]:
    """Number of requests between `arrived` and `ended` at each moment, above `_filling`."""
    ended = np.nan_to_num(ended, nan=np.inf)
    there = np.searchsorted(arrived, moments, side="right") - np.searchsorted(
        np.sort(ended), moments, side="right"
    )
    return tuple(np.rint(there - _filling(arrived, ended, moments)).astype(int).tolist())


def _filling(arrived: Floats, ended: Floats, moments: Floats) -> Floats:
    """Number of requests in the system at each moment if all stayed as long as the first ones."""
    arrived_rows = np.isfinite(arrived)
    arrived, ended = arrived[arrived_rows], ended[arrived_rows]
    ends = ended[np.isfinite(ended)]
    last_s = max(float(ends.max(initial=0.0)), float(moments.max(initial=0.0)))
    first = math.ceil(len(arrived) * _FIRST_SHARE)
    stays_s = np.sort(np.minimum(ended[:first], last_s) - arrived[:first])
    return np.array([_staying(arrived, moment_s, stays_s) for moment_s in moments.tolist()])


def _staying(arrived: Floats, moment_s: float, stays_s: Floats) -> float:
    """Expected number in the system at a moment of those that had `arrived`, ascending, if each
    stays as long as one of `stays_s`, ascending, taken at random.
    """
    if not len(stays_s):
        return 0.0
    # Earlier ones are gone for certain; the margin is for the rounding of the difference.
    from_s = moment_s - stays_s[-1] - 1e-9 * abs(moment_s)
    begin, end = np.searchsorted(arrived, from_s), np.searchsorted(arrived, moment_s, side="right")
    ages_s = moment_s - arrived[begin:end]
    gone = int(np.searchsorted(stays_s, ages_s, side="right").sum())
    return len(ages_s) - gone / len(stays_s)


def left_s(records: Records) -> Floats:
    """When each request left the system; a rejected or dropped request leaves as it arrives."""
    gone = (records.outcome != Outcome.FINISHED) & (records.outcome != Outcome.UNFINISHED)
    return np.where(gone & np.isnan(records.finish_s), records.arrival_s, records.finish_s)


def horizon_s(workload: Workload) -> float:
    """Time within which (nearly) every request that waits misses its SLO; 0 without such a bound.

    The 99th percentile over requests of the tightest of the bounds on TTFT and end-to-end latency
    and of the deadline.
    """
    tightest = np.minimum(workload.ttft_slo_s, workload.e2e_slo_s)
    tightest = np.minimum(tightest, workload.deadline_s - workload.arrival_s)
    bounds_s = tightest[np.isfinite(tightest)]
    return max(0.0, float(np.quantile(bounds_s, _HORIZON_QUANTILE))) if len(bounds_s) else 0.0


def grows(runs: Sequence[RunBatches]) -> bool:
    """Whether, in runs at one rate, the backlog or the queue of waiting requests grows without end.

    The queue tells first where a system batches more the more there is to do: the requests that it
    serves stay longer and longer, as if the system were still filling. In a system that keeps up,
    what a batch of arrivals adds is taken off by later ones: the changes sum up to no more than
    the queue's own spread. In one that does not, they are about independent and have a mean above
    zero, which a one-sided t test finds. Growth by less than 1 % of the arrivals counts as none: a
    system that serves short requests first can leave so many long ones for ever.
    """
    least = max(_LEAST_GROWTH * len(runs), MOST_GROWTH * sum(run.counted for run in runs))
    return _rises([run.backlog for run in runs], least) or _rises(
        [run.waiting for run in runs], least
    )


def backlog_growth(runs: Sequence[RunBatches]) -> float:
    """Share of the counted arrivals, in runs at one rate, which the backlog holds more at the end.

    Where the backlog grows without end, the rest of the arrivals leaves: served, or dropped.
    """
    grown = sum(run.backlog[-1] - run.backlog[0] for run in runs)
    return min(max(grown / sum(run.counted for run in runs), 0.0), 1.0)


def starves(run: RunBatches) -> bool:
    """Whether more than 1 % of the first requests wait from the first fifth of a run to its end.

    They missed their SLO long before, for the run is long against its horizon. Whether they are
    ever served the run cannot tell; their latencies depend on its length.
    """
    long = 0 < SETTLED_HORIZONS * run.horizon_s <= run.window_s
    return long and run.starved / _FIRST_SHARE >= max(_LEAST_GROWTH, MOST_GROWTH * run.counted)


def _rises(counts: Sequence[tuple[int, ...]], least: float) -> bool:
    changes = np.concatenate([np.diff(of_run) for of_run in counts]).astype(float)
    if changes.sum() < least:
        return False
    error = float(changes.std(ddof=1)) / math.sqrt(len(changes))
    return bool(changes.mean() > _GROWTH_SIGMAS * error)


def keeps_up(runs: Sequence[RunBatches], most_growth: float = MOST_GROWTH) -> bool:
    """Whether runs at one rate show that the served throughput keeps up with the offered load.

    The backlog's trend over a run, a straight line by least squares, has an upper confidence bound
    (2 standard errors, for residuals with their correlation from edge to edge) below `most_growth`
    of the arrivals. Where neither this holds nor `grows`, the runs are too short to tell.
    """
    trends, errors, lengths = [], [], []
    for run in runs:
        backlog = np.array(run.backlog, dtype=float)
        place = np.arange(len(backlog)) - (len(backlog) - 1) / 2
        trend = float(place @ backlog / (place @ place))
        rest = backlog - backlog.mean() - trend * place
        spread = float(rest @ rest)
        r = min(max(float(rest[1:] @ rest[:-1]) / spread, 0.0), 0.9) if spread else 0.0
        variance = spread / (len(backlog) - 2) * (1 + r) / (1 - r)
        arrivals = run.counted / len(run.batch_requests)
        trends.append(trend / arrivals)
        errors.append(math.sqrt(variance / float(place @ place)) / arrivals)
        lengths.append(float(run.counted))
    weights = np.array(lengths) ** 3  # a trend's variance falls with the third power of the length
    weights /= weights.sum()
    bound = float(weights @ trends) + 2 * float(np.linalg.norm(weights * errors))
    return bound <= most_growth


def drifts(run: RunBatches) -> bool:
    """Whether attainment rises or falls in the course of a run.

    t test of the slope of a straight line through the attainment of groups of neighbouring batches,
    which are nearly independent.
    """
    group_requests = np.array(run.batch_requests, dtype=float).reshape(_GROUPS, -1).sum(axis=1)
    shares = np.array(run.batch_met, dtype=float).reshape(_GROUPS, -1).sum(axis=1) / group_requests
    place = np.arange(_GROUPS) - (_GROUPS - 1) / 2
    slope = float(place @ shares / (place @ place))
    rest = shares - shares.mean() - slope * place
    error = math.sqrt(float(rest @ rest) / (_GROUPS - 2) / float(place @ place))
    between_halves = abs(slope) * _GROUPS / 2
    return between_halves > _LEAST_DRIFT and abs(slope) > _DRIFT_SIGMAS * error


def stationary(run: RunBatches) -> bool | None:
    """Whether a run shows the long run; None where it is too short to tell.

    False: the backlog grows, attainment drifts, or requests starve, so that figures depend on the
    run's length.
    """
    if grows([run]) or drifts(run) or starves(run):
        return False
    return True if run.settled and keeps_up([run]) else None


def design_effect(runs: Sequence[RunBatches], groups: int = 5, least: float = 1.0) -> float:
    """By how much correlation within runs inflates the variance of their attainment; at least
    `least`.

    Batch means: neighbouring batches are merged to `groups`, and the variance of their attainment
    is held against that of as many independent requests.
    """
    excess = expected = 0.0
    starts = np.arange(0, BATCHES, BATCHES // groups)
    for run in runs:
        share = run.attainment
        if not 0 < share < 1:
            continue
        met = np.add.reduceat(np.array(run.batch_met), starts)
        group_requests = np.add.reduceat(np.array(run.batch_requests), starts)
        excess += float(((met - group_requests * share) ** 2 / group_requests).sum())
        expected += (groups - 1) * share * (1 - share)
    return max(least, excess / expected) if expected else 1.0
