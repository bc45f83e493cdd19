"""Perturbations of a simulation: which input is changed, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.cells import predicted_output_tokens, workload_of
from ...predictors.profiles.step_time_table import Tables, TableStepTime
from ...predictors.roofline import OperatorRoofline, StepTime
from ...predictors.scaled import ScaledStepTime
from ...predictors.step_time import step_time
from ...workloads.arrays import Ints
from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.workload import Workload

_LENGTHS_STREAM = 20  # of random numbers, so that noise is the same for every system and rate


@dataclass(frozen=True)
class World:
    """Inputs of a simulation: workload, step-time model and predicted output tokens."""

    workload: Workload
    step_time: StepTime
    predicted_output_tokens: Ints | None


Change = Callable[[CellSpec, float], World]


@dataclass(frozen=True)
class Perturbation:
    """A simulation error to try. `neutral` is the value without an error, `values` the default
    values; none may be below `lowest`.
    """

    name: str
    label: str
    neutral: float
    values: tuple[float, ...]
    lowest: float
    change: Change

    def checked(self, values: Sequence[float]) -> tuple[float, ...]:
        """The values in order, each once.

        Raises:
            SloBenchError: one is out of range.
        """
        for value in values:
            if not value >= self.lowest:
                raise SloBenchError(
                    f"{self.name} must be at least {self.lowest:g} but is {value:g}"
                )
        return tuple(sorted(set(values)))


def world(spec: CellSpec) -> World:
    """The unperturbed inputs of a cell."""
    workload = workload_of(spec)
    model = spec.deployment.step_time.model
    return World(workload, model, predicted_output_tokens(spec, workload))


def _step_time(spec: CellSpec, factor: float) -> World:
    usual = world(spec)
    if factor == 1:
        return usual
    return dataclasses.replace(usual, step_time=ScaledStepTime(usual.step_time, factor))


def _weights(spec: CellSpec, factor: float) -> World:
    """Weights read at another bandwidth: of the slower model's terms those of linear layers.

    Of tables those sizes are changed that take no longer than reading: fewer tokens than the GPU
    could multiply meanwhile at the pace of the largest size.
    """
    usual = world(spec)
    if isinstance(usual.step_time, OperatorRoofline):
        placement = spec.deployment.placement
        bandwidth = placement.gpu.bandwidth_bytes_per_s / factor
        gpu = dataclasses.replace(placement.gpu, bandwidth_bytes_per_s=bandwidth)
        slower = step_time(
            dataclasses.replace(placement, gpu=gpu), host_s=spec.placement.analytic_host_s
        ).model
        return _with_roofline(
            usual,
            crossover_tokens=slower.crossover_tokens,
            memory_s=slower.memory_s,
            memory_s_per_token=slower.memory_s_per_token,
            compute_s=slower.compute_s,
            compute_s_per_token=slower.compute_s_per_token,
        )
    tables = _tables(spec, usual, "weights")
    linear = tables.linear
    computed_s = linear.seconds[-1] / linear.counts[-1] * linear.counts
    read_s = linear.seconds[0]
    seconds = np.where(
        computed_s < read_s,
        np.maximum(factor * linear.seconds, computed_s),
        np.maximum(linear.seconds, factor * read_s),
    )
    return _with_tables(usual, tables._replace(linear=dataclasses.replace(linear, seconds=seconds)))


def _attention(spec: CellSpec, factor: float) -> World:
    usual = world(spec)
    if isinstance(usual.step_time, OperatorRoofline):
        terms = ("decode_kv_s", "mixed_kv_s", "prefill_pair_s", "prefill_kv_s")
        scaled = {name: factor * getattr(usual.step_time, name) for name in terms}
        return _with_roofline(usual, **scaled)
    tables = _tables(spec, usual, "attention")
    decode = dataclasses.replace(tables.decode, seconds=factor * tables.decode.seconds)
    mixed = dataclasses.replace(tables.mixed, seconds=factor * tables.mixed.seconds)
    return _with_tables(usual, tables._replace(decode=decode, mixed=mixed))


def _host(spec: CellSpec, factor: float) -> World:
    """Host time of a step. Of a server that hides it behind the GPU's (0 s), a factor above 1 adds
    as much as of the roofline's host, 1 ms by default.
    """
    usual = world(spec)
    more_s = (factor - 1) * spec.placement.analytic_host_s
    if isinstance(usual.step_time, OperatorRoofline):
        memory_s, compute_s = usual.step_time.memory_s, usual.step_time.compute_s
        return _with_roofline(usual, memory_s=memory_s + more_s, compute_s=compute_s + more_s)
    tables = _tables(spec, usual, "host")
    step_s = tables.host.step_s
    step_s = factor * step_s if step_s else max(0.0, more_s)
    return _with_tables(
        usual, tables._replace(host=dataclasses.replace(tables.host, step_s=step_s))
    )


def _with_roofline(usual: World, **terms: Any) -> World:
    model = usual.step_time
    assert isinstance(model, OperatorRoofline)
    return dataclasses.replace(usual, step_time=dataclasses.replace(model, **terms))


def _with_tables(usual: World, tables: Tables) -> World:
    return dataclasses.replace(usual, step_time=TableStepTime(*tables))


def _tables(spec: CellSpec, usual: World, name: str) -> Tables:
    if type(usual.step_time) is not TableStepTime:
        raise SloBenchError(
            f"{name} is a part of operators and of the roofline, but steps of "
            f"{spec.placement.model} are timed by another model; vary step-time instead"
        )
    return usual.step_time.tables


def _noise(spec: CellSpec, sigma: float) -> World:
    """Every answer's predicted length is off by a factor that is lognormal, its median 1."""
    usual = world(spec)
    if sigma == 0:
        return usual
    true = usual.predicted_output_tokens
    true = usual.workload.output_tokens if true is None else true
    noise = np.random.default_rng((spec.seed, _LENGTHS_STREAM)).normal(size=len(true))
    predicted = np.maximum(1, np.rint(true * np.exp(sigma * noise))).astype(np.int64)
    return dataclasses.replace(usual, predicted_output_tokens=predicted)


def _burstiness(spec: CellSpec, cv: float) -> World:
    arrivals = f"gamma(cv={cv!r})"
    return world(dataclasses.replace(spec, workload=spec.workload.replaced(arrivals=arrivals)))


_SCALES = (0.7, 0.85, 1.15, 1.3)
_STOCK = (
    Perturbation("step-time", "step time ×", 1.0, _SCALES, 0.01, _step_time),
    Perturbation("weights", "time to read weights ×", 1.0, _SCALES, 0.01, _weights),
    Perturbation("attention", "time of attention ×", 1.0, (0.5, 0.75, 1.5, 2.0), 0.0, _attention),
    Perturbation("host", "host overhead ×", 1.0, (0.0, 0.5, 2.0, 4.0), 0.0, _host),
    Perturbation("prediction", "error of predicted lengths, σ", 0.0, (0.25, 0.5, 1.0), 0.0, _noise),
    Perturbation("burstiness", "burstiness (cv of gaps)", 1.0, (0.5, 2.0, 4.0), 0.01, _burstiness),
)
PERTURBATIONS: dict[str, Perturbation] = {entry.name: entry for entry in _STOCK}


def perturbation(name: str) -> Perturbation:
    """The perturbation of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in PERTURBATIONS:
        raise UnknownNameError("perturbation", name, PERTURBATIONS)
    return PERTURBATIONS[name]
