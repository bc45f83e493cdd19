"""Checks of a tuning run before its first trial."""

from __future__ import annotations

from dataclasses import dataclass

from ...harness.experiments.execution.specs import WorkloadSpec, source
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import system
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ..capacity.asked import CapacityOptions
from ..capacity.options import SearchOptions
from .evaluate import cell_of, gpus_of
from .outcome import on_backend
from .samplers import checked
from .settings import CAPACITY, COST, Aim, TuneSettings
from .space import Space, counts_gpus, space_of


@dataclass(frozen=True)
class Tuning:
    """A checked tuning run: experiment, settings, objectives and search space.

    Raises:
        SloBenchError: the experiment, the space and the settings do not fit each other.
    """

    experiment: Experiment
    settings: TuneSettings
    aim: Aim
    space: Space


def prepared(experiment: Experiment, settings: TuneSettings) -> Tuning:
    """Check everything that can be checked without a trial.

    Raises:
        SloBenchError: see `Tuning`.
    """
    experiment.refuse_variants("tune")
    if len(experiment.systems) != 1:
        raise SloBenchError(f"tuning needs one system, not {len(experiment.systems)}")
    if experiment.backend == "openai":
        raise SloBenchError(
            "settings of a running server cannot be changed: let `tune server` start it"
        )
    if any("concurrency" in arrivals for arrivals in experiment.arrivals):
        raise SloBenchError("concurrency(…) has no rate to tune for; choose other arrivals")
    aim = settings.aim
    if CAPACITY in aim.names:  # what a search would refuse is refused before the first server
        options = CapacityOptions(targets=(aim.target,), tolerance=settings.tolerance)
        SearchOptions.of(experiment, options)
    gpus = _gpus(experiment)
    space = space_of(experiment, settings.search, gpus)
    counting = counts_gpus(space)
    if counting and experiment.gpus == (None,) and COST not in aim.names:
        named = [name for name in counting if name in settings.search]
        if named and "instances" in named:
            raise SloBenchError(
                "more instances always carry more: give the number of GPUs (--gpus), or add "
                "the objective cost"
            )
        if experiment.backend == SIMULATED:
            experiment = _with_gpus(experiment, gpus)
    if COST in aim.names:
        if not counting:
            raise SloBenchError(
                "cost is the number of GPUs, but nothing that is searched changes it: search "
                "instances or tp (--search instances=1..8)"
            )
        if experiment.gpus != (None,):
            raise SloBenchError(
                "cost is the number of GPUs, and gpus is set: leave --gpus out, or cost"
            )
    checked(settings.sampler, space.dimensions, len(aim.objectives))
    for workload in settings.confirm_workloads:
        source(WorkloadSpec(workload, trace_format=experiment.trace_format))
    if settings.confirm_backend is not None:
        _check_backend(experiment, settings.confirm_backend)
    return Tuning(experiment, settings, aim, space)


def _gpus(experiment: Experiment) -> int:
    """Number of GPUs: the experiment's, or that of the default configuration.

    Raises:
        SloBenchError: the default does not fit, for another reason than its number of instances.
    """
    if experiment.gpus == (None,) or system(experiment.systems[0]).cluster is None:
        return gpus_of(cell_of(experiment, "default"))
    table = experiment.model_dump(exclude_unset=True) | {"systems": ("vllm",), "parameters": {}}
    return gpus_of(cell_of(Experiment(**table), "default"))


def _check_backend(experiment: Experiment, backend: str) -> None:
    from ...harness.experiments.experiment import backend_of

    if experiment.backend != SIMULATED:
        raise SloBenchError(f"this is tuned on {experiment.backend} already: leave --confirm out")
    real = on_backend(experiment, backend)
    backend_of(real).check(cell_of(real, "confirm"))


def _with_gpus(experiment: Experiment, gpus: int) -> Experiment:
    """The experiment on a fixed number of GPUs, so that configurations can be compared."""
    table = experiment.model_dump(exclude_unset=True) | {"gpus": (gpus,)}
    if table.get("instances", (None,)) != (None,):
        table["instances"] = (None,)
    return Experiment(**table)
