"""Pipeline stages that are not alike: contiguous layers on GPUs of different kinds."""

from __future__ import annotations

from dataclasses import dataclass

from .specs import GpuSpec, LinkSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Contiguous layers on one GPU, and the link to the stage after it (None: none follows).

    Each layer takes `layer_extra_s` longer than the step-time model says, as measured there.
    """

    gpu: GpuSpec
    layers: int
    link: LinkSpec | None = None
    layer_extra_s: float = 0.0


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each of `stages` stages, as even as can be; the first hold one more."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))
