"""The search space of a system: its parameters, and settings of where and how it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna.trial import Trial

from ...harness.core.policy import Bounds
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import declared
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import System, system
from ...harness.servers.launch.backend_names import SIMULATED
from ...harness.servers.server_kinds import LAUNCHED, server_kind
from ...workloads.errors import SloBenchError, UnknownNameError
from .dimension import Dimension, Value, of_bounds, of_values, parse
from .settings import Aim, TuneSettings

Configuration = Mapping[str, Value]
Asked = str | Sequence[Value] | Value  # the range or values of a searched name

PARAMETERS = "parameters"  # all of the system's own
SERVER = "server."  # begins the name of a server's own option

SETTINGS = {  # of an experiment that may be searched
    path: declaration
    for path, declaration in declared(ExperimentSchema).items()
    if declaration.setting.tunable
}
_COUNTING = ("instances", "tp", "pp", "embed_instances")  # they change how many GPUs there are


@dataclass(frozen=True)
class Space:
    """The searched dimensions of `system`, and the default's value in each."""

    system: str
    dimensions: tuple[Dimension, ...]
    defaults: Configuration

    def suggest(self, trial: Trial) -> Configuration:
        """The value of each dimension that the sampler suggests for `trial`."""
        return {dimension.name: dimension.suggest(trial) for dimension in self.dimensions}

    @property
    def default(self) -> Configuration | None:
        """The default as a point of the space; None if it is none."""
        point = {}
        for dimension in self.dimensions:
            value = self.defaults.get(dimension.name)
            if value is None or not dimension.holds(value):
                return None
            point[dimension.name] = dimension.own(value)
        return point

    @property
    def size(self) -> float:
        """Number of configurations in the space."""
        return float(np.prod([dimension.size for dimension in self.dimensions]))

    def neighbours(self, configuration: Configuration, max_points: int) -> list[Configuration]:
        """Those that differ in one dimension, of at most `max_points` in a range, by one step."""
        return [
            {**configuration, dimension.name: value}
            for dimension in self.dimensions
            for value in dimension.neighbours(configuration[dimension.name], max_points)
        ]

    def applied(self, experiment: Experiment, configuration: Configuration) -> Experiment:
        """The experiment with a configuration in place of its own settings.

        Raises:
            SloBenchError: they make no experiment.
        """
        changes: dict[str, Any] = {}
        parameters = dict(experiment.parameters.get(self.system, {}))
        args = list(experiment.server.args)
        for name, value in configuration.items():
            if name.startswith(SERVER):
                args += _server_words(name.removeprefix(SERVER), value)
            elif name in SETTINGS:
                changes[name] = (value,)
            else:
                parameters[name] = (value,)
        if "instances" in changes:
            changes["gpus"] = (None,)
        table = experiment.model_dump(exclude_unset=True) | changes
        if parameters:
            table["parameters"] = {self.system: parameters}
        if args != list(experiment.server.args):
            table["server"] = {**table.get("server", {}), "args": tuple(args)}
        return Experiment(**table)


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


def _server_words(name: str, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def key_of(configuration: Configuration) -> str:
    """A short name of a configuration, the same in every process."""
    text = json.dumps(sorted(configuration.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def space_of(experiment: Experiment, searched: Mapping[str, Asked], gpus: int | None) -> Space:
    """The search space: by default all parameters of the system that the machine does not give,
    else the named dimensions.

    Args:
        experiment: one system, with one value for every setting.
        searched: name to range or values, as in `--search`; "" is the whole range of a parameter.
        gpus: the number of GPUs, if it is fixed: it limits numbers of instances.

    Raises:
        SloBenchError: a name is unknown, or a range is missing or beyond a parameter's bounds.
    """
    name = experiment.systems[0]
    stock = system(name)
    bounds = _searchable(stock, experiment.backend)
    set_already = experiment.parameters.get(name, {})
    dimensions: dict[str, Dimension] = {}
    for full_name, values in (searched or {PARAMETERS: ""}).items():
        if full_name == PARAMETERS:
            for parameter, parameter_bounds in bounds.items():
                dimension = (
                    None if parameter_bounds.environment else of_bounds(parameter, parameter_bounds)
                )
                if dimension is not None and parameter not in set_already and dimension.size > 1:
                    dimensions.setdefault(parameter, _affordable(dimension, stock, gpus))
            continue
        short_name = _short(full_name, stock)
        dimension = _dimension(short_name, values, stock, bounds, experiment)
        dimensions[short_name] = dimension if values != "" else _affordable(dimension, stock, gpus)
        if short_name in set_already or (
            short_name in SETTINGS and _is_set(experiment, short_name)
        ):
            raise SloBenchError(f"{short_name} is both set and searched; keep one of them")
    if not dimensions:
        raise SloBenchError(
            f"{stock.name} has no parameters to search; name settings, as in --search tp=1,2,4"
        )
    return Space(name, tuple(dimensions.values()), _defaults(experiment, stock, dimensions))


def _searchable(stock: System, backend: str) -> dict[str, Bounds]:
    """The parameters; of a server as it is those that are options of its own."""
    options = server_kind(backend).own_options if stock.name == backend else stock.bounds()
    return {name: bounds for name, bounds in stock.bounds().items() if name in options}


def _short(full_name: str, stock: System) -> str:
    owner, dot, rest = full_name.partition(".")
    if not dot or full_name.startswith(SERVER):
        return full_name
    if owner != stock.name:
        raise UnknownNameError("system in --search", owner, [stock.name])
    return rest


def _dimension(
    name: str, values: Asked, stock: System, bounds: Mapping[str, Bounds], experiment: Experiment
) -> Dimension:
    if name.startswith(SERVER):
        if experiment.backend not in LAUNCHED:
            raise SloBenchError(
                f"{name} is an option of a server; search it with `slo-bench tune server`"
            )
        return _read(name, values, whole=False, needs_range=True)
    if name in bounds:
        parameter_bounds = bounds[name]
        if values == "":
            whole_range = of_bounds(name, parameter_bounds)
            if whole_range is None:
                raise SloBenchError(
                    f"{stock.name}.{name} has no bounds ({parameter_bounds}); give the range, as "
                    f"in --search {name}=1..10"
                )
            return whole_range
        read = _read(name, values, whole=parameter_bounds.whole, needs_range=False)
        _check_bounds(read, parameter_bounds, stock.name)
        return read
    if name not in SETTINGS:
        raise UnknownNameError(
            "parameter or setting in --search", name, [*bounds, *SETTINGS, PARAMETERS]
        )
    read = _read(name, values, whole=SETTINGS[name].kind is int, needs_range=True)
    for value in read.points(2):
        changed: dict[str, Any] = {name: value}
        Experiment(**changed)  # raises if a value is invalid
    return read


def _read(name: str, values: Asked, *, whole: bool, needs_range: bool) -> Dimension:
    if needs_range and values == "":
        raise SloBenchError(f"give the values of {name} to search, as in --search {name}=1,2,4")
    if isinstance(values, str):
        return parse(name, values, whole=whole)
    return of_values(name, list(values) if isinstance(values, Sequence) else [values])


def _check_bounds(read: Dimension, bounds: Bounds, owner: str) -> None:
    values = read.points(2)
    if bounds.choices is None and read.choices is None and not bounds.file:
        values = (int(read.low), int(read.high)) if read.whole else (read.low, read.high)
        if bounds.whole and not read.whole:
            raise SloBenchError(f"{owner}.{read.name} takes whole numbers, but {read} is searched")
    for value in values:
        bounds.check(f"{owner}.{read.name}", value)


def _affordable(dimension: Dimension, stock: System, gpus: int | None) -> Dimension:
    """A parameter that counts instances no higher than there are GPUs for the instances it
    makes.
    """
    if gpus is None or not dimension.whole or stock.cluster is None:
        return dimension
    name = dimension.name
    if name not in stock.cluster.bounds():
        return dimension
    others = {
        other: int(parameter_bounds.low)
        for other, parameter_bounds in stock.cluster.bounds().items()
        if parameter_bounds.whole
        and parameter_bounds.low is not None
        and other != name
        and _counts(stock, other)
    }
    if not _counts(stock, name):
        return dimension
    high = int(dimension.low)
    while high < dimension.high:
        bigger = stock.with_parameters(**others, **{name: high + 1})
        if bigger.least_instances > gpus:
            break
        high += 1
    return replace(dimension, high=high, log=False)


def _counts(stock: System, name: str) -> bool:
    """Whether a parameter is a number of instances."""
    now = stock.parameters()[name]
    bounds = stock.bounds()[name]
    if isinstance(now, bool) or not isinstance(now, int):
        return False
    now = max(1, now)  # 0: as many as the load needs, or all others
    other = now + 1 if bounds.high is None or now + 1 <= bounds.high else now - 1
    return stock.with_parameters(**{name: other}).least_instances != stock.least_instances


def counts_gpus(space: Space) -> tuple[str, ...]:
    """The dimensions that change a configuration's number of GPUs, unless that is fixed."""
    stock = system(space.system)
    names, bounds = [dimension.name for dimension in space.dimensions], stock.bounds()
    return tuple(n for n in names if n in _COUNTING or (n in bounds and _counts(stock, n)))


def _is_set(experiment: Experiment, name: str) -> bool:
    return bool(getattr(experiment, name) != SETTINGS[name].default)


def _defaults(
    experiment: Experiment, stock: System, dimensions: Mapping[str, Dimension]
) -> dict[str, Value]:
    parameters = stock.parameters()
    defaults: dict[str, Value] = {}
    for name in dimensions:
        value = None
        if name in parameters:
            value = parameters[name]
        elif name in SETTINGS:
            value = getattr(experiment, name)[0]
            if name == "instances" and value is None and experiment.gpus == (None,):
                value = stock.least_instances
            if name == "router" and value is None and experiment.backend == SIMULATED:
                value = stock.router
        if value is not None:
            defaults[name] = value
    return defaults
