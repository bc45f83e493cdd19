"""Conversations: turns whose prompts contain all earlier turns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrivals import MADE_BYTES, ArrivalProcess, Concurrency
from .call_parser import build, parse_call
from .errors import SloBenchError, UnknownNameError
from .lengths import (
    Geometric,
    LengthDistribution,
    Lognormal,
    PairLengths,
    mean_tokens,
    parse_lengths,
)
from .machine_memory import check_memory
from .prefixes import BLOCK_SIZE, SessionBlocks
from .streams import Streams
from .workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
N = TypeVar("N", np.int64, np.float64)


Pauses = LengthDistribution
"""A distribution of whole seconds."""


@dataclass(frozen=True)
class NoPause:
    """Think time of zero seconds."""

    def at(self, u: Floats) -> Ints:
        return np.zeros(len(u), dtype=np.int64)


@dataclass(frozen=True)
class Sessions:
    """Distributions of the number of turns and of think times of conversations.

    A turn's prompt is the shared system prompt, every earlier message and answer of the session,
    and a new message. Messages and answers have the workload's prompt and output lengths. A
    session ends early before a prompt and answer would exceed `max_context_tokens`.

    `think_s` is a distribution of whole seconds between an answer and the next message. With
    `closed`, a turn waits for the real answer; without, answers are taken to last `answer_s` each
    and all arrivals are drawn in advance.
    """

    turns: LengthDistribution = dataclasses.field(default_factory=lambda: Geometric(4.0))
    think_s: Pauses = dataclasses.field(default_factory=lambda: Lognormal(median=30.0, sigma=1.0))
    system_prompt_tokens: int = 0
    closed: bool = True
    answer_s: float = 10.0
    max_context_tokens: int = 131072

    def __post_init__(self) -> None:
        if self.system_prompt_tokens < 0:
            raise SloBenchError("system_prompt_tokens must not be negative")
        if not self.answer_s >= 0:
            raise SloBenchError(f"answer_s must not be negative but is {self.answer_s}")
        if self.max_context_tokens < self.system_prompt_tokens + 2:
            raise SloBenchError("max_context_tokens must exceed the system prompt")

    def make(
        self,
        lengths: PairLengths,
        arrivals: ArrivalProcess,
        streams: Streams,
        *,
        rate_rps: float,
        requests: int | None,
        duration_s: float | None,
    ) -> Workload:
        """Sessions that begin by the arrival process, so that turns come at the rate on average.

        The rate of sessions is the rate of requests over the mean number of turns, before any
        session is cut at `max_context_tokens`; it is reached once sessions of all ages are under
        way, since all begin after time 0. `requests` keeps the first turns to arrive.

        Raises:
            SloBenchError: the arrivals are a closed loop over single requests.
        """
        if isinstance(arrivals, Concurrency):
            raise SloBenchError("sessions set the order of requests already; leave out concurrency")
        sessions_rps = rate_rps / mean_tokens(self.turns)
        start_s = arrivals.times_s(
            sessions_rps, streams.rng("arrivals"), requests=requests, duration_s=duration_s
        )
        turns = self.turns.at(streams.rng("turns").random(len(start_s)))
        requested = float(turns.sum(dtype=np.float64))
        check_memory(requested * MADE_BYTES, f"making {requested:,.0f} turns of sessions")
        session = np.repeat(np.arange(len(turns)), turns)
        begin = np.repeat(np.cumsum(turns) - turns, turns)
        pairs = lengths.draw(len(session), streams.rng("lengths"))
        said = pairs.prompt_tokens + pairs.output_tokens
        prompt = (
            self.system_prompt_tokens + _since(np.cumsum(said) - said, begin) + pairs.prompt_tokens
        )
        think = self.think_s.at(streams.rng("think").random(len(session))).astype(np.float64)
        think[begin == np.arange(len(session))] = 0.0
        waits = think + (0.0 if self.closed else self.answer_s)
        waits[begin == np.arange(len(session))] = 0.0
        arrival_s = start_s[session] + _since(np.cumsum(waits), begin)
        # Tokens only grow within a session, so that dropping rows drops its last turns.
        keep = prompt + pairs.output_tokens <= self.max_context_tokens
        keep &= arrival_s < (duration_s or np.inf)
        order = np.flatnonzero(keep)
        order = order[np.argsort(arrival_s[order], kind="stable")][:requests]
        if not len(order):
            raise SloBenchError(
                f"no first turn fits into max_context_tokens={self.max_context_tokens}"
            )
        where = np.full(len(session), -1, dtype=np.int64)
        where[order] = np.arange(len(order))
        previous = np.where(begin[order] == order, -1, where[order - 1])
        covered = (prompt + pairs.output_tokens)[order]
        return Workload(
            arrival_s=arrival_s[order],
            prompt_tokens=prompt[order],
            output_tokens=pairs.output_tokens[order],
            max_output_tokens=pairs.max_output_tokens[order],
            session=session[order],
            follows=previous if self.closed else np.full(len(order), -1),
            think_s=think[order] if self.closed else np.zeros(len(order)),
            prefix_blocks=SessionBlocks.of(
                session[order], covered, self.system_prompt_tokens, BLOCK_SIZE
            ),
            prefix_block_size=BLOCK_SIZE,
        )


def _since(cumulative: NDArray[N], begin: Ints) -> NDArray[N]:
    """A running sum that starts anew in each session."""
    return cumulative - cumulative[begin]


def parse_sessions(text: str) -> Sessions:
    """Read `sessions` or `sessions(turns=uniform(2,8), think_s=lognormal(median=30, sigma=1),
    system_prompt_tokens=500, closed=true)`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
    """
    call = parse_call(text)
    if call.name != "sessions":
        raise UnknownNameError("session setting", call.name, ("sessions",))
    read = {
        "LengthDistribution": lambda value, what: parse_lengths(value),
        "Pauses": lambda value, what: parse_pauses(value),
    }
    return build(Sessions, call, read)


def parse_pauses(text: str) -> Pauses:
    """Read a length distribution as whole seconds, or `0` for none."""
    return NoPause() if text.strip() in ("0", "fixed(0)") else parse_lengths(text)
