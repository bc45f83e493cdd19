"""One request on one instance, as the engine sees it, and what an instance reports of it."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from ...workloads.request import Slo
from .compiled import mypyc_attr
from .decisions import ReleaseReason

NOT_YET_S: Final = float("nan")


class Phase(Enum):
    """State of a request on its instance."""

    WAITING = "waiting"  # needs prefill: new, or to be recomputed
    SWAPPED = "swapped"  # its KV is in host memory or at its former instance
    PREFILL = "prefill"
    DECODE = "decode"
    STALLED = "stalled"  # keeps its blocks, sits out
    DONE = "done"


# Looking up an enum member a million times costs.
WAITING: Final = Phase.WAITING
_FINISH: Final = ReleaseReason.FINISH


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestState:
    """Progress of a request. `id` is its row in the workload.

    While a request decodes, `kv_tokens`, `emitted_tokens` and `blocks` keep their values of tick
    `tick0` (a decode step then touches no request); ask the view for lengths. `target_tokens` is
    the number of tokens that prefill must put into the KV cache: the prompt and, after a
    recomputation, the output tokens that are out already.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "cached_tokens",
        "emitted_tokens",
        "finish_s",
        "first_scheduled_s",
        "first_token_s",
        "id",
        "in_host_memory",
        "instance",
        "kv_tokens",
        "last_token_s",
        "max_output_tokens",
        "notify_on_finish",
        "num_inputs",
        "output_tokens",
        "phase",
        "predicted_output_tokens",
        "prefix_blocks",
        "priority",
        "prompt_tokens",
        "queued_s",
        "recomputes",
        "reserved_blocks",
        "residue",
        "seq",
        "shared",
        "slo",
        "swaps",
        "target_tokens",
        "tick0",
        "transfer_s",
        "version",
        "visible_s",
    )

    def __init__(
        self,
        id: int,  # noqa: A002
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        max_output_tokens: int,
        slo: Slo,
        prefix_blocks: tuple[int, ...] = (),
        notify_on_finish: bool = False,
    ) -> None:
        self.id = id
        self.arrival_s = self.visible_s = arrival_s
        self.queued_s = arrival_s  # when the last instance returned it unbegun, if any did
        self.prompt_tokens = self.target_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_output_tokens = max_output_tokens
        self.slo = slo
        self.prefix_blocks = prefix_blocks
        self.notify_on_finish = notify_on_finish  # a client waits for this answer
        self.first_scheduled_s = self.first_token_s = self.finish_s = self.last_token_s = NOT_YET_S
        self.phase = WAITING
        self.emitted_tokens = self.kv_tokens = self.blocks = self.reserved_blocks = 0
        self.tick0 = self.residue = self.version = self.recomputes = self.swaps = 0
        self.cached_tokens = self.instance = self.seq = -1  # not looked up, not sent, not arrived
        self.in_host_memory = False
        self.transfer_s = 0.0  # between instances, its KV on the way or waiting to leave
        self.num_inputs = self.priority = 0  # texts to embed in one pass; 0: an answer is generated
        # by a client, of its answer; see `wire.PredictedLength`
        self.predicted_output_tokens: tuple[int, int] | None = None
        self.shared: list[int] | None = None  # hashes of the cached units it holds

    def __repr__(self) -> str:
        return f"<request {self.id} {self.phase.value} {self.kv_tokens} KV tokens>"


class Release(NamedTuple):
    """What became of a request at `time_s`, the clock of its instance."""

    request: RequestState
    reason: ReleaseReason
    time_s: float

    @classmethod
    def finish(cls, r: RequestState) -> Release:
        """The end of `r`, for a process that waits for it."""
        return cls(r, _FINISH, r.finish_s)
