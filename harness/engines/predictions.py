"""What policies believe on a simulated instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...predictors.step_time import StepTime
from ..core.state import RequestState


def true_output_tokens(r: RequestState) -> int:
    """An oracle: the length that the answer will have."""
    return r.output_tokens


class ModelledPredictions:
    """A step-time model, a link to host memory, and a guess of output lengths."""

    def __init__(
        self,
        step_time: StepTime,
        swap_s_per_block: float,
        output_tokens: Callable[[RequestState], int] = true_output_tokens,
    ) -> None:
        self._step_time = step_time
        self._swap_s_per_block = swap_s_per_block
        self._output_tokens = output_tokens

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return self._step_time.step_s(decode_seqs, decode_kv_tokens, chunks)

    def swap_s(self, blocks: int) -> float:
        return blocks * self._swap_s_per_block

    def output_tokens(self, r: RequestState) -> int:
        return self._output_tokens(r)
