"""What an experiment allows each of its systems: router, drop rule and parameters, and how the
parameters were chosen. Comparisons are fair where these are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.cluster_policy import overrides
from ..core.phase_capacity import PhaseCapacity
from ..policies.systems import System, system
from .config.schema import ExperimentSchema, Parameter, parameter_combinations

HEADS = (
    "system",
    "router",
    "drops or rejects a request when",
    "parameters",
    "how they were chosen",
)


@dataclass(frozen=True)
class Allowance:
    """One system of an experiment."""

    system: str
    router: str
    drop_rules: tuple[str, ...]  # of its configurations; "": it drops none
    parameters: Mapping[str, tuple[Parameter, ...]]  # those that the experiment sets
    defaults: Mapping[str, tuple[Parameter, ...]]  # the others
    chosen: str

    @property
    def row(self) -> tuple[str, ...]:
        """Its texts, in the order of `HEADS`."""
        rules = [rule for rule in self.drop_rules if rule]
        some = " (in some configurations)" if rules and "" in self.drop_rules else ""
        values = (
            f"{name}={' | '.join(map(_text, values))}" for name, values in self.parameters.items()
        )
        return (
            self.system,
            self.router,
            ("; ".join(rules) or "never") + some,
            ", ".join(values) or "defaults",
            self.chosen,
        )


def allowances(experiment: ExperimentSchema) -> list[Allowance]:
    """What each system of `experiment` is allowed; none where servers run already.

    Raises:
        SloBenchError: a system or parameter is unknown.
    """
    if experiment.backend == "openai":
        return []
    rows = []
    for variant, schema in experiment.each_variant().items():
        for allowance in (_allowance(name, schema) for name in schema.systems):
            rows.append(
                replace(allowance, system=f"{allowance.system} ({variant})")
                if variant
                else allowance
            )
    return rows


def configurations(name: str, experiment: ExperimentSchema) -> Iterator[System]:
    """A system with every combination of its parameters."""
    for parameters in parameter_combinations(experiment, name):
        yield system(name).with_parameters(**parameters)


def _allowance(name: str, experiment: ExperimentSchema) -> Allowance:
    configured = list(configurations(name, experiment))
    parameters = experiment.parameters.get(name, {})
    record = experiment.tuning.get(name)
    if record is not None:
        chosen = record.text
    elif any(len(values) > 1 for values in parameters.values()):
        alone = experiment.combinations == "one-at-a-time"
        chosen = "each value is run, one at a time" if alone else "all values are run"
    else:
        chosen = "set in the experiment" if parameters else "defaults"
    by_load = _by_load(configured[0])
    chosen = "; ".join((chosen, *(f"{name} by the load" for name in by_load)))
    return Allowance(
        configured[0].name,
        _router(configured[0], experiment),
        tuple(dict.fromkeys(configuration.drop_rule for configuration in configured)),
        parameters,
        {
            name: (value,)
            for name, value in configured[0].parameters().items()
            if name not in parameters and name not in by_load
        },
        chosen,
    )


def _by_load(configuration: System) -> list[str]:
    """The parameters that the system chooses by the load."""
    if configuration.cluster is None or not overrides(configuration.cluster, "for_load"):
        return []
    settled = configuration.cluster.for_load(
        PhaseCapacity(1.0, 1.0), max(2, configuration.least_instances)
    )
    return [
        name
        for name in settled.bounds()
        if getattr(settled, name) != getattr(configuration.cluster, name)
    ]


def _router(configuration: System, experiment: ExperimentSchema) -> str:
    if configuration.sharing is not None or configuration.cluster is not None:
        return "its own"
    counts = (*experiment.instances, *experiment.gpus)
    several = any(count not in (None, 1) for count in counts) or any(
        system(name).least_instances > 1 for name in experiment.systems
    )
    if not several:
        return "none: one instance"
    return " | ".join(dict.fromkeys(router or configuration.router for router in experiment.router))


def _text(value: Parameter) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
