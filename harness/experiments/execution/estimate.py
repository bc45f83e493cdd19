"""Size of an experiment before anything of it is made: cells, requests, memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....workloads.machine_memory import check_memory
from ..config.schema import DEFAULT_REQUESTS, DEFAULT_SEEDS, ExperimentSchema

# Measured with llama-3.1-8b on vllm at 2 req/s, one process of a 2-core machine, and rounded up:
# bytes of a request and of an instance, time of a request. The others are guesses; a planned cell
# took 840 bytes, without its row.
_CELL_BYTES, _REQUEST_BYTES, _INSTANCE_BYTES = 6_000, 1_100, 4_600
_CELL_S, _REQUEST_S, _INSTANCE_S = 0.01, 50e-6, 50e-6
_LADDER_LEVELS = 6


@dataclass(frozen=True)
class Estimate:
    """At least what an experiment takes. Several models or predictors take more."""

    cells: int
    requests: float  # of the largest cell
    instances: int

    @property
    def memory_bytes(self) -> float:
        """Memory of all rows, and of the largest cell while it is simulated."""
        cell = self.requests * _REQUEST_BYTES + self.instances * _INSTANCE_BYTES
        return self.cells * _CELL_BYTES + cell

    @property
    def cpu_s(self) -> float:
        """CPU time of all cells, if all are as large as the largest."""
        each = _CELL_S + self.requests * _REQUEST_S + self.instances * _INSTANCE_S
        return self.cells * each

    @property
    def text(self) -> str:
        """Cells, requests and time."""
        return (
            f"cells: {self.cells:,}, each of up to {self.requests:,.0f} requests, on "
            f"{self.instances:,} instances, {duration(self.cpu_s)} of CPU time if simulated,"
        )

    def check(self) -> None:
        """Raise SloBenchError if the memory of this machine does not suffice."""
        check_memory(self.memory_bytes, self.text)


def estimate(asked: ExperimentSchema) -> Estimate:
    """The size of an experiment, from its settings alone."""
    parts = [_of_variant(one) for one in asked.each_variant().values()]
    return Estimate(
        sum(one.cells for one in parts),
        max(one.requests for one in parts),
        max(one.instances for one in parts),
    )


def _of_variant(asked: ExperimentSchema) -> Estimate:
    systems = sum(_configurations(asked, name) for name in asked.systems)
    levels = asked.rates or asked.replay_speeds or asked.load_factors
    axes = math.prod(len(getattr(asked, name)) for name in asked.axes())
    seeds = asked.seeds or DEFAULT_SEEDS
    requests = [float(n) for n in asked.requests if n is not None]
    requests += [s * max(asked.rates or (1.0,)) for s in asked.duration_s if s is not None]
    instances = max(max(filter(None, (*asked.instances, *asked.gpus)), default=1), 1)
    cells = systems * axes * seeds * (len(levels) if levels else _LADDER_LEVELS)
    return Estimate(cells, max(requests, default=float(DEFAULT_REQUESTS)), instances)


def _configurations(asked: ExperimentSchema, system: str) -> int:
    """Combinations of a system's parameters, as `parameter_combinations` yields them."""
    several = [len(values) for values in asked.parameters.get(system, {}).values()]
    if asked.combinations == "all":
        return math.prod(several)
    return 1 + sum(several) - len(several)


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `5 h` or `12 days`."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
