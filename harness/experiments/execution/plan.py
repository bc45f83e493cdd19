"""From an experiment to its cells: look names up, fill in defaults, check everything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....predictors.output_length import length_predictor
from ....workloads.errors import SloBenchError
from ....workloads.slo import parse_slo
from ...engine.cluster.failures import parse_failures
from ...policies.routers import router as router_by_name
from ...results.metrics import parse_objective
from ...results.run_folder import Value
from ...servers.launch.backend_names import SIMULATED
from ..config.cell_names import NAMED, AxisColumns, column, distinct, file_name, offered, part
from ..config.choices import (
    Combination,
    SystemChoice,
    attached_of,
    combination_of,
    systems_of,
)
from ..config.compatible import check_layouts, check_models
from ..config.load import OperatingPoint, estimated_capacity_rps, filled_in, load_of
from ..config.schema import ExperimentSchema
from .cells import CellSpec, placed, source


@dataclass(frozen=True)
class ExperimentPlan:
    """All cells of an experiment in order, and the experiment with nothing left open."""

    cells: tuple[CellSpec, ...]
    resolved: ExperimentSchema

    def step_times(self) -> dict[str, dict[str, object]]:
        """Where the step times of every placement come from, for `environment.json`."""
        found: dict[str, dict[str, object]] = {}
        if self.resolved.backend != SIMULATED:
            return found
        for spec in dict.fromkeys(cell.placement for cell in self.cells):
            name = f"{spec.model} on {spec.gpu} tp{spec.tp}"
            name += f" pp{spec.pp}" if spec.pp > 1 else ""
            timed = placed(spec).step_time
            found[name] = {"fitted": timed.fitted, "provenance": timed.provenance}
        return found


def plan(asked: ExperimentSchema) -> ExperimentPlan:
    """Look up, fill in and check everything that can be checked without running.

    Raises:
        SloBenchError: an unknown name, a model that does not fit, a file that cannot be read, or
            settings that contradict each other.
    """
    asked = asked.anchored(Path.cwd())
    axes = {name: getattr(asked, name) for name in asked.axes()}
    for slo in axes["slo"]:
        parse_slo(slo)
    for text in axes["length_predictor"]:
        length_predictor(text)
    for objective in axes["objective"]:
        parse_objective(objective)
    for router in filter(None, axes["router"]):
        router_by_name(router)
    for failures in filter(None, axes["failures"]):
        parse_failures(failures)
        if asked.backend != SIMULATED:
            raise SloBenchError("failures are simulated: real servers are stopped by hand")
    systems = list(attached_of(asked) if asked.backend == "openai" else systems_of(asked))
    simulated = asked.backend == SIMULATED
    least = max((s.system.least_instances for s in systems if s.system and simulated), default=1)
    combinations = [
        combination_of(dict(zip(axes, values, strict=True)), asked, least)
        for values in itertools.product(*axes.values())
    ]
    if asked.backend == SIMULATED:
        check_models(systems, combinations)
        check_layouts(systems, combinations)
    workloads = list(dict.fromkeys(c.workload for c in combinations))
    load = load_of(asked, workloads, combinations[0].place, combinations[0].instances)
    columns = AxisColumns.of(asked, workloads)
    seeds = range(asked.seed, asked.seed + load.seeds)
    cells = (
        _cell(system, combination, level, seed, load.requests, columns)
        for system, combination, level, seed in itertools.product(
            systems, combinations, load.levels, seeds
        )
    )
    filled = _hardware(asked, systems, combinations) | filled_in(asked, load) | _records(asked)
    return ExperimentPlan(tuple(distinct(cells)), asked.model_copy(update=filled))


def _cell(
    system: SystemChoice,
    combination: Combination,
    level: OperatingPoint,
    seed: int,
    default_requests: int | None,
    columns: AxisColumns,
) -> CellSpec:
    values = combination.values
    if level.load_factor is not None:
        capacity_rps = estimated_capacity_rps(combination.workload, combination.place, 0)
        rate_rps = float(f"{capacity_rps * combination.instances * level.load_factor:.4g}")
        level = replace(level, rate_rps=rate_rps)
    open_length = values["requests"] is None and values["duration_s"] is None
    identity: dict[str, Value] = {
        "system": system.label,
        "backend": columns.backend,
        "workload": columns.workload[values["workload"]],
        "model": columns.model_of(values),
        "gpu": values["gpu"],
        "gpus": combination.gpus_of(system.system) * system.each,
        **offered(level, source(combination.workload).natural_rate_rps),
        "seed": seed,
        **{name: column(values[name]) for name in columns.swept if name not in NAMED},
        **system.turned,
    }
    parts = [system.label]
    parts += [part(name, values[name]) for name in columns.swept]
    parts += [part(parameter, system.parameters[parameter]) for parameter in system.swept]
    parts += [level.label, f"seed-{seed}"]
    own = {
        "router": None if system.decides_itself else values["router"],
        "instances": combination.instances_of(system.system),
        "requests": default_requests if open_length else values["requests"],
        "warmup_s": _warmup_s(values, level, default_requests),
    }
    named = {one.name: values[one.name] for one in fields(CellSpec) if one.name in values}
    return CellSpec(
        **{**named, **own, "workload": combination.workload},
        cell=file_name(parts),
        columns=identity,
        system=system.asked,
        parameters=system.parameters,
        placement=combination.place,
        rate_rps=level.rate_rps,
        replay_speed=level.replay_speed,
        seed=seed,
    )


def _warmup_s(
    values: Mapping[str, Any], level: OperatingPoint, default_requests: int | None
) -> float:
    """Seconds of warm-up, whose arrivals do not count.

    Raises:
        SloBenchError: the warm-up is a share of the run, but arrivals depend on the run.
    """
    share = values["warmup_share"]
    if not share:
        return float(values["warmup_s"])
    span_s = values["duration_s"]
    if span_s is None and level.rate_rps is not None:
        span_s = (values["requests"] or default_requests or 0) / level.rate_rps
    if not span_s:
        raise SloBenchError(
            "warmup_share needs rates or load_factors, and requests or duration_s; give warmup_s "
            "instead"
        )
    return float(max(values["warmup_s"], round(share * span_s, 9)))


def _hardware(
    asked: ExperimentSchema,
    systems: Sequence[SystemChoice],
    combinations: Sequence[Combination],
) -> dict[str, tuple[int, ...]]:
    """The parallelism that was left open, where it is the same throughout."""
    if any(asked.models):
        return {}
    found = {
        "tp": {combination.place.tp for combination in combinations},
        "instances": {c.instances_of(s.system) for s in systems for c in combinations},
    }
    return {
        name: tuple(values)
        for name, values in found.items()
        if len(values) == 1 and getattr(asked, name) == (None,)
    }


def _records(asked: ExperimentSchema) -> dict[str, str]:
    if asked.records == "auto":
        return {"records": "parquet" if find_spec("pyarrow") else "csv"}
    if asked.records == "parquet" and not find_spec("pyarrow"):
        raise SloBenchError("records as parquet need pyarrow: pip install 'slo-bench[parquet]'")
    return {"records": asked.records}
