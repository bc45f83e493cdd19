"""Sums over steps that grow evenly for a stretch, then evenly again at another pace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt

ENDLESS = 1 << 60
# How many steps, seconds of the first, and by how much each is longer than the one before.
Stretch = tuple[int, float, float]


class EvenSpans:
    """Spans of a step-time model whose decode steps grow evenly, stretch by stretch."""

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one iteration."""
        raise NotImplementedError

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """Seconds of several decode steps, in closed form."""
        return span_s(self._stretches(decode_seqs, decode_kv_tokens), steps)

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        """Fewest decode steps that take `duration_s`; agrees with `span_s` to the last bit."""
        return steps_within(self._stretches(decode_seqs, decode_kv_tokens), duration_s)

    def _stretches(self, seqs: int, kv_tokens: int) -> Iterable[Stretch]:
        """One stretch without end; each step takes `_growth_s` longer than the one before."""
        first_s = self.step_s(seqs, kv_tokens, ())
        return [(ENDLESS, first_s, self._growth_s(seqs))]

    def _growth_s(self, seqs: int) -> float:
        raise NotImplementedError


def total_s(steps: int, first_s: float, growth_s: float) -> float:
    """Seconds of that many steps of one stretch."""
    return steps * first_s + growth_s * (steps * (steps - 1) * 0.5)


def span_s(stretches: Iterable[Stretch], steps: int) -> float:
    """Seconds of the first `steps` steps; the stretches must hold as many."""
    before_s = 0.0
    for here, first_s, growth_s in stretches:
        if here >= steps:
            return before_s + total_s(steps, first_s, growth_s)
        before_s += total_s(here, first_s, growth_s)
        steps -= here
    raise AssertionError("the last stretch has no end")


def steps_within(stretches: Iterable[Stretch], duration_s: float) -> int:
    """Fewest steps whose `span_s` is at least `duration_s`, to the last bit; 0 if that is not
    positive.
    """
    if duration_s <= 0:
        return 0
    before_s = 0.0
    steps = 0
    for here, first_s, growth_s in stretches:
        after_s = before_s + total_s(here, first_s, growth_s) if here < ENDLESS else inf
        if after_s >= duration_s:
            return steps + crossing(first_s, growth_s, before_s, duration_s)
        before_s = after_s
        steps += here
    raise AssertionError("the last stretch has no end")


def crossing(first_s: float, growth_s: float, before_s: float, duration_s: float) -> int:
    """Fewest steps of a stretch that reach `duration_s` from `before_s`."""
    # growth/2 * n^2 + (first - growth/2) * n = what is missing. The root is taken in the form that
    # stays exact as growth vanishes; the loops then run once or not at all.
    missing_s = duration_s - before_s
    rest_s = first_s - 0.5 * growth_s
    root_s = rest_s + sqrt(max(0.0, rest_s * rest_s + 2 * growth_s * missing_s))
    steps = max(1, int(2 * missing_s / root_s) + 1)
    while before_s + total_s(steps, first_s, growth_s) < duration_s:
        steps += 1
    while steps > 1 and before_s + total_s(steps - 1, first_s, growth_s) >= duration_s:
        steps -= 1
    return steps
