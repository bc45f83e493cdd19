"""Workloads written out in one line: `synthetic(…)` and `embed(…)`, alone or as part of a mix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrivals import ArrivalProcess
from .base import DrawnSource
from .call_parser import Call, build
from .errors import SloBenchError
from .lengths import Fixed, Lengths, PairLengths, pair, parse_lengths
from .models import Models
from .request import Kind
from .streams import Streams
from .workload import Workload

Floats = NDArray[np.float64]

WRITTEN = ("synthetic", "embed")


@dataclass(frozen=True)
class WrittenSource(DrawnSource):
    """Drawn lengths, one priority, and for embedding requests the number of texts.

    The texts of a request are equally long, as the chunks of a document are.
    """

    texts: Lengths | None = None  # of an embedding request; None: it generates
    priority: int = 0

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        """See `DrawnSource`."""
        made = super().at_times(arrival_s, streams)
        made = dataclasses.replace(made, priority=np.full(len(made), self.priority))
        if self.texts is None:
            return made
        texts = self.texts.at(streams.rng("texts").random(len(made)))
        return dataclasses.replace(
            made,
            prompt_tokens=made.prompt_tokens * texts,
            kind=np.full(len(made), int(Kind.EMBED)),
            n_texts=texts,
        )


@dataclass(frozen=True)
class _Synthetic:
    prompt: Lengths
    output: Lengths
    priority: int = 0


@dataclass(frozen=True)
class _Embed:
    texts: Lengths
    tokens: Lengths
    priority: int = 0


def is_written(text: str) -> bool:
    """Whether `text` is a call of one of the names here."""
    return text.partition("(")[0].strip().lower() in WRITTEN and "(" in text


def written_source(
    call: Call, arrivals: ArrivalProcess, models: Models | None = None
) -> WrittenSource:
    """Read `synthetic(prompt=300, output=uniform(200,500), priority=1)`, or
    `embed(texts=32, tokens=256)`: requests of 32 texts of 256 tokens each to embed.

    Raises:
        SloBenchError: a value is missing or cannot be read.
    """
    lengths = {"Lengths": lambda text, what: parse_lengths(text)}
    if call.name == "synthetic":
        made = build(_Synthetic, call, lengths)
        return _source(call, pair(made.prompt, made.output), arrivals, models, made.priority)
    asked = build(_Embed, call, lengths)
    tokens = pair(asked.tokens, Fixed(1))
    return _source(call, tokens, arrivals, models, asked.priority, asked.texts)


def _source(
    call: Call,
    lengths: PairLengths,
    arrivals: ArrivalProcess,
    models: Models | None,
    priority: int,
    texts: Lengths | None = None,
) -> WrittenSource:
    if abs(priority) >= 2**31:
        raise SloBenchError(f"priority must be below 2^31 but is {priority} in {call.text!r}")
    return WrittenSource(
        name=call.text,
        lengths=lengths,
        arrivals=arrivals,
        origin=f"synthetic: {call.text}",
        models=models,
        texts=texts,
        priority=priority,
    )
