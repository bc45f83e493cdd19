"""Where a workload comes from: the catalogue, a trace file, or a mix; the way in for other rooms.

source = load_source("azure-conv")
workload = source.make(rate_rps=6.45, requests=1000, seed=0, slo=parse_slo("ttft=1"))
"""

from __future__ import annotations

from pathlib import Path

from . import catalogue
from .arrivals import Poisson, parse_arrivals
from .base import DrawnSource, TraceSource, WorkloadSource
from .call_parser import parse_call
from .errors import SloBenchError, UnknownNameError
from .fleet import Fleet
from .inline_specs import is_written, written_source
from .lengths import PairLengths, Part, pair, parse_lengths
from .mix import is_mix, parse_mix
from .models import parse_models
from .prefixes import Continuations
from .readers import read
from .sessions import parse_sessions


def load_source(
    text: str | Path,
    *,
    arrivals: str = "poisson",
    prompt_tokens: str | None = None,
    output_tokens: str | None = None,
    sessions: str | None = None,
    models: str | None = None,
    format: str | None = None,  # noqa: A002
    redraw_arrivals: bool = False,
) -> WorkloadSource:
    """A catalogue name, the path of a trace, `synthetic`, `synthetic(…)` or `embed(…)` (see
    `written`), or `mix(chat=azure-conv:0.7, …)` and its short form `collocated(1:9)`.

    Args:
        text: what to load; `synthetic` needs `prompt_tokens` and `output_tokens`.
        arrivals: the arrival process, as `parse_arrivals` reads it. A trace with arrivals of its
            own keeps them, unless `redraw_arrivals`.
        prompt_tokens: a length distribution in place of the catalogue's (`parse_lengths`).
        output_tokens: likewise.
        sessions: makes conversations of a catalogue's lengths (`parse_sessions`).
        models: which model each request asks for (`parse_models`).
        format: the format of a trace file, where it cannot be told (`readers.FORMATS`).
        redraw_arrivals: draw arrivals for a trace that has its own, keeping its rows in order.

    Raises:
        UnknownNameError: no such name in the catalogue, and no such file.
        FileFormatError: the file cannot be read.
        SloBenchError: settings that contradict each other or cannot be read.
    """
    text = str(text).strip()
    choice = None if models is None else parse_models(models)
    drawn = arrivals == "poisson" and not sessions and not is_mix(text)
    if isinstance(choice, Fleet) and (not drawn or Path(text).exists()):
        raise SloBenchError(
            "fleet(…) draws arrivals of its own, with the lengths of one catalogue workload: leave "
            "arrivals and sessions out; for a trace or a mix use zipf(…) or assign(…)"
        )
    if is_mix(text):
        if prompt_tokens or output_tokens or sessions or format:
            raise SloBenchError("set lengths and sessions in the sources of a mix, not for the mix")
        return parse_mix(text, arrivals, choice, load=load_source)
    process = parse_arrivals(arrivals)
    if is_written(text):
        if prompt_tokens or output_tokens or sessions or format:
            raise SloBenchError(f"{text} says its own lengths, and has no sessions and no format")
        return written_source(parse_call(text), process, choice)
    talks = None if sessions is None else parse_sessions(sessions)
    prompt = None if prompt_tokens is None else parse_lengths(prompt_tokens)
    output = None if output_tokens is None else parse_lengths(output_tokens)
    if text == "synthetic":
        if prompt is None or output is None:
            raise SloBenchError("workload synthetic needs prompt_tokens and output_tokens")
        origin = f"synthetic: prompt {prompt_tokens}, output {output_tokens}"
        return DrawnSource(
            text, pair(prompt, output), process, origin, sessions=talks, models=choice
        )
    if text not in catalogue.catalogue():
        if not _exists(text):
            raise _unknown(text)
        if prompt or output or talks:
            raise SloBenchError(
                f"{text} has its own lengths; prompt_tokens, output_tokens and "
                "sessions are for catalogue workloads"
            )
        trace = read(text, format)
        keeps = trace.has_arrivals and not redraw_arrivals
        if keeps and process != Poisson():
            raise SloBenchError(
                f"{text} has arrivals of its own; to replace them by {arrivals} say redraw_arrivals"
            )
        return TraceSource(
            Path(text).name, trace, None if keeps else process, f"file {Path(text).name}", choice
        )
    entry = catalogue.find(text)
    lengths = entry.lengths
    if prompt or output:
        parts = (Part(prompt or p.prompt, output or p.output, p.weight) for p in lengths.parts)
        lengths = PairLengths(tuple(parts))
    return DrawnSource(
        name=entry.name,
        lengths=lengths,
        arrivals=process,
        origin=entry.origin,
        notes=(entry.note,),
        natural_rate_rps=entry.natural_rate_rps,
        continuations=_continuations(entry) if talks is None else None,
        sessions=talks,
        models=choice,
    )


def _continuations(entry: catalogue.Entry) -> Continuations | None:
    figures = entry.prefix
    if figures is None:
        return None
    return Continuations(
        share=figures.continuation_share,
        turn_correlation=figures.turn_correlation,
        gap_median_s=figures.gap_median_s,
        gap_sigma=figures.gap_sigma,
        system_blocks=figures.system_blocks,
        block_tokens=figures.block_tokens,
    )


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
            f"{', '.join(sorted(catalogue.catalogue()))}"
        )
    error = UnknownNameError("workload", text, catalogue.catalogue())
    error.args = (f"{error} (the path of a trace file works too)",)
    return error
