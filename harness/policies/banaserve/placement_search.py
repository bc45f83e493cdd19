"""The placement of modules with the best predicted objective.

Source: BanaServe (docs/papers.md), Eq. 4-25 and 4-27.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ....predictors.specs import LinkSpec
from ...core.instance import Instance
from ...core.module_moves import Module, ModuleMove
from .module_costs import MovedStepTime
from .modules import Choice, Modules, moved_step_time
from .prediction import Hosted, Load, PlacedInstance, Prediction, compute_use, predict


@dataclass(frozen=True, slots=True)
class Budgets:
    """Of Eq. 4-25, and rho: what a second of moving must bring."""

    ttft_s: float
    tpot_s: float
    efficiency: float


class PlacementSearch:
    """Eq. 4-27 by steepest ascent: of all moves that are possible now, the one that leaves the
    placement with the least excess over the budgets and the best objective together; then the
    next, of instances that do not move yet, until no move is worth what it costs.

    The thesis prints the maximum without a method. All placements are as many as the ways to pair
    instances times the layers and heads of each; a cycle makes few moves, and the next one looks
    again.
    """

    def __init__(self, modules: Modules, instances: Iterable[Instance], over: LinkSpec) -> None:
        self._modules = modules
        self._instances = {instance.index: instance for instance in instances}
        self._over = over

    def placement(self) -> dict[int, PlacedInstance]:
        """Where the modules are now."""
        return {index: self._placed(instance) for index, instance in self._instances.items()}

    def _placed(self, instance: Instance) -> PlacedInstance:
        offloaded = self._modules.offloaded.get(instance.index)
        step_time = MovedStepTime(instance.step_time)
        if offloaded is not None:
            step_time = moved_step_time(instance, offloaded.module, offloaded.units, self._over)
        return PlacedInstance(instance, step_time, self._hosted(instance))

    def _hosted(self, instance: Instance) -> Hosted | None:
        received = self._modules.received.get(instance.index)
        if received is None or not received.units:
            return None
        times = moved_step_time(received.owner, received.module, received.units, self._over)
        return Hosted(received.owner, received.module, received.units, times)

    def plan(self, load: Load, budgets: Budgets, *, layers: bool, heads: bool) -> list[ModuleMove]:
        """The moves of one cycle, in order."""
        placed = self.placement()
        now = self._predicted(placed, load, budgets)
        allowed = {Module.LAYERS: layers, Module.HEADS: heads}
        choices = list(self._modules.choices(self._instances.values(), self._over, allowed))
        planned: list[ModuleMove] = []
        while choices:
            outcomes = [self._after(choice, placed) for choice in choices]
            predicted = [self._predicted(outcome, load, budgets) for outcome in outcomes]
            best = max(range(len(choices)), key=lambda k: (predicted[k].worth_over(now), -k))
            choice, worth = choices[best], predicted[best].worth_over(now)
            if worth <= 0 or worth < budgets.efficiency * choice.cost_s:
                break
            placed, now = outcomes[best], predicted[best]
            planned.append(_move(choice, placed, load))
            both = {choice.owner.index, choice.helper.index}
            choices = [c for c in choices if not both & {c.owner.index, c.helper.index}]
        return planned

    def saved_s(self, move: ModuleMove, load: Load) -> float:
        """Seconds of latency that a move saves over the horizon, the hops of every later step and
        the wait of the helper's own steps counted; below 0 where it costs some.
        """
        choice = self._modules.choice_of(move, self._instances, self._over)
        if choice is None:
            return 0.0
        placed, free = self.placement(), Budgets(math.inf, math.inf, 0.0)
        after = self._predicted(self._after(choice, placed), load, free)
        return after.saved_s(self._predicted(placed, load, free), load)

    def _predicted(
        self, placed: Mapping[int, PlacedInstance], load: Load, budgets: Budgets
    ) -> Prediction:
        return predict(list(placed.values()), load, budgets.ttft_s, budgets.tpot_s)

    def _after(
        self, choice: Choice, placed: Mapping[int, PlacedInstance]
    ) -> dict[int, PlacedInstance]:
        owner, helper = choice.owner, choice.helper
        times = moved_step_time(owner, choice.module, choice.units, self._over)
        hosted = Hosted(owner, choice.module, choice.units, times) if choice.units else None
        lost = choice.helper_blocks
        return {
            **placed,
            owner.index: PlacedInstance(owner, times, None, choice.owner_blocks),
            helper.index: replace(placed[helper.index], hosted=hosted, gained_blocks=-lost),
        }


def _move(choice: Choice, placed: Mapping[int, PlacedInstance], load: Load) -> ModuleMove:
    uses = {i: compute_use(placed[i], load) for i in (choice.owner.index, choice.helper.index)}
    source, target = choice.owner.index, choice.helper.index
    if choice.returns:
        source, target = target, source
    return ModuleMove(
        choice.module, source, target, choice.units, uses[source], uses[target], choice.cost_s
    )
