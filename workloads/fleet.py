"""Models each with requests of its own: popular and rare ones, idle spells, swings of the rate."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .call_parser import Call, build, positive
from .errors import SloBenchError
from .streams import Streams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
        positive(rate_rps, "rate_rps")
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
            own = streams.within(f"model {model}")
            edges_s, rates = self._profile(share * rate_rps, own, span_s)
            done = np.concatenate(([0.0], np.cumsum(rates * np.diff(edges_s))))
            rng = own.rng("arrivals")
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
        at = np.minimum(np.searchsorted(swings, middle, side="right"), len(factors) - 1)
        return edges_s, mean_rps / active_share * factors[at] * active


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


@dataclass(frozen=True)
class _Settings:
    exponent: float = MultiModelArrivals.exponent
    active_s: float = MultiModelArrivals.active_s
    idle_s: float = MultiModelArrivals.idle_s
    swing: float = MultiModelArrivals.swing
    swing_s: float = MultiModelArrivals.swing_s


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
    most = max((count for _, count in counted), default=0)
    found = [base for base, count in counted if not count]
    for k in range(most):
        found += [f"{base}#{k + 1}" for base, count in counted if count > k]
    return tuple(found)


def shape_of(name: str) -> str:
    """The model of the catalogue that `llama-3.1-8b#2` is a fine-tuned copy of."""
    return name.partition("#")[0]


def parse_fleet(call: Call) -> MultiModelArrivals:
    """Read `fleet(llama-3.1-8b*4, qwen2.5-3b, exponent=0.9, active_s=120, idle_s=120, swing=5)`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
    """
    settings = build(_Settings, Call(call.name, (), call.named, call.text))
    return MultiModelArrivals(
        expanded(call.positional),
        settings.exponent,
        settings.active_s,
        settings.idle_s,
        settings.swing,
        settings.swing_s,
    )
