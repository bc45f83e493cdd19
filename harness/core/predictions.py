"""What policies believe on a simulated instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
        """Learn from an iteration that took `seconds`. Decode steps that the engine skips over are
        not reported, and the plain reference engine reports nothing.
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
