"""The step-time model of a placement: fitted where a profile exists, else an analytic estimate."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from statistics import median
from typing import Any

from ..workloads.errors import SloBenchError
from .dtypes import SIXTEEN_BIT_BYTES, weight_dtype
from .placement import Placement
from .roofline import Coefficients, Work
from .roofline import OperatorRoofline as OperatorRoofline
from .roofline import StepTime as StepTime
from .specs import ModelSpec, model

DEFAULT_HOST_S = 0.001
_PAIR_FIELDS = ("model", "gpu", "tp", "rows", "mape_percent", "p95_percent", "origin")
ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP


@dataclass(frozen=True, slots=True)
class FittedPair:
    """Coefficients that were fitted for one model shape on one kind of GPU."""

    model: str
    gpu: str
    tp: int
    coefficients: Coefficients
    rows: int
    mape_percent: float
    p95_percent: float
    origin: str

    @property
    def label(self) -> str:
        """Model, GPU and tensor-parallel degree, for people."""
        return f"{self.model} on {self.gpu}" + (f" × tp {self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """A step-time model and where its numbers come from."""

    model: StepTime
    fitted: bool
    provenance: str


@dataclass(frozen=True, slots=True)
class RooflineModel(StepTimeModel):
    """A step-time model that is a sum of roofline terms."""

    model: OperatorRoofline


@lru_cache(maxsize=1)
def fitted_pairs() -> tuple[FittedPair, ...]:
    """The fits that are shipped in `fitted.toml`."""
    text = (files(__package__) / "fitted.toml").read_text(encoding="utf-8")
    return tuple(
        FittedPair(coefficients=_coefficients(row), **{name: row[name] for name in _PAIR_FIELDS})
        for row in tomllib.loads(text)["pair"]
    )


def _coefficients(row: dict[str, Any]) -> Coefficients:
    # The fits put the output head's time on the layers' matrices. The model charges matrices and
    # head alike: c0 and c1 shrink by the share of the head, which leaves predictions as they were.
    spec = model(row["model"])
    matrices = spec.layers * spec.layer_matrix_parameters / spec.streamed_parameters
    return Coefficients(
        c0=row["c0"] * matrices,
        c1=row["c1"] * matrices,
        c2=row["c2"],
        c2_mixed=row.get("c2_mixed", row["c2"]),
        c3=row["c3"],
        c4=row["c4"],
        c5_s=row["c5_us"] * 1e-6,
        c6_s=row["c6_us"] * 1e-6,
        c7_s=row["c7_ms"] * 1e-3,
        c8_s=row["c8_ms"] * 1e-3,
    )


def step_time(placement: Placement, host_s: float = DEFAULT_HOST_S) -> RooflineModel:
    """The step-time model of a placement; `host_s` seconds of scheduling are added to every step.

    A fit is used for models whose layers have the shape that it was made for, on that GPU and tp
    (16-bit weights and KV, any pp). Their number and the vocabulary may differ (see
    `coefficients_of`). Everything else is an analytic estimate, and says so.

    Raises:
        SloBenchError: `host_s` is not a time from 0 on, or the model is not a decoder.
    """
    checked_host_s(host_s)
    if placement.model.kind != "decoder":
        raise SloBenchError(f"{placement.model.name} is an encoder; step times are for decoders")
    basis = coefficients_of(placement)
    all_reduce = placement.tp > 1 and not basis.fitted  # a fit contains it
    return RooflineModel(
        _roofline(
            replace(placement, model=basis.model), basis.coefficients, host_s, all_reduce=all_reduce
        ),
        fitted=basis.fitted,
        provenance=basis.provenance,
    )


def _check_plain(spec: ModelSpec) -> None:
    """Raise SloBenchError where the analytic estimate does not know a part of the model."""
    if not spec.is_plain:
        raise SloBenchError(
            f"analytic step times know neither experts nor latent attention nor sliding windows, "
            f"which {spec.name} has; use its step times from operators (profile operators)"
        )


@dataclass(frozen=True, slots=True)
class KnownCoefficients:
    """Coefficients for a placement, and where they come from.

    `model` is what they charge for: the placement's, with the vocabulary of the fit.
    """

    model: ModelSpec
    coefficients: Coefficients
    fitted: bool
    provenance: str


def coefficients_of(placement: Placement) -> KnownCoefficients:
    """Those fitted for the shape of the model's layers on this GPU and tp, else the estimate.

    Each layer pays its share of the overheads of a fit. The part by which the output head
    differs is read in every step and multiplied once a sequence: a prefill computes the
    logits of its last token alone.
    """
    here = placement.model
    _check_plain(here)
    pair = _fitted_for(placement)
    if pair is not None:
        there = model(pair.model)
        provenance = f"fitted: {pair.label}, MAPE {pair.mape_percent} %"
        for unit, ours, theirs in (
            ("layers", here.layers, there.layers),
            ("tokens of vocabulary", here.vocab, there.vocab),
        ):
            if ours != theirs:
                provenance += f", for {ours} instead of {theirs} {unit}"
        c = pair.coefficients.for_layers(here.layers / there.layers)
        head, gpu = (here.vocab - there.vocab) * here.hidden / placement.tp, placement.gpu
        fitted = replace(
            c,
            c6_s=c.c6_s + c.c1 * 2 * head / gpu.flops(16),
            c8_s=c.c8_s + c.c0 * SIXTEEN_BIT_BYTES * head / gpu.bandwidth_bytes_per_s,
        )
        return KnownCoefficients(replace(here, vocab=there.vocab), fitted, True, provenance)
    estimate = estimated_coefficients(here)
    return KnownCoefficients(here, estimate, False, _describe(estimate))


def checked_host_s(host_s: float) -> None:
    """Raise SloBenchError unless `host_s` is a time from 0 on."""
    if not (math.isfinite(host_s) and host_s >= 0):
        raise SloBenchError(f"host_s must be a time from 0 on but is {host_s}")


def work(placement: Placement) -> Work:
    """Seconds at the hardware's peak that the coefficients multiply.

    On each GPU of a tensor-parallel group (they work side by side), summed over pipeline stages.
    """
    spec, gpu, tp = placement.model, placement.gpu, placement.tp
    weights = weight_dtype(placement.weight_dtype)
    return Work(
        weight_read_s=spec.streamed_weight_bytes(placement.weight_dtype)
        / tp
        / gpu.bandwidth_bytes_per_s,
        linear_s_per_token=2 * spec.streamed_parameters / tp / gpu.flops(weights.compute_bits),
        kv_read_s_per_token=placement.kv_bytes_per_token / tp / gpu.bandwidth_bytes_per_s,
        attention_s_per_pair=4 * spec.query_width * spec.layers / tp / gpu.flops(16),
    )


def estimated_coefficients(spec: ModelSpec) -> Coefficients:
    """Coefficients where nothing was fitted.

    The medians over the fits on one GPU; of their overheads, the medians per layer.
    """
    single = [pair for pair in fitted_pairs() if pair.tp == 1]
    fits = [pair.coefficients for pair in single]
    layers = [model(pair.model).layers for pair in single]

    def per_layer_s(values: list[float]) -> float:
        return median(v / n for v, n in zip(values, layers, strict=True)) * spec.layers

    return Coefficients(
        median(c.c0 for c in fits),
        median(c.c1 for c in fits),
        median(c.c2 for c in fits),
        median(c.c2_mixed for c in fits),
        median(c.c3 for c in fits),
        median(c.c4 for c in fits),
        c5_s=per_layer_s([c.c5_s for c in fits]),
        c6_s=per_layer_s([c.c6_s for c in fits]),
        c7_s=per_layer_s([c.c7_s for c in fits]),
        c8_s=per_layer_s([c.c8_s for c in fits]),
    )


def _fitted_for(placement: Placement) -> FittedPair | None:
    sixteen_bit = ("bf16", "fp16")
    if placement.weight_dtype not in sixteen_bit or placement.kv_dtype not in sixteen_bit:
        return None
    here = placement.model
    serving = [
        pair
        for pair in fitted_pairs()
        if pair.gpu == placement.gpu.name
        and pair.tp == placement.tp
        and layer_shape(model(pair.model)) == layer_shape(here)
    ]
    return min(serving, key=lambda p: abs(model(p.model).layers - here.layers), default=None)


def layer_shape(spec: ModelSpec) -> tuple[object, ...]:
    """What the time of one layer depends on; models that share it (Llama 3.1 8B, Mistral 7B) share
    a fit.
    """
    return (
        spec.hidden,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.intermediate,
        spec.traits,
    )


def _roofline(
    placement: Placement, coefficients: Coefficients, host_s: float, all_reduce: bool
) -> OperatorRoofline:
    spec, tp, peer = placement.model, placement.tp, placement.peer_link
    token_bytes = spec.hidden * SIXTEEN_BIT_BYTES
    reduces = ALL_REDUCES_PER_LAYER * spec.layers if all_reduce else 0
    # A ring all-reduce moves each byte 2 (tp - 1) / tp times over every GPU's link; small messages
    # pay one latency each for the scatter and the gather (kernels write to all peers at once).
    ring_bytes = 2 * (tp - 1) / tp * token_bytes
    return OperatorRoofline.of(
        coefficients,
        work(placement),
        host_s,
        extra_s=reduces * 2 * peer.latency_s,
        extra_s_per_token=reduces * ring_bytes / peer.bandwidth_bytes_per_s,
        stages=placement.pp,
        hop_latency_s=peer.latency_s,
        hop_s_per_token=token_bytes / tp / peer.bandwidth_bytes_per_s,
    )


def _describe(c: Coefficients) -> str:
    return (
        "unfitted: analytic estimate with coefficients "
        f"c0..c4 = {c.c0:.2f}, {c.c1:.2f}, {c.c2:.2f} (mixed {c.c2_mixed:.2f}), "
        f"{c.c3:.2f}, {c.c4:.2f}; "
        f"c5, c6 = {c.c5_s * 1e6:.2f}, {c.c6_s * 1e6:.2f} µs; "
        f"c7, c8 = {c.c7_s * 1e3:.2f}, {c.c8_s * 1e3:.2f} ms"
    )
