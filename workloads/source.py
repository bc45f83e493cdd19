"""Load a workload by its specification: a catalogue name, a trace file, lengths, or a mix.

source = load_source("azure-conv")
workload = source.make(rate_rps=6.45, requests=1000, seed=0, slo=parse_slo("ttft=1"))

The catalogue has figures of public data sets, each with its origin (`catalogue.toml`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from .arrivals import ArrivalProcess, parse_arrivals
from .base import DrawnSource, Member, MixedSource, TaskSource, TraceSource, WorkloadSource
from .call_parser import Call, build, parse_call, positive
from .errors import SloBenchError, UnknownNameError, by_name
from .lengths import (
    Fixed,
    LengthDistribution,
    MixtureComponent,
    PairLengths,
    Quantiles,
    pair,
    parse_lengths,
)
from .models import Models, MultiModelArrivals, parse_models
from .prefixes import Continuations, HotPrefixes
from .sessions import CONVERTERS, Agents, Sessions, parse_agents, parse_sessions


@dataclass(frozen=True)
class Entry:
    """One shipped workload.

    `mean_prompt_tokens` and `mean_output_tokens` are the origin's true means, where there is one
    to compare with; `natural_rate_rps` is the rate at which the origin's requests came.
    """

    name: str
    title: str
    origin: str
    licence: str
    note: str
    lengths: PairLengths
    requests_seen: int | None = None
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    natural_rate_rps: float | None = None
    prefix: Continuations | HotPrefixes | None = None


@functools.cache
def catalogue() -> Mapping[str, Entry]:
    """Entries of all shipped workloads, by name."""
    text = resources.files(__package__).joinpath("catalogue.toml").read_text("utf-8")
    return {name: _entry(name, table) for name, table in tomllib.loads(text).items()}


def find(name: str) -> Entry:
    """A shipped workload.

    Raises:
        UnknownNameError: there is none of this name.
    """
    return by_name("workload", name, catalogue())


def _entry(name: str, table: dict[str, Any]) -> Entry:
    values = dict(table)
    parts = tuple(_part(part) for part in values.pop("part"))
    lengths = PairLengths(parts, values.pop("max_total_tokens", None))
    if "prefix" in values:
        values["prefix"] = Continuations(**values["prefix"])
    elif "hot" in values:
        values["prefix"] = HotPrefixes(**values.pop("hot"))
    return Entry(name=name, lengths=lengths, **values)


def _part(table: dict[str, Any]) -> MixtureComponent:
    values = {name: value for name, value in table.items() if name != "title"}
    values |= {name: _lengths(values[name]) for name in ("prompt", "output")}
    return MixtureComponent(**values)


def _lengths(value: str | dict[str, Any]) -> LengthDistribution:
    if isinstance(value, str):
        return parse_lengths(value)
    return Quantiles(tuple(value["p"]), tuple(value["tokens"]))


def load_source(
    text: str | Path,
    *,
    arrivals: str = "poisson",
    prompt_tokens: str | None = None,
    output_tokens: str | None = None,
    sessions: str | None = None,
    models: str | None = None,
    format: str | None = None,  # noqa: A002
    columns: str | None = None,
    redraw_arrivals: bool = False,
) -> WorkloadSource:
    """Load a workload by a catalogue name, the path of a trace, `synthetic`, `synthetic(…)`,
    `embed(…)` or `hot-prefixes(…)`, or `mix(chat=azure-conv:0.7, …)` and its short form
    `collocated(1:9)`.

    Args:
        text: specification of the workload; `synthetic` needs `prompt_tokens` and `output_tokens`.
        arrivals: the arrival process, as `parse_arrivals` reads it. A trace with arrivals of its
            own keeps them, unless `redraw_arrivals`.
        prompt_tokens: a length distribution in place of the catalogue's (`parse_lengths`).
        output_tokens: likewise.
        sessions: makes conversations of a catalogue's lengths (`parse_sessions`).
        models: the model of each request (`parse_models`).
        format: the format of a trace file, if it cannot be recognised (`readers.formats.FORMATS`).
        columns: the file's names of a workload's columns (`readers.columns.parse_columns`).
        redraw_arrivals: draw arrivals for a trace that has its own, keeping its rows in order.

    Raises:
        UnknownNameError: no such name in the catalogue, and no such file.
        FileFormatError: the file cannot be read.
        SloBenchError: settings that contradict each other or cannot be read.
    """
    text = str(text).strip()
    choice = None if models is None else parse_models(models)
    drawn = arrivals == "poisson" and not sessions and not is_mix(text)
    if isinstance(choice, MultiModelArrivals) and (not drawn or Path(text).exists()):
        raise SloBenchError(
            "fleet(…) draws arrivals of its own, with the lengths of one catalogue workload: leave "
            "arrivals and sessions out; for a trace or a mix use zipf(…) or assign(…)"
        )
    format_given = format or columns is not None
    if is_mix(text):
        if prompt_tokens or output_tokens or sessions or format_given:
            raise SloBenchError("set lengths and sessions in the sources of a mix, not for the mix")
        return parse_mix(text, arrivals, choice)
    process = parse_arrivals(arrivals)
    if is_inline_spec(text):
        if prompt_tokens or output_tokens or sessions or format_given:
            raise SloBenchError(f"{text} says its own lengths, and has no sessions and no format")
        return inline_source(parse_call(text), process, choice)
    talks = None if sessions is None else _talks(sessions)
    prompt = None if prompt_tokens is None else parse_lengths(prompt_tokens)
    output = None if output_tokens is None else parse_lengths(output_tokens)
    drawn_by: dict[str, Any] = {"arrivals": process, "sessions": talks, "models": choice}
    if text == "synthetic":
        if prompt is None or output is None:
            raise SloBenchError("workload synthetic needs prompt_tokens and output_tokens")
        origin = f"synthetic: prompt {prompt_tokens}, output {output_tokens}"
        return DrawnSource(name=text, lengths=pair(prompt, output), origin=origin, **drawn_by)
    if text not in catalogue():
        if not _exists(text):
            raise _unknown(text)
        if prompt or output or talks:
            raise SloBenchError(
                f"{text} has its own lengths; prompt_tokens, output_tokens and "
                "sessions are for catalogue workloads"
            )
        from .readers.agents import RecordedTasks
        from .readers.formats import read

        trace = read(text, format, columns)
        if isinstance(trace, RecordedTasks):
            return TaskSource(  # they begin by the arrival process; their starts are not used
                name=Path(text).name,
                arrivals=process,
                origin=f"file {Path(text).name}",
                notes=trace.notes,
                models=choice,
                tasks=trace.tasks,
                block_size=trace.block_size,
            )
        return TraceSource.of_trace(trace, text, arrivals, choice, redraw_arrivals=redraw_arrivals)
    if columns is not None:
        raise SloBenchError(f"columns are of a trace file, and {text} is a catalogue workload")
    entry = find(text)
    lengths = entry.lengths
    if prompt or output:
        parts = [(prompt or p.prompt, output or p.output, p.weight) for p in lengths.parts]
        lengths = PairLengths(tuple(MixtureComponent(*part) for part in parts))
    hidden = (f"the file {text} is not read; ./{text} is",) if Path(text).is_file() else ()
    return DrawnSource(
        name=entry.name,
        lengths=lengths,
        origin=entry.origin,
        notes=(*hidden, entry.note),
        natural_rate_rps=entry.natural_rate_rps,
        continuations=entry.prefix if talks is None else None,
        **drawn_by,
    )


def _talks(text: str) -> Sessions | Agents:
    called = text.partition("(")[0].strip()
    return parse_agents(text) if called == "agents" else parse_sessions(text)


def _exists(text: str) -> bool:
    """Whether there is such a file; a text that can be no name is none."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _unknown(text: str) -> SloBenchError:
    if "/" in text or Path(text).suffix:
        return SloBenchError(
            f"there is no file {text}; a workload is a trace file or one of "
            f"{', '.join(sorted(catalogue()))}"
        )
    error = UnknownNameError("workload", text, catalogue())
    error.args = (f"{error} (the path of a trace file works too)",)
    return error


@dataclass(frozen=True)
class _Synthetic:
    prompt: LengthDistribution
    output: LengthDistribution
    priority: int = 0


@dataclass(frozen=True)
class _Embed:
    texts: LengthDistribution
    tokens: LengthDistribution
    priority: int = 0


@dataclass(frozen=True)
class _HotPrefixes:
    """What is left out is as in the catalogue."""

    prefixes: int | None = None
    tokens: int | None = None
    exponent: float | None = None
    prompt: LengthDistribution | None = None
    output: LengthDistribution | None = None
    priority: int = 0


_INLINE = ("synthetic", "embed", "hot-prefixes")


def is_inline_spec(text: str) -> bool:
    """Whether `text` is `synthetic(…)`, `embed(…)` or `hot-prefixes(…)`."""
    return text.partition("(")[0].strip().lower() in _INLINE and "(" in text


def inline_source(call: Call, arrivals: ArrivalProcess, models: Models | None) -> DrawnSource:
    """Read `synthetic(prompt=300, output=uniform(200,500), priority=1)`,
    `embed(texts=32, tokens=256)`: requests of 32 texts of 256 tokens each to embed, or
    `hot-prefixes(prefixes=10, tokens=4096, exponent=1.2, prompt=uniform(200,900))`.

    Raises:
        SloBenchError: a value is missing or cannot be read.
    """
    spec: _Synthetic | _Embed | _HotPrefixes
    texts = prefix = None
    if call.name == "synthetic":
        spec = build(_Synthetic, call, CONVERTERS)
        lengths = pair(spec.prompt, spec.output)
    elif call.name == "embed":
        spec = build(_Embed, call, CONVERTERS)
        lengths, texts = pair(spec.tokens, Fixed(1)), spec.texts
    else:
        optional = {f"{kind} | None": convert for kind, convert in CONVERTERS.items()}
        spec = build(_HotPrefixes, call, optional)
        entry = find(call.name)
        (part,) = entry.lengths.parts
        lengths = pair(spec.prompt or part.prompt, spec.output or part.output)
        shape = {name: getattr(spec, name) for name in ("prefixes", "tokens", "exponent")}
        changed = {name: value for name, value in shape.items() if value is not None}
        prefix = replace(cast("HotPrefixes", entry.prefix), **changed)
    if abs(spec.priority) >= 2**31:
        raise SloBenchError(f"priority must be below 2^31 but is {spec.priority} in {call.text!r}")
    return DrawnSource(
        name=call.text,
        lengths=lengths,
        arrivals=arrivals,
        origin=f"synthetic: {call.text}",
        models=models,
        texts=texts,
        continuations=prefix,
        priority=spec.priority,
    )


# Defaults of `collocated`.
_COLLOCATED = {
    "prompt": "uniform(100,500)",
    "output": "uniform(200,500)",
    "texts": "uniform(16,128)",
    "tokens": "512",
}


def is_mix(text: str) -> bool:
    """Whether `text` is a mix, in the long or the short form."""
    return text.startswith(("mix(", "collocated("))


def parse_mix(text: str, arrivals: str, models: Models | None) -> MixedSource:
    """Read `mix(chat=azure-conv:0.7, code=azure-code:0.3)`: class = source:share, or only
    `source:share`, which makes the source's name the class.

    `collocated(1:9)` is short for one part of generation to nine of embedding requests: classes
    chat (high priority) and batch, half of the generation each, and embed. `prompt`, `output`
    (of the generation), `texts` and `tokens` (of each text) may be set:
    `collocated(7:3, output=uniform(1000,2000))`.

    Raises:
        SloBenchError: the text has another form, or a source cannot be mixed.
    """
    call = parse_call(text)
    if call.name == "collocated":
        call = parse_call(_collocated(call))
    if call.name != "mix":
        example = "mix(chat=azure-conv:0.7, code=azure-code:0.3)"
        raise SloBenchError(f"cannot read {text!r}; write {example}")
    members = [_member(None, value) for value in call.positional]
    members += [_member(name, value) for name, value in call.named.items()]
    return MixedSource(
        name=text,
        arrivals=parse_arrivals(arrivals),
        origin="; ".join(f"{m.class_name}: {m.source.origin}" for m in members),
        notes=tuple(f"{m.class_name}: {note}" for m in members for note in m.source.notes),
        models=models,
        members=tuple(members),
    )


def _collocated(call: Call) -> str:
    """The mix that it is short for."""
    unknown = sorted(set(call.named) - set(_COLLOCATED))
    parts = call.positional[0].split(":") if len(call.positional) == 1 else []
    if unknown or len(parts) != 2:
        raise SloBenchError(
            f"cannot read {call.text!r}; write collocated(1:9) for one part of generation to nine "
            f"of embedding, and {', '.join(f'{name}=…' for name in _COLLOCATED)} if need be"
        )
    shares = [positive(part, f"part of {call.text}") for part in parts]
    has = {**_COLLOCATED, **call.named}
    generation = f"synthetic(prompt={has['prompt']},output={has['output']}"
    return (
        f"mix(chat={generation},priority=1):{shares[0]},batch={generation}):{shares[0]},"
        f"embed=embed(texts={has['texts']},tokens={has['tokens']}):{2 * shares[1]})"
    )


def _member(class_name: str | None, text: str) -> Member:
    name, colon, share = text.rpartition(":")
    if not colon:
        raise SloBenchError(f"{text!r} in the mix lacks its share; write {text}:0.5")
    source = load_source(name)
    if not isinstance(source, (DrawnSource, TraceSource)):
        raise SloBenchError(f"a mix cannot hold another mix: {name}")
    return Member(class_name or source.name, source, positive(share, f"share of {name}"))
