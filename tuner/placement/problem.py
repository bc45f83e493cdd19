"""The placement problem of HELR: contiguous layers on devices, and the order of the devices.

A pass goes through the devices one after the other, so its latency is the sum of the devices' own
times and of the hops between them. What is minimised is

    a1 * latency / ideal + a2 * devices

where `ideal` is the latency of all layers on the fastest device, as if they fitted there: a1 and
a2 then weigh like with like. Ties go to the lower latency, then to fewer devices.

Source: UELLM (see docs/papers.md), §3.5 and §3.5.3.

`kv_tokens_of` says how many tokens' KV must fit beside the layers for a workload to be served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...predictors.dtypes import AUTO
from ...predictors.placement import PipelineStage, Placement
from ...predictors.specs import ModelSpec
from ...predictors.staged import stage_step_time
from ...predictors.step_time import DEFAULT_HOST_S
from ...workloads.base import TraceSource
from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.source import load_source
from .topology import Machine, Topology

INF = math.inf


@dataclass(frozen=True)
class CostWeights:
    """Weights of the objective: a1 (`latency`) and a2 (`devices`)."""

    latency: float
    devices: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < INF and 0 <= self.devices < INF):
            raise SloBenchError("weights of latency and devices must be numbers from 0 on")
        if self.latency == self.devices == 0:
            raise SloBenchError(
                "the weights of latency and devices are both 0; one must be positive"
            )


MODES: Mapping[str, CostWeights] = {
    "he": CostWeights(0.0, 1.0),  # the fewest devices
    "lr": CostWeights(10.0, 1.0),  # the thesis: a1 much greater than a2, say 10:1
    "balanced": CostWeights(1.0, 1.0),
}


def weights_of(mode: str) -> CostWeights:
    """The weights of a mode, or `UnknownNameError`."""
    if mode not in MODES:
        raise UnknownNameError("mode", mode, MODES)
    return MODES[mode]


@dataclass(frozen=True)
class Candidate:
    """One device of the problem.

    `room` is how many layers fit; fewer if it is first (embeddings) or last (norm and head), for
    which it also takes `head_s` longer. `room_spread` is how many would fit if embeddings and head
    were spread evenly over all layers.
    """

    name: str
    layer_s: float
    room: int
    room_first: int
    room_last: int
    room_alone: int
    room_spread: int
    head_s: float = 0.0

    def holds(self, *, first: bool, last: bool) -> int:
        """Layers that fit in this place."""
        if first and last:
            return self.room_alone
        return self.room_first if first else self.room_last if last else self.room


@dataclass(frozen=True)
class LayerRange:
    """Contiguous layers on one device, by its place in the problem."""

    device: int
    layers: int


Map = tuple[LayerRange, ...]


@dataclass(frozen=True)
class Problem:
    """Number of layers, candidate devices, and the seconds of a hop between each two of them."""

    layers: int
    devices: tuple[Candidate, ...]
    hop_s: tuple[tuple[float, ...], ...]

    @cached_property
    def ideal_s(self) -> float:
        """Latency of all layers on the fastest device, as if they fitted there."""
        return min(d.layer_s * self.layers + d.head_s for d in self.devices)

    def fits(self, placed: Map) -> bool:
        """Is every layer placed once, and does every device hold what it is given?"""
        if not placed or sum(held.layers for held in placed) != self.layers:
            return False
        if len({held.device for held in placed}) < len(placed):
            return False
        last = len(placed) - 1
        return all(
            1 <= held.layers <= self.devices[held.device].holds(first=n == 0, last=n == last)
            for n, held in enumerate(placed)
        )

    def latency_s(self, placed: Map) -> float:
        """Seconds of a pass over the map, also of one that does not fit."""
        own_s = sum(held.layers * self.devices[held.device].layer_s for held in placed)
        hops_s = sum(self.hop_s[a.device][b.device] for a, b in pairwise(placed))
        return own_s + hops_s + self.devices[placed[-1].device].head_s

    def cost(self, placed: Map, weights: CostWeights) -> float:
        """The objective; infinite where it does not fit."""
        if not self.fits(placed):
            return INF
        return self.cost_of(self.latency_s(placed), len(placed), weights)

    def cost_of(self, latency_s: float, devices: int, weights: CostWeights) -> float:
        """The objective of a latency and a number of devices."""
        return weights.latency * latency_s / self.ideal_s + weights.devices * devices


def map_of(problem: Problem, text: str) -> Map:
    """The map of `14,14`: layers on each device, in the order of the devices; 0 leaves one out.

    Raises:
        SloBenchError: it is no such list, or does not place every layer on a device that holds it.
    """
    counts = [int(part) if part.strip().isdigit() else -1 for part in text.split(",")]
    if len(counts) != len(problem.devices) or min(counts) < 0 or sum(counts) != problem.layers:
        raise SloBenchError(
            f"--split {text!r} must have {len(problem.devices)} numbers of layers, one for each "
            f"device, with the sum {problem.layers}"
        )
    placed = tuple(LayerRange(device, n) for device, n in enumerate(counts) if n)
    if not problem.fits(placed):
        raise SloBenchError(f"--split {text!r}: its layers do not fit on its devices")
    return placed


def no_room(problem: Problem) -> SloBenchError:
    """The error for a model that does not fit on the devices."""
    room = sum(device.room for device in problem.devices)
    return SloBenchError(
        f"{problem.layers} layers do not fit: the {len(problem.devices)} devices hold "
        f"{room} layers at most, beside embeddings, head and what is reserved for KV; reserve "
        "less, add devices or use smaller weights (--weight-dtype)"
    )


def problem_of(
    model: ModelSpec,
    topology: Topology,
    *,
    weight_dtype: str = AUTO,
    kv_dtype: str = "bf16",
    memory_share: float = 0.9,
    reserve_bytes: float = 0.0,
    kv_tokens: int = 2048,
    batch: int = 8,
    context_tokens: int = 512,
    host_s: float = DEFAULT_HOST_S,
) -> Problem:
    """The problem of a model on a topology; times are those of one decode step.

    Args:
        model: a decoder.
        topology: the devices.
        weight_dtype: of the weights.
        kv_dtype: of the KV cache.
        memory_share: of each device's memory that may be used.
        reserve_bytes: kept free on every device for KV (the thesis' T).
        kv_tokens: tokens with KV that must fit beside the layers on every device.
        batch: sequences of the step.
        context_tokens: KV tokens of each.
        host_s: seconds of the host in a pass, split by layers.
    """
    if model.kind != "decoder":
        raise SloBenchError(f"{model.name} is an encoder; layers are mapped for decoders")
    for name, value in (("reserve", reserve_bytes), ("kv tokens", kv_tokens)):
        if value < 0:
            raise SloBenchError(f"{name} must be at least 0 but is {value:g}")
    for name, count in (("batch", batch), ("context", context_tokens)):
        if count < 1:
            raise SloBenchError(f"{name} must be at least 1 but is {count}")
    weight_dtype, kv_dtype = model.dtype_of(weight_dtype), model.kv_dtype_of(kv_dtype)
    layer_bytes = model.layer_weight_bytes(weight_dtype)
    kv_bytes = model.kv_bytes_per_token(kv_dtype) / model.layers
    table_bytes = 2 * model.embedding_parameters  # embeddings and head stay at 16 bits
    whole_bytes = model.weight_bytes(weight_dtype) - model.layers * layer_bytes
    devices = []
    for device in topology.devices:
        place = Placement(
            model,
            device.gpu,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            memory_share=memory_share,
        )
        free = place.usable_bytes_per_gpu - place.reserve_bytes_per_gpu - reserve_bytes

        def room(beside_bytes: float, each_bytes: float = 0.0, free: float = free) -> int:
            each_bytes += layer_bytes + kv_bytes * kv_tokens
            return max(0, min(model.layers, int((free - beside_bytes) // each_bytes)))

        def step_s(*, head: bool, device: Machine = device, place: Placement = place) -> float:
            stage = PipelineStage(device.gpu, 1, layer_extra_s=device.layer_extra_s)
            timed = stage_step_time(place, stage, host_s, last=head)
            return timed.step_s(batch, batch * context_tokens, ())

        layer_s = step_s(head=False)
        devices.append(
            Candidate(
                device.name,
                layer_s,
                room=room(0),
                room_first=room(table_bytes),
                room_last=room(table_bytes),
                room_alone=room(whole_bytes),
                room_spread=room(0, whole_bytes / model.layers),
                head_s=step_s(head=True) - layer_s,
            )
        )
    moved_bytes = batch * model.hidden * 2
    hop_s = tuple(
        tuple(0.0 if link is None else link.transfer_s(moved_bytes) for link in row)
        for row in topology.links
    )
    return Problem(model.layers, tuple(devices), hop_s)


DRAWN = 2_000  # requests
_BLOCK = 16  # KV is held in blocks; a request may leave one partly empty


def kv_tokens_of(workload: str, model: ModelSpec, batch: int, seed: int) -> int:
    """Tokens of the longest of 2,000 requests (a trace: of all), or of `batch` mean ones if more.

    Requests beyond the model's context are left out: no map serves them.

    Raises:
        SloBenchError: there is no such workload, or a file cannot be read.
    """
    source = load_source(workload)
    if isinstance(source, TraceSource) or source.has_arrivals:
        drawn = source.make(seed=seed)
    else:
        drawn = source.make(rate_rps=None if source.closed_loop else 1.0, requests=DRAWN, seed=seed)
    tokens = np.asarray(drawn.prompt_tokens) + np.asarray(drawn.output_tokens)
    tokens = tokens[tokens <= model.context_tokens]
    if not len(tokens):
        return model.context_tokens
    return int(max(tokens.max(), batch * tokens.mean())) + _BLOCK
