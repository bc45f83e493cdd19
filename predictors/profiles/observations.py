"""Whole steps with their measured times, put together from a profile's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.arrays import Floats, Mask
from ...workloads.errors import SloBenchError
from ..placement import Placement
from .build_model import linear_curve, profiled_gpu, profiled_model, summed_curve
from .profile_format import Profile, ProfileTable
from .step_time_table import Curve


@dataclass(frozen=True)
class Observations:
    """Measured steps: `chunks` equal chunks of `chunk_tokens` after `context_tokens` each, together
    with `sequences` that decode over `kv_tokens` in all. A step that only decodes has no chunks.
    """

    chunks: Floats
    chunk_tokens: Floats
    context_tokens: Floats
    sequences: Floats
    kv_tokens: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, rows: Mask) -> Observations:
        return Observations(*(column[rows] for column in vars(self).values()))

    @property
    def tokens(self) -> Floats:
        """Number of tokens of each step."""
        return self.sequences + self.chunks * self.chunk_tokens

    @property
    def pairs(self) -> Floats:
        """(Query, KV) pairs of the chunks."""
        return self.chunks * self.chunk_tokens * (self.context_tokens + 0.5 * self.chunk_tokens)

    @property
    def prefill_kv_tokens(self) -> Floats:
        """KV tokens under the chunks, their own included."""
        return self.chunks * (self.context_tokens + self.chunk_tokens)

    @property
    def outermost(self) -> Mask:
        """Rows in the outer half of what was measured, by chunk, context, batch or KV."""
        outer = np.zeros(len(self), dtype=np.bool_)
        for column in (self.chunk_tokens, self.context_tokens, self.sequences, self.kv_tokens):
            if len(column) and column.max() > 0:
                outer |= column > 0.5 * column.max()
        return outer

    @classmethod
    def joined(cls, parts: Sequence[Observations]) -> Observations:
        """The rows of several observations, one after another."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def placement_of(profile: Profile) -> Placement:
    """The model on the GPUs that the profile is about.

    Raises:
        SloBenchError: neither the catalogue nor the profile knows the model or the GPU.
    """
    return Placement(
        profiled_model(profile),
        profiled_gpu(profile),
        tp=profile.tp,
        weight_dtype=profile.weight_dtype,
        kv_dtype=profile.kv_dtype,
    )


def observations(profile: Profile) -> Observations:
    """All steps with times in the tables and KV that fits into the GPU's memory.

    Raises:
        SloBenchError: the tables do not cover whole steps.
    """
    parts = []
    if {"linear", "attention"} <= set(profile.tables):
        parts.append(from_layers(profile))
    if "steps" in profile.tables:
        parts.append(observed(profile.tables["steps"]))
    if not parts:
        raise SloBenchError(
            f"the tables of {profile.label} do not make whole steps: linear layers and attention, "
            "or steps, are needed"
        )
    steps = Observations.joined(parts)
    room = placement_of(profile).kv_tokens
    if not room:
        return steps
    held = steps.kv_tokens + steps.prefill_kv_tokens <= room
    return steps[held] if held.any() else steps


def observed(table: ProfileTable) -> Observations:
    """The rows of a table of steps, as arrays."""
    return Observations(
        table["chunks"],
        table["prefill_chunk"],
        table["kv_prefill"],
        table["n_decode"],
        table["n_decode"] * table["kv_decode"],
        table["time_us"] * 1e-6,
    )


def from_layers(profile: Profile) -> Observations:
    """A step for each row of the attention table, with the linear layers' time added."""
    attention = profile.tables["attention"]
    chunk, sequences = attention["prefill_chunk"], attention["n_decode"]
    chunks = (chunk > 0).astype(np.float64)
    linear = linear_curve(profile)
    seconds = attention["time_us"] * attention["calls"] * 1e-6
    seconds = seconds + _at(linear, chunk + sequences)
    if "per_sequence" in profile.tables:
        per_sequence = summed_curve(profile.tables["per_sequence"], "sequences")
        seconds = seconds + _at(per_sequence, chunks + sequences)
    return Observations(
        chunks,
        chunk,
        attention["kv_prefill"],
        sequences,
        sequences * attention["kv_decode"],
        seconds,
    )


def _at(curve: Curve, counts: Floats) -> Floats:
    sizes, where = np.unique(counts, return_inverse=True)
    return np.array([curve(size) for size in sizes])[where]
