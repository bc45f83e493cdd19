"""Step time where the layers are mapped unevenly, or onto GPUs of different kinds.

A pass goes through the stages one after the other: it takes the sum of what each stage takes for
its own layers on its own GPU, and of the hops between them. Overheads that are fitted or given for
a whole pass (`c5`…`c8`, `host_s`) are shared out by layers, since they are paid layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .dtypes import SIXTEEN_BIT_BYTES, weight_dtype
from .placement import PipelineStage, Placement
from .roofline import OperatorRoofline, Work
from .step_time import (
    DEFAULT_HOST_S,
    KnownCoefficients,
    StepTimeModel,
    checked_host_s,
    coefficients_of,
)
from .stretches import EvenSpans

# The decode step by whose times the share of each stage is computed.
_SHARED_SEQS, _SHARED_KV_TOKENS = 8, 8 * 256


@dataclass(frozen=True, slots=True)
class StagedStepTime(EvenSpans):
    """`StepTime` as the sum over stages; each part's hand-over to the next stage is in it, of which
    `hops_s` is the latency of the link.
    """

    parts: tuple[OperatorRoofline, ...]
    hops_s: tuple[float, ...]

    def shares(self) -> tuple[float, ...]:
        """What share of a pass, but for the latency of links, each stage takes, in a decode step of
        eight sequences.

        In a prefill step the shares differ a little where GPUs differ more in operations than in
        bandwidth; the sum over the stages is exact for both.
        """
        times_s = [
            part.step_s(_SHARED_SEQS, _SHARED_KV_TOKENS, ()) - hop_s
            for part, hop_s in zip(self.parts, self.hops_s, strict=True)
        ]
        whole_s = sum(times_s)
        return tuple(time_s / whole_s for time_s in times_s)

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return sum(part.step_s(decode_seqs, decode_kv_tokens, chunks) for part in self.parts)

    def _growth_s(self, seqs: int) -> float:
        return seqs * sum(part.decode_kv_s for part in self.parts)


@dataclass(frozen=True, slots=True)
class StagedModel(StepTimeModel):
    """A step-time model whose parts are the stages of a placement."""

    model: StagedStepTime


def staged_step_time(placement: Placement, host_s: float = DEFAULT_HOST_S) -> StagedModel:
    """The step-time model of a placement with stages of their own (`Placement.split`).

    Every stage is fitted where its GPU and the model's shape are, else estimated; one estimate
    makes the whole unfitted.

    Raises:
        SloBenchError: `host_s` is not a time from 0 on.
    """
    checked_host_s(host_s)
    parts, fitted, provenances = [], True, dict[str, None]()
    for number, stage in enumerate(placement.stages):
        basis = _coefficients(placement, stage)
        fitted = fitted and basis.fitted
        provenances.setdefault(f"{stage.gpu.name}: {basis.provenance}")
        parts.append(stage_step_time(placement, stage, host_s, last=number == placement.pp - 1))
    hops_s = [stage.link.latency_s if stage.link else 0.0 for stage in placement.stages[:-1]]
    steps = StagedStepTime(tuple(parts), (*hops_s, 0.0))
    return StagedModel(steps, fitted, "; ".join(provenances))


def stage_step_time(
    placement: Placement, stage: PipelineStage, host_s: float, *, last: bool
) -> OperatorRoofline:
    """How long a pass is in one stage of the model that `placement` places, hand-over included.

    The last has the final norm and the output head, and hands nothing over.
    """
    basis = _coefficients(placement, stage)
    placement = replace(placement, model=basis.model)
    share = stage.layers / placement.model.layers
    link = None if last else stage.link
    token_bytes = placement.model.hidden * SIXTEEN_BIT_BYTES
    return OperatorRoofline.of(
        basis.coefficients.for_layers(share),
        _work(placement, stage, head=last),
        host_s * share,
        extra_s=(link.latency_s if link else 0.0) + stage.layers * stage.layer_extra_s,
        extra_s_per_token=token_bytes / link.bandwidth_bytes_per_s if link else 0.0,
    )


def _coefficients(placement: Placement, stage: PipelineStage) -> KnownCoefficients:
    return coefficients_of(replace(placement, gpu=stage.gpu, pp=1, split=(), fixed_lanes=None))


def _work(placement: Placement, stage: PipelineStage, head: bool) -> Work:
    """What the stage reads and multiplies; the last has the final norm and the output head."""
    spec, gpu, dtype = placement.model, stage.gpu, placement.weight_dtype
    held_bytes = stage.layers * spec.layer_weight_bytes(dtype)
    held = stage.layers * spec.layer_parameters
    if head:
        held_bytes += spec.streamed_weight_bytes(dtype) - spec.layers * spec.layer_weight_bytes(
            dtype
        )
        held += spec.streamed_parameters - spec.layers * spec.layer_parameters
    share = stage.layers / spec.layers
    return Work(
        weight_read_s=held_bytes / gpu.bandwidth_bytes_per_s,
        linear_s_per_token=2 * held / gpu.flops(weight_dtype(dtype).compute_bits),
        kv_read_s_per_token=placement.kv_bytes_per_token * share / gpu.bandwidth_bytes_per_s,
        attention_s_per_pair=4 * spec.query_width * stage.layers / gpu.flops(16),
    )
