"""M/D/c queues, whose capacity has an exact formula, to verify the search.

M/D/c: Poisson arrivals, `servers` servers, constant service time `service_s`, first come first
served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slo_bench import Experiment
from slo_bench.harness.results.stationarity import RunBatches, batches_of
from slo_bench.tuner.capacity.capacity_options import REAL_LEAST, CapacityOptions
from slo_bench.tuner.capacity.capacity_search import find_capacity, throughput_of_bursts
from slo_bench.tuner.capacity.folder import BURST_SHARE
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.capacity.search_options import Capacity, SearchOptions
from slo_bench.workloads.errors import SloBenchError

Floats = NDArray[np.float64]

_NOTHING = 34.0  # e^-34 is a rounding error
_MOST_STATES = 2000


@dataclass(frozen=True)
class MdcQueue:
    """An M/D/c queue whose requests must begin service within `wait_slo_s`."""

    servers: int
    service_s: float
    wait_slo_s: float

    @property
    def limit_rps(self) -> float:
        """The rate from which on the queue grows without end."""
        return self.servers / self.service_s

    def attainment(self, rate_rps: float) -> float:
        """The long-run share of requests that wait at most `wait_slo_s`, exactly.

        G. J. Franx, A simple solution for the M/D/c waiting time distribution, Operations Research
        Letters 29 (2001): with k = ⌊t/D⌋ + 1 and u = kD − t,
        P(W ≤ t) = Σ_{j<kc} Q_{kc−1−j} · e^{−λu} (λu)^j / j!, where Q_m is the chance that at most
        m requests wait (those in service not counted).
        """
        if rate_rps >= self.limit_rps:
            return 0.0
        c, d, t = self.servers, self.service_s, self.wait_slo_s
        k = math.floor(t / d + 1e-12) + 1
        u = k * d - t
        waiting = np.cumsum(self._in_system(rate_rps, at_least=(k + 1) * c))[c:]
        terms = _poisson(rate_rps * u, k * c)
        return float(waiting[k * c - 1 :: -1][: k * c] @ terms)

    def _in_system(self, rate_rps: float, at_least: int) -> Floats:
        """Chances of 0, 1, … requests in the system at any moment.

        What is in the system at a moment and one service time later:
        N' = max(N − c, 0) + Poisson(λD).
        """
        load, c = rate_rps * self.service_s, self.servers
        size = max(at_least, c + math.ceil(_NOTHING / self._decay(load)))
        come = _poisson(load, math.ceil(load + 10 * math.sqrt(load) + _NOTHING))
        step = np.zeros((size, size))
        for there in range(size):
            left = max(0, there - c)
            stay = come[: size - left]
            step[there, left : left + len(stay)] = stay
            step[there, -1] += 1 - stay.sum()
        # States are eliminated from the last on (Grassmann, Taksar and Heyman 1985); a state has
        # steps to at most c fewer, and from at most len(come) fewer.
        for s in range(size - 1, 0, -1):
            fewer, few = slice(max(0, s - c), s), slice(max(0, s - len(come)), s)
            step[few, s] /= step[s, fewer].sum()
            step[few, fewer] += np.outer(step[few, s], step[s, fewer])
        chances: Floats = np.ones(size)
        for s in range(1, size):
            few = slice(max(0, s - len(come)), s)
            chances[s] = chances[few] @ step[few, s]
        chances /= chances.sum()
        return chances

    def _decay(self, load: float) -> float:
        """Far out, each chance is exp(−decay) of the one before: e^{load(z−1)} = z^c, z > 1."""
        low, high = 0.0, 50.0  # of log z
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            if load * math.expm1(middle) < self.servers * middle:
                low = middle
            else:
                high = middle
        return max(low, _NOTHING / _MOST_STATES)

    def capacity_rps(self, target: float) -> float:
        """The rate at which the attainment is `target`, to six digits."""
        low, high = 0.0, self.limit_rps
        while high - low > 1e-6 * self.limit_rps:
            middle = (low + high) / 2
            if self.attainment(middle) >= target:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """Simulate the waiting times by Lindley's recursion, from an empty queue."""
        if requests < 1:
            raise SloBenchError(f"requests must be at least 1 but is {requests}")
        rng = np.random.default_rng([seed, requests])
        arrival_s = np.cumsum(rng.standard_exponential(requests)) / rate_rps
        horizon_s = self.wait_slo_s + self.service_s
        batches = self.batches(arrival_s, self.waits_s(arrival_s), horizon_s)
        return LevelSample(**vars(batches), rate_rps=rate_rps, seed=seed, requests=requests)

    def batches(self, arrival_s: Floats, waits_s: Floats, horizon_s: float) -> RunBatches:
        """The batches of requests that wait so long."""
        return batches_of(
            arrival_s=arrival_s,
            end_s=arrival_s + waits_s + self.service_s,
            met=waits_s <= self.wait_slo_s,
            first_token_s=arrival_s + waits_s,
            horizon_s=horizon_s,
        )

    def waits_s(self, arrival_s: Floats) -> Floats:
        """How long each of the requests waits.

        Equal services end in the order in which they began, so that request i takes the place of
        request i − c: c queues of one server each, taken in turn.
        """
        waits_s = np.empty_like(arrival_s)
        for server in range(self.servers):
            arrivals = arrival_s[server :: self.servers]
            slack = np.concatenate(([0.0], self.service_s - np.diff(arrivals)))
            walk = np.cumsum(slack)
            waits_s[server :: self.servers] = walk - np.minimum.accumulate(walk)
        return waits_s


@dataclass
class MeasuredQueue:
    """A queue as a server that is measured: what its clock shows passes in every run.

    Each run begins when the one before has ended, and takes `between_s` more. A `stream` never
    stops: a run is the next stretch of it, and begins when the last request of the one before has
    arrived or, where a third of its last requests missed, when nobody waits any more.
    """

    queue: MdcQueue
    seed: int
    stream: bool = False
    first_token_s: float = 0.05
    between_s: float = 0.3
    clock_s: float = 0.0

    def __post_init__(self) -> None:
        self._arrival_s = np.zeros(0)

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """Let requests arrive at a rate and tell how they fared."""
        rng = np.random.default_rng([self.seed, seed, requests])
        began_s = self.clock_s
        arrival_s = began_s + np.cumsum(rng.standard_exponential(requests)) / rate_rps
        before_s = self._arrival_s if self.stream else np.zeros(0)
        self._arrival_s = np.concatenate([before_s, arrival_s])
        waits_s = self.queue.waits_s(self._arrival_s)[len(before_s) :]
        self.clock_s = arrival_s[-1]
        if not self.stream:
            self.clock_s = (arrival_s + waits_s).max() + self.queue.service_s + self.between_s
        elif (waits_s[-max(20, requests // 10) :] > self.queue.wait_slo_s).mean() > 1 / 3:
            self.clock_s = (arrival_s + waits_s).max()
        horizon_s = self.queue.wait_slo_s + self.first_token_s
        return LevelSample(
            **vars(self.queue.batches(arrival_s, waits_s, horizon_s)),
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            wall_s=float(self.clock_s - began_s),
        )


def measured_capacity(
    queue: MdcQueue, seed: int, *, stream: bool = False
) -> tuple[Capacity, float]:
    """The capacity at 0.9 by the default search of a real server, and the seconds that it took."""
    server = MeasuredQueue(queue, seed, stream)
    options = SearchOptions.of(Experiment(backend="openai"), CapacityOptions())
    begin_rps = BURST_SHARE * throughput_of_bursts(server, first_seed=900_000)
    search = find_capacity(
        server,
        start_rps=begin_rps,
        options=replace(options, requests=REAL_LEAST),
        neighbours=[begin_rps],
    )
    return search.capacities[0], server.clock_s


def _poisson(mean: float, size: int) -> Floats:
    """Chances of 0 … size − 1."""
    counts = np.arange(size)
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, size)))))
    chances: Floats = np.exp(counts * math.log(mean) - mean - logs)
    return chances
