"""Several sources as one workload, each a class of its own with its share of the requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrivals import ArrivalProcess, Concurrency, parse_arrivals
from .base import (
    NO_SLO,
    DrawnSource,
    TraceSource,
    WorkloadSource,
    check_extent,
    finish,
    offered_rate,
)
from .call_parser import Call, parse_call, positive
from .errors import SloBenchError
from .models import Models
from .slo import COLUMNS, SloSpec
from .streams import Streams
from .workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Load = Callable[[str], WorkloadSource]


@dataclass(frozen=True)
class Member:
    """One class of a mix."""

    class_name: str
    source: DrawnSource | TraceSource
    share: float


def _shares_prefixes(source: DrawnSource | TraceSource) -> bool:
    if isinstance(source, TraceSource):
        return source.trace.workload.prefix_blocks is not None or source.trace.workload.closed
    return source.sessions is not None or source.continuations is not None


@dataclass(frozen=True)
class MixedSource:
    """One arrival process; each request's class is drawn in proportion to the shares."""

    name: str
    members: tuple[Member, ...]
    arrivals: ArrivalProcess
    models: Models | None = None

    def __post_init__(self) -> None:
        names = [m.class_name for m in self.members]
        if len(set(names)) != len(names) or not names:
            raise SloBenchError("a mix needs one class at least, and no class name twice")
        for m in self.members:
            positive(m.share, f"share of {m.class_name}")
            if _shares_prefixes(m.source):
                raise SloBenchError(
                    f"{m.source.name} shares prefixes between its requests and cannot be mixed yet"
                )

    @property
    def origin(self) -> str:
        """See `WorkloadSource`."""
        return "; ".join(f"{m.class_name}: {m.source.origin}" for m in self.members)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `WorkloadSource`."""
        return tuple(f"{m.class_name}: {note}" for m in self.members for note in m.source.notes)

    @property
    def has_arrivals(self) -> bool:
        """See `WorkloadSource`."""
        return False

    @property
    def closed_loop(self) -> bool:
        """See `WorkloadSource`."""
        return isinstance(self.arrivals, Concurrency)

    @property
    def natural_rate_rps(self) -> float | None:
        """See `WorkloadSource`."""
        return None

    def make(
        self,
        *,
        rate_rps: float | None = None,
        speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> Workload:
        """See `WorkloadSource`."""
        check_extent(requests, duration_s)
        rate = offered_rate(self, rate_rps, speed)
        streams = Streams(seed)
        arrival_s = self.arrivals.times_s(
            rate, streams.rng("arrivals"), requests=requests, duration_s=duration_s
        )
        shares = np.cumsum([m.share for m in self.members])
        u = streams.rng("classes").random(len(arrival_s))
        which = np.searchsorted(shares / shares[-1], u, side="right")
        which = np.minimum(which, len(shares) - 1).astype(np.int64)
        parts = []
        for k, member in enumerate(self.members):
            times_s = arrival_s[which == k]
            if len(times_s):
                parts.append(
                    _Part(k, member.source.at_times(times_s, streams.within(member.class_name)))
                )
        workload = _merged(arrival_s, which, parts, tuple(m.class_name for m in self.members))
        return finish(workload, self.name, self.arrivals, self.models, streams, slo)


@dataclass(frozen=True)
class _Part:
    index: int
    workload: Workload


def _merged(
    arrival_s: Floats, which: Ints, parts: list[_Part], class_names: tuple[str, ...]
) -> Workload:
    columns: dict[str, Any] = {}
    for name in (
        "prompt_tokens",
        "output_tokens",
        "max_output_tokens",
        "kind",
        "n_texts",
        "priority",
        *COLUMNS.values(),
    ):
        like = getattr(parts[0].workload, name)
        columns[name] = np.empty(len(arrival_s), dtype=like.dtype)
        for part in parts:
            columns[name][which == part.index] = getattr(part.workload, name)
    texts: list[str | None] | None = None
    if any(part.workload.texts is not None for part in parts):
        texts = [None] * len(arrival_s)
        for part in parts:
            for row, text in zip(
                np.flatnonzero(which == part.index), part.workload.texts or (), strict=False
            ):
                texts[row] = text
    return Workload(arrival_s, **columns, class_index=which, class_names=class_names, texts=texts)


# What `collocated` says nothing of.
_COLLOCATED = {
    "prompt": "uniform(100,500)",
    "output": "uniform(200,500)",
    "texts": "uniform(16,128)",
    "tokens": "512",
}


def is_mix(text: str) -> bool:
    """Whether `text` is for `parse_mix`."""
    return text.startswith(("mix(", "collocated("))


def parse_mix(
    text: str, arrivals: str = "poisson", models: Models | None = None, *, load: Load
) -> MixedSource:
    """Read `mix(chat=azure-conv:0.7, code=azure-code:0.3)`: class = source:share, or only
    `source:share`, which makes the source's name the class.

    `collocated(1:9)` is short for one part of generation to nine of embedding requests: classes
    `chat` (high priority) and `batch`, half of the generation each, and `embed`. `prompt`, `output`
    (of the generation), `texts` and `tokens` (of each text) may be set:
    `collocated(7:3, output=uniform(1000,2000))`. `load` makes the sources (`load_source`).

    Raises:
        SloBenchError: the text has another form, or a source cannot be mixed.
    """
    call = parse_call(text)
    if call.name == "collocated":
        call = parse_call(_collocated(call))
    if call.name != "mix":
        raise SloBenchError(
            f"cannot read {text!r}; write mix(chat=azure-conv:0.7, code=azure-code:0.3)"
        )
    members = [_member(None, value, load) for value in call.positional]
    members += [_member(name, value, load) for name, value in call.named.items()]
    return MixedSource(text, tuple(members), parse_arrivals(arrivals), models)


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


def _member(class_name: str | None, text: str, load: Load) -> Member:
    name, colon, share = text.rpartition(":")
    if not colon:
        raise SloBenchError(f"{text!r} in the mix lacks its share; write {text}:0.5")
    source = load(name)
    if not isinstance(source, (DrawnSource, TraceSource)):
        raise SloBenchError(f"a mix cannot hold another mix: {name}")
    return Member(class_name or source.name, source, positive(share, f"share of {name}"))
