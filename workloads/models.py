"""The model of each request: Zipf popularity, idle spells, or arrivals of each model's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from .arrays import Floats, Ints
from .arrivals import Extent
from .call_parser import Call, build, parse_call, positive
from .errors import SloBenchError, UnknownNameError
from .machine_memory import check_memory
from .streams import Streams
from .workload import Workload


@dataclass(frozen=True)
class ModelArrivals:
    """Requests in order of arrival, each with its model."""

    arrival_s: Floats
    model_index: Ints


@dataclass(frozen=True)
class MultiModelArrivals:
    """Every model is a Poisson process of its own, the k-th of a share like 1 / k^exponent.

    A model is in demand for spells of mean `active_s` and idle for spells of mean `idle_s` (both
    exponential, begun in their long-run mix). While it is in demand its rate is drawn anew after
    `swing_s` (mean, exponential), log-uniform between its least and `swing` times that. The mean
    over all time of every model is its share of the rate, and models do not know of each other:
    the total rises and falls.

    The defaults show what Prism (see docs/papers.md, §3.1) reports of production traces: with 18
    or 58 models 60 % of them have about 25 % of the requests, idle gaps above 30 s, coefficients
    of variation of a minute's requests about 1 and above, fivefold swings within minutes.
    """

    names: tuple[str, ...]
    exponent: float = 0.9
    active_s: float = 120.0
    idle_s: float = 120.0
    swing: float = 5.0
    swing_s: float = 60.0

    def __post_init__(self) -> None:
        if len(self.names) < 1 or len(set(self.names)) != len(self.names):
            raise SloBenchError("a fleet needs one model at least, and no name twice")
        for name in ("active_s", "swing_s"):
            positive(getattr(self, name), f"fleet {name}")
        for name in ("exponent", "idle_s"):
            if not getattr(self, name) >= 0:
                raise SloBenchError(
                    f"fleet {name} must not be negative but is {getattr(self, name)}"
                )
        if not self.swing >= 1:
            raise SloBenchError(f"fleet swing must be at least 1 but is {self.swing}")

    @property
    def shares(self) -> Floats:
        """Mean share of the requests of each model."""
        weights: Floats = np.arange(1, len(self.names) + 1, dtype=np.float64) ** -self.exponent
        shares: Floats = weights / weights.sum()
        return shares

    def draw(
        self, rate_rps: float, streams: Streams, requests: int | None, duration_s: float | None
    ) -> ModelArrivals:
        """All requests before `duration_s`, or the first `requests`, or what ends first.

        Spells and swings of a seed are the same at every rate.
        """
        Extent(rate_rps, requests, duration_s)  # raises SloBenchError
        span_s = duration_s
        if span_s is None:
            assert requests is not None
            span_s = requests / rate_rps
        while True:
            coming = self._until(rate_rps, streams, span_s)
            enough = requests is None or len(coming.arrival_s) >= requests
            if duration_s is not None or enough:
                break
            span_s *= 1.5
        if not len(coming.arrival_s):
            raise SloBenchError(f"nothing arrives within {span_s:g} s at {rate_rps:g} requests/s")
        return ModelArrivals(coming.arrival_s[:requests], coming.model_index[:requests])

    def _until(self, rate_rps: float, streams: Streams, span_s: float) -> ModelArrivals:
        times, models = [], []
        for model, share in enumerate(self.shares):
            model_streams = streams.within(f"model {model}")
            edges_s, rates = self._profile(share * rate_rps, model_streams, span_s)
            done = np.concatenate(([0.0], np.cumsum(rates * np.diff(edges_s))))
            rng = model_streams.rng("arrivals")
            gaps = rng.standard_exponential(max(16, int(1.5 * done[-1]) + 16))
            while gaps.sum() <= done[-1]:
                gaps = np.concatenate((gaps, rng.standard_exponential(len(gaps))))
            work = np.cumsum(gaps)
            work = work[work < done[-1]]
            times.append(np.interp(work, done, edges_s))
            models.append(np.full(len(work), model, dtype=np.int64))
        arrival_s, model_index = np.concatenate(times), np.concatenate(models)
        order = np.argsort(arrival_s, kind="stable")
        return ModelArrivals(arrival_s[order], model_index[order])

    def _profile(self, mean_rps: float, streams: Streams, span_s: float) -> tuple[Floats, Floats]:
        """Edges of the times of constant rate up to the span, and the rates between them."""
        rng = streams.rng("swings")
        swings = _edges(rng, self.swing_s, self.swing_s, span_s, False)
        factors = self.swing ** rng.random(len(swings))
        if self.swing > 1:
            factors *= np.log(self.swing) / (self.swing - 1)  # the mean of a log-uniform factor
        rng = streams.rng("spells")
        begins_idle = self.idle_s > 0 and rng.random() < self.idle_s / (self.active_s + self.idle_s)
        spells = np.array([span_s])
        if self.idle_s > 0:
            spells = _edges(rng, self.active_s, self.idle_s, span_s, begins_idle)
        edges_s = np.unique(np.concatenate(([0.0], swings, spells, [span_s])))
        edges_s = edges_s[edges_s <= span_s]
        middle = (edges_s[:-1] + edges_s[1:]) / 2
        spell = np.searchsorted(spells, middle, side="right")
        active = (spell + begins_idle) % 2 == 0
        active_share = self.active_s / (self.active_s + self.idle_s)
        swing_index = np.minimum(np.searchsorted(swings, middle, side="right"), len(factors) - 1)
        return edges_s, mean_rps / active_share * factors[swing_index] * active


def _edges(
    rng: np.random.Generator, odd_s: float, even_s: float, span_s: float, even_first: bool
) -> Floats:
    """Ends of spells of two kinds in turn, until past the span."""
    means = (even_s, odd_s) if even_first else (odd_s, even_s)
    ends = np.empty(0)
    while not len(ends) or ends[-1] <= span_s:
        more = rng.standard_exponential((64, 2)) * means
        last = ends[-1] if len(ends) else 0.0
        ends = np.concatenate((ends, last + np.cumsum(more.ravel())))
    return ends


def expanded(names: tuple[str, ...]) -> tuple[str, ...]:
    """`a*3, b*2` as a#1, b#1, a#2, b#2, a#3: models of one shape, fine-tuned apart."""
    counted = []
    for name in names:
        base, star, count = name.partition("*")
        base, count = base.strip(), count.strip()
        if star and not (base and re.fullmatch(r"0*[1-9][0-9]{0,3}", count, re.ASCII)):
            raise SloBenchError(
                f"cannot read {name!r}; write llama-3.1-8b*3 for three of a shape, at most 9999"
            )
        counted.append((base, int(count) if star else 0))
    copies = max((count for _, count in counted), default=0)
    model_names = [base for base, count in counted if not count]
    for k in range(copies):
        model_names += [f"{base}#{k + 1}" for base, count in counted if count > k]
    return tuple(model_names)


def shape_of(name: str) -> str:
    """The model of the catalogue that `llama-3.1-8b#2` is a fine-tuned copy of."""
    return name.partition("#")[0]


def parse_fleet(call: Call) -> MultiModelArrivals:
    """Read `fleet(llama-3.1-8b*4, qwen2.5-3b, exponent=0.9, active_s=120, idle_s=120, swing=5)`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
    """
    return build(MultiModelArrivals, replace(call, positional=expanded(call.positional)))


_MODEL_BYTES = 5_000  # of a model's instance in a simulation, measured
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
        return replace(workload, model_index=index, model_names=self.names)

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
        request_counts = np.bincount(workload.model_index, minlength=count)
        rank = np.empty(count, dtype=np.int64)
        rank[np.argsort(-request_counts, kind="stable")] = np.arange(count)
        rounds = -(-count // len(self.names))
        names = self.names
        if rounds > 1:
            names = tuple(f"{name}#{k + 1}" for k in range(rounds) for name in self.names)
        return replace(workload, model_index=rank[workload.model_index], model_names=names[:count])


Models = ModelChoice | MultiModelArrivals | Assigned


def parse_models(text: str) -> Models:
    """Read `zipf(count=8, exponent=1.05, active_s=60, idle_s=120)`, which names the models model-0,
    model-1, …; or `zipf(llama-3-8b, opt-13b, exponent=1)` by name, most popular first.
    `fleet(…)`: each with arrivals of its own (`parse_fleet`). `assign(llama-3-8b, opt-13b)`:
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
    counts: dict[str, str] = {}
    if len(names) == 1 and names[0].isdigit():
        counts, names = {"count": names[0]}, ()
    names = expanded(names)
    if names:
        counts = {"count": str(len(names))}
    zipf = build(_Zipf, replace(call, positional=(), named={**counts, **call.named}))
    if zipf.count < 1 or (names and zipf.count != len(names)):
        raise SloBenchError(f"zipf count must be at least 1, and the number of names: {text!r}")
    # A name, a queue and an instance for each.
    check_memory(zipf.count * _MODEL_BYTES, f"{zipf.count:,} models")
    return ModelChoice(
        names or tuple(f"model-{k}" for k in range(zipf.count)),
        zipf.exponent,
        zipf.active_s,
        zipf.idle_s,
    )
