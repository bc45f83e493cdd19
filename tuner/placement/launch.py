"""A placement as settings of accelerate, the servers and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...harness.servers.server_kinds import server_kinds
from ...predictors.device_map import DeviceMap
from ...predictors.placement import PipelineStage, even_layers
from ...predictors.specs import ModelSpec
from ...workloads.errors import SloBenchError
from .problem import LayerRange, Map
from .topology import Topology


@dataclass(frozen=True)
class _Names:
    """Modules of a family, in the order of the pass."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    head: str


_LLAMA = _Names(
    ("model.embed_tokens", "model.rotary_emb"), "model.layers.{}", ("model.norm",), "lm_head"
)
# Module names of the implementations in transformers, and of ChatGLM's and Qwen's own code.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "glm", "glm4"), _LLAMA),
    "opt": _Names(
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder.layers.{}",
        ("model.decoder.final_layer_norm",),
        "lm_head",
    ),
    "chatglm": _Names(
        ("transformer.word_embeddings",),
        "transformer.layers.{}",
        ("transformer.final_layernorm",),
        "lm_head",
    ),
    "chatglm2": _Names(
        ("transformer.embedding", "transformer.rotary_pos_emb"),
        "transformer.encoder.layers.{}",
        ("transformer.encoder.final_layernorm",),
        "transformer.output_layer",
    ),
    "qwen": _Names(
        ("transformer.wte", "transformer.drop", "transformer.rotary_emb"),
        "transformer.h.{}",
        ("transformer.ln_f",),
        "lm_head",
    ),
}


def accelerate_map(model: ModelSpec, placed: Map) -> dict[str, int]:
    """`device_map` of `from_pretrained` or `dispatch_model`: modules to device numbers.

    Devices are counted as in the topology, which is as CUDA counts them. A head that shares its
    weights with the embeddings stays with them.
    """
    names = _FAMILIES.get(model.family)
    if names is None:
        raise SloBenchError(f"no module names for model family {model.family}")
    first, last = placed[0].device, placed[-1].device
    device_of = dict.fromkeys(names.before, first)
    number = 0
    for held in placed:
        for _ in range(held.layers):
            device_of[names.layers.format(number)] = held.device
            number += 1
    device_of |= dict.fromkeys(names.after, last)
    device_of[names.head] = first if model.tied_embeddings else last
    return device_of


def server_settings(placed: Map) -> dict[str, dict[str, Any]]:
    """Environment and options of each server: a pipeline stage a device, in order."""
    devices = ",".join(str(held.device) for held in placed)
    layers = [held.layers for held in placed]
    return {
        name: {
            "environment": {"CUDA_VISIBLE_DEVICES": devices, **kind.stage_layers(layers)},
            "arguments": [kind.stages_option, str(len(placed))],
        }
        for name, kind in server_kinds().items()
        if kind.stages_option
    }


def device_map(
    model: ModelSpec,
    topology: Topology,
    placed: Map,
    *,
    lanes: int | None = None,
    ready_s: float = 0.0,
) -> DeviceMap:
    """The map in the form of the simulator."""
    stages = []
    for n, held in enumerate(placed):
        machine = topology.devices[held.device]
        link = None
        if n + 1 < len(placed):
            link = topology.links[held.device][placed[n + 1].device]
        stages.append(PipelineStage(machine.gpu, held.layers, link, machine.layer_extra_s))
    names = tuple(topology.devices[held.device].name for held in placed)
    return DeviceMap(model.name, tuple(stages), names, lanes, ready_s)


def document(
    model: ModelSpec, topology: Topology, placed: Map, *, lanes: int | None, ready_s: float = 0.0
) -> dict[str, Any]:
    """The file that `--out` writes: the device map, for accelerate and the servers, too."""
    plain_map = device_map(model, topology, placed, lanes=lanes, ready_s=ready_s).plain()
    return {**plain_map, "accelerate": accelerate_map(model, placed), **server_settings(placed)}


def even_map(layers: int, devices: int) -> Map:
    """The map of accelerate's `device_map="balanced"`: equal layers on all devices, in order."""
    if devices > layers:
        raise SloBenchError(f"{layers} layers cannot be shared out to {devices} devices")
    return tuple(LayerRange(device, n) for device, n in enumerate(even_layers(layers, devices)))
