"""The answers a policy can give."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """What one iteration may hold.

    `mixed_batches`: prefill and decode share an iteration (False: prefill goes first, alone).
    `chunked`: a prompt may be split over iterations. `allocate_per_chunk`: its blocks are taken
    chunk by chunk instead of at entry; entry still needs room for all of it. `watermark_blocks`
    stay free after an entry, `decode_headroom_blocks` after decode growth. `async_scheduling`: an
    iteration is decided while the one before it runs: it holds only who had arrived when that one
    began, and who ends in that one keeps place and blocks for it. `overlap_swap`: copies to and
    from host memory run beside the step's computation, layer by layer, and lengthen it only by what
    exceeds it.
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

    def exposed_swap_s(self, step_s: float, swap_s: float) -> float:
        """By how much swapping lengthens the step that it belongs to."""
        return max(0.0, swap_s - step_s) if self.overlap_swap else swap_s


class Admission(Enum):
    """What becomes of a request on arrival."""

    ADMIT = "admit"
    REJECT = "reject"


class PreemptionMode(Enum):
    """How a victim gives up its place."""

    RECOMPUTE = "recompute"  # KV thrown away, prompt and given tokens prefilled again
    SWAP = "swap"  # KV to host memory
    STALL = "stall"  # keeps its blocks and sits out until a block is free


class NextQueue(Enum):
    """Who may enter the batch next."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    NONE = "none"


class ReleaseReason(Enum):
    """Why an instance gives a request back, or what it tells of one."""

    OFFLOAD = "offload"  # before its prefill began
    DROP = "drop"
    REJECT = "reject"
    HAND_OVER = "hand over"  # its prefill is done, and it decodes elsewhere
    FAIL = "fail"  # the instance is gone
    FINISH = "finish"  # only told where somebody waits for it
    BEGUN = "begun"  # the last one that waited has entered the batch; only told where asked


@dataclass(frozen=True, slots=True)
class Timeout:
    """When a request that has still not begun goes, and why."""

    time_s: float
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Line:
    """A key that changes with time: `value` at `time_s`, and `per_s` more each second."""

    time_s: float
    value: float
    per_s: float

    def at(self, now_s: float) -> float:
        """The key now."""
        return self.value + (now_s - self.time_s) * self.per_s
