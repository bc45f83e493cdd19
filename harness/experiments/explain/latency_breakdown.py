"""Latency breakdown of a request: consecutive phases, from the log of its instance."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Self

from ...engine.loop.traced_instance import InstanceLog, State, StateChange, TracedStep


class SpanKind(Enum):
    """Phase of a request, with its `meaning`: what the request does or waits for."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Let the name alone be the value."""
        kind = object.__new__(cls)
        kind._value_, kind.meaning = value, meaning
        return kind

    QUEUE = "queue", "at an instance, waited to enter a batch"
    PREFILL = "prefill", "in steps that computed its prompt"
    PREFILL_WAIT = "prefill turn", "in the batch, while the token budget went to others"
    DECODE = "decode", "in steps that gave it a token"
    BEHIND_PREFILL = "prefill of others", "ready to decode, while prompts of others were computed"
    SWAP = "KV transfer", "in the batch, while KV blocks moved to or from host memory"
    PREEMPTED = "preempted", "thrown out under KV pressure, waited to start again"
    RECOMPUTE = "recomputed prefill", "in steps that computed its prompt and answer again"
    SWAPPED = "swapped out", "its KV in host memory, waited for room"
    STALLED = "stalled", "kept its KV and sat out until a block was free"
    PIPELINE = (
        "pipeline",
        "waited for a device busy with other batches: pipeline stages, embeddings",
    )
    PADDING = "padding", "answered, while the longest of its batch went on"
    SHARED = "others on the GPU", "in the batch, while other models of the GPU computed"
    # Phases outside instances, and of several instances.
    HELD = "held before instances", "in a queue before the instances: none was chosen, or had room"
    LOADING = "model loading", "at a model whose weights were on their way to the GPU"
    PREFILLED = (
        "decode instance full",
        "prefilled, waited until a decode instance had room for its KV",
    )
    TRANSFER = "KV to another instance", "its KV went to the instance where it decodes on"
    EMBED = "embedding pass", "in a pass of the embedder"
    # Phases of requests to real servers, as the client sees them.
    CLIENT = "client", "due, and not yet sent by the client"
    UNTIL_ANSWER = (
        "until first token",
        "sent, without an answer: network, queue and prefill of the server",
    )
    ANSWER = "answer", "between its first token and its last"


_OUTSIDE = {
    State.PREEMPTED: SpanKind.PREEMPTED,
    State.SWAPPED: SpanKind.SWAPPED,
    State.STALLED: SpanKind.STALLED,
    State.PADDING: SpanKind.PADDING,
}


@dataclass(frozen=True)
class LatencySpan:
    """A span of a request's time with what it did or waited for."""

    begin_s: float
    end_s: float
    part: SpanKind

    @property
    def duration_s(self) -> float:
        """Duration of the span in seconds."""
        return self.end_s - self.begin_s


def latency_breakdown(
    log: InstanceLog, request: int, begin_s: float, end_s: float
) -> list[LatencySpan]:
    """All of a request's time at one instance, without gaps or overlaps.

    Each span begins exactly at the time at which the previous one ends.
    """
    here = [move for move in log.moves.get(request, ()) if begin_s <= move.time_s < end_s]
    moves = [*here, StateChange(end_s, State.DONE)]
    pieces = [LatencySpan(begin_s, moves[0].time_s, SpanKind.QUEUE)]
    for move, following in pairwise(moves):
        pieces += _within(log.steps, request, move, following.time_s)
    return _joined(pieces)


def totals_s(spans: list[LatencySpan]) -> dict[SpanKind, float]:
    """Seconds by phase, largest first; their sum is the time from the first to the last span."""
    times_s: dict[SpanKind, list[float]] = {}
    for span in spans:
        times_s.setdefault(span.part, []).extend((span.end_s, -span.begin_s))
    seconds = {part: math.fsum(times) for part, times in times_s.items()}  # rounded once
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _within(
    steps: list[TracedStep], request: int, move: StateChange, until_s: float
) -> Iterator[LatencySpan]:
    """Split one state of a request into spans at the steps of its instance."""
    if move.state in _OUTSIDE:
        yield LatencySpan(move.time_s, until_s, _OUTSIDE[move.state])
        return
    at_s = move.time_s
    first = bisect_left(steps, at_s, key=lambda step: step.begin_s)
    for step in steps[first:]:
        if step.begin_s >= until_s:
            break
        for piece in _parts(step, request, move.state):
            end_s = min(piece.end_s, until_s)
            if end_s > at_s:
                yield LatencySpan(at_s, end_s, piece.part)
                at_s = end_s
    if at_s < until_s:
        yield LatencySpan(at_s, until_s, SpanKind.PIPELINE)


def _parts(step: TracedStep, request: int, state: State) -> Iterator[LatencySpan]:
    """Phases of a request in the batch during one step, in this order."""
    computes_s = step.end_s - step.compute_s
    swaps_s = computes_s - step.swap_s
    if swaps_s > step.begin_s + _ROUNDING_S:
        yield LatencySpan(step.begin_s, swaps_s, SpanKind.PIPELINE)
    if step.swap_s:
        yield LatencySpan(swaps_s, computes_s, SpanKind.SWAP)
    if step.shared_s:
        yield LatencySpan(computes_s, computes_s + step.shared_s, SpanKind.SHARED)
        computes_s += step.shared_s
    if state is not State.DECODE:
        served = any(chunk.request == request for chunk in step.chunks)
        part = SpanKind.PREFILL if state is State.PREFILL else SpanKind.RECOMPUTE
        yield LatencySpan(computes_s, step.end_s, part if served else SpanKind.PREFILL_WAIT)
        return
    if step.decode_seqs and step.decode_s < step.compute_s:
        alone = 1 - step.shared_s / step.compute_s
        decoded_s = computes_s + step.decode_s * alone
        yield LatencySpan(computes_s, decoded_s, SpanKind.DECODE)
        yield LatencySpan(decoded_s, step.end_s, SpanKind.BEHIND_PREFILL)
        return
    yield LatencySpan(
        computes_s, step.end_s, SpanKind.DECODE if step.decode_seqs else SpanKind.BEHIND_PREFILL
    )


_ROUNDING_S = 1e-9  # what `end - duration` may miss the beginning by


def _joined(pieces: list[LatencySpan]) -> list[LatencySpan]:
    """Merge adjacent spans of one phase, and drop empty ones."""
    joined: list[LatencySpan] = []
    for piece in pieces:
        if piece.end_s <= piece.begin_s:
            continue
        if joined and joined[-1].part is piece.part:
            joined[-1] = LatencySpan(joined[-1].begin_s, piece.end_s, piece.part)
        else:
            joined.append(piece)
    return joined
