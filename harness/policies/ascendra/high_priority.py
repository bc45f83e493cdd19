"""Ascendra's high-priority instance: first come, first served, prompts first, elastic batches.

Source: Ascendra (see docs/papers.md), §6 (prefill before decode), §6.2 (elastic batch size), §6.3
(dropping), §8.5 (10 % of free memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.decisions import UNLIMITED, Limits, Timeout
from ...core.policy import Policy, parameter
from ...core.state import RequestState
from ...core.view import View
from ..shared.timeouts import DROPPING, OVERDUE, when_overdue

RESCUED = "rescued"
_LITTLE = 16  # answers before which nothing is known of their length
_MEMORY = 256  # answers that the history is about


@dataclass
class DecodeLengths:
    """Lengths of the last answers, the older the less."""

    answers: int = 0
    mean: float = 0.0
    mean_square: float = 0.0
    last_beyond: int = -1  # request that was counted as `elastic` last

    def add(self, tokens: int) -> None:
        """Record an output of `tokens` tokens."""
        self.answers += 1
        share = max(1.0 / self.answers, 1.0 / _MEMORY)
        self.mean += share * (tokens - self.mean)
        self.mean_square += share * (tokens * tokens - self.mean_square)

    def to_come(self, decoding: int, fresh: int) -> float:
        """Tokens that `decoding` decoding requests and `beginning` new ones will still produce. A
        request observed while it decodes has mean square / (2 mean) left: the mean residual life.
        """
        if self.answers < _LITTLE:
            return 0.0
        return decoding * self.mean_square / (2 * self.mean) + fresh * self.mean


@dataclass(frozen=True)
class AscendraHp(Policy):
    """Prompts alone in an iteration, as they came; decodes when none waits or fits.

    `elastic`: no cap on the batch. A prompt enters while `spare` of all blocks stay free, and as
    many as the history of answers says that the batch will still take, if those are more. The
    paper says how neither is reckoned. Otherwise at most `max_num_seqs`, as on LP instances.
    """

    max_num_batched_tokens: int = parameter(4096, 16, 131072, log=True)
    max_num_seqs: int = parameter(128, 1, 8192, log=True)
    elastic: bool = parameter(True)
    spare: float = parameter(0.1, 0.0, 0.9)
    watermark: float = parameter(0.01, 0.0, 0.5)  # share of blocks left free after an entry
    overdue: str = parameter("keep", choices=("keep", "drop"))

    def new_state(self) -> DecodeLengths:
        return DecodeLengths()

    def mechanisms(self) -> dict[str, str]:
        descriptions = {RESCUED: "offloaded requests with their first token in time"}
        if self.elastic:
            descriptions["elastic"] = "requests considered for a batch of max_num_seqs or more"
        return descriptions | (DROPPING if self.overdue == "drop" else {})

    def limits(self, view: View) -> Limits:
        return Limits(
            self.max_num_batched_tokens,
            UNLIMITED if self.elastic else self.max_num_seqs,
            mixed_batches=False,
            chunked=False,
            watermark_blocks=int(self.watermark * view.total_blocks),
            decode_headroom_blocks=1,
        )

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        if not (self.elastic and view.n_running):
            return 0
        lengths: DecodeLengths = view.policy_state
        if view.n_running >= self.max_num_seqs and lengths.last_beyond != r.id:
            lengths.last_beyond = r.id
            view.counters.add("elastic", r)
        tokens = lengths.to_come(view.n_decoding, view.n_prefilling + 1)
        spare = int((self.spare - self.watermark) * view.total_blocks)
        return max(spare, int(tokens / view.block_size), 0)

    @property
    def drop_rule(self) -> str:
        return "" if self.overdue == "keep" else OVERDUE

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        return None if self.overdue == "keep" else when_overdue(r)

    def on_finished(self, r: RequestState, view: View) -> None:
        lengths: DecodeLengths = view.policy_state
        lengths.add(r.output_tokens)
        if math.isnan(r.first_token_s):  # a real server does not tell
            view.counters.pop(RESCUED, None)
        elif r.queued_s > r.arrival_s and r.first_token_s - r.arrival_s <= r.slo.ttft_s:
            view.counters.add(RESCUED, r)
