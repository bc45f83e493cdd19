"""Makes an experiment from the options of `slo-bench run` and similar commands."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ...harness.experiments.config.schema import ALTERNATIVES
from ...harness.experiments.config.setting import number_list
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import system
from ...predictors.operators.assembly import chosen_engine
from ...predictors.profiles.profile import read_profile
from ...workloads.call_parser import split_outside, value_of
from ...workloads.errors import SloBenchError, UnknownNameError
from .from_schema import Given

DEFAULT_SUITE = "quickstart"


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """The values of an option such as `--rates`."""
    if text is None:
        return None
    try:
        return number_list(text)
    except SloBenchError as error:
        raise SloBenchError(f"{option}: {error}") from None


def experiment_of(given: Given, resumed: Path | None = None) -> Experiment:
    """The experiment in the file, suite or resumed folder, changed by the options.

    Raises:
        SloBenchError: the options contradict each other, or make no experiment.
    """
    if given.file is not None and given.suite is not None:
        raise SloBenchError("give an experiment file or --suite, not both")
    if given.file is not None:
        base = Experiment.load(given.file)
    elif given.suite is not None:
        base = Experiment.suite(given.suite)
    elif resumed is not None and not given:
        kept = resumed / "experiment.toml"
        if not kept.is_file():
            raise SloBenchError(f"there is nothing to resume in {resumed}: no experiment.toml")
        base = Experiment.load(kept)
    else:
        base = Experiment() if given else Experiment.suite(DEFAULT_SUITE)
    changed = changed_experiment(base, given) if given else base
    if given.variant is None:
        return changed
    if not changed.variants:
        raise SloBenchError("--variant NAME takes one of an experiment's variants; this has none")
    if given.variant not in changed.variants:
        raise UnknownNameError("variant", given.variant, changed.variants)
    return changed.variant(given.variant)


def changed_experiment(base: Experiment, given: Given) -> Experiment:
    """The experiment changed by options.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    settings: dict[str, Any] = base.model_dump(exclude_unset=True)
    asked = given.settings | _implied(given.settings)
    for path, value in asked.items():
        _set(settings, path, value, asked)
    systems: Sequence[str] = settings.get("systems", base.systems)
    settings["parameters"] = {
        name: dict(parameters) for name, parameters in base.parameters.items() if name in systems
    }
    seen = set(asked)
    options = [("--set", text) for text in given.sets] + [("--sweep", t) for t in given.sweeps]
    for option, text in options:
        name, values = _named_values(option, text)
        if name in seen:
            raise SloBenchError(f"{name} is given twice; keep one of them")
        seen.add(name)
        owner, dot, parameter = name.rpartition(".")
        if name in Experiment.model_fields and name != "parameters":
            _set(settings, name, values[0] if len(values) == 1 else tuple(values), seen)
        elif owner in ("client", "server"):
            _set(settings, name, values[0], seen)
        else:
            owner = _asked_name(owner, systems, option) if dot else _only(systems, name, option)
            settings["parameters"].setdefault(owner, {})[parameter] = tuple(map(value_of, values))
    kept = settings["parameters"]
    settings["tuning"] = {
        name: record
        for name, record in base.tuning.items()
        if name in systems and kept.get(name) == base.parameters.get(name)
    }
    return Experiment(**settings)


def _implied(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings implied by other options, unless they are given."""
    found: dict[str, Any] = {}
    if "arrivals" in given:
        found["redraw_arrivals"] = True
    if "client.base_urls" in given:
        found["backend"] = "openai"
    if "profile" in given and chosen_engine(given["profile"]) is None:
        measured = read_profile(given["profile"])
        for name in ("model", "gpu", "tp", "weight_dtype", "kv_dtype"):
            found[name] = getattr(measured, name)
        found = {name: value for name, value in found.items() if value is not None}
        if given.get("model", measured.model) == measured.model and measured.model_file:
            return found | given | {"model": measured.model_file}
    return found | given


def _set(settings: dict[str, Any], path: str, value: object, given: Container[str]) -> None:
    """Set one setting; the alternative that it replaces is removed, unless it was given as well."""
    table, dot, name = path.rpartition(".")
    if dot:
        settings[table] = {**settings.get(table, {}), name: value}
        return
    settings[name] = value
    for names in ALTERNATIVES:
        if name in names:
            settings |= {other: None for other in names if other not in given}


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


def _asked_name(owner: str, systems: Sequence[str], option: str) -> str:
    """Return the system as given on the command line: by file or by name."""
    by_name = {system(asked).name: asked for asked in systems}
    if owner in systems:
        return owner
    if owner not in by_name:
        raise UnknownNameError(f"system in {option}", owner, by_name)
    return by_name[owner]


def _only(systems: Sequence[str], parameter: str, option: str) -> str:
    """Return the only system; it must have this parameter."""
    bounds = system(systems[0]).bounds() if len(systems) == 1 else {}
    if parameter not in bounds:
        known = {*bounds, *Experiment.model_fields} - {"parameters"}
        raise UnknownNameError(f"parameter or setting in {option}", parameter, known)
    return systems[0]
