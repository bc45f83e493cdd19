"""Load of an experiment: rates, requests and seeds, with their defaults; and its size before
anything is made: cells, requests, memory and time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....predictors.placement import TP_DEGREES
from ....workloads.errors import SloBenchError
from ....workloads.file_cache import file_cache
from ....workloads.machine_memory import check_memory
from ....workloads.request import RequestType
from ....workloads.slo import parse_slo
from ....workloads.workload import Workload, take
from ...core.phase_capacity import PhaseCapacity, phase_capacity
from ...servers.launch.backend_names import SIMULATED, TORCH
from ..config.schema import DEFAULT_REPLAY_SPEEDS, DEFAULT_REQUESTS, DEFAULT_SEEDS, ExperimentSchema
from .cell_specs import (
    EXACT_REQUESTS,
    CellSpec,
    OperatingPoint,
    Placed,
    PlacementSpec,
    WorkloadSpec,
    placed,
    source,
)

LADDER = (0.2, 0.5, 0.8, 1.1)  # of the estimated capacity
REFINE_ROUNDS = 2  # of further rates, where none are given
_MOST_SEQUENCES = 256  # in the estimate's batch
_SAMPLE_REQUESTS = 500


@dataclass(frozen=True)
class Load:
    """The levels of an experiment, how many requests each has by default, and its seeds."""

    levels: tuple[OperatingPoint, ...]
    requests: int | None  # if neither requests nor duration_s is given
    seeds: int


def load_of(
    experiment: ExperimentSchema,
    workloads: Sequence[WorkloadSpec],
    place: PlacementSpec,
    instances: int,
) -> Load:
    """Return the experiment's levels, numbers of requests and seeds, with defaults filled in.

    Args:
        experiment: whose load it is.
        workloads: all of its workloads.
        place: the placement (the first, where there are several) that a ladder is made for.
        instances: how many of them.

    Raises:
        SloBenchError: the workloads cannot be offered so.
    """
    recorded = all(source(spec).has_arrivals for spec in workloads)
    levels = _levels(experiment, workloads, place, instances)
    by_speed = levels[0].replay_speed is not None
    return Load(
        levels=levels,
        requests=None if recorded else DEFAULT_REQUESTS,
        seeds=seeds_of(experiment, by_speed=by_speed),
    )


def _levels(
    experiment: ExperimentSchema,
    workloads: Sequence[WorkloadSpec],
    place: PlacementSpec,
    instances: int,
) -> tuple[OperatingPoint, ...]:
    closed = [source(spec).closed_loop for spec in workloads]
    if any(closed) and not all(closed):
        raise SloBenchError(
            "arrivals mix concurrency(…), which has no rate, with processes that need one; "
            "run them as two experiments"
        )
    recorded = all(source(spec).has_arrivals for spec in workloads)
    if all(closed):
        if (
            experiment.rates is not None
            or experiment.replay_speeds is not None
            or experiment.load_factors is not None
        ):
            raise SloBenchError(
                "concurrency(…) sets the load itself; leave rates, replay_speeds and load_factors "
                "out, or choose another arrival process"
            )
        return (OperatingPoint(),)
    if experiment.replay_speeds is not None:
        if not recorded:
            raise SloBenchError(
                "replay_speeds need a workload with arrivals of its own (a trace); give rates "
                "instead"
            )
        return tuple(OperatingPoint(replay_speed=speed) for speed in experiment.replay_speeds)
    if experiment.rates is not None:
        return tuple(OperatingPoint(rate_rps=rate) for rate in experiment.rates)
    if experiment.load_factors is not None and experiment.backend == SIMULATED:
        return tuple(OperatingPoint(load_factor=load) for load in experiment.load_factors)
    if recorded and experiment.load_factors is None:
        return tuple(OperatingPoint(replay_speed=speed) for speed in DEFAULT_REPLAY_SPEEDS)
    if experiment.backend != SIMULATED:
        raise SloBenchError(
            "what a real server carries is not estimated beforehand; give rates (--rates 1,2,4)"
        )
    capacity_rps = estimated_capacity_rps(workloads[0], place, experiment.seed) * instances
    return tuple(OperatingPoint(rate_rps=two_digits(capacity_rps * share)) for share in LADDER)


def seeds_of(experiment: ExperimentSchema, *, by_speed: bool = False) -> int:
    """The number of seeds: one by default where a server's time is spent on them, or where arrivals
    are replayed and nothing is drawn.
    """
    once = experiment.backend not in (SIMULATED, TORCH) or (by_speed and not _draws(experiment))
    return experiment.seeds or (1 if once else DEFAULT_SEEDS)


def _draws(experiment: ExperimentSchema) -> bool:
    """Return True if the SLO is drawn, and so depends on the seed."""

    def drawn(slo: object) -> bool:
        if isinstance(slo, Mapping):
            return any(map(drawn, slo.values()))
        return isinstance(slo, str) and "(" in slo

    return any(map(drawn, experiment.slo))


@file_cache(maxsize=64)
def estimated_capacity_rps(workload: WorkloadSpec, place: PlacementSpec, seed: int) -> float:
    """Requests a second at which one instance's GPUs never idle, roughly.

    A batch as large as the KV cache holds decodes all the time, and every prompt is computed once;
    nothing waits. Real capacity within an SLO is lower, so a ladder up to a little above this
    shows where attainment falls. Each embedding request adds the time of a pass of its own.
    """
    sample = source(workload).make(rate_rps=1.0, requests=_SAMPLE_REQUESTS, seed=seed)
    where = placed(place)
    generates = np.flatnonzero(sample.request_type == RequestType.GENERATE)
    if len(generates) < len(sample) and where.embedder is None:
        raise SloBenchError(
            f"{workload.workload} has embedding requests: say which model embeds (embedder)"
        )
    generated = take(sample, generates, sample.arrival_s[generates])
    busy_s = _generating_s(generated, where) * len(generated) if len(generated) else 0.0
    if where.embedder is not None:
        busy_s += sum(
            where.embedder.pass_s([(r.num_inputs, r.prompt_tokens // r.num_inputs)])
            for r in sample
            if r.request_type is RequestType.EMBED
        )
    return len(sample) / busy_s


@file_cache(maxsize=64)
def estimated_phases(
    workload: WorkloadSpec, place: PlacementSpec, slo: str, slo_scale: float
) -> PhaseCapacity | None:
    """What one instance carries of a workload in each phase, from a sample of its requests; so of
    other tensor-parallel degrees on which the model fits.
    """
    workload_source = source(workload)
    sample = workload_source.make(
        rate_rps=None if workload_source.closed_loop else 1.0,
        requests=_SAMPLE_REQUESTS,
        seed=0,
        slo=parse_slo(slo, slo_scale),
    )
    capacity = _phases(sample, place)
    return capacity and replace(capacity, others=tuple(_other_degrees(sample, place)))


def _phases(sample: Workload, place: PlacementSpec) -> PhaseCapacity | None:
    where = placed(place)
    return phase_capacity(sample, where.placement, where.step_time.model)


def _other_degrees(sample: Workload, place: PlacementSpec) -> Iterator[PhaseCapacity]:
    """Of instances with another `tp`, where the model fits and step times are known."""
    memory_settings = (place.num_gpu_blocks, place.device_map, place.embedder, place.speculation)
    if any((*memory_settings, place.max_loras)):
        return  # what these take of memory is known for the tensor-parallel degree of the run
    for tp in TP_DEGREES:
        with contextlib.suppress(SloBenchError):
            if tp != place.tp and (capacity := _phases(sample, place.replaced(tp=tp))) is not None:
                yield capacity


def _generating_s(sample: Workload, where: Placed) -> float:
    """Seconds of the GPUs that one request of `sample` takes in a full batch."""
    step_s = where.step_time.model.step_s
    prompt = float(sample.prompt_tokens.mean())
    output = float(sample.output_tokens.mean())
    kv_tokens = prompt + output / 2
    sequences = max(1, min(_MOST_SEQUENCES, int(where.placement.kv_tokens / kv_tokens)))
    decode_s = output * step_s(sequences, round(sequences * kv_tokens), ()) / sequences
    alone_s = step_s(1, round(kv_tokens), ())
    prefill_s = max(0.0, step_s(1, round(kv_tokens), ((0, max(1, round(prompt))),)) - alone_s)
    return decode_s + prefill_s


def two_digits(value: float) -> float:
    """Rounded to two significant digits: a rate that can be said aloud."""
    return round(value, 1 - math.floor(math.log10(value)))


def filled_in(experiment: ExperimentSchema, load: Load) -> dict[str, Any]:
    """The settings of `load`, to be written where the experiment left them open."""
    filled: dict[str, Any] = {"seeds": load.seeds}
    if load.levels[0].rate_rps is not None:
        filled["rates"] = tuple(level.rate_rps for level in load.levels)
        if experiment.rates is None and experiment.refine is None:
            filled["refine"] = REFINE_ROUNDS
    elif load.levels[0].load_factor is not None:
        filled["load_factors"] = tuple(level.load_factor for level in load.levels)
    elif load.levels[0].replay_speed is not None:
        filled["replay_speeds"] = tuple(level.replay_speed for level in load.levels)
    if not any(experiment.requests) and not any(experiment.duration_s):
        filled["requests"] = (load.requests,)
    return filled


# Measured with llama-3.1-8b on vllm at 2 req/s, one process of a 2-core machine, and rounded up:
# bytes of a request and of an instance, time of a request. The others are guesses; a planned cell
# took 840 bytes, without its row.
_CELL_BYTES, _REQUEST_BYTES, _INSTANCE_BYTES = 6_000, 1_100, 4_600
_CELL_S, _REQUEST_S, _INSTANCE_S = 0.01, 50e-6, 140e-6
_MOST_INSTANCES = 100_000  # no system has more GPUs


@dataclass(frozen=True)
class Estimate:
    """At least what an experiment takes. Several models or predictors take more."""

    cells: int
    requests: float  # of the largest cell
    instances: int
    kept: float  # requests in memory at once

    @property
    def memory_bytes(self) -> float:
        """Memory of all rows, and of the largest cell while it is simulated."""
        cell = self.kept * _REQUEST_BYTES + self.instances * _INSTANCE_BYTES
        return self.cells * _CELL_BYTES + cell

    @property
    def cpu_s(self) -> float:
        """CPU time of all cells, if all are as large as the largest."""
        each = _CELL_S + self.requests * _REQUEST_S + self.instances * _INSTANCE_S
        return self.cells * each

    @property
    def text(self) -> str:
        """Number of cells, requests and instances, and CPU time, as one line."""
        return (
            f"cells: {self.cells:,}, each of up to {self.requests:,.0f} requests, on "
            f"{self.instances:,} instances, {duration(self.cpu_s)} of CPU time if simulated,"
        )

    def check(self) -> None:
        """Raise SloBenchError if the memory of this machine does not suffice, or there are more
        instances than any system has.
        """
        if self.instances > _MOST_INSTANCES:
            raise SloBenchError(
                f"{self.instances:,} instances or GPUs are more than the {_MOST_INSTANCES:,} that "
                "can be simulated"
            )
        check_memory(self.memory_bytes, self.text)


def estimate(experiment: ExperimentSchema) -> Estimate:
    """The size of an experiment, from its settings alone."""
    parts = [_variant_estimate(variant) for variant in experiment.each_variant().values()]
    return Estimate(
        sum(part.cells for part in parts),
        max(part.requests for part in parts),
        max(part.instances for part in parts),
        max(part.kept for part in parts),
    )


def _variant_estimate(experiment: ExperimentSchema) -> Estimate:
    systems = sum(_configurations(experiment, name) for name in experiment.systems)
    levels = experiment.rates or experiment.replay_speeds or experiment.load_factors
    axes = math.prod(len(getattr(experiment, name)) for name in experiment.axes())
    seeds = seeds_of(experiment)
    requests = [float(n) for n in experiment.requests if n is not None]
    requests += [
        s * max(experiment.rates or (1.0,)) for s in experiment.duration_s if s is not None
    ]
    instances = max(max(filter(None, (*experiment.instances, *experiment.gpus)), default=1), 1)
    first = len(levels) if levels else len(LADDER)
    rounds = REFINE_ROUNDS if experiment.rates is None else experiment.refine or 0
    cells = systems * axes * seeds * (first + 2 * rounds)
    largest = max(requests, default=float(DEFAULT_REQUESTS))
    # Without records most systems keep no more in memory; what does is checked as it is made.
    kept = min(largest, EXACT_REQUESTS) if experiment.records == "none" else largest
    return Estimate(cells, largest, instances, kept)


def _configurations(experiment: ExperimentSchema, system: str) -> int:
    """Combinations of a system's parameters, as `parameter_combinations` yields them."""
    several = [len(values) for values in experiment.parameters.get(system, {}).values()]
    if experiment.combinations == "all":
        return math.prod(several)
    return 1 + sum(several) - len(several)


def offered_s(specs: Sequence[CellSpec]) -> float | None:
    """Seconds in which the requests of cells arrive, one cell after another; None if that is not
    known from their settings (traces, closed loops).
    """
    total_s = 0.0
    for spec in specs:
        if spec.duration_s is not None:
            total_s += spec.duration_s
        elif spec.rate_rps and spec.requests:
            total_s += spec.requests / spec.rate_rps
        else:
            return None
    return total_s


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `5 h` or `12 days`."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
