"""The predictions that policies read: modelled on a simulated instance, learned inside a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .state import RequestState


def true_output_tokens(r: RequestState) -> int:
    """An oracle: the length that the answer will have."""
    return r.output_tokens


class Predicts(Protocol):
    """Something that says how long an iteration takes: a `StepTime`, or what learns one."""

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one iteration."""


class Learner(Predicts, Protocol):
    """A performance model that learns from the iterations of one instance."""

    @property
    def error(self) -> float:
        """Mean relative error of its predictions so far."""

    def learn(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        duration_s: float,
    ) -> None:
        """Learn from an iteration that took `duration_s`. Decode steps that the engine skips over
        are not reported, and the plain reference engine reports nothing.
        """


class ModelledPredictions:
    """A step-time model, a link to host memory, and a guess of output lengths."""

    def __init__(
        self,
        step_time: Predicts,
        swap_s_per_block: float,
        output_tokens: Callable[[RequestState], int] = true_output_tokens,
        output_tokens_p90: Callable[[RequestState], int] | None = None,
    ) -> None:
        self._step_time = step_time
        self._swap_s_per_block = swap_s_per_block
        self._output_tokens = output_tokens
        self._longest = output_tokens_p90 or output_tokens

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one iteration."""
        return self._step_time.step_s(decode_seqs, decode_kv_tokens, chunks)

    def swap_s(self, blocks: int) -> float:
        return blocks * self._swap_s_per_block

    def output_tokens(self, r: RequestState) -> int:
        return self._output_tokens(r)

    def output_tokens_p90(self, r: RequestState) -> int:
        return self._longest(r)


_FORGET = 0.999  # weight of a step, after one more
_PRIOR = 1e6  # how little is known at first
_FEATURES = 4


class LearnedPredictions:
    """Recursive least squares on a step's sums: constant, decodes, KV read, tokens prefilled.

    Before it has learned it predicts zero, so that no request is dropped for an unknown time. The
    first step of a kind (with prompts, without) is left out: it includes one-time set-up, and a
    policy that used it would reject requests and so never correct the estimate.
    """

    def __init__(self) -> None:
        self._weights = np.zeros(_FEATURES)
        self._covariance = np.eye(_FEATURES) * _PRIOR
        self._swap_s_per_block: float | None = None
        self._warm: set[bool] = set()  # kinds that have been run

    def learn(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        duration_s: float,
    ) -> None:
        """A step of this composition took so long."""
        if not (decode_seqs or chunks):
            return
        kind = bool(chunks)
        if kind not in self._warm:
            self._warm.add(kind)
            return
        x = _features(decode_seqs, decode_kv_tokens, chunks)
        gain = self._covariance @ x / (_FORGET + x @ self._covariance @ x)
        self._weights += gain * (duration_s - x @ self._weights)
        self._covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / _FORGET
        if not np.isfinite(self._covariance).all() or np.trace(self._covariance) > 1e12:
            self._covariance = np.eye(_FEATURES) * _PRIOR  # the same batch for very long

    def learn_swap(self, blocks: int, duration_s: float) -> None:
        """Learn from a swap of `blocks` blocks that took `duration_s` seconds."""
        if blocks:
            each_s, known_s = duration_s / blocks, self._swap_s_per_block
            self._swap_s_per_block = each_s if known_s is None else 0.8 * known_s + 0.2 * each_s

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return max(0.0, float(_features(decode_seqs, decode_kv_tokens, chunks) @ self._weights))

    def swap_s(self, blocks: int) -> float:
        return blocks * (self._swap_s_per_block or 0.0)

    def output_tokens(self, r: RequestState) -> int:
        """The length that the client predicts; without one the maximum, which is all that a server
        knows.
        """
        return (
            r.max_output_tokens
            if r.predicted_output_tokens is None
            else min(r.predicted_output_tokens[0], r.max_output_tokens)
        )

    def output_tokens_p90(self, r: RequestState) -> int:
        """The 90 % quantile that the client predicts; without one the maximum."""
        return (
            r.max_output_tokens
            if r.predicted_output_tokens is None
            else min(r.predicted_output_tokens[1], r.max_output_tokens)
        )


class Guess(LearnedPredictions):
    """Predictions with learned step and swap times and given output lengths."""

    def __init__(
        self,
        output_tokens: Callable[[RequestState], int] | None = None,
        output_tokens_p90: Callable[[RequestState], int] | None = None,
    ) -> None:
        super().__init__()
        self._median = output_tokens
        self._longest = output_tokens_p90 or output_tokens

    def output_tokens(self, r: RequestState) -> int:
        """The predicted length; without one the maximum."""
        return super().output_tokens(r) if self._median is None else self._median(r)

    def output_tokens_p90(self, r: RequestState) -> int:
        """The predicted 90 % quantile; without one the expected length."""
        return super().output_tokens_p90(r) if self._longest is None else self._longest(r)


def _features(
    decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
) -> np.ndarray:
    prefill = sum(tokens for _, tokens in chunks)
    kv_read = decode_kv_tokens + sum(before + tokens // 2 for before, tokens in chunks)
    # Thousands, so that the columns are of like size.
    return np.array([1.0, decode_seqs / 1e3, kv_read / 1e3, prefill / 1e3])
