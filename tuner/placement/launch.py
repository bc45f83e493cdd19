"""A placement as settings of accelerate, the servers and the simulator."""

from __future__ import annotations

from typing import Any

from ...harness.servers.server_kinds import server_kinds
from ...predictors.device_map import DeviceMap
from ...predictors.families import FAMILIES
from ...predictors.placement import PipelineStage, even_layers
from ...predictors.specs import ModelSpec
from ...workloads.errors import SloBenchError
from .problem import LayerRange, Map
from .topology import Topology


def accelerate_map(model: ModelSpec, placed: Map) -> dict[str, int]:
    """`device_map` of `from_pretrained` or `dispatch_model`: modules to device numbers.

    Devices are counted as in the topology, which is as CUDA counts them. A head that shares its
    weights with the embeddings stays with them.
    """
    modules = FAMILIES[model.family].modules
    if modules is None or not modules.head:
        raise SloBenchError(f"no module names for model family {model.family}")
    first, last, root = placed[0].device, placed[-1].device, modules.roots[0]
    device_of = {f"{root}{name}": first for name in (modules.tokens, *modules.positions)}
    devices = (held.device for held in placed for _ in range(held.layers))
    device_of |= {f"{root}{modules.layers}.{n}": device for n, device in enumerate(devices)}
    device_of[f"{root}{modules.norm}"] = last
    device_of[modules.head] = first if model.tied_embeddings else last
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
