"""Moves of layers or attention heads between devices, and what a policy that plans them answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Module(Enum):
    """Kind of module that can move."""

    LAYERS = "layers"  # weights and KV of whole layers
    HEADS = "heads"  # KV of some attention heads, of all layers


@dataclass(frozen=True, slots=True)
class ModuleMove:
    """One possible move, and what the two devices' loads would be after it."""

    module: Module
    source: int
    target: int
    units: int  # layers or KV heads of the one that are at the other afterwards
    source_load: float
    target_load: float
    cost_s: float  # transfer and synchronisation


# The move of modules of a kind from a source to a target device at these loads, or None.
Offers = Callable[[Module, int, int, Mapping[int, float]], ModuleMove | None]


class Planner(Protocol):
    """Plans the moves of one cycle; remembers what it must between cycles."""

    def plan(self, loads: Mapping[int, float], offer: Offers) -> Sequence[ModuleMove]:
        """Moves in order, given the load of each device and what could move."""


class ModulePolicy(Protocol):
    """When modules move between the devices of one engine, and which kinds may."""

    @property
    def control_every_s(self) -> float:
        """Seconds between two control steps."""

    @property
    def layer_moves(self) -> bool:
        """Whether layers may move."""

    @property
    def head_moves(self) -> bool:
        """Whether attention heads may move."""

    @property
    def smoothing(self) -> float:
        """Weight of the newest measurement in a load."""

    def planner(self) -> Planner:
        """A planner for one run; it makes at most one move a cycle."""
