"""Seconds of one iteration, as a sum of roofline terms (docs/measurements/step-time.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Protocol, TypeGuard


class StepTime(Protocol):
    """Interface of models that predict iteration times."""

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one iteration.

        `decode_seqs` sequences that hold `decode_kv_tokens` KV tokens in all decode a token each;
        `chunks` are the pieces of prefill: (tokens already in KV, tokens computed now).
        """

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` iterations that only decode; each grows the KV by `decode_seqs`."""

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        """Fewest such iterations whose span is at least `duration_s`; 0 if that is not positive."""


class LengthAwareStepTime(StepTime, Protocol):
    """A step-time model that also depends on how unequal the decoding sequences are.

    Engines that find `wants_lengths` true call `tail_s` and pass what it returns to the others. It
    holds for as long as no sequence joins or leaves, because each then grows by a token a step.
    """

    wants_lengths: bool

    def tail_s(self, begins: Sequence[int], total: int) -> float:
        """Seconds that unequal sequences take longer than equal ones with as many KV tokens.

        `begins`: for each decoding sequence, ascending, any number minus its KV tokens (the longest
        sequence comes first); `total` is their sum.
        """

    def step_s(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        tail_s: float = 0.0,
    ) -> float:
        """Seconds of one iteration, as `StepTime.step_s`."""

    def span_s(
        self, decode_seqs: int, decode_kv_tokens: int, steps: int, tail_s: float = 0.0
    ) -> float:
        """Seconds of several decode steps, as `StepTime.span_s`."""

    def steps_within(
        self, decode_seqs: int, decode_kv_tokens: int, duration_s: float, tail_s: float = 0.0
    ) -> int:
        """Steps within a duration, as `StepTime.steps_within`."""


# Base seconds, seconds per KV token, from and up to how many KV tokens, whether `tail_s` is added.
DecodeLine = tuple[float, float, float, float, bool]


class LinearStepTime(StepTime, Protocol):
    """A step-time model whose decode steps are linear in the KV tokens, piece by piece."""

    def decode_line(self, decode_seqs: int, decode_kv_tokens: int) -> DecodeLine:
        """The piece that a decode step with so many KV tokens is on."""


def wants_lengths(step_time: StepTime) -> TypeGuard[LengthAwareStepTime]:
    """Does this model depend on the lengths of the decoding sequences?"""
    return getattr(step_time, "wants_lengths", False) is True


def has_decode_line(step_time: StepTime) -> TypeGuard[LinearStepTime]:
    """Are this model's decode steps linear in the KV tokens, piece by piece?"""
    return hasattr(step_time, "decode_line")


_ROUNDED = 1e-6  # of a step; sums of up to a million steps are exact to far less


def growing_steps_within(first_s: float, growth_s: float, duration_s: float) -> int:
    """Fewest steps that take at least the finite `duration_s`, where the first takes `first_s` and
    each `growth_s` more than the one before.

    Solves the closed form, then walks to where the sum itself crosses the duration, so that both
    always agree.
    """
    if duration_s <= 0:
        return 0
    # sum = growth/2 * n^2 + (first - growth/2) * n. The root is taken in the form that stays
    # exact as the quadratic part vanishes; both loops below run once or not at all, and seldom
    # matter: near a whole number alone does rounding decide.
    rest_s = first_s - 0.5 * growth_s
    root = 2 * duration_s / (rest_s + sqrt(rest_s * rest_s + 2 * growth_s * duration_s))
    steps = int(root) + 1
    if _ROUNDED < steps - root < 1 - _ROUNDED:
        return steps
    while steps * first_s + growth_s * (steps * (steps - 1) * 0.5) < duration_s:
        steps += 1
    while steps > 1:
        fewer = steps - 1
        if fewer * first_s + growth_s * (fewer * (fewer - 1) * 0.5) < duration_s:
            break
        steps = fewer
    return steps


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The fitted numbers. `c0`..`c4` multiply roofline times; `c5_s`..`c8_s` are seconds."""

    c0: float  # larger of the linear layers' byte time and operation time
    c1: float  # smaller of the two
    c2: float  # reading the KV of decoding sequences
    c2_mixed: float  # the same in a step that also prefills
    c3: float  # attention operations of prefill
    c4: float  # reading the KV under prefill
    c5_s: float  # per token
    c6_s: float  # per sequence or chunk
    c7_s: float  # where there is any prefill
    c8_s: float  # per iteration

    def for_layers(self, ratio: float) -> Coefficients:
        """Those of `ratio` times as many layers: each layer pays its share of the overheads."""
        return replace(
            self,
            c5_s=self.c5_s * ratio,
            c6_s=self.c6_s * ratio,
            c7_s=self.c7_s * ratio,
            c8_s=self.c8_s * ratio,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What the terms multiply: seconds at the hardware's peak, for one pass through the model."""

    weight_read_s: float
    linear_s_per_token: float
    kv_read_s_per_token: float
    attention_s_per_pair: float  # per (query token, KV token)


@dataclass(frozen=True, slots=True)
class OperatorRoofline:
    """`StepTime` as a sum of operators, linear in the number of KV tokens.

    All fields are seconds, ready to be multiplied: up to `crossover_tokens` tokens reading the
    weights is the longer side of the linear layers, beyond it multiplying is.
    """

    crossover_tokens: float
    memory_s: float
    memory_s_per_token: float
    compute_s: float
    compute_s_per_token: float
    sequence_s: float
    decode_kv_s: float
    mixed_kv_s: float
    prefill_pair_s: float
    prefill_kv_s: float
    prefill_s: float
    stages: int = 1
    hop_latency_s: float = 0.0
    hop_s_per_token: float = 0.0

    @classmethod
    def of(
        cls,
        coefficients: Coefficients,
        work: Work,
        host_s: float,
        extra_s: float = 0.0,
        extra_s_per_token: float = 0.0,
        stages: int = 1,
        hop_latency_s: float = 0.0,
        hop_s_per_token: float = 0.0,
    ) -> OperatorRoofline:
        """Multiply out.

        `extra_*` is communication that the coefficients do not contain; the hops between
        pipeline stages are added to every pass.
        """
        c = coefficients
        hops = stages - 1
        constant_s = c.c8_s + host_s + extra_s + hops * hop_latency_s
        per_token_s = c.c5_s + extra_s_per_token + hops * hop_s_per_token
        read_s, linear_s = work.weight_read_s, work.linear_s_per_token
        return cls(
            crossover_tokens=read_s / linear_s,
            memory_s=constant_s + c.c0 * read_s,
            memory_s_per_token=per_token_s + c.c1 * linear_s,
            compute_s=constant_s + c.c1 * read_s,
            compute_s_per_token=per_token_s + c.c0 * linear_s,
            sequence_s=c.c6_s,
            decode_kv_s=c.c2 * work.kv_read_s_per_token,
            mixed_kv_s=c.c2_mixed * work.kv_read_s_per_token,
            prefill_pair_s=c.c3 * work.attention_s_per_pair,
            prefill_kv_s=c.c4 * work.kv_read_s_per_token,
            prefill_s=c.c7_s,
            stages=stages,
            hop_latency_s=hop_latency_s,
            hop_s_per_token=hop_s_per_token,
        )

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one pass through all stages (see `StepTime`).

        A chunk's tokens attend to the KV before them and, causally, to each other:
        chunk * (context + chunk / 2) pairs.
        """
        # The simulator's innermost call: no loop for the two common cases.
        if not chunks:
            if decode_seqs < self.crossover_tokens:
                linear_s = self.memory_s + self.memory_s_per_token * decode_seqs
            else:
                linear_s = self.compute_s + self.compute_s_per_token * decode_seqs
            return linear_s + self.sequence_s * decode_seqs + self.decode_kv_s * decode_kv_tokens
        if len(chunks) == 1:
            context, tokens = chunks[0]
            pairs = tokens * (context + 0.5 * tokens)
            kv = context + tokens
            sequences = decode_seqs + 1
            tokens += decode_seqs
        else:
            pairs = 0.0
            kv = 0
            sequences = decode_seqs + len(chunks)
            tokens = decode_seqs
            for context, chunk in chunks:
                pairs += chunk * (context + 0.5 * chunk)
                kv += context + chunk
                tokens += chunk
        if tokens < self.crossover_tokens:
            linear_s = self.memory_s + self.memory_s_per_token * tokens
        else:
            linear_s = self.compute_s + self.compute_s_per_token * tokens
        return (
            linear_s
            + self.sequence_s * sequences
            + self.mixed_kv_s * decode_kv_tokens
            + self.prefill_pair_s * pairs
            + self.prefill_kv_s * kv
            + self.prefill_s
        )

    def decode_line(self, decode_seqs: int, decode_kv_tokens: int) -> DecodeLine:
        """As `LinearStepTime.decode_line`: one line for any KV."""
        if decode_seqs < self.crossover_tokens:
            linear_s = self.memory_s + self.memory_s_per_token * decode_seqs
        else:
            linear_s = self.compute_s + self.compute_s_per_token * decode_seqs
        return linear_s + self.sequence_s * decode_seqs, self.decode_kv_s, 0.0, inf, False

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """Closed form: the first step, `steps` times, and what the growing KV adds."""
        if decode_seqs < self.crossover_tokens:
            linear_s = self.memory_s + self.memory_s_per_token * decode_seqs
        else:
            linear_s = self.compute_s + self.compute_s_per_token * decode_seqs
        first_s = linear_s + self.sequence_s * decode_seqs + self.decode_kv_s * decode_kv_tokens
        return steps * first_s + self.decode_kv_s * decode_seqs * (steps * (steps - 1) * 0.5)

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        """Fewest steps whose span is at least the finite `duration_s`."""
        base_s, token_s, *_ = self.decode_line(decode_seqs, decode_kv_tokens)
        return growing_steps_within(
            base_s + token_s * decode_kv_tokens, token_s * decode_seqs, duration_s
        )

    def hop_s(self, tokens: int) -> float:
        """Seconds to hand the activations of `tokens` tokens to the next pipeline stage."""
        return self.hop_latency_s + self.hop_s_per_token * tokens if self.stages > 1 else 0.0
