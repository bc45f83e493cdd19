"""What was tested, in a few lines: model, GPUs, workload, SLO, seeds and duration."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...harness.experiments.allowances import configurations
from ...harness.experiments.config.schema import DEFAULT_SEEDS, ExperimentSchema
from ...harness.experiments.config.setting import listed
from ...harness.results.read_run import RunResults, detail_file, read_table
from ...predictors.operators.assembly import is_file
from ...predictors.profiles.profile_format import outside_scope
from ...predictors.profiles.scope import Range, middle_range
from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_toml
from ...workloads.slo import ChoiceBound, FixedBound, SloBound, UniformBound, parse_slo
from ...workloads.source import catalogue
from ..figures.figure import rate_text, seconds_text
from ..figures.levels import offered, origin

_MOST_NAMED = 4  # workloads, models or SLOs; more are counted
_DECIDING = {
    "chunk_tokens": "chunk",
    "chunked_prefill_tokens": "chunk",
    "max_num_batched_tokens": "budget",
    "token_budget": "budget",
    "max_batch": "batch",
}
"""Parameters that decide how a system does, and what they are called beside its name."""

_UNITS = {
    "chunk": "prompt tokens in a step",
    "budget": "tokens in a step",
    "batch": "requests",
}


def experiment_lines(
    runs: Sequence[RunResults], cells: pd.DataFrame, *, search: bool = False
) -> list[str]:
    """Lines that name what the cells of these runs tested; `search`: each has a seed of its own."""
    tables = [table for run in runs if (table := _table(run)) is not None]
    models = _named([f"{name}" for name in dict.fromkeys(cells["model"])], "models")
    hardware = " and ".join(_gpus(cells, str(gpu)) for gpu in dict.fromkeys(cells["gpu"]))
    slos = list(dict.fromkeys(text for table in tables for text in slo_texts(table)))
    lines = [
        f"{origin(cells)}: {models} on {hardware}",
        f"workload: {_named(list(_workloads(runs, cells)), 'workloads')}{_rates(cells, tables)}",
        f"SLO: {_named(slos, 'SLOs')}" if slos else "",
        f"runs: {_length(cells, search=search)}",
        *_beyond_profiles(runs, cells, tables),
    ]
    return list(filter(None, lines))


def _beyond_profiles(
    runs: Sequence[RunResults], cells: pd.DataFrame, tables: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A line for each calibrated profile that is used outside the loads that it was made with."""
    named = {
        (name, server)
        for table in tables
        for name in listed(table.get("profile", ()))
        for server in listed(table.get("server_version"))
    }
    for name, server in sorted(named, key=str):
        with contextlib.suppress(SloBenchError):  # a file that has gone since
            if is_file(name) and (text := outside_scope(name, _uses(runs, cells), server)):
                yield text


def _uses(runs: Sequence[RunResults], cells: pd.DataFrame) -> dict[str, Range]:
    """Loads of an instance, and most lengths, by the names of a profile's scope."""
    instances = cells.get("instances", 1)
    uses = {}
    if "level_rps" in cells and (rates := (cells["level_rps"] / instances).dropna()).any():
        uses["rate_rps"] = float(rates.min()), float(rates.max())
        if "e2e_mean_s" in cells and not (at_once := (rates * cells["e2e_mean_s"]).dropna()).empty:
            uses["concurrency"] = float(at_once.min()), float(at_once.max())
    for _, rows in cells.groupby("workload", sort=False):
        with contextlib.suppress(SloBenchError):  # without records
            first = rows.iloc[0]
            path = detail_file(runs[int(first["folder"])].path / "requests", str(first["cell"]))
            requests = read_table(path, ("prompt_tokens", "expected_output_tokens"))
            for column, name in (
                ("prompt_tokens", "prompt_tokens"),
                ("expected_output_tokens", "output_tokens"),
            ):
                low, high = middle_range(requests[column].to_numpy(dtype=np.float64))
                lowest, highest = uses.get(name, (low, high))
                uses[name] = min(low, lowest), max(high, highest)
    return uses


def lines_of_settings(experiment_toml: str) -> list[str]:
    """Lines that name what an experiment tests, by its settings alone; none where it has none."""
    try:
        table = parse_toml(experiment_toml)
    except tomllib.TOMLDecodeError:
        return []
    seeds = table.get("seeds", DEFAULT_SEEDS)
    if "workload" not in table or not isinstance(seeds, int):
        return []
    origin_text = "simulated" if table.get("backend", "simulated") == "simulated" else "measured"
    models = _named(list(map(str, listed(table.get("model", "several models")))), "models")
    gpus = " and ".join(map(str, listed(table.get("gpu", "unknown"))))
    count = table.get("gpus")
    workloads = [f"{name}{_lengths(str(name), table)}" for name in listed(table["workload"])]
    lengths = [f"{n:,} requests" for n in listed(table.get("requests", ())) if n]
    lengths += [f"{s:g}\xa0s of arrivals" for s in listed(table.get("duration_s", ())) if s]
    runs = f"runs: {seeds}\xa0seed{'s' * (seeds > 1)}"
    return [
        f"{origin_text}: {models} on {f'{count} × ' if isinstance(count, int) else ''}{gpus}",
        f"workload: {_named(workloads, 'workloads')}",
        f"SLO: {_named(list(slo_texts(table)), 'SLOs')}",
        f"{runs} of {' or '.join(lengths)}" if lengths else runs,
    ]


def _table(run: RunResults) -> dict[str, Any] | None:
    try:
        return parse_toml(run.experiment_toml)
    except tomllib.TOMLDecodeError:
        return None  # the report shows the file as it is


def _named(texts: Sequence[str], noun: str) -> str:
    return ", ".join(texts) if len(texts) <= _MOST_NAMED else f"{len(texts)} {noun}"


def _gpus(cells: pd.DataFrame, gpu: str) -> str:
    counts = sorted(set(cells.loc[cells["gpu"] == gpu, "gpus"].dropna()))
    low, high = (f"{counts[end]:g}" for end in (0, -1)) if counts else ("?", "?")
    return f"{low} × {gpu}" if low == high else f"{low} to {high} × {gpu}"


def slo_texts(table: Mapping[str, Any]) -> Iterator[str]:
    """Each SLO of an experiment's settings in words, times its scale."""
    scales = [f"{scale:g} × " if scale != 1 else "" for scale in listed(table.get("slo_scale", 1))]
    for slo in listed(table.get("slo", "")):
        with contextlib.suppress(SloBenchError):
            words = slo_words(slo) or "the workload's own"
            yield from (f"{scale}({words})" if scale else words for scale in scales)


def slo_words(slo: str | Mapping[str, Any]) -> str:
    """`TTFT ≤ 1 s, TPOT ≤ 150 ms`, by class of requests where it differs; empty without bounds."""
    parts = []
    for entry in parse_slo(slo).entries:
        bounds = (f"{name.upper()}\xa0≤\xa0{_bound(b)}" for name, b in entry.bounds.items())
        parts.append(f"{entry.class_name}: " * bool(entry.class_name) + ", ".join(bounds))
    return "; ".join(parts)


def _bound(bound: SloBound) -> str:
    if isinstance(bound, UniformBound):
        return f"{_time(bound.low_s)} to {_time(bound.high_s)} by request"
    if isinstance(bound, ChoiceBound):
        return f"{' or '.join(map(_time, bound.seconds))} by request"
    return _time(bound.seconds) if isinstance(bound, FixedBound) else str(bound)


def _time(seconds: float) -> str:
    return seconds_text(seconds).replace(" ", "\xa0")


def _workloads(runs: Sequence[RunResults], cells: pd.DataFrame) -> Iterator[str]:
    """`sharegpt (mean 226 prompt, 191 output tokens)`, by the requests of a cell of each."""
    for name, rows in cells.groupby("workload", sort=False):
        first = rows.iloc[0]
        run = runs[int(first["folder"])]
        try:
            path = detail_file(run.path / "requests", str(first["cell"]))
            requests = read_table(path, ("prompt_tokens", "expected_output_tokens"))
            prompt, output = (float(requests[column].mean()) for column in requests)
            yield f"{name} (mean {prompt:,.0f} prompt, {output:,.0f} output tokens)"
        except SloBenchError:  # without records
            yield f"{name}{_lengths(str(name), _table(run) or {})}"


def _lengths(workload: str, table: Mapping[str, Any]) -> str:
    """The settings that replace a workload's lengths, in brackets, else the catalogue's means."""
    settings = ("prompt_tokens", "output_tokens", "sessions")
    replaced = [f"{name} {value}" for name in settings for value in listed(table.get(name, ()))]
    if replaced:
        return f" ({', '.join(replaced)})"
    entry = catalogue().get(workload)
    if entry is None or entry.mean_prompt_tokens is None or entry.mean_output_tokens is None:
        return ""
    means = f"mean {entry.mean_prompt_tokens:,.0f} prompt, {entry.mean_output_tokens:,.0f} output"
    return f" ({means} tokens)"


def _rates(cells: pd.DataFrame, tables: Sequence[Mapping[str, Any]]) -> str:
    """The rates that were offered, or that came about where none was."""
    rates = sorted(set(cells["level_rps"]))
    if offered(cells) == "at once":
        return ", all requests at once"
    low, high = (rate_text(rates[end]) for end in (0, -1))
    span = f"{low}\xa0req/s" if low == high else f"{low}\xa0to\xa0{high}\xa0req/s"
    arrivals = dict.fromkeys(str(a) for t in tables for a in listed(t.get("arrivals", ())))
    if arrivals and all(text.startswith("concurrency") for text in arrivals):
        return f", {_named(list(arrivals), 'numbers of clients')}: {span}"
    return f", {span}" if low == high else f", {len(rates)}\xa0rates\xa0from\xa0{span}"


def _length(cells: pd.DataFrame, *, search: bool) -> str:
    seeds = cells["seed"].nunique()
    text = f"{len(cells)} of " if search else f"{seeds}\xa0seed{'s' * (seeds > 1)}, "
    text += f"{_span(cells['requests'], '{:,.0f}')}\xa0requests{'' if search else ' a run'}"
    if "arrival_window_s" in cells and cells["arrival_window_s"].notna().all():
        spans_s = cells["arrival_window_s"]
        low, high = (_time(float(span_s)) for span_s in (spans_s.min(), spans_s.max()))
        text += f", arriving in {low}" + f" to {high}" * (low != high)
    return text


def _span(values: pd.Series[Any], form: str) -> str:
    low, high = (form.format(float(value)) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def deciding_settings(
    runs: Sequence[RunResults], cells: pd.DataFrame
) -> dict[tuple[int, str], str]:
    """`chunk 512` by the run's place and the name of a simulated system: the setting that decides
    how it does there.

    Systems whose setting is swept (their series say it), and those not known here, are left out.
    """
    settings: dict[tuple[int, str], str] = {}
    for folder, run in enumerate(runs):
        try:
            experiment = ExperimentSchema(**parse_toml(run.experiment_toml))
            if experiment.backend != "simulated" or experiment.variants:
                continue
            for reference in experiment.systems:
                system = next(configurations(reference, experiment))
                for parameter, value in system.parameters().items():
                    word = _DECIDING.get(parameter)
                    if word and value and f"{system.name}.{parameter}" not in cells:
                        settings[folder, system.name] = f"{word}\xa0{value:,}"
                        break
        except (SloBenchError, tomllib.TOMLDecodeError):
            continue
    return settings


def settings_note(settings: Mapping[tuple[int, str], str]) -> str:
    """`chunk of prompt tokens in a step, batch of requests`; empty without settings."""
    words = dict.fromkeys(text.partition("\xa0")[0] for text in settings.values())
    return ", ".join(f"{word} of {_UNITS[word]}" for word in words)
