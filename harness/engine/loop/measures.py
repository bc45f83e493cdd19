"""What an instance measures while it runs: gaps between tokens, use over time, sums."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.records.request_records import Gaps

Sample = tuple[float, int, int, int]  # time, waiting, running, KV blocks
Timed = TypeVar("Timed", Sample, tuple[float, int])

_APART: Final = 0.75  # of the time between samples; each comes at the end of a step
_SPAN_POINTS: Final = 8  # weighted values that stand for one leap over decode steps
# Relative spread of step times within a leap that one value may stand for.
_SPAN_TOLERANCE: Final = 0.005


class Measures:
    """Counters of one instance, constant cost an iteration.

    A decode step gives one gap to every decoding request. It is the same for all that decoded in
    the step before; requests that joined since then are kept apart until their first step.
    """

    __slots__ = (
        "_add_count",
        "_add_gap",
        "_gap_count",
        "_gap_s",
        "_joined",
        "decode_tokens",
        "idle_s",
        "kv_block_s",
        "kv_peak",
        "last_decode_s",
        "most_samples",
        "next_sample_s",
        "padded_tokens",
        "preemptions",
        "prefill_tokens",
        "sample_s",
        "samples",
        "steps",
        "waited_s",
        "worked",
    )

    def __init__(self, sample_s: float = float("inf"), most_samples: float = float("inf")) -> None:
        """Samples are `sample_s` seconds apart; whenever there are `most_samples`, half of them go
        and the next ones are twice as far apart.
        """
        self._gap_s = array("d")
        self._gap_count = array("q")
        self._add_gap, self._add_count = self._gap_s.append, self._gap_count.append
        self._joined: list[float] = []
        self.last_decode_s = 0.0
        self.idle_s = 0.0  # time with nothing to do before the last work ended
        self.waited_s = 0.0  # for a device busy with other batches, or for KV blocks
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.padded_tokens = 0
        self.preemptions = 0
        self.kv_block_s = 0.0
        self.kv_peak = 0
        self.sample_s = sample_s
        self.most_samples = most_samples
        self.next_sample_s = 0.0
        self.samples: list[Sample] = []
        self.worked: list[tuple[float, int]] = []  # time, tokens computed until then

    def join(self, last_token_s: float, first: bool) -> None:
        """Add a request with its last token at `last_token_s`; it decodes from the next step."""
        if first and not self._joined:
            self.last_decode_s = last_token_s
        elif last_token_s != self.last_decode_s:
            self._joined.append(last_token_s)

    def unjoin(self, last_token_s: float) -> None:
        """That request leaves before its first step."""
        if last_token_s in self._joined:
            self._joined.remove(last_token_s)

    def sample(self, sample: Sample, tokens: int) -> None:
        """Take a sample, with the tokens computed until then."""
        self.samples.append(sample)
        self.worked.append((sample[0], tokens))
        if len(self.worked) >= self.most_samples:
            self.sample_s *= 2
            apart_s = self.sample_s * _APART
            self.samples = _apart(self.samples, apart_s)
            self.worked = _apart(self.worked, apart_s)
        self.next_sample_s = sample[0] + self.sample_s

    def idle(self, from_s: float, to_s: float) -> None:
        """Nothing is here between those times; a spell longer than a sample shows as such."""
        self.idle_s += to_s - from_s
        if to_s - from_s > self.sample_s and self.samples:
            self.samples.append((from_s, 0, 0, 0))

    def gap(self, gap_s: float, count: int = 1) -> None:
        """Record a gap that occurred `count` times."""
        self._add_gap(gap_s)
        self._add_count(count)

    def decode_step(self, now_s: float, seqs: int) -> None:
        """`seqs` requests got a token at `now_s`."""
        if self._joined:
            for last_token_s in self._joined:
                self._add_gap(now_s - last_token_s)
                self._add_count(1)
            seqs -= len(self._joined)
            self._joined.clear()
        if seqs:
            self._add_gap(now_s - self.last_decode_s)
            self._add_count(seqs)
        self.last_decode_s = now_s

    def decode_span(
        self, now_s: float, seqs: int, steps: int, span_s: float, before_s: float
    ) -> None:
        """`steps` decode steps that took `span_s` together, the last ending at `now_s`; the step
        before them took `before_s`, and step times grow evenly.
        """
        mean_s = span_s / steps
        if steps < _SPAN_POINTS or mean_s - before_s <= _SPAN_TOLERANCE * before_s:
            self._add_gap(mean_s)
            self._add_count(seqs * steps)
        else:
            share, rest = divmod(steps, _SPAN_POINTS)
            for k in range(_SPAN_POINTS):
                point = (k + 0.5) / _SPAN_POINTS
                self._add_gap(mean_s + (2 * point - 1) * (mean_s - before_s))
                self._add_count(seqs * (share + (1 if k < rest else 0)))
        self.last_decode_s = now_s

    @property
    def n_gaps(self) -> int:
        """Weighted values that `take_gaps` would return."""
        return len(self._gap_s)

    def take_gaps(self) -> Gaps:
        """All inter-token gaps of the instance until now, without a copy; it begins anew."""
        gaps = Gaps(np.frombuffer(self._gap_s), np.frombuffer(self._gap_count, dtype=np.int64))
        self._gap_s, self._gap_count = array("d"), array("q")
        self._add_gap, self._add_count = self._gap_s.append, self._gap_count.append
        return gaps


def _apart(samples: list[Timed], apart_s: float) -> list[Timed]:
    """Those that are so far apart, and all at which nothing ran."""
    kept = samples[:1]
    last_s = kept[0][0]
    for sample in samples[1:]:
        if sample[0] - last_s >= apart_s or not (sample[-1] or any(sample[1:-1])):
            kept.append(sample)
            last_s = sample[0]
    return kept


def gaps_of(measures: Iterable[Measures]) -> Gaps:
    """Take all gaps of several instances; there may be none."""
    parts = [measured.take_gaps() for measured in measures]
    if len(parts) == 1:
        return parts[0]
    parts.append(Gaps(np.empty(0), np.empty(0, dtype=np.int64)))
    return Gaps(np.concatenate([p.gap_s for p in parts]), np.concatenate([p.count for p in parts]))


def summed(
    sampled: Iterable[Sequence[Sample]],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Samples of several instances on one axis, each of which holds until the instance's next.

    All moments, and the sums of waiting, running and blocks then, in rows. The samples of each are
    in order of time.
    """
    tables = [np.array(samples) for samples in sampled]
    times = np.unique(np.concatenate([table[:, 0] for table in tables]))
    sums = np.zeros((3, len(times)), dtype=np.int64)
    for table in tables:
        indices = np.searchsorted(table[:, 0], times, side="right") - 1
        state = table[np.maximum(indices, 0), 1:].astype(np.int64).T
        sums += np.where(indices >= 0, state, 0)
    return times, sums
