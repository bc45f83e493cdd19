"""Distributions of token counts as quantile functions, alone and in pairs.

Each distribution is its inverse cumulative function `at(u)`, so that prompt and output can be
drawn together with a given rank correlation, and the same random numbers give the same lengths
at every arrival rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from .arrays import Floats, Ints
from .call_parser import Call, build, number, parse_call, positive
from .errors import SloBenchError, by_name

MOST_TOKENS = 1 << 31  # of one prompt or output
_MOST_SIGMA = 10


class LengthDistribution(Protocol):
    """Interface of distributions of token counts."""

    def at(self, u: Floats) -> Ints:
        """Token counts, at least 1, at the probabilities `0 <= u < 1`."""


def _tokens(values: Floats) -> Ints:
    return np.maximum(np.rint(values), 1).astype(np.int64)


def _at_least_one(value: float, label: str) -> None:
    if not value >= 1:
        raise SloBenchError(f"{label} must be at least 1 token but is {value:g}")
    if value > MOST_TOKENS:
        raise SloBenchError(f"{label} must be at most {MOST_TOKENS:,} but is {value!s:.20}")


@dataclass(frozen=True)
class Fixed:
    """The same token count for every request."""

    tokens: int

    def __post_init__(self) -> None:
        _at_least_one(self.tokens, "fixed tokens")

    def at(self, u: Floats) -> Ints:
        return np.full(len(u), self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least_one(self.low, "uniform low")
        if self.high < self.low:
            raise SloBenchError(f"uniform high must be at least low={self.low} but is {self.high}")
        _at_least_one(self.high, "uniform high")

    def at(self, u: Floats) -> Ints:
        return self.low + np.floor(u * (self.high - self.low + 1)).astype(np.int64)


@dataclass(frozen=True)
class Geometric:
    """1, 2, 3, … with a constant chance to stop; `mean` is at least 1."""

    mean: float

    def __post_init__(self) -> None:
        _at_least_one(self.mean, "geometric mean")

    def at(self, u: Floats) -> Ints:
        if self.mean == 1:
            return np.ones(len(u), dtype=np.int64)
        return 1 + np.floor(np.log1p(-u) / math.log1p(-1 / self.mean)).astype(np.int64)


@dataclass(frozen=True)
class Lognormal:
    """exp of a normal: give `median` or `mean`, and `sigma` of the logarithm; cut at `max`."""

    median: float | None = None
    sigma: float = 1.0
    mean: float | None = None
    min: float = 1.0
    max: float | None = None

    def __post_init__(self) -> None:
        if (self.median is None) == (self.mean is None):
            raise SloBenchError("lognormal takes either median or mean, and sigma")
        middle = positive(self.median or self.mean or 0.0, "lognormal median or mean")
        if middle > MOST_TOKENS:
            raise SloBenchError(
                f"lognormal median or mean must be at most {MOST_TOKENS:,} but is {middle:g}"
            )
        if not 0 <= self.sigma <= _MOST_SIGMA:
            raise SloBenchError(
                f"lognormal sigma must lie in 0..{_MOST_SIGMA} but is {self.sigma:g}"
            )
        _at_least_one(self.min, "lognormal min")
        if self.max is not None and self.max < self.min:
            raise SloBenchError(f"lognormal max must be at least min={self.min:g}")

    def at(self, u: Floats) -> Ints:
        median = self.median or (self.mean or 0.0) * math.exp(-(self.sigma**2) / 2)
        values = median * np.exp(self.sigma * normal_quantile(u))
        # Beyond any context a count is only a risk of overflow.
        return _tokens(np.clip(values, self.min, self.max or 1e12))


@dataclass(frozen=True)
class Quantiles:
    """Empirical quantiles, interpolated between knots in the logarithm of the count.

    Token counts spread over orders of magnitude, so that between two knots a straight line in
    the logarithm is closer than one in the count. `probabilities` begin at 0, end at 1 and do
    not decrease; `tokens` are the counts there.
    """

    probabilities: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        p, t = self.probabilities, self.tokens
        if len(p) != len(t) or len(p) < 2:
            raise SloBenchError("quantiles need as many probabilities as tokens, and two at least")
        if p[0] != 0 or p[-1] != 1 or any(not b >= a for a, b in pairwise(p)):
            raise SloBenchError(f"quantile probabilities must rise from 0 to 1 but are {p}")
        _at_least_one(t[0], "quantile tokens")
        if any(not b >= a for a, b in pairwise(t)):
            raise SloBenchError(f"quantile tokens must not decrease but are {t}")
        _at_least_one(t[-1], "quantile tokens")

    def at(self, u: Floats) -> Ints:
        return _tokens(np.exp(np.interp(u, self.probabilities, np.log(self.tokens))))


@dataclass(frozen=True)
class Mixture:
    """Each count comes from one of several distributions, by weight.

    `at` is the inverse cumulative function only within a component: components stand side by
    side along u in the order given, so rank correlation with a mixture is approximate.
    """

    weights: tuple[float, ...]
    components: tuple[LengthDistribution, ...]

    def __post_init__(self) -> None:
        if not self.weights or len(self.weights) != len(self.components):
            raise SloBenchError("a mixture needs a weight for each component, and one at least")
        for weight in self.weights:
            positive(weight, "mixture weight")

    def at(self, u: Floats) -> Ints:
        edges = np.cumsum(self.weights) / sum(self.weights)
        which = np.minimum(np.searchsorted(edges, u, side="right"), len(edges) - 1)
        begin = np.concatenate(([0.0], edges[:-1]))
        inner = np.clip((u - begin[which]) / (edges - begin)[which], 0, np.nextafter(1, 0))
        tokens = np.empty(len(u), dtype=np.int64)
        for k, component in enumerate(self.components):
            mine = which == k
            tokens[mine] = component.at(inner[mine])
        return tokens


def _mixture(call: Call) -> Mixture:
    values = call.positional
    if call.named or len(values) % 2:
        raise SloBenchError(
            f"cannot read {call.text!r}; write mixture(0.3, fixed(10), 0.7, uniform(1,100))"
        )
    weights = tuple(positive(w, "mixture weight") for w in values[::2])
    return Mixture(weights, tuple(parse_lengths(text) for text in values[1::2]))


def _quantiles(call: Call) -> Quantiles:
    if call.positional or not call.named:
        raise SloBenchError(f"cannot read {call.text!r}; write quantiles(0=10, 0.5=80, 1=900)")
    knots = sorted((number(p, "probability"), number(t, "tokens")) for p, t in call.named.items())
    return Quantiles(tuple(p for p, _ in knots), tuple(t for _, t in knots))


LENGTHS: dict[str, Callable[[Call], LengthDistribution]] = {
    "fixed": lambda call: build(Fixed, call),
    "uniform": lambda call: build(Uniform, call),
    "geometric": lambda call: build(Geometric, call),
    "lognormal": lambda call: build(Lognormal, call),
    "quantiles": _quantiles,
    "mixture": _mixture,
}


def parse_lengths(text: str | int) -> LengthDistribution:
    """Read `512`, `fixed(512)`, `uniform(1,100)`, `geometric(mean=4)`,
    `lognormal(median=300, sigma=0.8, max=4096)`, `quantiles(0=10, 0.5=80, 1=900)` or
    `mixture(0.3, fixed(10), 0.7, uniform(1,100))`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
        UnknownNameError: no such distribution.
    """
    call = parse_call(str(text))
    if not call.positional and not call.named and call.name[0] in "0123456789-+.":
        return build(Fixed, Call("fixed", (call.name,), {}, call.text))
    return by_name("length distribution", call.name, LENGTHS)(call)


@dataclass(frozen=True)
class MixtureComponent:
    """Requests of one kind: their prompts and outputs, and how these go together.

    `rank_correlation` is Spearman's, through a Gaussian copula (for a `Mixture`
    approximate). `max_output_tokens` is what such requests ask for; 0 = what they get.
    """

    prompt: LengthDistribution
    output: LengthDistribution
    weight: float = 1.0
    rank_correlation: float = 0.0
    max_output_tokens: int = 0

    def __post_init__(self) -> None:
        positive(self.weight, "weight")
        if not -1 <= self.rank_correlation <= 1:
            raise SloBenchError(
                f"rank_correlation must lie in -1..1 but is {self.rank_correlation}"
            )


@dataclass(frozen=True)
class TokenPairs:
    """Drawn lengths, one row a request."""

    prompt_tokens: Ints
    output_tokens: Ints
    max_output_tokens: Ints


@dataclass(frozen=True)
class PairLengths:
    """Prompt and output lengths drawn together: each request from one part, by weight.

    With `max_total_tokens`, outputs are cut so that prompt and output stay within it.
    """

    parts: tuple[MixtureComponent, ...]
    max_total_tokens: int | None = None

    def draw(self, n: int, rng: np.random.Generator) -> TokenPairs:
        """Lengths of `n` requests; the first k are the same for every n >= k."""
        return self.at(self.uniforms(n, rng))

    def prompts_alone(self) -> PairLengths:
        """The same prompts with outputs of one token, which cost nothing to draw."""
        parts = (
            replace(part, output=Fixed(1), rank_correlation=0.0, max_output_tokens=0)
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def uniforms(self, n: int, rng: np.random.Generator) -> Floats:
        """Random numbers in [0, 1) for `n` requests, shape (n, 3): part, prompt, output."""
        return rng.random((n, 3))

    def at(self, u: Floats) -> TokenPairs:
        """Lengths at probabilities, one row of three a request."""
        n = len(u)
        edges = np.cumsum([p.weight for p in self.parts])
        which = np.searchsorted(edges / edges[-1], u[:, 0], side="right")
        which = np.minimum(which, len(self.parts) - 1)
        prompt = np.empty(n, dtype=np.int64)
        output = np.empty(n, dtype=np.int64)
        limit = np.empty(n, dtype=np.int64)
        for k, part in enumerate(self.parts):
            mine = np.flatnonzero(which == k) if len(self.parts) > 1 else slice(None)
            prompt[mine] = part.prompt.at(u[mine, 1])
            output[mine] = part.output.at(_coupled(u[mine, 1], u[mine, 2], part.rank_correlation))
            limit[mine] = part.max_output_tokens
        if self.max_total_tokens is not None:
            prompt = np.minimum(prompt, self.max_total_tokens - 1)
            output = np.minimum(output, self.max_total_tokens - prompt)
        if not limit.any():
            return TokenPairs(prompt, output, output)
        return TokenPairs(prompt, output, np.where(limit > 0, np.maximum(limit, output), output))


def pair(prompt: LengthDistribution, output: LengthDistribution) -> PairLengths:
    """A pair of length distributions that are drawn independently."""
    return PairLengths((MixtureComponent(prompt, output),))


def _coupled(u: Floats, v: Floats, rank_correlation: float) -> Floats:
    """A uniform column made from `v` whose ranks correlate with those of `u`."""
    if rank_correlation == 0:
        return v
    # Spearman's rho of a Gaussian copula is 6/pi * asin(r/2).
    r = 2 * math.sin(math.pi * rank_correlation / 6)
    z = r * normal_quantile(u) + math.sqrt(max(0.0, 1 - r * r)) * normal_quantile(v)
    return np.clip(normal_cumulative(z), 0, np.nextafter(1, 0))


def mean_tokens(lengths: LengthDistribution, points: int = 100_000) -> float:
    """Mean of a distribution, by the midpoint rule over its quantiles."""
    return float(lengths.at((np.arange(points) + 0.5) / points).mean())


def _poly(x: Floats, *coefficients: float) -> Floats:
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def normal_quantile(u: Floats) -> Floats:
    """Inverse cumulative distribution at 0 < u < 1, to about seven digits.

    Source: M. J. Wichura, "Algorithm AS 241: The percentage points of the normal
    distribution", Applied Statistics 37 (1988), routine PPND7.
    """
    u = np.clip(u, 1e-300, 1 - 1e-16)
    q = u - 0.5
    z = np.empty_like(q)
    central = np.abs(q) <= 0.425
    inner = q[central]
    r = 0.180625 - inner * inner
    z[central] = (
        inner
        * _poly(r, 3.3871327179, 50.434271938, 159.29113202, 59.109374720)
        / _poly(r, 1.0, 17.895169469, 78.757757664, 67.187563600)
    )
    outer = ~central
    u, q = u[outer], q[outer]
    r = np.sqrt(-np.log(np.minimum(u, 1 - u)))
    near = _poly(r - 1.6, 1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103) / _poly(
        r - 1.6, 1.0, 0.73700164250, 0.12021132975
    )
    far = _poly(r - 5, 6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997) / _poly(
        r - 5, 1.0, 0.24197894225, 0.012258202635
    )
    z[outer] = np.sign(q) * np.where(r <= 5, near, far)
    return z


def normal_cumulative(z: Floats) -> Floats:
    """P(Z <= z), to 1e-7.

    Source: M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 26.2.17.
    """
    t = 1 / (1 + 0.2316419 * np.abs(z))
    upper = (
        np.exp(-z * z / 2)
        / np.sqrt(2 * np.pi)
        * t
        * _poly(t, 0.319381530, -0.356563782, 1.781477937, -1.821255978, 1.330274429)
    )
    below: Floats = np.where(z >= 0, 1 - upper, upper)
    return below
