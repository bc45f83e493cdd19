"""Ascendra's high-priority instance: first come, first served, prompts first, elastic batches.

Source: Ascendra (see docs/papers.md), §6 (prefill before decode), §6.2 (elastic batch size), §6.3
(dropping), §8.5 (10 % of free memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.decisions import UNLIMITED, Leave, Limits
from ...core.policy import Policy, knob
from ...core.state import RequestState
from ...core.view import View
from ..shared.timeouts import when_overdue

_LITTLE = 16  # answers before which nothing is known of their length
_MEMORY = 256  # answers that the history is about


@dataclass
class DecodeLengths:
    """Lengths of the last answers, the older the less."""

    seen: int = 0
    mean: float = 0.0
    mean_square: float = 0.0

    def add(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self.seen += 1
        share = max(1.0 / self.seen, 1.0 / _MEMORY)
        self.mean += share * (tokens - self.mean)
        self.mean_square += share * (tokens * tokens - self.mean_square)

    def to_come(self, decoding: int, fresh: int) -> float:
        """Tokens that so many decoding requests and so many that begin will still produce.

        Who is met decoding has mean square / (2 mean) left: the mean residual life.
        """
        if self.seen < _LITTLE:
            return 0.0
        return decoding * self.mean_square / (2 * self.mean) + fresh * self.mean


@dataclass(frozen=True)
class AscendraHp(Policy):
    """Prompts alone in an iteration, as they came; decodes when none waits or fits.

    `elastic`: no cap on the batch. A prompt enters while `spare` of all blocks stay free, and as
    many as the history of answers says that the batch will still take, if those are more. The
    paper says how neither is reckoned. Otherwise at most `max_num_seqs`, as on LP instances.
    """

    max_num_batched_tokens: int = knob(4096, 16, 131072, log=True)
    max_num_seqs: int = knob(128, 1, 8192, log=True)
    elastic: bool = knob(True)
    spare: float = knob(0.1, 0.0, 0.9)
    watermark: float = knob(0.01, 0.0, 0.5)  # share of blocks left free after an entry
    overdue: str = knob("keep", choices=("keep", "drop"))

    def new_state(self) -> DecodeLengths:
        return DecodeLengths()

    def limits(self, view: View) -> Limits:
        return Limits(
            self.max_num_batched_tokens,
            UNLIMITED if self.elastic else self.max_num_seqs,
            mix=False,
            chunked=False,
            watermark_blocks=int(self.watermark * view.total_blocks),
            headroom_blocks=1,
        )

    def reserve(self, r: RequestState, view: View) -> int:
        if not (self.elastic and view.n_running):
            return 0
        lengths: DecodeLengths = view.state
        tokens = lengths.to_come(view.n_decoding, view.n_prefilling + 1)
        spare = int((self.spare - self.watermark) * view.total_blocks)
        return max(spare, int(tokens / view.block_tokens), 0)

    def leave(self, r: RequestState, view: View) -> Leave | None:
        return None if self.overdue == "keep" else when_overdue(r)

    def finished(self, r: RequestState, view: View) -> None:
        lengths: DecodeLengths = view.state
        lengths.add(r.output_tokens)
