"""The decisions that a policy returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .kv.layer_pipeline import pipeline_s

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one iteration.

    `mixed_batches`: prefill and decode share an iteration (False: prefill goes first, alone).
    `chunked`: a prompt may be split over iterations. `allocate_per_chunk`: its blocks are allocated
    chunk by chunk instead of on entry; entry still needs room for the whole prompt.
    `watermark_blocks` stay free after an entry, `decode_headroom_blocks` after decode growth.
    `async_scheduling`: an iteration is scheduled while the previous one runs; it holds only
    requests that had arrived when the previous one began, and a request that ends in the previous
    one keeps its place and blocks for one more. `overlap_swap`: copies to and from host memory run
    in parallel to the computation, layer by layer, and lengthen the iteration only by what exceeds
    it, and by the first of `layers` layers (0: as many as no first one shows). Each prompt token is
    then stored in `store_s_per_token` seconds, likewise in parallel.
    """

    token_budget: int = 2048
    max_seqs: int = 256
    mixed_batches: bool = True
    chunked: bool = True
    allocate_per_chunk: bool = False
    watermark_blocks: int = 0
    decode_headroom_blocks: int = 0
    async_scheduling: bool = False
    overlap_swap: bool = False
    layers: int = 0
    store_s_per_token: float = 0.0

    def exposed_swap_s(
        self, step_s: float, swap_s: float, chunks: Sequence[tuple[int, int]] = ()
    ) -> float:
        """Seconds by which copies lengthen an iteration that prefills `chunks`: (tokens in KV
        already, tokens to prefill).
        """
        if not self.overlap_swap:
            return swap_s
        store_s = self.store_s_per_token * sum(tokens for _, tokens in chunks)
        if not self.layers:
            return max(0.0, swap_s - step_s, store_s - step_s)
        return pipeline_s(self.layers, swap_s, step_s, store_s) - step_s


class Admission(Enum):
    """Decision on a request when it arrives."""

    ADMIT = "admit"
    REJECT = "reject"


class PreemptionMode(Enum):
    """How a victim gives up its place."""

    RECOMPUTE = "recompute"  # KV thrown away, prompt and given tokens prefilled again
    SWAP = "swap"  # KV to host memory
    STALL = "stall"  # keeps its blocks and sits out until a block is free


class NextQueue(Enum):
    """The queue whose requests enter the batch next."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    NONE = "none"


class ReleaseReason(Enum):
    """Why an instance returns a request or reports an event of it."""

    OFFLOAD = "offload"  # before its prefill began
    DROP = "drop"
    REJECT = "reject"
    HAND_OVER = "hand over"  # prefilled; it decodes on another instance
    FAIL = "fail"  # the instance is gone
    FINISH = "finish"  # reported only if `notify_on_finish` or `reports_all_ends`
    BEGUN = "begun"  # the last waiting request has entered; only if `reports_empty_queue`


@dataclass(frozen=True, slots=True)
class Timeout:
    """When a request that has not begun leaves, and why."""

    time_s: float
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Line:
    """A key that is linear in time: `value` at `time_s`, plus `per_s` each second."""

    time_s: float
    value: float
    per_s: float

    def at(self, now_s: float) -> float:
        """Value of the key at `now_s`."""
        return self.value + (now_s - self.time_s) * self.per_s
