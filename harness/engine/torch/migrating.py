"""Layers and heads move between the processes of one real engine, as a `ModulePolicy` plans it.

The same planner decides in the simulator. A device is a process with its share of the model. Its
load is C/Cmax + M/Mmax: the CPU time that it took of the time that went by, and the share that its
weights and KV in use take of a capacity that is the same for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ...core.module_moves import Module, ModuleMove, ModulePolicy

if TYPE_CHECKING:
    from .distributed import CompletedMove, Spread

HERE = 0


@dataclass(frozen=True)
class ExecutedMove:
    """A move that was made: when, on which loads, what they were to become, and what it took."""

    time_s: float
    loads: Mapping[int, float]
    planned: ModuleMove
    completed: tuple[CompletedMove, ...]

    def line(self) -> str:
        """Log line of the move."""
        planned = {**asdict(self.planned), "module": self.planned.module.value}
        completed = [asdict(move) for move in self.completed]
        loads = {str(device): load for device, load in self.loads.items()}
        entry = {"time_s": self.time_s, "loads": loads, "planned": planned, "made": completed}
        return json.dumps(entry)


@dataclass
class Migrator:
    """Checks the loads every `rule.control_every_s` seconds, before an iteration, and makes at most
    one move.

    Args:
        spread: the model over its processes.
        used_blocks: KV blocks in use now.
        rule: thresholds, and kinds of modules that may move.
        now_s: the clock.
    """

    spread: Spread
    used_blocks: Callable[[], int]
    rule: ModulePolicy
    now_s: Callable[[], float]
    history: list[ExecutedMove] = field(default_factory=list)

    def __post_init__(self) -> None:
        rule, spread = self.rule, self.spread
        self._planner = rule.planner()
        self._next_s = self.now_s() + rule.control_every_s
        self._cpu_s = self._spent()
        self._looked_s = time.perf_counter()
        self._compute: dict[int, float] = {}
        self._capacity_bytes = spread.own_weight_bytes + sum(spread.layer_bytes(None))

    def look(self) -> None:
        """Called before every iteration; most often it is not yet time."""
        now_s = self.now_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.rule.control_every_s
        self._measure()
        loads = self.loads()
        for planned in self._planner.plan(loads, self._offer):
            completed = self._carry_out(planned)
            self.history.append(ExecutedMove(now_s, loads, planned, completed))

    def loads(self) -> dict[int, float]:
        """Load U of each process."""
        load_of = {}
        for device, compute in self._compute.items():
            held = self.spread.held_bytes(device, self.used_blocks())
            load_of[device] = compute + held / self._capacity_bytes
        return load_of

    def _spent(self) -> dict[int, float]:
        """CPU seconds of each process so far."""
        return {HERE: time.process_time(), **self.spread.busy_s()}

    def _measure(self) -> None:
        spent, looked_s = self._spent(), time.perf_counter()
        elapsed_s = max(1e-9, looked_s - self._looked_s)
        for device, cpu_s in spent.items():
            share = min(1.0, (cpu_s - self._cpu_s[device]) / elapsed_s)
            before = self._compute.get(device, share)
            self._compute[device] = before + self.rule.smoothing * (share - before)
        self._cpu_s, self._looked_s = spent, looked_s

    # ---------------------------------------------------------------- what could move

    def _offer(
        self, module: Module, source: int, target: int, load: Mapping[int, float]
    ) -> ModuleMove | None:
        if module is Module.LAYERS and self.rule.layer_moves:
            return self._layers(source, target, load)
        if module is Module.HEADS and self.rule.head_moves:
            return self._heads(source, target, load)
        return None

    def _layers(self, source: int, target: int, load: Mapping[int, float]) -> ModuleMove | None:
        there = self.spread.movable(source)
        max_layers = len(there) - (source == HERE)  # the first process keeps one
        if max_layers < 1:
            return None
        each_bytes = self.spread.layer_bytes(self.used_blocks())[there[-1]]
        computed = self._compute[source] / len(self.spread.layers_at(source))
        return self._nearest(Module.LAYERS, source, target, max_layers, computed, each_bytes, load)

    def _heads(self, source: int, target: int, load: Mapping[int, float]) -> ModuleMove | None:
        """KV heads of all whole layers that are here; or all that a helper has come home."""
        spread, every = self.spread, self.spread.config.kv_heads
        kv_bytes = spread.kv_bytes(self.used_blocks())
        if source != HERE:
            held = spread.helped_by(source)
            if target != HERE or not held:
                return None
            moved = sum(kv_bytes * heads // every for heads in held.values())
            shift = moved / self._capacity_bytes
            after = (load[source] - shift, load[target] + shift)
            return ModuleMove(Module.HEADS, source, target, 0, *after, self._cost_s(moved))
        each_bytes = kv_bytes * len(spread.movable(HERE)) // every
        return self._nearest(Module.HEADS, source, target, every - 1, 0.0, each_bytes, load)

    def _nearest(
        self,
        module: Module,
        source: int,
        target: int,
        max_units: int,
        computed: float,
        each_bytes: int,
        load: Mapping[int, float],
    ) -> ModuleMove | None:
        """As many units as bring the two loads as near as can be."""
        shift = computed + each_bytes / self._capacity_bytes
        if shift <= 0:
            return None
        gap = load[source] - load[target]
        units = min(range(1, max_units + 1), key=lambda n: abs(gap - 2 * n * shift), default=0)
        if not units:
            return None
        here, there = load[source] - units * shift, load[target] + units * shift
        return ModuleMove(
            module, source, target, units, here, there, self._cost_s(units * each_bytes)
        )

    def _cost_s(self, moved_bytes: int) -> float:
        """At the pace of all moves so far; the first is made to learn it."""
        moves = self.spread.moves
        total = sum(move.moved_bytes for move in moves)
        return moved_bytes * sum(move.seconds for move in moves) / total if total else 0.0

    # ---------------------------------------------------------------- moving

    def _carry_out(self, move: ModuleMove) -> tuple[CompletedMove, ...]:
        spread = self.spread
        there = spread.movable(move.source)
        if move.module is Module.LAYERS:
            # What is away stays one stretch at the end, so that activations travel twice a step.
            chosen = there[-move.units :] if move.source == HERE else there[: move.units]
            return (spread.move_layers(chosen, move.target),)
        if move.source == HERE:
            return tuple(spread.move_heads(n, move.units, move.target) for n in there)
        return tuple(spread.return_heads(n) for n in spread.helped_by(move.source))
