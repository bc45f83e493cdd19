"""A profile of whole steps, as a server logged them, and the formula that is fitted to it.

Nothing about the hardware is needed: a step's time is a sum of terms in what was in its batch.
What the host adds is in the steps that were measured, and so in the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.arrays import Floats, Mask
from ...workloads.errors import SloBenchError
from ..stretches import EvenSpans
from .least_squares import non_negative
from .observations import Observations, observed
from .profile_format import Fitted, Profile, ProfileTable, Source, table_of

NAME = "sums"
LEAST_STEPS = 30
HELD_OUT = 0.2
MOST_STEPS = 20_000  # kept in a profile; of more, evenly chosen ones
STALLED = 5.0  # times as long as the fit says: the machine was doing something else
_LEAST_OF_A_KIND = 10
_REWEIGHTINGS = 8
_SHORTEST_S = 1e-6
# Time grows faster from here on: tokens of a batch begin to take longer than reading the weights.
_BENDS = (8, 32, 128, 512)
_DECODE = (
    "decode_s",
    "decode_s_several",
    "decode_s_per_sequence",
    *(f"decode_s_per_sequence_above_{bend}" for bend in _BENDS),
    "decode_s_per_mean_kv_token",
    "decode_s_per_kv_token",
)
_PREFILL = (
    "prefill_s",
    "prefill_s_beside_decodes",
    "prefill_s_per_token",
    *(f"prefill_s_per_token_above_{bend}" for bend in _BENDS),
    "prefill_s_per_chunk",
    "prefill_s_per_pair",
    "prefill_s_per_context_token",
    "prefill_s_per_kv_token",
)
_ALIKE = {
    "decode_s": "prefill_s",
    "decode_s_per_sequence": "prefill_s_per_token",
    **{f"decode_s_per_sequence_above_{b}": f"prefill_s_per_token_above_{b}" for b in _BENDS},
    "decode_s_per_kv_token": "prefill_s_per_kv_token",
}
COEFFICIENTS = (*_DECODE, *_PREFILL)


@dataclass(frozen=True)
class LoggedStep:
    """One step of a log. `chunks` are (tokens in KV before, tokens prefilled)."""

    decode_seqs: int
    decode_kv_tokens: int
    chunks: Sequence[tuple[int, int]]
    duration_s: float


@dataclass(frozen=True)
class SumsStepTime(EvenSpans):
    """Seconds of a step, by the sums over its batch; implements `StepTime`.

    Steps that only decode: constant, another where there is more than one sequence (a product with
    one row is another kernel), sequences, KV tokens of one sequence (mean) and of all. Steps with
    prefill: constant, another if sequences decode in the same step (their attention kernel
    differs), all tokens, chunks, (query, KV) pairs of the chunks, tokens before them, KV tokens of
    the decodes. Tokens and sequences count again above each of `_BENDS`.
    """

    decode: tuple[float, ...]
    prefill: tuple[float, ...]

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        if not chunks:
            *_, mean_s, kv_s = self.decode
            read_s = kv_s * decode_kv_tokens + mean_s * decode_kv_tokens / max(1, decode_seqs)
            return max(_SHORTEST_S, self._decode_s(decode_seqs)) + read_s
        constant_s, beside_s, *by_token_s, chunk_s, pair_s, context_s, kv_s = self.prefill
        tokens, pairs, context = decode_seqs, 0.0, 0
        for before, chunk in chunks:
            tokens += chunk
            pairs += chunk * (before + 0.5 * chunk)
            context += before
        seconds = constant_s + chunk_s * len(chunks) + pair_s * pairs
        seconds += context_s * context + kv_s * decode_kv_tokens
        if decode_seqs:
            seconds += beside_s
        return max(_SHORTEST_S, seconds + _bent(by_token_s, tokens))

    def _decode_s(self, sequences: int) -> float:
        constant_s, several_s, *by_sequence_s = self.decode[:-2]
        seconds = constant_s + _bent(by_sequence_s, sequences)
        return seconds + several_s if sequences > 1 else seconds

    def _growth_s(self, seqs: int) -> float:
        *_, mean_s, kv_s = self.decode
        return kv_s * seqs + mean_s


def _bent(slopes: Sequence[float], count: float) -> float:
    first, *more = slopes
    seconds = first * count
    for slope, bend in zip(more, _BENDS, strict=True):
        if count <= bend:
            break
        seconds += slope * (count - bend)
    return seconds


def made_of(by_name: Mapping[str, float]) -> SumsStepTime:
    """The step-time model of these coefficients."""
    return SumsStepTime(
        tuple(by_name.get(name, 0.0) for name in _DECODE),
        tuple(by_name.get(name, 0.0) for name in _PREFILL),
    )


def terms(steps: Observations) -> Floats:
    """What each coefficient multiplies, [row, coefficient]."""
    prefill = steps.chunks > 0
    decode = ~prefill
    return np.column_stack(
        [
            decode,
            decode * (steps.sequences > 1),
            decode * steps.sequences,
            *(decode * np.maximum(0.0, steps.sequences - bend) for bend in _BENDS),
            decode * steps.kv_tokens / np.maximum(1.0, steps.sequences),
            decode * steps.kv_tokens,
            prefill,
            prefill * (steps.sequences > 0),
            prefill * steps.tokens,
            *(prefill * np.maximum(0.0, steps.tokens - bend) for bend in _BENDS),
            steps.chunks,
            steps.pairs,
            steps.chunks * steps.context_tokens,
            prefill * steps.kv_tokens,
        ]
    ).astype(np.float64)


def profile_of_steps(
    steps: Sequence[LoggedStep], *, model: str, gpu: str, tp: int = 1, source: Source
) -> Profile:
    """A profile of the steps, with `sums` fitted to them.

    The least squared error relative to the time that the fit itself says, under coefficients that
    are not negative. Steps that took more than `STALLED` times as long as the rest tell are left
    out. `held_out_percent` is of a fifth of the steps, drawn at random and kept out;
    `extrapolated_percent` of the outer half of the range.

    Raises:
        SloBenchError: there are too few steps.
    """
    if len(steps) < LEAST_STEPS:
        raise SloBenchError(
            f"{source.path} has {len(steps)} steps, too few to fit ({LEAST_STEPS} are needed); "
            "send more requests"
        )
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS), dtype=int)
    table = _table([steps[k] for k in chosen.tolist()])
    observations = observed(table)
    kept = ~_stalled(observations)
    table, observations = table.rows(kept), observations[kept]
    drawn = np.random.default_rng(0).random(len(observations)) >= HELD_OUT
    fit = Fitted(
        coefficients(observations),
        held_out_percent=_error_percent(observations, drawn),
        extrapolated_percent=_error_percent(observations, ~observations.outermost),
    )
    return Profile(
        model,
        gpu,
        tp=tp,
        best=NAME,
        sources=(source,),
        tables={"steps": table},
        fits={NAME: fit},
    )


def _table(steps: Sequence[LoggedStep]) -> ProfileTable:
    """Unequal chunks as equal ones with as many tokens and (query, KV) pairs.

    n chunks of the mean length have no more pairs among themselves, so what comes before is not
    negative.
    """
    rows = []
    for step in steps:
        count = len(step.chunks)
        tokens = sum(chunk for _, chunk in step.chunks)
        pairs = sum(chunk * (before + 0.5 * chunk) for before, chunk in step.chunks)
        length = tokens / count if count else 0.0
        before = max(0.0, pairs / tokens - 0.5 * length) if tokens else 0.0
        kv = step.decode_kv_tokens / step.decode_seqs if step.decode_seqs else 0.0
        rows.append((count, length, before, step.decode_seqs, kv, step.duration_s * 1e6))
    return table_of("steps", rows)


def coefficients(steps: Observations, *, typical: bool = False) -> dict[str, float]:
    """The fit; a kind of step that hardly occurs is priced as the other. `typical`: the least
    absolute error, which a few steps that took much too long do not sway.
    """
    columns = terms(steps)
    decode = steps.chunks == 0
    parts = (slice(0, len(_DECODE)), slice(len(_DECODE), None))
    solution = np.zeros(len(COEFFICIENTS))
    for part, rows in zip(parts, (decode, ~decode), strict=True):
        if rows.sum() >= _LEAST_OF_A_KIND:
            solution[part] = _fitted(columns[rows][:, part], steps.seconds[rows], typical)
    by_name = dict(zip(COEFFICIENTS, solution.tolist(), strict=True))
    # The constant, tokens (or sequences) and KV tokens of one kind of step for the other.
    if decode.sum() < _LEAST_OF_A_KIND:
        by_name.update({ours: by_name[theirs] for ours, theirs in _ALIKE.items()})
    elif (~decode).sum() < _LEAST_OF_A_KIND:
        by_name.update({theirs: by_name[ours] for ours, theirs in _ALIKE.items()})
    return by_name


def _fitted(columns: Floats, seconds: Floats, typical: bool) -> Floats:
    """Weighted by what the last round says: noise that makes single steps long does not make all
    others short, as it would with errors relative to the times measured.
    """
    usual_s = float(np.median(seconds))
    weight = np.full(len(seconds), 1 / usual_s)
    solution = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        solution = non_negative(columns * weight[:, None], seconds * weight)
        predicted_s = np.maximum(columns @ solution, 0.1 * usual_s)
        weight = 1 / predicted_s
        if typical:
            weight /= np.sqrt(np.maximum(np.abs(seconds / predicted_s - 1), 0.01))
    return solution


def _stalled(steps: Observations) -> Mask:
    predicted_s = terms(steps) @ np.array(list(coefficients(steps, typical=True).values()))
    ratio = steps.seconds / np.maximum(predicted_s, _SHORTEST_S)
    return np.asarray(ratio > STALLED * np.median(ratio))


def _error_percent(steps: Observations, kept: Mask) -> float:
    if kept.all() or kept.sum() < LEAST_STEPS // 2:
        return math.nan
    solution = np.array(list(coefficients(steps[kept]).values()))
    others = steps[~kept]
    return float(100 * np.abs(terms(others) @ solution / others.seconds - 1).mean())
