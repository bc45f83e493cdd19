"""A request: what arrives, what it asks for and by when it wants it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

NEVER_S = math.inf
SLO_COLUMNS = {
    "ttft": "ttft_slo_s",
    "tpot": "tpot_slo_s",
    "e2e": "e2e_slo_s",
    "deadline": "deadline_s",
}
"""Columns of the SLO bounds, by their key in the written form `ttft=1,tpot=0.15`."""


class RequestType(IntEnum):
    """Type of a request: generation or embedding."""

    GENERATE = 0
    EMBED = 1


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective; every bound is in seconds and infinite if not set.

    All bounds count from the scheduled arrival, but `deadline_s`, which is the latest time of the
    last token on the workload's clock. A request meets its SLO when every bound holds. TPOT = (last
    - first token) / (output tokens - 1); one token has no TPOT and meets any.
    """

    ttft_s: float = NEVER_S
    tpot_s: float = NEVER_S
    e2e_s: float = NEVER_S
    deadline_s: float = NEVER_S

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds in seconds by the keys of `SLO_COLUMNS`."""
        return {
            "ttft": self.ttft_s,
            "tpot": self.tpot_s,
            "e2e": self.e2e_s,
            "deadline": self.deadline_s,
        }


@dataclass(frozen=True, slots=True)
class Request:
    """One row of a `Workload`.

    `prefix_blocks` are hashes of consecutive blocks of `Workload.prefix_block_size` tokens; each
    identifies its block and all blocks before it. They cover the prompt and, where known, may go on
    over the output (so that the next turn of a conversation finds it cached). `follows` is the
    index of the request whose answer this one waits for; it arrives `think_s` after that answer
    ends, and `arrival_s` is then only the earliest moment it could. `joins` are further requests
    that it waits for, as an agent does for its sub-agents: it arrives `think_s` after the last of
    all these answers. An embedding request has
    `num_inputs` texts of equal length; `prompt_tokens` is their sum, and nothing is generated.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    slo: Slo = Slo()
    class_name: str = ""
    priority: int = 0
    model: str = ""
    session: int | None = None
    prefix_blocks: tuple[int, ...] = ()
    follows: int | None = None
    joins: tuple[int, ...] = ()
    think_s: float = 0.0
    text: str | None = None
    body: Mapping[str, Any] | None = None  # fields of its own; see `request_bodies`
    request_type: RequestType = RequestType.GENERATE
    num_inputs: int = 1
