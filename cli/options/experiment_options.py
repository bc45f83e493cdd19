"""Makes an experiment from the options of `slo-bench run` and similar commands."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ...harness.experiments.config.schema import ALTERNATIVES
from ...harness.experiments.config.setting import number_list
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import system
from ...predictors.operators.assembly import is_file
from ...predictors.profiles.profile_format import read_profile
from ...workloads.call_parser import split_outside, value_of
from ...workloads.errors import SloBenchError, UnknownNameError
from .from_schema import Given
from .like import with_like

DEFAULT_SUITE = "quickstart"


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """The values of an option such as `--rates`."""
    if text is None:
        return None
    try:
        return number_list(text)
    except SloBenchError as error:
        raise SloBenchError(f"{option}: {error}") from None


def experiment_of(experiment_options: Given, resumed: Path | None = None) -> Experiment:
    """The experiment in the file, suite or resumed folder, changed by the options.

    Raises:
        SloBenchError: the options contradict each other, or make no experiment.
    """
    experiment_options = with_like(experiment_options)
    if experiment_options.file is not None and experiment_options.suite is not None:
        raise SloBenchError("give an experiment file or --suite, not both")
    if experiment_options.file is not None:
        base = Experiment.load(experiment_options.file)
    elif experiment_options.suite is not None:
        base = Experiment.suite(experiment_options.suite)
    elif resumed is not None and not experiment_options:
        experiment_file = resumed / "experiment.toml"
        if not experiment_file.is_file():
            raise SloBenchError(f"there is nothing to resume in {resumed}: no experiment.toml")
        base = Experiment.load(experiment_file)
    else:
        base = Experiment() if experiment_options else Experiment.suite(DEFAULT_SUITE)
    changed = changed_experiment(base, experiment_options) if experiment_options else base
    if experiment_options.variant is None:
        return changed
    if not changed.variants:
        raise SloBenchError("--variant NAME takes one of an experiment's variants; this has none")
    if experiment_options.variant not in changed.variants:
        raise UnknownNameError("variant", experiment_options.variant, changed.variants)
    return changed.variant(experiment_options.variant)


def changed_experiment(base: Experiment, experiment_options: Given) -> Experiment:
    """The experiment changed by options.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    settings: dict[str, Any] = base.model_dump(exclude_unset=True)
    changes = experiment_options.settings | _implied(experiment_options.settings)
    for path, value in changes.items():
        _set(settings, path, value, changes)
    systems: Sequence[str] = settings.get("systems", base.systems)
    settings["parameters"] = {
        name: dict(parameters) for name, parameters in base.parameters.items() if name in systems
    }
    given_names = set(changes)
    options = [("--set", text) for text in experiment_options.sets] + [
        ("--sweep", t) for t in experiment_options.sweeps
    ]
    for option, text in options:
        name, values = _named_values(option, text)
        if name in given_names:
            raise SloBenchError(f"{name} is given twice; keep one of them")
        given_names.add(name)
        owner, dot, parameter = name.rpartition(".")
        if name in Experiment.model_fields and name != "parameters":
            _set(settings, name, values[0] if len(values) == 1 else tuple(values), given_names)
        elif owner in ("client", "server"):
            _set(settings, name, values[0], given_names)
        else:
            owner = (
                _system_reference(owner, systems, option) if dot else _only(systems, name, option)
            )
            settings["parameters"].setdefault(owner, {})[parameter] = tuple(map(value_of, values))
    system_parameters = settings["parameters"]
    settings["tuning"] = {
        name: record
        for name, record in base.tuning.items()
        if name in systems and system_parameters.get(name) == base.parameters.get(name)
    }
    return Experiment(**settings)


def _implied(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings implied by other options, unless they are given."""
    implied: dict[str, Any] = {}
    if "arrivals" in settings:
        implied["redraw_arrivals"] = True
    if "client.base_urls" in settings:
        implied["backend"] = "openai"
    if "profile" in settings and is_file(settings["profile"]):
        measured = read_profile(settings["profile"])
        for name in ("model", "gpu", "tp", "weight_dtype", "kv_dtype"):
            implied[name] = getattr(measured, name)
        implied = {name: value for name, value in implied.items() if value is not None}
        if settings.get("model", measured.model) == measured.model and measured.model_file:
            return implied | settings | {"model": measured.model_file}
    return implied | settings


def _set(settings: dict[str, Any], path: str, value: object, given_names: Container[str]) -> None:
    """Set one setting; the alternative that it replaces is removed, unless it was given as well."""
    table, dot, name = path.rpartition(".")
    if dot:
        settings[table] = {**settings.get(table, {}), name: value}
        return
    settings[name] = value
    for names in ALTERNATIVES:
        if name in names:
            settings |= {other: None for other in names if other not in given_names}


def _named_values(option: str, text: str) -> tuple[str, list[str]]:
    """Parse the values of `--set` and `--sweep`."""
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not value:
        form = "NAME=VALUE" if option == "--set" else "FIELD=A,B as in tp=1,2"
        raise SloBenchError(f"cannot read {option} {text!r}; write {form}")
    if name == "slo":
        if option == "--sweep":
            raise SloBenchError("an SLO has commas of its own; repeat --slo to compare several")
        return name, [value]
    values = split_outside(value, ",")
    if option == "--set" and len(values) > 1:
        raise SloBenchError(f"--set {name} takes one value; several are for --sweep or --search")
    return name, values


def _system_reference(owner: str, systems: Sequence[str], option: str) -> str:
    """Return the system as given on the command line: by file or by name."""
    by_name = {system(reference).name: reference for reference in systems}
    if owner in systems:
        return owner
    if owner not in by_name:
        raise UnknownNameError(f"system in {option}", owner, by_name)
    return by_name[owner]


def _only(systems: Sequence[str], parameter: str, option: str) -> str:
    """Return the only system; it must have this parameter."""
    bounds = system(systems[0]).bounds() if len(systems) == 1 else {}
    if parameter not in bounds:
        known_names = {*bounds, *Experiment.model_fields} - {"parameters"}
        raise UnknownNameError(f"parameter or setting in {option}", parameter, known_names)
    return systems[0]
