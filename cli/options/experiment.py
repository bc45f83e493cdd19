"""From the options of `slo-bench run` and its like to an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...harness.experiments.config.load import rates_text
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import system
from ...predictors.profiles.profile import read_profile
from ...workloads.call_parser import split_outside, value_of
from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.parsing import parse_json

DEFAULT_SUITE = "quickstart"
_AS_NAMED = (
    "arrivals",
    "requests",
    "slo_scale",
    "seeds",
    "seed",
    "model",
    "gpu",
    "gpus",
    "tp",
    "pp",
    "instances",
    "router",
    "device_map",
    "failures",
    "embedder",
    "length_predictor",
    "models",
    "overlong_requests",
    "records",
)
_INSTEAD = {
    "rates": ("replay_speeds", "load_factors"),
    "replay_speeds": ("rates", "load_factors"),
    "load_factors": ("rates", "replay_speeds"),
    "requests": ("duration_s",),
    "duration_s": ("requests",),
}


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """The values of `--rates`, `--replay-speed` and `--load-factors`."""
    if text is None:
        return None
    try:
        return rates_text(text)
    except SloBenchError as error:
        raise SloBenchError(f"{option}: {error}") from None


def asked_experiment(given: Mapping[str, Any]) -> Experiment:
    """The experiment that options ask for, by the names that `run` gives them.

    An option that a command does not have is one that was not given.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    resume, out = given.get("resume"), given.get("out")
    if resume and out is None:
        raise SloBenchError("--resume needs the folder to go on with: --out DIR")
    return experiment_of(
        file=given.get("file"),
        suite=given.get("suite"),
        asked=_settings(given),
        sweeps=given.get("sweep") or [],
        resumed=out if resume else None,
    )


def changed_experiment(base: Experiment, given: Mapping[str, Any]) -> Experiment:
    """The experiment changed by options, by the names that `run` gives them.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    return _changed(base, _settings(given), given.get("sweep") or [])


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options set, by the names of an experiment's settings."""
    settings: dict[str, Any] = {name: given.get(name) for name in _AS_NAMED}
    if given.get("profile") is not None:
        measured = read_profile(given["profile"])
        for name in ("model", "gpu", "tp", "weight_dtype", "kv_dtype"):
            if settings.get(name) is None:
                settings[name] = getattr(measured, name)
        if settings["model"] == measured.model and measured.model_file:
            settings["model"] = measured.model_file
    base_url, server_arg = given.get("base_url"), given.get("server_arg")
    settings |= {
        "systems": tuple(name for one in given.get("system") or () for name in one.split(",")),
        "workload": tuple(given.get("workload") or ()),
        "redraw_arrivals": None if given.get("arrivals") is None else True,
        "rates": numbers(given.get("rates"), "--rates"),
        "replay_speeds": numbers(given.get("replay_speed"), "--replay-speed"),
        "load_factors": numbers(given.get("load_factors"), "--load-factors"),
        "duration_s": given.get("duration"),
        "warmup_s": given.get("warmup"),
        "slo": tuple(given.get("slo") or ()),
        "profile": None if given.get("profile") is None else str(given["profile"]),
        "backend": given.get("backend") or ("openai" if base_url else None),
        "server": {"args": tuple(server_arg)} if server_arg else None,
        "client": client_of(
            base_url=base_url,
            header=given.get("header"),
            body=given.get("body"),
            tokenizer=given.get("tokenizer"),
            api=given.get("api"),
            api_key_env=given.get("api_key_env"),
            prompt_format=given.get("prompt_format"),
            time_limit_s=given.get("time_limit"),
            processes=given.get("processes"),
            save_token_times=given.get("save_token_times") or None,
            export=given.get("export"),
        )
        or None,
    }
    return {name: value for name, value in settings.items() if value not in (None, ())}


def client_of(
    *,
    base_url: Sequence[str] | None,
    header: Sequence[str] | None,
    body: Sequence[str] | None,
    tokenizer: Path | None,
    **settings: object,
) -> dict[str, Any]:
    """The options that say how a real server is asked, as the table `client`.

    Raises:
        SloBenchError: a header or a field of the body cannot be read.
    """
    client: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if base_url:
        client["base_urls"] = tuple(base_url)
    if header:
        client["headers"] = dict(_named_value(one, "--header", "NAME=VALUE") for one in header)
    if body:
        pairs = (_named_value(one, "--body", "KEY=JSON") for one in body)
        client["body"] = {name: _json(name, text) for name, text in pairs}
    if tokenizer is not None:
        client["tokenizer"] = str(tokenizer.absolute())
    return client


def _named_value(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        # The value may be a secret: it is not repeated.
        raise SloBenchError(f"cannot read {option} {name!r}; write {form}")
    return name.strip(), value.strip()


def _json(name: str, text: str) -> Any:
    """JSON, or a plain word for which nobody wants to write quotes."""
    try:
        return parse_json(text)
    except ValueError:
        if text[:1] in ("{", "[", '"'):
            raise SloBenchError(f"--body {name}: {text!r} is no JSON") from None
        return text


def experiment_of(
    *,
    file: Path | None,
    suite: str | None,
    asked: Mapping[str, Any],
    sweeps: Sequence[str],
    resumed: Path | None,
) -> Experiment:
    """The experiment in the file, suite or resumed folder, changed by the options.

    Raises:
        SloBenchError: the options contradict each other, or make no experiment.
    """
    if file is not None and suite is not None:
        raise SloBenchError("give an experiment file or --suite, not both")
    bare = not asked and not sweeps
    if file is not None:
        base = Experiment.load(file)
    elif suite is not None:
        base = Experiment.suite(suite)
    elif resumed is not None and bare:
        kept = resumed / "experiment.toml"
        if not kept.is_file():
            raise SloBenchError(f"there is nothing to resume in {resumed}: no experiment.toml")
        base = Experiment.load(kept)
    else:
        base = Experiment.suite(DEFAULT_SUITE) if bare else Experiment()
    return base if bare else _changed(base, asked, sweeps)


def _changed(base: Experiment, asked: Mapping[str, Any], sweeps: Sequence[str]) -> Experiment:
    settings: dict[str, Any] = base.model_dump(exclude_unset=True)
    asked = dict(asked)
    tables = {name: asked.pop(name, {}) for name in ("client", "server")}
    for name, value in asked.items():
        settings[name] = value
        settings |= {other: None for other in _INSTEAD.get(name, ()) if other not in asked}
    for name, table in tables.items():
        settings[name] = settings.get(name, {}) | table
    systems: Sequence[str] = settings.get("systems", base.systems)
    settings["parameters"] = {
        name: dict(parameters) for name, parameters in base.parameters.items() if name in systems
    }
    seen = set(asked)
    for sweep in sweeps:
        name, equals, text = sweep.partition("=")
        name = name.strip()
        if not equals or not text.strip():
            raise SloBenchError(f"cannot read --sweep {sweep!r}; write FIELD=A,B as in tp=1,2")
        if name in seen:
            raise SloBenchError(f"{name} is given twice; keep one of them")
        seen.add(name)
        if name == "slo":
            raise SloBenchError("an SLO has commas of its own; repeat --slo to compare several")
        values = split_outside(text, ",")
        owner, dot, parameter = name.rpartition(".")
        if dot:
            choices = settings["parameters"].setdefault(_asked_name(owner, systems), {})
            choices[parameter] = tuple(map(value_of, values))
        elif name not in Experiment.model_fields or name == "parameters":
            raise UnknownNameError(
                "setting in --sweep", name, set(Experiment.model_fields) - {"parameters"}
            )
        else:
            settings[name] = values[0] if len(values) == 1 else tuple(values)
            settings |= {other: None for other in _INSTEAD.get(name, ()) if other not in seen}
    return Experiment(**settings)


def _asked_name(owner: str, systems: Sequence[str]) -> str:
    """The system as it was asked for, by that or by its name."""
    by_name = {system(asked).name: asked for asked in systems}
    if owner in systems:
        return owner
    if owner not in by_name:
        raise UnknownNameError("system in --sweep", owner, by_name)
    return by_name[owner]
