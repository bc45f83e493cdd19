"""Which model a request asks for: Zipf popularity, and models that fall idle for spells."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .call_parser import Call, build, parse_call, positive
from .errors import SloBenchError, UnknownNameError
from .fleet import MultiModelArrivals, expanded, parse_fleet
from .streams import Streams
from .workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROWS = 65536  # requests judged at once, to bound memory with many models


@dataclass(frozen=True)
class ModelChoice:
    """Models in order of rank; the k-th is requested in proportion to 1 / k^exponent.

    With `idle_s`, each model is in demand for spells of mean `active_s` and idle for spells of mean
    `idle_s` (both exponential, begun in their long-run mix); requests go to models in demand or,
    without one, to any. Total arrivals stay as they are. All turns of a session use one model.

    The Arena trace of VTC (25 models) has an exponent of 1.05 (maximum likelihood) to 1.25 (least
    squares).
    """

    names: tuple[str, ...]
    exponent: float = 1.0
    active_s: float = 60.0
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.names) < 1 or len(set(self.names)) != len(self.names):
            raise SloBenchError("models need one name at least, and no name twice")
        if not self.exponent >= 0:
            raise SloBenchError(f"zipf exponent must not be negative but is {self.exponent}")
        positive(self.active_s, "zipf active_s")
        if not self.idle_s >= 0:
            raise SloBenchError(f"zipf idle_s must not be negative but is {self.idle_s}")

    def apply(self, workload: Workload, streams: Streams) -> Workload:
        """The workload with a model for each request."""
        popularity = np.arange(1, len(self.names) + 1, dtype=np.float64) ** -self.exponent
        rng = streams.rng("models")
        u = rng.random(len(workload))
        spells = self._spells(workload.span_s, streams.rng("idle spells"))
        index = np.empty(len(workload), dtype=np.int64)
        for begin in range(0, len(workload), _ROWS):
            rows = slice(begin, begin + _ROWS)
            weights = np.tile(popularity, (len(u[rows]), 1))
            for model, ends_s in enumerate(spells):
                # Even spells are active: spell 0 ends at ends_s[0], and may be of no length.
                spell = np.searchsorted(ends_s, workload.arrival_s[rows], side="right")
                weights[spell % 2 == 1, model] = 0.0
            weights[weights.sum(axis=1) == 0] = popularity
            edges = np.cumsum(weights, axis=1)
            index[rows] = (u[rows, None] * edges[:, -1:] >= edges).sum(axis=1)
        index = np.minimum(index, len(self.names) - 1)
        in_session = workload.session >= 0
        if in_session.any():
            _, first, inverse = np.unique(
                workload.session[in_session], return_index=True, return_inverse=True
            )
            index[in_session] = index[np.flatnonzero(in_session)[first]][inverse]
        return dataclasses.replace(workload, model_index=index, model_names=self.names)

    def _spells(self, span_s: float, rng: np.random.Generator) -> list[Floats]:
        """When each model's spells end, active and idle in turn, until past the span."""
        if self.idle_s == 0:
            return []
        ends = []
        cycle_s = self.active_s + self.idle_s
        for _ in self.names:
            lengths = np.empty(0)
            if rng.random() < self.idle_s / cycle_s:
                lengths = np.array([0.0, rng.exponential(self.idle_s)])
            while lengths.sum() <= span_s:
                more = rng.standard_exponential((32, 2)) * (self.active_s, self.idle_s)
                lengths = np.concatenate((lengths, more.ravel()))
            ends.append(np.cumsum(lengths))
        return ends


@dataclass(frozen=True)
class _Zipf:
    count: int
    exponent: float = 1.0
    active_s: float = 60.0
    idle_s: float = 0.0


@dataclass(frozen=True)
class Assigned:
    """The models of a trace, most popular first, stand for these, again from the first if fewer."""

    names: tuple[str, ...]

    def apply(self, workload: Workload, streams: Streams) -> Workload:
        """The workload with other names for its models.

        Raises:
            SloBenchError: it names no models.
        """
        if len(workload.model_names) < 2:
            raise SloBenchError(f"{workload.name} names no models that others could stand for")
        count = len(workload.model_names)
        asked = np.bincount(workload.model_index, minlength=count)
        rank = np.empty(count, dtype=np.int64)
        rank[np.argsort(-asked, kind="stable")] = np.arange(count)
        rounds = -(-count // len(self.names))
        names = self.names
        if rounds > 1:
            names = tuple(f"{name}#{k + 1}" for k in range(rounds) for name in self.names)
        return dataclasses.replace(
            workload, model_index=rank[workload.model_index], model_names=names[:count]
        )


Models = ModelChoice | MultiModelArrivals | Assigned


def parse_models(text: str) -> Models:
    """Read `zipf(count=8, exponent=1.05, active_s=60, idle_s=120)`, which names the models model-0,
    model-1, …; or `zipf(llama-3-8b, opt-13b, exponent=1)` by name, most popular first.
    `fleet(…)`: each with arrivals of its own (`fleet.parse_fleet`). `assign(llama-3-8b, opt-13b)`:
    what the models of a trace are, most popular first.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
        UnknownNameError: no such way to choose.
    """
    call = parse_call(text)
    if call.name == "fleet":
        return parse_fleet(call)
    if call.name == "assign":
        if call.named or not call.positional:
            raise SloBenchError(f"cannot read {text!r}; write assign(llama-3.1-8b, qwen2.5-3b)")
        return Assigned(expanded(call.positional))
    if call.name != "zipf":
        raise UnknownNameError("choice of models", call.name, ("zipf", "fleet", "assign"))
    names = call.positional
    if len(names) == 1 and names[0].isdigit():
        call = Call(call.name, (), {"count": names[0], **call.named}, call.text)
        names = ()
    names = expanded(names)
    if names:
        named = {"count": str(len(names)), **call.named}
        call = Call(call.name, (), named, call.text)
    zipf = build(_Zipf, call)
    if zipf.count < 1 or (names and zipf.count != len(names)):
        raise SloBenchError(f"zipf count must be at least 1, and the number of names: {text!r}")
    return ModelChoice(
        names or tuple(f"model-{k}" for k in range(zipf.count)),
        zipf.exponent,
        zipf.active_s,
        zipf.idle_s,
    )
