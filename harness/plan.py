"""From what was asked to the cells to run: names looked up, blanks filled in, all checked first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..predictors.device_map import read_device_map
from ..predictors.output_length import length_predictor
from ..predictors.placement import smallest_tp
from ..predictors.specs import gpu, model
from ..workloads.errors import SloBenchError
from ..workloads.models import parse_models
from ..workloads.slo import parse_slo
from .cells import CellSpec, PlacementSpec, WorkloadSpec, configured, models_of, placed, source
from .clusters.failing import check_failures, parse_failures
from .clusters.routers import router as router_by_name
from .core.policy import StaticPolicy
from .load import Level, estimated_capacity_rps, filled_in, load_of
from .metrics import parse_objective
from .schema import ExperimentSchema
from .store import Value
from .systems import System

_NAMED = ("workload", "model", "gpu", "gpus")  # these columns are always there
_PLACED = (
    "weight_dtype",
    "kv_dtype",
    "memory_share",
    "block_tokens",
    "host_memory_gib",
    "kv_blocks",
    "host_blocks",
    "host_s",
    "profile",
    "embedder",
    "device_map",
)
_WORKLOAD = (
    "workload",
    "arrivals",
    "redraw_arrivals",
    "prompt_tokens",
    "output_tokens",
    "sessions",
    "models",
)
_AXES = (
    *_WORKLOAD,
    "model",
    "gpu",
    "tp",
    "pp",
    "instances",
    "gpus",
    "embed_instances",
    "router",
    "failures",
    *_PLACED,
    "requests",
    "duration_s",
    "warmup_s",
    "warmup_share",
    "max_output_tokens",
    "slo",
    "slo_scale",
    "length_predictor",
    "oversize",
    "objective",
)

SIMULATED = "simulated"
_LONGEST_NAME = 150  # of a cell, which is a file's name


@dataclass(frozen=True)
class Plan:
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


@dataclass(frozen=True)
class _SystemChoice:
    """A system with one value for each of its knobs."""

    asked: str
    label: str
    knobs: Mapping[str, Any]
    swept: tuple[str, ...]  # knobs that have several values in the experiment
    each: int = 1  # servers that make one, where their roles differ
    system: System | None = None  # None: servers that run already

    @property
    def decides_itself(self) -> bool:
        """Does it take no router?"""
        return self.system is not None and self.system.cluster is not None

    @property
    def turned(self) -> dict[str, Value]:
        return {f"{self.label}.{knob}": self.knobs[knob] for knob in self.swept}


@dataclass(frozen=True)
class _Combination:
    """One value for every axis but the load and the system, and what follows from them."""

    values: Mapping[str, Any]
    workload: WorkloadSpec
    place: PlacementSpec
    instances: int
    asked: bool  # somebody said how many instances

    def instances_of(self, system: System | None) -> int:
        """How many a system gets: as many as it is made of, if nobody said how many."""
        if self.asked or system is None or system.cluster is None:
            return self.instances
        return system.least_instances

    def generating(self, system: System | None) -> int:
        """Those of them that do not only embed."""
        return self.instances_of(system) - int(self.values["embed_instances"])

    def gpus_of(self, system: System | None) -> int:
        return self.instances_of(system) * self.place.tp * self.place.pp


def plan(asked: ExperimentSchema) -> Plan:
    """Look up, fill in and check everything that can be checked without running.

    Raises:
        SloBenchError: an unknown name, a model that does not fit, a file that cannot be read, or
            settings that contradict each other.
    """
    asked = asked.anchored(Path.cwd())
    axes = {name: getattr(asked, name) for name in _AXES}
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
    systems = list(_attached(asked) if asked.backend == "http" else _systems(asked))
    simulated = asked.backend == SIMULATED
    least = max((s.system.least_instances for s in systems if s.system and simulated), default=1)
    combinations = [
        _combination(dict(zip(axes, values, strict=True)), asked, least)
        for values in itertools.product(*axes.values())
    ]
    if asked.backend == SIMULATED:
        _check_models(systems, combinations)
        _check_layouts(systems, combinations)
    workloads = list(dict.fromkeys(c.workload for c in combinations))
    load = load_of(asked, workloads, combinations[0].place, combinations[0].instances)
    columns = _Columns.of(asked, workloads)
    seeds = range(asked.seed, asked.seed + load.seeds)
    cells = (
        _cell(system, combination, level, seed, load.requests, columns)
        for system, combination, level, seed in itertools.product(
            systems, combinations, load.levels, seeds
        )
    )
    filled = _hardware(asked, systems, combinations) | filled_in(asked, load) | _records(asked)
    return Plan(tuple(_distinct(cells)), asked.model_copy(update=filled))


def _cell(
    system: _SystemChoice,
    combination: _Combination,
    level: Level,
    seed: int,
    default_requests: int | None,
    columns: _Columns,
) -> CellSpec:
    values = combination.values
    if level.load is not None:
        capacity_rps = estimated_capacity_rps(combination.workload, combination.place, 0)
        rate_rps = float(f"{capacity_rps * combination.instances * level.load:.4g}")
        level = replace(level, rate_rps=rate_rps)
    open_length = values["requests"] is None and values["duration_s"] is None
    identity: dict[str, Value] = {
        "system": system.label,
        "backend": columns.backend,
        "workload": columns.workload[values["workload"]],
        "model": columns.model_of(values),
        "gpu": values["gpu"],
        "gpus": combination.gpus_of(system.system) * system.each,
        **_offered(level, source(combination.workload).natural_rate_rps),
        "seed": seed,
        **{name: _column(values[name]) for name in columns.swept if name not in _NAMED},
        **system.turned,
    }
    parts = [system.label]
    parts += [_part(name, values[name]) for name in columns.swept]
    parts += [_part(knob, system.knobs[knob]) for knob in system.swept]
    parts += [level.label, f"seed-{seed}"]
    return CellSpec(
        cell=_file_name(parts),
        columns=identity,
        system=system.asked,
        knobs=system.knobs,
        placement=combination.place,
        instances=combination.instances_of(system.system),
        embed_instances=values["embed_instances"],
        router=None if system.decides_itself else values["router"],
        failures=values["failures"],
        workload=combination.workload,
        rate_rps=level.rate_rps,
        speed=level.speed,
        requests=default_requests if open_length else values["requests"],
        duration_s=values["duration_s"],
        warmup_s=_warmup_s(values, level, default_requests),
        max_output_tokens=values["max_output_tokens"],
        slo=values["slo"],
        slo_scale=values["slo_scale"],
        seed=seed,
        oversize=values["oversize"],
        objective=values["objective"],
        length_predictor=values["length_predictor"],
    )


def _warmup_s(values: Mapping[str, Any], level: Level, default_requests: int | None) -> float:
    """Seconds whose arrivals do not count.

    Raises:
        SloBenchError: a share is asked for, but when arrivals come only the run can tell.
    """
    share = values["warmup_share"]
    if not share:
        return float(values["warmup_s"])
    span_s = values["duration_s"]
    if span_s is None and level.rate_rps is not None:
        span_s = (values["requests"] or default_requests or 0) / level.rate_rps
    if not span_s:
        raise SloBenchError(
            "warmup_share needs rates or loads, and requests or duration_s; give warmup_s instead"
        )
    return float(max(values["warmup_s"], round(share * span_s, 9)))


def _systems(asked: ExperimentSchema) -> Iterator[_SystemChoice]:
    for name in asked.systems:
        choices = asked.knobs.get(name, {})
        swept = tuple(knob for knob, values in choices.items() if len(values) > 1)
        for values in itertools.product(*choices.values()):
            knobs = dict(zip(choices, values, strict=True))
            found = configured(name, knobs)
            each = found.least_instances if asked.backend != SIMULATED else 1
            yield _SystemChoice(name, found.name, knobs, swept, each, found)


def _check_models(systems: Iterable[_SystemChoice], combinations: Sequence[_Combination]) -> None:
    """Raise SloBenchError where a system for several models gets one, or one for one several."""
    for choice, combination in itertools.product(systems, combinations):
        if choice.system is None:
            continue
        several = combination.values["models"] is not None
        if several and choice.system.sharing is None:
            raise SloBenchError(
                f"{choice.label} serves one model; for models = {combination.values['models']!r} "
                "use prism, muxserve, qlm or static-partition"
            )
        if choice.system.sharing is not None and not several:
            raise SloBenchError(
                f"{choice.label} serves several models: say which (models, for example "
                "fleet(llama-3.1-8b*4, qwen2.5-3b*4), or assign(…) for a trace that names its own)"
            )
        if several:
            models_of(combination.place, combination.workload, combination.instances)


def _check_layouts(systems: Sequence[_SystemChoice], combinations: Sequence[_Combination]) -> None:
    """Raise SloBenchError where instances make no such system, or their roles do not fit, or where
    a router is asked for and no system takes one.
    """
    for choice, combination in itertools.product(systems, combinations):
        alone = combination.values["embed_instances"]
        instances = combination.instances_of(choice.system)
        if alone >= instances:
            raise SloBenchError(
                f"embed_instances = {alone} leaves none of {instances} instances to generate"
            )
        if alone and combination.values["embedder"] is None:
            raise SloBenchError("embed_instances needs an embedder")
        _check_failures(choice, combination, instances)
    asked = any(c.values["router"] is not None for c in combinations)
    if asked and all(choice.decides_itself for choice in systems):
        raise SloBenchError(f"{systems[0].label} decides across instances itself; leave router out")
    for choice, combination in itertools.product(systems, combinations):
        system = choice.system
        if system is None or system.cluster is None:
            continue
        if combination.place.device_map is not None:
            raise SloBenchError(f"{choice.label} places layers itself; leave device_map out")
        place = placed(combination.place).placement
        instances = combination.generating(system)
        for role in system.cluster.layout(system.policy, place, instances):
            if role.placement is not None:
                role.placement.check()


def _check_failures(choice: _SystemChoice, combination: _Combination, instances: int) -> None:
    failures, system = combination.values["failures"], choice.system
    if failures is None or system is None:
        return
    if system.sharing is not None or isinstance(system.policy, StaticPolicy):
        kind = "several models on shared GPUs" if system.sharing is not None else "static batches"
        raise SloBenchError(f"instances of {choice.label} ({kind}) do not fail; leave failures out")
    if combination.values["embedder"] is not None:
        raise SloBenchError("an instance with an embedder does not fail; leave failures out")
    check_failures(parse_failures(failures), instances)


def _attached(asked: ExperimentSchema) -> Iterator[_SystemChoice]:
    """Servers that run already: a system is no more than a name for them."""
    if len(asked.systems) > 1 or asked.knobs:
        raise SloBenchError(
            "backend http measures servers that run already: it takes one system, as a name for "
            "them, and no knobs"
        )
    yield _SystemChoice(asked.systems[0], asked.systems[0], {}, ())


def _combination(values: Mapping[str, Any], asked: ExperimentSchema, least: int) -> _Combination:
    """Settle GPUs = instances × tp × pp, and check that the model fits (a server checks itself)."""
    simulated = asked.backend == SIMULATED
    if asked.client.base_urls:
        values = {**values, "instances": values["instances"] or len(asked.client.base_urls)}
    if values["device_map"] is not None:
        values = _mapped(values, simulated)
    pp, gpus, instances = values["pp"], values["gpus"], values["instances"]
    numbers = {name: values[name] for name in ("weight_dtype", "kv_dtype", "memory_share")}
    tp = values["tp"] or 1
    if values["models"] is not None:
        return _several(values, asked)
    if simulated and values["tp"] is None:
        tp = smallest_tp(model(values["model"]), gpu(values["gpu"]), pp=pp, **numbers)
    each = tp * pp
    place = PlacementSpec(
        model=values["model"],
        gpu=values["gpu"],
        tp=tp,
        pp=pp,
        **{name: values[name] for name in _PLACED},
    )
    if simulated:
        placed(place)
    workload = WorkloadSpec(
        **{name: values[name] for name in _WORKLOAD}, trace_format=asked.trace_format
    )
    shape = f"tp {tp}" + (f" × pp {pp}" if pp > 1 else "")
    if gpus is None:
        asked_for = instances is not None or not simulated
        return _Combination(values, workload, place, instances or least, asked_for)
    if instances is not None and gpus != instances * each:
        raise SloBenchError(
            f"gpus = {gpus} contradicts {instances} instances × {shape} = {instances * each} GPUs; "
            "leave one of them out"
        )
    if gpus % each:
        raise SloBenchError(
            f"{gpus} GPUs cannot be shared out to instances of {shape} = {each} GPUs; "
            f"use {max(1, gpus // each) * each} or another tp"
        )
    return _Combination(values, workload, place, gpus // each, asked=True)


def _mapped(values: Mapping[str, Any], simulated: bool) -> Mapping[str, Any]:
    """The same, on the GPUs that a device map names."""
    if not simulated:
        raise SloBenchError("device_map is simulated; servers take settings that its file holds")
    if values["tp"] not in (None, 1) or values["pp"] != 1:
        raise SloBenchError("device_map says what is on which device; leave tp and pp out")
    found = read_device_map(values["device_map"])
    return {**values, "gpu": found.gpus_text, "tp": 1, "pp": len(found.stages)}


def _several(values: Mapping[str, Any], asked: ExperimentSchema) -> _Combination:
    """Several models on `gpus` GPUs, each on the fewest that it fits on."""
    single = ("tp", "pp", "instances", "router", "device_map", "embedder", "profile", "kv_blocks")
    for name in single:
        if values[name] not in (None, 1):
            raise SloBenchError(
                f"{name} is for one model; several share all GPUs (gpus), each on the fewest that "
                "it fits on"
            )
    if asked.backend != SIMULATED:
        raise SloBenchError(
            f"several models on shared GPUs are simulated, not run on {asked.backend}"
        )
    if asked.rates is None and asked.speeds is None:
        raise SloBenchError(
            "what several models carry is not estimated beforehand; give rates (--rates 1,2,4)"
        )
    place = PlacementSpec(
        model=values["model"], gpu=values["gpu"], tp=1, **{name: values[name] for name in _PLACED}
    )
    workload = WorkloadSpec(
        **{name: values[name] for name in _WORKLOAD}, trace_format=asked.trace_format
    )
    return _Combination(values, workload, place, values["gpus"] or 1, asked=True)


def _hardware(
    asked: ExperimentSchema,
    systems: Sequence[_SystemChoice],
    combinations: Sequence[_Combination],
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


@dataclass(frozen=True)
class _Columns:
    """Which settings have a column, and what they call workloads and models there."""

    swept: tuple[str, ...]
    workload: Mapping[str, str]
    model: Mapping[str, str]
    backend: str

    @classmethod
    def of(cls, asked: ExperimentSchema, workloads: Iterable[WorkloadSpec]) -> _Columns:
        names = {spec.workload: source(spec).name for spec in workloads}
        return cls(
            tuple(name for name in _AXES if len(getattr(asked, name)) > 1),
            _if_distinct(names),
            _if_distinct({text: _model_name(text, asked.backend) for text in asked.model}),
            asked.backend,
        )

    def model_of(self, values: Mapping[str, Any]) -> str:
        """What is served, in the column of the model."""
        models = values["models"]
        if models is None:
            return self.model[values["model"]]
        return f"{len(parse_models(models).names)} models"


def _model_name(text: str, backend: str) -> str:
    """A served model may be none that we know: then it is called as its folder is."""
    return model(text).name if backend == SIMULATED else text.rstrip("/").rpartition("/")[2]


def _if_distinct(names: Mapping[str, str]) -> Mapping[str, str]:
    """Short names, where they tell the texts they stand for apart; else the texts."""
    return names if len(set(names.values())) == len(names) else {text: text for text in names}


def _offered(level: Level, natural_rate_rps: float | None) -> dict[str, Value]:
    """The columns of the load; a rate that only the run can tell is None here."""
    if level.load is not None:
        return {"rate_rps": level.rate_rps, "speed": level.speed, "load": level.load}
    if level.speed is None or natural_rate_rps is None:
        return {"rate_rps": level.rate_rps, "speed": level.speed}
    return {"rate_rps": round(natural_rate_rps * level.speed, 9), "speed": level.speed}


def _column(value: object) -> Value:
    """A setting as it stands in its column."""
    if isinstance(value, Mapping):
        return _slo_text(value)
    assert value is None or isinstance(value, str | int | float)
    return value


def _slo_text(table: Mapping[str, Any]) -> str:
    """A table of SLOs in the short form: `ttft=1,tpot=0.15; chat:ttft=0.5`."""

    def bounds(of: Mapping[str, Any]) -> str:
        return ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in of.items()
        )

    for_all = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    pieces = [bounds(for_all)] if for_all else []
    pieces += [f"{name}:{bounds(of)}" for name, of in table.items() if isinstance(of, Mapping)]
    return "; ".join(pieces)


def _part(name: str, value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(_column(value))
    return text if name in ("workload", "model", "gpu") else f"{name}-{text}"


def _file_name(parts: Iterable[str]) -> str:
    plain = (re.sub(r"[^A-Za-z0-9.+-]+", "-", part.rpartition("/")[2]) for part in parts)
    return "_".join(part.strip("-.") for part in plain)[:_LONGEST_NAME]


def _distinct(cells: Iterable[CellSpec]) -> Iterator[CellSpec]:
    """Cells whose names came out equal get numbers."""
    taken: set[str] = set()
    for spec in cells:
        name, number = spec.cell, 2
        while name.lower() in taken:  # some file systems know no case
            name, number = f"{spec.cell}_{number}", number + 1
        taken.add(name.lower())
        yield replace(spec, cell=name, columns={"cell": name, **spec.columns})
