"""Systems with their parameters, and combinations of settings: looked up, settled and checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....predictors.device_map import read_device_map
from ....predictors.operators.assembly import is_file
from ....predictors.output_length import check_installed, length_predictor
from ....workloads.errors import SloBenchError
from ....workloads.slo import parse_slo
from ...core.cluster_policy import overrides
from ...core.policy import StaticPolicy
from ...engine.cluster.failures import check_failures, parse_failures
from ...policies.routers import router as router_by_name
from ...policies.systems import System, several_models
from ...policies.systems import system as system_by_name
from ...results.metrics import parse_objective
from ...results.run_folder import Value
from ...servers.launch.backend_names import ATTACHED, SIMULATED
from ..config.schema import ExperimentSchema, parameter_combinations
from ..config.setting import column_value, declared
from .cell_specs import PlacementSpec, WorkloadSpec, placed, placed_for, source
from .cells import models_of
from .offered_load import estimated_phases


@dataclass(frozen=True)
class SystemChoice:
    """A system with one value for each of its parameters."""

    reference: str  # name or file, as in the experiment
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
    instances_given: bool

    def instances_of(self, system: System | None) -> int:
        """Return the number of instances of a system: as given, or the number that its roles
        need.
        """
        if self.instances_given or system is None or system.cluster is None:
            return self.instances
        return system.least_instances

    def generating(self, system: System | None) -> int:
        """Those of them that do not only embed."""
        return self.instances_of(system) - int(self.values["embed_instances"])

    def gpus_of(self, system: System | None) -> int:
        """Return the number of GPUs of a system."""
        return self.instances_of(system) * self.place.gpus


@dataclass(frozen=True)
class Group:
    """The systems and combinations of one variant, each of which is run with each."""

    systems: Sequence[SystemChoice]
    combinations: Sequence[Combination]


def group_of(experiment: ExperimentSchema) -> Group:
    """Every system and combination of one variant, checked."""
    axes = {name: getattr(experiment, name) for name in experiment.axes()}
    for slo in axes["slo"]:
        parse_slo(slo)
    for objective in axes["objective"]:
        parse_objective(objective)
    for router in filter(None, axes["router"]):
        router_by_name(router)
    for failures in filter(None, axes["failures"]):
        parse_failures(failures)
    systems = list(
        _attached_of(experiment) if experiment.backend == "openai" else _systems_of(experiment)
    )
    simulated = experiment.backend == SIMULATED
    least = max((s.system.least_instances for s in systems if s.system and simulated), default=1)
    combinations = [
        _combination_of(dict(zip(axes, values, strict=True)), experiment, least)
        for values in itertools.product(*axes.values())
    ]
    for combination in combinations:
        predictor = length_predictor(combination.values["length_predictor"])
        check_installed(predictor, reads_texts=source(combination.workload).has_texts)
    if experiment.backend != ATTACHED:
        _check_models(systems, combinations)
    if simulated:
        _check_layouts(systems, combinations)
    return Group(systems, combinations)


def _systems_of(experiment: ExperimentSchema) -> Iterator[SystemChoice]:
    """Every system with every combination of its parameters.

    Raises:
        SloBenchError: an unknown system or parameter, or a value out of its bounds.
    """
    for name in experiment.systems:
        choices = experiment.parameters.get(name, {})
        several = tuple(parameter for parameter, values in choices.items() if len(values) > 1)
        for parameters in parameter_combinations(experiment, name):
            alone = experiment.combinations == "one-at-a-time"
            swept = tuple(p for p in several if not alone or parameters[p] != choices[p][0])
            system = system_by_name(name).with_parameters(**parameters)
            each = system.least_instances if experiment.backend != SIMULATED else 1
            yield SystemChoice(name, system.name, parameters, swept, each, system)


def _attached_of(experiment: ExperimentSchema) -> Iterator[SystemChoice]:
    """Servers that run already: a system is no more than a name for them."""
    if len(experiment.systems) > 1 or experiment.parameters:
        raise SloBenchError(
            "backend openai measures servers that run already: it takes one system, as a name for "
            "them, and no parameters"
        )
    yield SystemChoice(experiment.systems[0], experiment.systems[0], {}, ())


def _combination_of(
    values: Mapping[str, Any], experiment: ExperimentSchema, least: int
) -> Combination:
    """Settle GPUs = instances × dp × tp × pp; check that the model fits (servers check it)."""
    simulated = experiment.backend == SIMULATED
    if experiment.client.base_urls:
        values = {**values, "instances": values["instances"] or len(experiment.client.base_urls)}
    if values["device_map"] is not None:
        values = _mapped(values, experiment.backend)
    if values["models"] is not None:
        return _several(values, experiment)
    place = PlacementSpec.of(values)
    if simulated:
        place = place.settled
        formats = {"weight_dtype": place.weight_dtype, "kv_dtype": place.kv_dtype}
        values = {**values, **formats}
        placed(place)
    elif place.tp is None:
        place = place.replaced(tp=1)
    gpus, instances, each = values["gpus"], values["instances"], place.gpus
    workload = _workload(values, experiment)
    shape = f"tp {place.tp}" + (f" × pp {place.pp}" if place.pp > 1 else "")
    shape += f" × dp {place.dp}" if place.dp > 1 else ""
    if gpus is None:
        instances_given = instances is not None or not simulated
        return Combination(values, workload, place, instances or least, instances_given)
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
    return Combination(values, workload, place, gpus // each, instances_given=True)


def _workload(values: Mapping[str, Any], experiment: ExperimentSchema) -> WorkloadSpec:
    if values["adapters"] is not None and values["max_loras"] is None:
        raise SloBenchError("adapters need slots: give max_loras, for example 8")
    models = values["models"] if values["adapters"] is None else values["adapters"]
    settings = {**values, "models": models}
    settings |= {name: getattr(experiment, name) for name in ("trace_format", "trace_columns")}
    return WorkloadSpec.of(settings)


def _mapped(values: Mapping[str, Any], backend: str) -> Mapping[str, Any]:
    """The same, on the GPUs that a device map names, or on as many as it has stages."""
    if values["tp"] not in (None, 1) or values["pp"] != 1:
        raise SloBenchError("device_map says what is on which device; leave tp and pp out")
    device_map = read_device_map(values["device_map"])
    gpus = device_map.gpus_text if backend == SIMULATED else values["gpu"]
    return {**values, "gpu": gpus, "tp": 1, "pp": len(device_map.stages)}


def _several(values: Mapping[str, Any], experiment: ExperimentSchema) -> Combination:
    """Several models on `gpus` GPUs, each on the fewest that it fits on."""
    for name, declaration in declared(type(experiment)).items():
        if not declaration.setting.one_model or values[name] in (None, 1):
            continue
        if name != "profile" or is_file(values[name]):
            raise SloBenchError(
                f"{name} is for one model; several share all GPUs (gpus), each on the fewest that "
                "it fits on"
            )
    workload = _workload(values, experiment)
    if not (source(workload).closed_loop or experiment.rates or experiment.replay_speeds):
        raise SloBenchError(
            "what several models carry is not estimated beforehand; give rates (--rates 1,2,4)"
        )
    place = PlacementSpec.of(values, tp=1)
    return Combination(values, workload, place, values["gpus"] or 1, instances_given=True)


def by_load(choice: SystemChoice, combination: Combination) -> dict[str, Any]:
    """The parameters that a system chooses by the load, for example how many instances prefill."""
    system = choice.system
    if system is None or system.cluster is None or not overrides(system.cluster, "for_load"):
        return {}
    slo = column_value(combination.values["slo"])
    capacity = estimated_phases(
        combination.workload, combination.place, str(slo), combination.values["slo_scale"]
    )
    if capacity is None:
        return {}
    settled = system.cluster.for_load(capacity, combination.generating(system))
    return {
        name: getattr(settled, name)
        for name in settled.bounds()
        if getattr(settled, name) != getattr(system.cluster, name)
    }


def _check_models(systems: Iterable[SystemChoice], combinations: Sequence[Combination]) -> None:
    """Raise SloBenchError where a system for several models gets one, or one for one several."""
    for choice, combination in itertools.product(systems, combinations):
        if choice.system is None:
            continue
        several = combination.values["models"] is not None
        if several and choice.system.sharing is None:
            raise SloBenchError(
                f"{choice.label} serves one model; for models = {combination.values['models']!r} "
                f"use one of {', '.join(several_models())}"
            )
        if choice.system.sharing is not None and not several:
            raise SloBenchError(
                f"{choice.label} serves several models: say which (models, for example "
                "fleet(llama-3.1-8b*4, qwen2.5-3b*4), or assign(…) for a trace that names its own)"
            )
        if several:
            models_of(combination.place, combination.workload, combination.instances)


def _check_layouts(systems: Sequence[SystemChoice], combinations: Sequence[Combination]) -> None:
    """Raise SloBenchError if the instances cannot form a system, their roles do not fit, or a
    router is set and no system takes one.
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
    router_is_set = any(c.values["router"] is not None for c in combinations)
    if router_is_set and all(choice.decides_itself for choice in systems):
        raise SloBenchError(f"{systems[0].label} decides across instances itself; leave router out")
    for choice, combination in itertools.product(systems, combinations):
        system = choice.system
        if system is None or system.cluster is None:
            if system is not None and system.sharing is None:
                placed_for(combination.place, system)
            _check_failures(choice, combination, combination.instances_of(system))
            continue
        if combination.place.device_map is not None:
            raise SloBenchError(f"{choice.label} places layers itself; leave device_map out")
        place = placed_for(combination.place, system).placement
        settled = system.cluster.with_parameters(**by_load(choice, combination))
        roles = settled.layout(system.policy, place, combination.generating(system))
        for role in roles:
            if role.placement is not None:
                role.placement.check()
        _check_failures(choice, combination, sum(role.instances for role in roles))


def _check_failures(choice: SystemChoice, combination: Combination, instances: int) -> None:
    failures, system = combination.values["failures"], choice.system
    if failures is None or system is None:
        return
    if system.sharing is not None or isinstance(system.policy, StaticPolicy):
        kind = "several models on shared GPUs" if system.sharing is not None else "static batches"
        raise SloBenchError(f"instances of {choice.label} ({kind}) do not fail; leave failures out")
    if combination.values["embedder"] is not None:
        raise SloBenchError("an instance with an embedder does not fail; leave failures out")
    check_failures(parse_failures(failures), instances)
