"""Morphling: stress tests find a deployment, with a prior learnt from other models' tests.

Source: Wang et al., "Morphling: Fast, Near-Optimal Auto-Configuration for Cloud-Native Model
Serving" (SoCC 2021), as UELLM (see docs/papers.md, §2.4.2 and §3.6) compares with it. A
configuration is the number of GPUs and the largest batch; the layers are split evenly over the
first GPUs. Throughput is predicted by a regression whose start is meta-learnt from other models,
and adapts to this one by a few stress tests, each on the configuration that looks best.

Deviates: the published meta-model is a small network trained by MAML. Here it is linear in a
handful of features, where adapting the meta-learnt weights by a few observations has a closed form
(Bayesian regression; the mean and covariance of the other models' weights are the start). Tests are
simulated, and their time counts: loading the weights over the host links, and serving the test's
requests to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...harness.engine.simulator.simulate import simulate
from ...harness.policies.systems import system
from ...predictors.dtypes import AUTO
from ...predictors.placement import Placement
from ...predictors.specs import ModelSpec, link, model
from ...predictors.staged import staged_step_time
from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError
from ...workloads.source import load_source
from .launch import device_map, even_map
from .problem import Map
from .topology import Topology

BATCHES = (1, 2, 4, 8, 10)
TEACHERS = ("llama-2-7b", "opt-6.7b", "mistral-7b", "qwen2.5-7b", "chatglm-6b")
RESTART_S = 15.0  # a process starts and warms up; an assumption
_BURST_RPS = 1000.0


@dataclass(frozen=True)
class Setup:
    """A configuration: the number of GPUs and the largest batch."""

    gpus: int
    batch: int


@dataclass(frozen=True)
class Stress:
    """Result of one stress test, and its duration with loading of the weights."""

    setup: Setup
    tokens_per_s: float
    took_s: float


@dataclass(frozen=True)
class Search:
    """The best configuration tested, and all tests in order."""

    best: Setup
    placed: Map
    tests: tuple[Stress, ...]

    @property
    def took_s(self) -> float:
        """Seconds of tests before it serves."""
        return sum(test.took_s for test in self.tests)


@dataclass(frozen=True)
class Bench:
    """Topology, size and settings of the stress tests."""

    topology: Topology
    requests: int = 100
    workload: str = "alpaca"
    host_s: float = 0.001
    weight_dtype: str = AUTO
    kv_dtype: str = "bf16"
    memory_share: float = 0.9
    seed: int = 0

    def placement(self, spec: ModelSpec, gpus: int) -> Placement:
        """The layers spread evenly over the first GPUs, one batch in flight."""
        mapped = device_map(spec, self.topology, even_map(spec.layers, gpus), lanes=1)
        return Placement(
            spec,
            mapped.stages[0].gpu,
            pp=gpus,
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
            memory_share=self.memory_share,
            split=mapped.stages,
            fixed_lanes=1,
        )

    def fitting(self, spec: ModelSpec, batches: Sequence[int]) -> list[Setup]:
        """Configurations whose weights fit into memory; no test is needed for this."""
        max_gpus = min(len(self.topology.devices), spec.layers)
        able = [n for n in range(1, max_gpus + 1) if self.placement(spec, n).fits]
        return [Setup(gpus, batch) for gpus in able for batch in batches]

    def stress(self, spec: ModelSpec, setup: Setup) -> Stress:
        """All requests at once, first come first served, one batch after the other (simulated)."""
        place = self.placement(spec, setup.gpus)
        burst = load_source(self.workload).make(
            rate_rps=_BURST_RPS, requests=self.requests, seed=self.seed
        )
        fifo = system("fifo").with_parameters(max_batch=setup.batch)
        steps = staged_step_time(place, self.host_s).model
        totals = simulate(burst, fifo, place, steps, overlong_requests="reject").totals
        loading_s = max(
            stage.layers
            * spec.layer_weight_bytes(place.weight_dtype)
            / link(stage.gpu.host_link).bandwidth_bytes_per_s
            for stage in place.stages
        )
        tokens_per_s = int(burst.output_tokens.sum()) / totals.makespan_s
        return Stress(setup, tokens_per_s, RESTART_S + loading_s + totals.makespan_s)


def morphling(
    spec: ModelSpec, bench: Bench, *, tests: int = 4, batches: Sequence[int] = BATCHES
) -> Search:
    """Search with at most `tests` stress tests.

    Raises:
        SloBenchError: no configuration fits, or no test is allowed.
    """
    if tests < 1 or bench.requests < 1:
        raise SloBenchError("morphling needs at least 1 test of at least 1 request")
    setups = bench.fitting(spec, batches)
    if not setups:
        raise SloBenchError(
            f"{spec.name} spread evenly fits on none of the first 1 to "
            f"{len(bench.topology.devices)} devices; use more of them, or smaller weights"
        )
    taught = []
    for name in TEACHERS:
        other = model(name)
        if other != spec:
            taught.append([bench.stress(other, setup) for setup in bench.fitting(other, batches)])
    stresses = adapt(setups, partial(bench.stress, spec), list(filter(None, taught)), tests)
    best = max(stresses, key=lambda test: test.tokens_per_s).setup
    return Search(best, even_map(spec.layers, best.gpus), tuple(stresses))


def adapt(
    setups: Sequence[Setup],
    test: Callable[[Setup], Stress],
    taught: Sequence[Sequence[Stress]],
    tests: int,
) -> list[Stress]:
    """Stress the configuration that looks best, learn from it, and so on.

    It ends when tests are used up, or when the one that looks best has been tested.
    """
    mean, covariance, noise = _taught(taught)
    done: list[Stress] = []
    while len(done) < min(tests, len(setups)):
        ranked = sorted(setups, key=lambda setup: -float(_features(setup) @ mean))
        if done and ranked[0] in [test_run.setup for test_run in done]:
            break
        done.append(test(ranked[0]))
        mean, covariance = _learnt(mean, covariance, noise, done[-1])
    return done


def _features(setup: Setup) -> Floats:
    gpus, batch = math.log(setup.gpus), math.log(setup.batch)
    return np.array([1.0, gpus, batch, gpus * batch, batch * batch])


def _taught(taught: Sequence[Sequence[Stress]]) -> tuple[Floats, Floats, float]:
    """Mean and covariance of the other models' weights, and the variance that they leave."""
    size = len(_features(Setup(1, 1)))
    weights, left = [], []
    for tests in taught:
        x = np.array([_features(test.setup) for test in tests])
        y = np.log([test.tokens_per_s for test in tests])
        w = np.linalg.solve(x.T @ x + 1e-6 * np.eye(size), x.T @ y)
        weights.append(w)
        left += list((y - x @ w) ** 2)
    if not weights:
        return np.zeros(size), np.eye(size), 1.0
    spread = np.cov(np.array(weights).T) if len(weights) > 1 else np.zeros((size, size))
    return np.mean(weights, axis=0), spread + 1e-3 * np.eye(size), max(1e-4, float(np.mean(left)))


def _learnt(mean: Floats, covariance: Floats, noise: float, test: Stress) -> tuple[Floats, Floats]:
    """Update a Bayesian linear regression with one observation."""
    x = _features(test.setup)
    gain = covariance @ x / (x @ covariance @ x + noise)
    error = math.log(test.tokens_per_s) - float(x @ mean)
    return mean + gain * error, covariance - np.outer(gain, x @ covariance)
