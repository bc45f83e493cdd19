"""Which modules move from which device to which.

Source: BanaServe (docs/papers.md), Algorithm 4-1, Eq. 4-28 to 4-31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.module_moves import Module, ModuleMove, Offers

Saving = Callable[[ModuleMove], float]
"""Seconds of latency that a move saves."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of Algorithm 4-1. Loads are U = C/Cmax + M/Mmax (Eq. 4-28), from 0 to 2; work that waits may
    add to it.

    Moving begins when two devices are more than `rise` apart and goes on until none are more than
    `fall` apart (hysteresis: delta_up > delta_down). From a gap of `large` on layers move, below
    it heads. `efficiency` is rho: what a second of moving must bring. At most `moves` in a cycle.
    """

    rise: float = 0.4
    fall: float = 0.2
    large: float = 0.6
    efficiency: float = 1.0
    moves: int = 8


class Balancer:
    """Algorithm 4-1, corrected. As printed, the sets of overloaded and underloaded devices are
    never computed again, a device in the middle is in both, and heads would move only where layers
    cannot. Here the loads are computed again after every move, the most loaded device offloads to
    the least loaded one that can take a module, and layers serve large gaps, heads small ones
    (§4.3.2) and those for which no layer can move. A cycle ends when no pair is left whose move is
    worth its cost.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._moving = False  # since the gap exceeded `rise`

    def plan(
        self, loads: Mapping[int, float], offer: Offers, saved_s: Saving | None = None
    ) -> list[ModuleMove]:
        """The moves of one cycle, in order.

        Args:
            loads: U of each device.
            offer: gives the move of modules of a kind from a source to a target, for the loads that
                the moves so far would leave, or None.
            saved_s: what a move brings (`pays`).
        """
        thresholds, load = self._thresholds, dict(loads)
        planned: list[ModuleMove] = []
        if len(load) < 2:
            return planned
        while len(planned) < thresholds.moves:
            gap = max(load.values()) - min(load.values())
            if gap <= thresholds.fall:
                self._moving = False
            elif gap > thresholds.rise:
                self._moving = True
            if not self._moving:
                break
            move = self._best(load, offer, saved_s)
            if move is None:
                break
            load[move.source], load[move.target] = move.source_load, move.target_load
            planned.append(move)
        return planned

    def _best(
        self, load: Mapping[int, float], offer: Offers, saved_s: Saving | None
    ) -> ModuleMove | None:
        """The first pair, from the largest gap on, with a move that is worth it."""
        sources = sorted(load, key=lambda d: (-load[d], d))
        targets = sorted(load, key=lambda d: (load[d], d))
        for source in sources:
            for target in targets:
                gap = load[source] - load[target]
                if gap <= self._thresholds.fall:
                    break
                small = gap < self._thresholds.large
                for kind in (Module.HEADS,) if small else (Module.LAYERS, Module.HEADS):
                    move = offer(kind, source, target, load)
                    if move is None:
                        continue
                    closed = gap - abs(move.source_load - move.target_load)
                    if closed > 0 and self.pays(move, closed if saved_s is None else saved_s(move)):
                        return move
        return None

    def pays(self, move: ModuleMove, benefit: float) -> bool:
        """Eq. 4-31: is the benefit worth the seconds that the move takes? As printed the benefit is
        the gap that closes; or else the seconds of latency that the move saves while it lasts.
        """
        return benefit > 0 and benefit >= self._thresholds.efficiency * move.cost_s
