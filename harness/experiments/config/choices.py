"""Alternatives of an experiment: systems with their parameters, and combinations of other
settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ....predictors.device_map import read_device_map
from ....predictors.placement import smallest_tp
from ....predictors.specs import gpu, model
from ....workloads.errors import SloBenchError
from ...policies.systems import System
from ...results.run_folder import Value
from ...servers.launch.backend_names import SIMULATED
from ..execution.cells import PlacementSpec, WorkloadSpec, configured, placed
from .schema import ExperimentSchema

_OWN = ("model", "gpu", "tp", "pp")  # of a placement, worked out together


@dataclass(frozen=True)
class SystemChoice:
    """A system with one value for each of its parameters."""

    asked: str
    label: str
    parameters: Mapping[str, Any]
    swept: tuple[str, ...]  # parameters that have several values in the experiment
    each: int = 1  # servers that make one, where their roles differ
    system: System | None = None  # None: servers that run already

    @property
    def decides_itself(self) -> bool:
        """Return True if the system has its own controller and takes no router."""
        return self.system is not None and self.system.cluster is not None

    @property
    def turned(self) -> dict[str, Value]:
        """Its parameters that have several values, as columns."""
        return {f"{self.label}.{parameter}": self.parameters[parameter] for parameter in self.swept}


@dataclass(frozen=True)
class Combination:
    """One value for every axis but the load and the system, and what follows from them."""

    values: Mapping[str, Any]
    workload: WorkloadSpec
    place: PlacementSpec
    instances: int
    asked: bool  # the number of instances is given

    def instances_of(self, system: System | None) -> int:
        """Return the number of instances of a system: as given, or the number that its roles
        need.
        """
        if self.asked or system is None or system.cluster is None:
            return self.instances
        return system.least_instances

    def generating(self, system: System | None) -> int:
        """Those of them that do not only embed."""
        return self.instances_of(system) - int(self.values["embed_instances"])

    def gpus_of(self, system: System | None) -> int:
        """Return the number of GPUs of a system."""
        return self.instances_of(system) * self.place.tp * self.place.pp


def systems_of(asked: ExperimentSchema) -> Iterator[SystemChoice]:
    """Every system with every combination of its parameters.

    Raises:
        SloBenchError: an unknown system or parameter, or a value out of its bounds.
    """
    for name in asked.systems:
        choices = asked.parameters.get(name, {})
        swept = tuple(parameter for parameter, values in choices.items() if len(values) > 1)
        for values in itertools.product(*choices.values()):
            parameters = dict(zip(choices, values, strict=True))
            found = configured(name, parameters)
            each = found.least_instances if asked.backend != SIMULATED else 1
            yield SystemChoice(name, found.name, parameters, swept, each, found)


def attached_of(asked: ExperimentSchema) -> Iterator[SystemChoice]:
    """Servers that run already: a system is no more than a name for them."""
    if len(asked.systems) > 1 or asked.parameters:
        raise SloBenchError(
            "backend openai measures servers that run already: it takes one system, as a name for "
            "them, and no parameters"
        )
    yield SystemChoice(asked.systems[0], asked.systems[0], {}, ())


def combination_of(values: Mapping[str, Any], asked: ExperimentSchema, least: int) -> Combination:
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
    place = PlacementSpec(values["model"], values["gpu"], tp, pp, **_placed_by(values))
    if simulated:
        placed(place)
    workload = _workload(values, asked)
    shape = f"tp {tp}" + (f" × pp {pp}" if pp > 1 else "")
    if gpus is None:
        asked_for = instances is not None or not simulated
        return Combination(values, workload, place, instances or least, asked_for)
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
    return Combination(values, workload, place, gpus // each, asked=True)


def _placed_by(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a placement but for the model and the shape of its GPUs."""
    return {one.name: values[one.name] for one in fields(PlacementSpec) if one.name not in _OWN}


def _workload(values: Mapping[str, Any], asked: ExperimentSchema) -> WorkloadSpec:
    named = {one.name: values[one.name] for one in fields(WorkloadSpec) if one.name in values}
    return WorkloadSpec(**named, trace_format=asked.trace_format)


def _mapped(values: Mapping[str, Any], simulated: bool) -> Mapping[str, Any]:
    """The same, on the GPUs that a device map names."""
    if not simulated:
        raise SloBenchError("device_map is simulated; servers take settings that its file holds")
    if values["tp"] not in (None, 1) or values["pp"] != 1:
        raise SloBenchError("device_map says what is on which device; leave tp and pp out")
    found = read_device_map(values["device_map"])
    return {**values, "gpu": found.gpus_text, "tp": 1, "pp": len(found.stages)}


def _several(values: Mapping[str, Any], asked: ExperimentSchema) -> Combination:
    """Several models on `gpus` GPUs, each on the fewest that it fits on."""
    single = (
        "tp",
        "pp",
        "instances",
        "router",
        "device_map",
        "embedder",
        "profile",
        "num_gpu_blocks",
    )
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
    if asked.rates is None and asked.replay_speeds is None:
        raise SloBenchError(
            "what several models carry is not estimated beforehand; give rates (--rates 1,2,4)"
        )
    place = PlacementSpec(values["model"], values["gpu"], tp=1, **_placed_by(values))
    workload = _workload(values, asked)
    return Combination(values, workload, place, values["gpus"] or 1, asked=True)
