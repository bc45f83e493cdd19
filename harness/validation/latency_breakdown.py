"""Where a request's time went, from the log of its instance: stays that follow on each other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise

from ..engine.loop.traced import InstanceLog, Move, State, Step


class Part(Enum):
    """What a request does, or waits for."""

    QUEUE = "queue"
    PREFILL = "prefill"
    PREFILL_WAIT = "prefill turn"
    DECODE = "decode"
    BEHIND_PREFILL = "prefill of others"
    SWAP = "KV transfer"
    PREEMPTED = "preempted"
    RECOMPUTE = "recomputed prefill"
    SWAPPED = "swapped out"
    STALLED = "stalled"
    PIPELINE = "pipeline"
    PADDING = "padding"
    # Of real servers, which a client sees from outside.
    CLIENT = "client"
    UNTIL_ANSWER = "until first token"
    ANSWER = "answer"


MEANING = {
    Part.QUEUE: "waited to enter a batch for the first time",
    Part.PREFILL: "in steps that computed its prompt",
    Part.PREFILL_WAIT: "in the batch, while the token budget went to others",
    Part.DECODE: "in steps that gave it a token",
    Part.BEHIND_PREFILL: "ready to decode, while prompts of others were computed",
    Part.SWAP: "in the batch, while KV blocks moved to or from host memory",
    Part.PREEMPTED: "thrown out under KV pressure, waited to start again",
    Part.RECOMPUTE: "in steps that computed its prompt and answer again",
    Part.SWAPPED: "its KV in host memory, waited for room",
    Part.STALLED: "kept its KV and sat out until a block was free",
    Part.PIPELINE: "waited for a device busy with other batches: pipeline stages, embeddings",
    Part.PADDING: "answered, while the longest of its batch went on",
    Part.CLIENT: "due, and not yet sent by our client",
    Part.UNTIL_ANSWER: "sent, without an answer: network, queue and prefill of the server",
    Part.ANSWER: "between its first token and its last",
}

_OUTSIDE = {
    State.PREEMPTED: Part.PREEMPTED,
    State.SWAPPED: Part.SWAPPED,
    State.STALLED: Part.STALLED,
    State.PADDING: Part.PADDING,
}


@dataclass(frozen=True)
class Stay:
    """One stretch of a request's time."""

    begin_s: float
    end_s: float
    part: Part

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


def stays(log: InstanceLog, request: int, arrival_s: float) -> list[Stay]:
    """All of a finished request's time from arrival to finish, without gaps or overlaps.

    Each stay begins at the very moment, bit for bit, at which the one before it ends.
    """
    moves = log.moves[request]
    pieces = [Stay(arrival_s, moves[0].time_s, Part.QUEUE)]
    for move, following in pairwise(moves):
        pieces += _within(log.steps, request, move, following.time_s)
    return _joined(pieces)


def totals_s(of: list[Stay]) -> dict[Part, float]:
    """Seconds by part, largest first; together they are the time from first to last moment."""
    exact: dict[Part, Fraction] = {}
    for stay in of:
        length = Fraction(stay.end_s) - Fraction(stay.begin_s)
        exact[stay.part] = exact.get(stay.part, Fraction(0)) + length
    ordered = sorted(exact.items(), key=lambda item: -item[1])
    return {part: float(length) for part, length in ordered}


def _within(steps: list[Step], request: int, move: Move, until_s: float) -> Iterator[Stay]:
    """One state of a request, cut at the steps it saw."""
    if move.state in _OUTSIDE:
        yield Stay(move.time_s, until_s, _OUTSIDE[move.state])
        return
    at_s = move.time_s
    first = bisect_left(steps, at_s, key=lambda step: step.begin_s)
    for step in steps[first:]:
        if step.begin_s >= until_s:
            break
        for piece in _parts(step, request, move.state):
            end_s = min(piece.end_s, until_s)
            if end_s > at_s:
                yield Stay(at_s, end_s, piece.part)
                at_s = end_s
    if at_s < until_s:
        yield Stay(at_s, until_s, Part.PIPELINE)


def _parts(step: Step, request: int, state: State) -> Iterator[Stay]:
    """What a member of the batch does in a step, in this order."""
    computes_s = step.end_s - step.compute_s
    swaps_s = computes_s - step.swap_s
    if swaps_s > step.begin_s + _ROUNDING_S:
        yield Stay(step.begin_s, swaps_s, Part.PIPELINE)
    if step.swap_s:
        yield Stay(swaps_s, computes_s, Part.SWAP)
    if state is not State.DECODE:
        served = any(chunk.request == request for chunk in step.chunks)
        part = Part.PREFILL if state is State.PREFILL else Part.RECOMPUTE
        yield Stay(computes_s, step.end_s, part if served else Part.PREFILL_WAIT)
        return
    if step.decode_seqs and step.decode_s < step.compute_s:
        decoded_s = computes_s + step.decode_s
        yield Stay(computes_s, decoded_s, Part.DECODE)
        yield Stay(decoded_s, step.end_s, Part.BEHIND_PREFILL)
        return
    yield Stay(computes_s, step.end_s, Part.DECODE if step.decode_seqs else Part.BEHIND_PREFILL)


_ROUNDING_S = 1e-9  # what `end - duration` may miss the beginning by


def _joined(pieces: list[Stay]) -> list[Stay]:
    """Neighbours of one kind become one; what took no time is left out."""
    joined: list[Stay] = []
    for piece in pieces:
        if piece.end_s <= piece.begin_s:
            continue
        if joined and joined[-1].part is piece.part:
            joined[-1] = Stay(joined[-1].begin_s, piece.end_s, piece.part)
        else:
            joined.append(piece)
    return joined
