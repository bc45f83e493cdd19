"""Idle gaps of a model, and how long one must last before the model may leave its GPU.

Source: §6.2 of Yu et al., "Prism": a threshold from the distribution of idle gaps.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

LEAST_GAPS = 8  # before so many are seen a model has no distribution of its own
_REMEMBERED = 128


class IdleGaps:
    """The last gaps between the end of a model's work and its next request."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, gap_s: float) -> None:
        """Another gap has ended."""
        if len(self._recent) == _REMEMBERED:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(gap_s)
        insort(self._sorted, gap_s)

    def threshold_s(self, worth_s: float, share: float, default_s: float) -> float:
        """How long a model must have been idle before it may go.

        The paper finds its threshold by looking at the distribution and does not print a rule.
        Here: the shortest spell after which at least `share` of the gaps that lasted so long
        lasted `worth_s` longer, the time that makes an eviction worth while; `default_s` until
        `LEAST_GAPS` are seen. Where no spell says so, the longest gap seen.
        """
        gaps = self._sorted
        if len(gaps) < LEAST_GAPS:
            return default_s
        for spell_s in (0.0, *gaps):
            lasted = len(gaps) - bisect_right(gaps, spell_s)
            longer = len(gaps) - bisect_right(gaps, spell_s + worth_s)
            if lasted and longer >= share * lasted:
                return spell_s
        return gaps[-1]
