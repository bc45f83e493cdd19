"""From an experiment to its cells: every combination at every level and seed, with its name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ....predictors.operators.assembly import ROOFLINE
from ....predictors.specs import model
from ....predictors.speculation import OFF, parse_speculation
from ....workloads.checksums import crc32_of_file
from ....workloads.errors import SloBenchError
from ....workloads.extras import is_installed, need
from ....workloads.file_cache import files_read
from ....workloads.models import parse_models
from ....workloads.shown_paths import short_paths
from ...results.acceptance import with_acceptance
from ...results.run_folder import Value
from ...servers.launch.backend_names import SIMULATED
from ..config.schema import ExperimentSchema
from ..config.setting import column_value
from .cell_specs import CellSpec, OperatingPoint, WorkloadSpec, placed, source
from .combinations import Combination, SystemChoice, by_load, group_of
from .offered_load import estimate, estimated_capacity_rps, filled_in, load_of

_ALWAYS_COLUMNS = ("workload", "model", "gpu", "gpus")
_LONGEST_NAME = 150  # characters of a cell's name, which is a file name


@dataclass(frozen=True)
class ExperimentPlan:
    """All cells of an experiment in order, and the experiment with nothing left open."""

    cells: tuple[CellSpec, ...]
    resolved: ExperimentSchema
    files: tuple[Path, ...] = ()  # that were read for it

    def inputs(self) -> dict[str, str]:
        """CRC-32 of every file that the cells depend on, by path."""
        with files_read() as profiles:
            self.step_times()
        return {str(path): crc32_of_file(path) for path in sorted({*self.files, *profiles})}

    def step_times(self) -> dict[str, dict[str, object]]:
        """Where the step times of every placement come from, for `environment.json`."""
        return step_times_of(self.cells if self.resolved.backend == SIMULATED else ())


def step_times_of(cells: Iterable[CellSpec]) -> dict[str, dict[str, object]]:
    """Where the step times of every placement of simulated cells come from."""
    step_times: dict[str, dict[str, object]] = {}
    for spec in dict.fromkeys(cell.placement for cell in cells):
        name = f"{spec.model} on {spec.gpu} tp{spec.tp}"
        for axis, size in (("pp", spec.pp), ("dp", spec.dp), ("ep", spec.ep)):
            name += f" {axis}{size}" if size > 1 else ""
        name += f" {spec.speculation}" if spec.speculation else ""
        timed = placed(spec).step_time
        step_times[name] = {"fitted": timed.fitted, "provenance": timed.provenance}
    return step_times


def plan(experiment: ExperimentSchema) -> ExperimentPlan:
    """Look up, fill in and check everything that can be checked without running.

    Raises:
        SloBenchError: an unknown name, a model that does not fit, a file that cannot be read, or
            settings that contradict each other.
    """
    with files_read() as files:
        planned = _plan(experiment.anchored(Path.cwd()))
    return replace(planned, files=tuple(files))


def _plan(experiment: ExperimentSchema) -> ExperimentPlan:
    for variant in experiment.each_variant().values():
        variant.check_effects(tables=False)
    estimate(experiment).check()
    experiment = experiment.model_copy(update={"speculation": _speculations(experiment)})
    experiment = experiment.model_copy(update={"variants": _settled_variants(experiment)})
    experiment = experiment.model_copy(update={"profile": _profiles(experiment)})
    groups = [group_of(variant) for variant in experiment.each_variant().values()]
    workloads = list(dict.fromkeys(c.workload for group in groups for c in group.combinations))
    first = groups[0].combinations[0]
    load = load_of(experiment, workloads, first.place, first.instances)
    columns = AxisColumns.of(experiment, workloads)
    seeds = range(experiment.seed, experiment.seed + load.seeds)
    cells = (
        _cell(system, combination, level, seed, load.requests, columns, name)
        for name, group in zip(experiment.variants or ("",), groups, strict=True)
        for system, combination, level, seed in itertools.product(
            group.systems, group.combinations, load.levels, seeds
        )
    )
    settled = (
        {}
        if experiment.variants
        else _hardware(experiment, groups[0].systems, groups[0].combinations)
    )
    filled = settled | filled_in(experiment, load) | _records(experiment)
    return ExperimentPlan(tuple(distinct(cells)), experiment.model_copy(update=filled))


def _profiles(experiment: ExperimentSchema) -> tuple[str | None, ...]:
    """The values of `profile`: beside device maps, whose step times come from the roofline, it has
    those of all others too.
    """
    variants = experiment.each_variant().values()
    mapped = any(device_map for variant in variants for device_map in variant.device_map)
    beside = mapped and experiment.backend == SIMULATED
    return tuple(ROOFLINE if beside and p is None else p for p in experiment.profile)


def _settled_variants(experiment: ExperimentSchema) -> dict[str, dict[str, Any]]:
    """The variants, with acceptances of `speculation` in place of the files that hold them."""
    return {
        name: changes
        | ({"speculation": _speculations(variant)} if "speculation" in changes else {})
        for (name, changes), variant in zip(
            experiment.variants.items(), experiment.each_variant().values(), strict=False
        )
    }


def _speculations(experiment: ExperimentSchema) -> tuple[str | None, ...]:
    """The values of `speculation`, with acceptances in place of the files that hold them."""
    texts = [text for text in experiment.speculation if text not in (None, OFF)]
    speculations = {text: parse_speculation(text) for text in texts if text is not None}
    settled = {
        text: str(with_acceptance(speculation))
        for text, speculation in speculations.items()
        if speculation is not None
    }
    return tuple(settled.get(text or "", text) for text in experiment.speculation)


def _cell(
    system: SystemChoice,
    combination: Combination,
    level: OperatingPoint,
    seed: int,
    default_requests: int | None,
    columns: AxisColumns,
    variant: str,
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
        **level.columns(source(combination.workload).natural_rate_rps),
        "seed": seed,
        **({"variant": variant} if variant else {}),
        **columns.settings(values),
        **system.turned,
    }
    chosen = by_load(system, combination) if columns.backend == SIMULATED else {}
    identity |= {f"{system.label}.{name}": value for name, value in chosen.items()}
    parts = [system.label, *filter(None, [variant])]
    parts += [name_part(name, values[name]) for name in columns.named]
    parts += [name_part(parameter, system.parameters[parameter]) for parameter in system.swept]
    parts += [level.label, f"seed-{seed}"]
    settled = {
        "router": None if system.decides_itself else values["router"],
        "instances": combination.instances_of(system.system),
        "requests": default_requests if open_length else values["requests"],
        "warmup_s": _warmup_s(values, level, default_requests),
    }
    named = {
        setting.name: values[setting.name] for setting in fields(CellSpec) if setting.name in values
    }
    return CellSpec(
        **{**named, **settled, "workload": combination.workload},
        cell=file_name(parts),
        columns=identity,
        system=system.reference,
        parameters={**system.parameters, **chosen},
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
    experiment: ExperimentSchema,
    systems: Sequence[SystemChoice],
    combinations: Sequence[Combination],
) -> dict[str, tuple[int, ...]]:
    """The parallelism that was left open, where it is the same throughout."""
    if any(experiment.models):
        return {}
    sizes = {
        "tp": {combination.place.tp for combination in combinations},
        "instances": {c.instances_of(s.system) for s in systems for c in combinations},
    }
    return {
        name: tuple(values)
        for name, values in sizes.items()
        if len(values) == 1 and getattr(experiment, name) == (None,)
    }


def _records(experiment: ExperimentSchema) -> dict[str, str]:
    if experiment.records == "auto":
        return {"records": "parquet" if is_installed("pyarrow") else "csv"}
    if experiment.records == "parquet":
        need("parquet", "--records parquet")
    return {"records": experiment.records}


@dataclass(frozen=True)
class AxisColumns:
    """Which settings have a column, and what they call workloads and models there."""

    swept: tuple[str, ...]
    named: tuple[str, ...]  # those of them in a cell's name: not settled by the variant
    workload: Mapping[str, str]
    model: Mapping[str, str]
    backend: str
    paths: Mapping[str, str]  # of the other settings, as shown

    @classmethod
    def of(cls, experiment: ExperimentSchema, workloads: Iterable[WorkloadSpec]) -> AxisColumns:
        """Name the settings that have several values; short names are used if they are distinct."""
        names = {spec.workload: source(spec).name for spec in workloads}
        variants = experiment.each_variant().values()
        several = {
            name: [getattr(variant, name) for variant in variants] for name in experiment.axes()
        }
        models = {text for variant in variants for text in variant.model}
        return cls(
            tuple(
                name
                for name, variant_values in several.items()
                if any(values != variant_values[0] for values in variant_values)
                or len(variant_values[0]) > 1
            ),
            tuple(
                name
                for name, variant_values in several.items()
                if any(len(values) > 1 for values in variant_values)
            ),
            _if_distinct(names),
            _if_distinct({text: _model_name(text, experiment.backend) for text in models}),
            experiment.backend,
            short_paths(
                {
                    value
                    for lists in several.values()
                    for value in itertools.chain.from_iterable(lists)
                    if isinstance(value, str)
                }
            ),
        )

    def model_of(self, values: Mapping[str, Any]) -> str:
        """Return the served model as written in the column `model`."""
        models = values["models"]
        if models is None:
            return self.model[values["model"]]
        return f"{len(parse_models(models).names)} models"

    def settings(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """The columns of the settings that have several values."""
        named = (name for name in self.swept if name not in _ALWAYS_COLUMNS)
        return {name: self.shown(values[name]) for name in named}

    def shown(self, value: object) -> Value:
        """A setting's value as written in its column."""
        plain = column_value(value)
        return self.paths.get(plain, plain) if isinstance(plain, str) else plain


def _model_name(text: str, backend: str) -> str:
    """A served model may be none that we know: then it is called as its folder is."""
    return model(text).name if backend == SIMULATED else text.rstrip("/").rpartition("/")[2]


def _if_distinct(names: Mapping[str, str]) -> Mapping[str, str]:
    """Return short names if they are distinct, otherwise the texts, of paths what tells them
    apart.
    """
    return names if len(set(names.values())) == len(names) else short_paths(names)


def name_part(name: str, value: object) -> str:
    """Return a setting's value as written in a cell's name."""
    text = f"{value:g}" if isinstance(value, float) else str(column_value(value))
    return text if name in ("workload", "model", "gpu") else f"{name}-{text}"


def file_name(parts: Iterable[str]) -> str:
    """The parts as one name that every file system takes."""
    plain = (re.sub(r"[^A-Za-z0-9.+-]+", "-", part.rpartition("/")[2]) for part in parts)
    return "_".join(part.strip("-.") for part in plain)[:_LONGEST_NAME]


def distinct(cells: Iterable[CellSpec]) -> Iterator[CellSpec]:
    """Append numbers to equal cell names."""
    used_names: set[str] = set()
    for spec in cells:
        name, number = spec.cell, 2
        while name.lower() in used_names:  # some file systems know no case
            name, number = f"{spec.cell}_{number}", number + 1
        used_names.add(name.lower())
        yield replace(spec, cell=name, columns={"cell": name, **spec.columns})
