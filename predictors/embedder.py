"""An embedding model on the device of a language model: time and memory of one pass over a batch of
texts.

A pass is bidirectional, leaves no KV behind and computes every token at once, so that it needs
memory for the activations of all tokens. An embedder that is the language model itself shares its
weights, reads its texts causally, and is timed as that model's prefill.

Its time is an estimate (`step_time.estimated_coefficients`): nothing was fitted for encoders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..workloads.errors import SloBenchError
from .placement import ACTIVATION_BYTES, Placement
from .roofline import OperatorRoofline
from .specs import ModelSpec
from .step_time import DEFAULT_HOST_S, estimated_coefficients, step_time, work

Texts = tuple[int, int]  # how many texts, tokens of each


@dataclass(frozen=True)
class Embedder:
    """How long passes take and how much memory they hold, on the GPUs of a language model.

    A small model of its own stands whole on each of the `replicas` GPUs, which share a batch's
    texts out; the language model's own weights are split as that model's are. Memory is counted
    in KV blocks of `block_bytes` on the fullest GPU, the unit of what both models compete for.
    With `padded` every text of a batch is computed as long as the longest, as sentence-transformers
    does; else the texts are packed one behind the other.
    """

    model: ModelSpec
    block_bytes: int
    replicas: int
    split: int
    time: OperatorRoofline
    padded: bool = True

    def pass_s(self, batch: Iterable[Texts]) -> float:
        """Seconds of one pass over the batch."""
        time, sequences, tokens, pairs = self.time, 0, 0, 0.0
        for texts, length in self._on_one_gpu(batch):
            sequences += texts
            tokens += texts * length
            pairs += texts * length * length
        if self.model.kind == "encoder":
            pairs *= 2  # the roofline's pairs are causal: half of all
        if tokens < time.crossover_tokens:
            linear_s = time.memory_s + time.memory_s_per_token * tokens
        else:
            linear_s = time.compute_s + time.compute_s_per_token * tokens
        return (
            linear_s
            + time.sequence_s * sequences
            + time.prefill_pair_s * 0.5 * pairs
            + time.prefill_kv_s * tokens
            + time.prefill_s
        )

    def workspace_bytes(self, batch: Iterable[Texts]) -> int:
        """Bytes of activations on the fullest GPU during a pass (`activation_bytes`)."""
        tokens = 0
        for texts, length in self._on_one_gpu(batch):
            tokens += texts * length
        return round(tokens * self._bytes_per_token)

    @cached_property
    def _bytes_per_token(self) -> float:
        model = self.model
        widened = model.traits.mlp_matrices * model.intermediate / self.split
        return activation_bytes(model.hidden, widened)

    def blocks(self, batch: Iterable[Texts]) -> int:
        """Number of KV blocks with the memory of a pass."""
        return -(-self.workspace_bytes(batch) // self.block_bytes)

    def _on_one_gpu(self, batch: Iterable[Texts]) -> list[Texts]:
        """What the fullest GPU computes: its share of the texts, padded or not."""
        replicas = self.replicas
        if not self.padded:
            return [(-(-texts // replicas), length) for texts, length in batch]
        together = longest = 0
        for texts, length in batch:
            together += texts
            if length > longest:
                longest = length
        return [(-(-together // replicas), longest)]


def activation_bytes(hidden: int, widened: float, value_bytes: int = ACTIVATION_BYTES) -> float:
    """Bytes of activations of a token during a pass; attention is fused.

    At the peak the residual stream, its normed copy, attention output and queries are held together
    with the MLP's `widened` activations of one layer (as in `Placement.reserve_bytes_per_gpu`).
    """
    return (4 * hidden + widened) * value_bytes


def own_weight_bytes(model: ModelSpec, beside: ModelSpec, weight_dtype: str = "bf16") -> int:
    """Bytes of weights that an embedder adds on each GPU; 0 if it is the language model itself."""
    return 0 if model == beside else model.weight_bytes(weight_dtype)


def embedder(
    model: ModelSpec, beside: Placement, *, padded: bool = True, host_s: float = DEFAULT_HOST_S
) -> Embedder:
    """The embedding model on the GPUs of `beside`, whose `Placement.beside_bytes` must include its
    weights.

    Raises:
        SloBenchError: pipeline parallelism, or a decoder other than the language model itself.
    """
    if beside.pp > 1:
        raise SloBenchError("an embedder together with pipeline stages is not modelled; use pp 1")
    if model == beside.model:
        time = step_time(beside, host_s).model
        return Embedder(model, beside.block_bytes_per_gpu, 1, beside.tp, time, padded)
    if model.kind != "encoder":
        raise SloBenchError(
            f"{model.name} is a decoder: as an embedder only an encoder (bge-m3, e5-large, "
            f"gte-large) or the language model itself ({beside.model.name}) is modelled"
        )
    alone = Placement(model, beside.gpu, weight_dtype=beside.weight_dtype)
    time = OperatorRoofline.of(estimated_coefficients(model), work(alone), host_s)
    return Embedder(model, beside.block_bytes_per_gpu, beside.tp, 1, time, padded)
