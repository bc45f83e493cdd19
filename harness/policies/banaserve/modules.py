"""Which instance has offloaded layers or heads to which, what could move next, and moving it.

Source: BanaServe (docs/papers.md), §4.3.1, §4.3.2, §4.4.3 and §4.4.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ....predictors.specs import LinkSpec
from ...core.cluster_policy import ClusterControl
from ...core.instance import Instance
from ...core.module_moves import Module, ModuleMove, Offers
from ..shared.disaggregated import DECODE
from ..shared.kv_transfer import KvNetwork
from .module_costs import (
    SYNC_S,
    MoveCost,
    MovedStepTime,
    head_move,
    head_toll,
    layer_move,
    layer_toll,
)

_OFFERED = 0.25  # of a helper's free blocks, for what it hosts
_AGAIN_S = 0.05  # until it is looked again whether blocks are free


@dataclass(frozen=True, slots=True)
class Use:
    """U = C/Cmax + M/Mmax of an instance's GPUs, Eq. 4-28."""

    compute: float
    memory: float

    @property
    def total(self) -> float:
        """Sum of both shares, from 0 to 2."""
        return self.compute + self.memory


@dataclass(slots=True)
class OffloadedModules:
    """Modules of `owner` that are on `helper`: `units` layers, or KV heads of all layers."""

    owner: Instance
    helper: Instance
    module: Module
    units: int
    helper_blocks: int  # that `helper` has given up for them

    @property
    def share(self) -> float:
        """Of the owner's KV that lies at the helper."""
        return _share(self.owner, self.module, self.units)


@dataclass(frozen=True, slots=True)
class ModuleMoveRecord:
    """A move that has been made."""

    begin_s: float
    end_s: float
    move: ModuleMove
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One move that is possible now, to `units` of the owner's modules at the helper."""

    module: Module
    owner: Instance
    helper: Instance
    units: int
    returns: bool  # fewer than now
    cost_s: float
    owner_blocks: int  # KV blocks that the owner gains
    helper_blocks: int  # and that the helper gives up


class _Blocks(NamedTuple):
    """What a move would make of the two KV cache managers."""

    owner_total: int
    helper_blocks: int


@dataclass
class Modules:
    """An instance offloads modules of one kind to one other, which offloads none and helps no
    other.

    The helper computes them at once, as part of the owner's steps; its own steps wait meanwhile, so
    that a GPU never computes two steps at once. The helper gives up KV blocks for weights and KV. A
    decode instance then gains as many blocks as fit the freed memory; a prefill instance, twice
    what it has in use, or four full contexts. Every instance keeps room for the longest possible
    request.
    """

    offloaded: dict[int, OffloadedModules] = field(default_factory=dict)  # by the owner's index
    received: dict[int, OffloadedModules] = field(default_factory=dict)  # by the helper's index
    own_blocks: dict[int, int] = field(default_factory=dict)  # before anything moved
    most_share: float = 0.5  # of an instance's layers or heads
    realloc_s: float = 0.0  # of a layer's or a head's buffers, T_mem_realloc of Eq. 4-24
    in_motion: set[int] = field(default_factory=set)
    history: list[ModuleMoveRecord] = field(default_factory=list)

    def loads(
        self,
        instances: Sequence[Instance],
        compute_by_instance: Mapping[int, float],
        held_tokens: int = 0,
    ) -> dict[int, Use]:
        """What each instance's GPUs do, given the share of compute that each model asks for.

        `held_tokens`: KV that waits for room to decode, an equal part of it at each instance.
        """
        use = {instance.index: self._use(instance, compute_by_instance) for instance in instances}
        decoding = [instance for instance in instances if instance.role == DECODE]
        for instance in decoding:
            place, own_use = instance.placement, use[instance.index]
            held_bytes = held_tokens * place.kv_bytes_per_token / place.gpus / len(decoding)
            memory = own_use.memory + held_bytes / place.usable_bytes_per_gpu
            use[instance.index] = Use(own_use.compute, memory)
        return use

    def _use(self, instance: Instance, compute_by_instance: Mapping[int, float]) -> Use:
        offloaded, received = self.offloaded.get(instance.index), self.received.get(instance.index)
        compute = compute_by_instance[instance.index]
        moved = (offloaded.module, offloaded.units) if offloaded else ()
        memory = _own_bytes(instance, *moved)
        if offloaded and offloaded.module is Module.LAYERS:
            compute *= 1 - offloaded.share
        if received:
            memory += _away_bytes(received.owner, received.module, received.units)
            if received.module is Module.LAYERS and received.owner.index in compute_by_instance:
                compute += compute_by_instance[received.owner.index] * received.share
        return Use(compute, memory / instance.placement.usable_bytes_per_gpu)

    # ---------------------------------------------------------------- what could move

    def offers(
        self,
        instances: Sequence[Instance],
        loads: Mapping[int, Use],
        over: LinkSpec,
        *,
        layers: bool,
        heads: bool,
    ) -> Offers:
        """A function of module kind, source, target and planned loads that returns a move, or None.

        The move makes the loads of source and target as equal as possible. From a helper to the
        owner of its modules, it returns modules. An instance whose planned load differs from the
        measured one takes part in a move of this cycle already, so it gets no second one.

        `layers` and `heads`: whether modules of that kind may move at all.
        """
        by_index = {instance.index: instance for instance in instances}
        allowed = {Module.LAYERS: layers, Module.HEADS: heads}

        def offer(
            module: Module, source_index: int, target_index: int, planned: Mapping[int, float]
        ) -> ModuleMove | None:
            both = {source_index, target_index}
            if not allowed[module] or both & self.in_motion:
                return None
            if any(planned[index] != loads[index].total for index in both):
                return None
            source, target = by_index[source_index], by_index[target_index]
            back = self.received.get(source_index)
            if back is not None:
                fits = back.owner is target and back.module is module
                fewer = range(back.units)
                return self._best(module, target, source, fewer, loads, over) if fits else None
            offloaded = self.offloaded.get(source_index)
            if offloaded is not None and (
                offloaded.helper is not target or offloaded.module is not module
            ):
                return None
            if target_index in self.offloaded or (
                offloaded is None and target_index in self.received
            ):
                return None
            if module is Module.HEADS and source.role != DECODE:
                return None  # a prompt's Q, K, V and O are as large as its activations
            before = offloaded.units if offloaded else 0
            more = range(before + 1, self._most_units(source, module) + 1)
            return self._best(module, source, target, more, loads, over)

        return offer

    def _most_units(self, owner: Instance, module: Module) -> int:
        """Of the owner that may be elsewhere; one layer or head stays at least."""
        units = _units(owner, module)
        return min(units - 1, int(self.most_share * units))

    def choices(
        self, instances: Iterable[Instance], over: LinkSpec, allowed: Mapping[Module, bool]
    ) -> Iterable[Choice]:
        """Every move that is possible now, of instances that none is under way for."""
        settled = [instance for instance in instances if instance.index not in self.in_motion]
        for owner in settled:
            if owner.index in self.received:
                continue
            offloaded = self.offloaded.get(owner.index)
            free = [
                candidate
                for candidate in settled
                if candidate is not owner
                and candidate.index not in self.offloaded
                and candidate.index not in self.received
            ]
            for module, may_move in allowed.items():
                if not may_move or (module is Module.HEADS and owner.role != DECODE):
                    continue
                if offloaded is None:
                    for helper in free:
                        yield from self._choices(module, owner, helper, 0, over)
                elif offloaded.module is module and offloaded.helper.index not in self.in_motion:
                    yield from self._choices(module, owner, offloaded.helper, offloaded.units, over)

    def _choices(
        self, module: Module, owner: Instance, helper: Instance, before: int, over: LinkSpec
    ) -> Iterable[Choice]:
        for units in range(self._most_units(owner, module) + 1):
            choice = None if units == before else self._choice(module, owner, helper, units, over)
            if choice is not None:
                yield choice

    def _choice(
        self, module: Module, owner: Instance, helper: Instance, units: int, over: LinkSpec
    ) -> Choice | None:
        offloaded = self.offloaded.get(owner.index)
        before, helper_blocks = (offloaded.units, offloaded.helper_blocks) if offloaded else (0, 0)
        blocks = self._blocks(module, units, owner, helper)
        if blocks is None:
            return None
        return Choice(
            module,
            owner,
            helper,
            units,
            units < before,
            self._cost(owner, module, abs(units - before), over).seconds,
            blocks.owner_total - owner.kv_manager.total,
            blocks.helper_blocks - helper_blocks,
        )

    def choice_of(
        self, move: ModuleMove, instances: Mapping[int, Instance], over: LinkSpec
    ) -> Choice | None:
        """A planned move as a choice; None where room went in the meantime."""
        ends = instances[move.source], instances[move.target]
        owner, helper = ends[::-1] if move.source in self.received else ends
        return self._choice(move.module, owner, helper, move.units, over)

    def returns(self, loads: Mapping[int, Use], over: LinkSpec) -> Iterable[ModuleMove]:
        """The moves that would bring home all that an instance has offloaded."""
        for index, offloaded in self.offloaded.items():
            owner, helper = offloaded.owner, offloaded.helper
            if not {index, helper.index} & self.in_motion and {index, helper.index} <= set(loads):
                move = self._best(offloaded.module, owner, helper, (0,), loads, over)
                if move is not None:
                    yield move

    def _best(
        self,
        module: Module,
        owner: Instance,
        helper: Instance,
        choices: Iterable[int],
        loads: Mapping[int, Use],
        over: LinkSpec,
    ) -> ModuleMove | None:
        """To as many units at the helper, of `choices`, as bring the two loads together."""
        offloaded = self.offloaded.get(owner.index)
        before = offloaded.units if offloaded else 0
        best: ModuleMove | None = None
        for units in choices:
            if self._blocks(module, units, owner, helper) is None:
                continue
            cost_s = self._cost(owner, module, abs(units - before), over).seconds
            own_use, helper_use = self._after(module, before, units, owner, helper, loads)
            ends = (owner.index, own_use), (helper.index, helper_use)
            (source, source_use), (target, target_use) = ends if units > before else ends[::-1]
            gap = abs(source_use - target_use)
            if best is None or gap < abs(best.source_load - best.target_load):
                best = ModuleMove(module, source, target, units, source_use, target_use, cost_s)
        return best

    @staticmethod
    def _after(
        module: Module,
        before: int,
        units: int,
        owner: Instance,
        helper: Instance,
        loads: Mapping[int, Use],
    ) -> tuple[float, float]:
        """Loads of owner and helper with `units` offloaded in place of `before`."""
        source_use, target_use = loads[owner.index], loads[helper.index]
        kept_bytes = _own_bytes(owner, module, units) - _own_bytes(owner, module, before)
        away = _away_bytes(owner, module, units) - _away_bytes(owner, module, before)
        shift = 0.0
        if module is Module.LAYERS:
            compute_by_instance = source_use.compute / (1 - _share(owner, module, before))
            moved = _share(owner, module, units) - _share(owner, module, before)
            shift = compute_by_instance * moved
        return (
            source_use.total - shift + kept_bytes / owner.placement.usable_bytes_per_gpu,
            target_use.total + shift + away / helper.placement.usable_bytes_per_gpu,
        )

    def _blocks(
        self, module: Module, units: int, owner: Instance, helper: Instance
    ) -> _Blocks | None:
        """None if the helper has no room, or the owner would have too little."""
        share = _share(owner, module, units)
        own_blocks = self.own_blocks.get(owner.index, owner.kv_manager.total)
        if not units:
            return _Blocks(own_blocks, 0) if _used(owner) <= own_blocks else None
        weights = _weight_bytes(owner, module, units) / owner.placement.block_bytes_per_gpu
        total = math.floor((own_blocks + weights) / (1 - share))
        least = own_blocks
        if owner.role != DECODE:
            context = owner.kv_manager.blocks(owner.placement.model.context_tokens)
            least = min(own_blocks, max(_used(owner), 2 * context))
            total = min(total, own_blocks, max(2 * _used(owner), 4 * context))
        offloaded = self.offloaded.get(owner.index)
        helper_blocks = offloaded.helper_blocks if offloaded else 0
        longest = helper.kv_manager.blocks(helper.placement.model.context_tokens) + 1
        room = min(_OFFERED * helper.free_blocks, helper.kv_manager.total - longest) + helper_blocks
        total = min(total, math.floor((room - weights) / share))
        if total < max(least, _used(owner)):
            return None
        return _Blocks(total, math.ceil(weights + total * share))

    def _cost(self, owner: Instance, module: Module, units: int, over: LinkSpec) -> MoveCost:
        tokens = _used(owner) * owner.placement.block_size
        make = layer_move if module is Module.LAYERS else head_move
        return make(owner.placement, units, tokens, over, self._pause_s(units))

    def _pause_s(self, units: int) -> float:
        """T_sync and T_mem_realloc of Eq. 4-24, for which owner and helper wait."""
        return SYNC_S + units * self.realloc_s

    # ---------------------------------------------------------------- moving

    def begin(self, move: ModuleMove, cluster: ClusterControl) -> None:
        """Start a transfer; what it changes holds from its end on."""
        by_index = {instance.index: instance for instance in cluster.instances}
        source, target = by_index[move.source], by_index[move.target]
        back = self.received.get(move.source)
        owner, helper = (target, source) if back else (source, target)
        before = self.offloaded[owner.index].units if owner.index in self.offloaded else 0
        blocks = self._blocks(move.module, move.units, owner, helper)
        if blocks is None:
            return  # room went in the meantime
        if not back:
            self._set_aside(move.module, owner, helper, blocks)
        moved = abs(move.units - before)
        cost = self._cost(owner, move.module, moved, _network(cluster).network.spec)
        on_a_link = cost.moved_bytes // owner.placement.gpus
        now_s = cluster.now_s
        end_s = _network(cluster).network.send(source.number, target.number, on_a_link, now_s)
        kind = "layer_moves" if move.module is Module.LAYERS else "head_moves"
        cluster.counters.add("returns" if back else kind)
        self.in_motion |= {owner.index, helper.index}
        self.history.append(
            ModuleMoveRecord(now_s, end_s + self._pause_s(moved), move, cost.moved_bytes)
        )
        settle = partial(self._settle, move.module, move.units, owner, helper, blocks, cluster)
        cluster.at(end_s, settle)

    def _set_aside(
        self, module: Module, owner: Instance, helper: Instance, blocks: _Blocks
    ) -> None:
        """The helper gives up its blocks before anything arrives."""
        self.own_blocks.setdefault(owner.index, owner.kv_manager.total)
        offloaded = self.offloaded.get(owner.index)
        if offloaded is None:
            offloaded = OffloadedModules(owner, helper, module, 0, 0)
            self.offloaded[owner.index] = self.received[helper.index] = offloaded
        added_blocks = max(0, blocks.helper_blocks - offloaded.helper_blocks)
        helper.resize(helper.kv_manager.total - added_blocks)
        offloaded.helper_blocks += added_blocks

    def _settle(
        self,
        module: Module,
        units: int,
        owner: Instance,
        helper: Instance,
        blocks: _Blocks,
        cluster: ClusterControl,
    ) -> None:
        """Owner and helper synchronise and go on with the modules where they are now; the helper
        gets back the blocks that it has given up for more than that.
        """
        cluster.bring(owner)  # what it has computed until now took as long as it did
        if _used(owner) > blocks.owner_total:
            again_s = cluster.now_s + _AGAIN_S
            cluster.at(again_s, lambda: self._settle(module, units, owner, helper, blocks, cluster))
            return
        owner.resize(blocks.owner_total)
        offloaded = self.offloaded[owner.index]
        pause_s = self._pause_s(abs(units - offloaded.units))
        offloaded.units = units
        helper.resize(helper.kv_manager.total + offloaded.helper_blocks - blocks.helper_blocks)
        offloaded.helper_blocks = blocks.helper_blocks
        if not units:
            del self.offloaded[owner.index], self.received[helper.index]
            owner.bring_home(pause_s)
            cluster.separate(owner, helper)
        else:
            cluster.unite(owner, helper)
            over = _network(cluster).network.spec
            step_time = moved_step_time(owner, module, units, over)
            owner.offload(module, units, helper, step_time, pause_s)
        self.in_motion -= {owner.index, helper.index}
        for instance in (owner, helper):
            cluster.reconsider(instance)


@dataclass(frozen=True, slots=True)
class ShiftModules:
    """An action: carry out a planned move."""

    move: ModuleMove
    modules: Modules

    def apply(self, cluster: ClusterControl) -> None:
        self.modules.begin(self.move, cluster)


def _network(cluster: ClusterControl) -> KvNetwork:
    assert isinstance(cluster.links, KvNetwork)
    return cluster.links


def _units(instance: Instance, module: Module) -> int:
    model = instance.placement.model
    return model.layers if module is Module.LAYERS else model.kv_heads


def _share(instance: Instance, module: Module, units: int) -> float:
    return units / _units(instance, module)


def _used(instance: Instance) -> int:
    return instance.kv_manager.total - instance.free_blocks


def _weight_bytes(instance: Instance, module: Module, units: int) -> int:
    if module is Module.HEADS:
        return 0
    place = instance.placement
    return units * place.layer_weight_bytes // place.tp


def _away_bytes(instance: Instance, module: Module, units: int) -> float:
    """Weights and KV of `units` offloaded units, on each GPU."""
    kv_bytes = _used(instance) * instance.placement.block_bytes_per_gpu
    return _weight_bytes(instance, module, units) + kv_bytes * _share(instance, module, units)


def _own_bytes(instance: Instance, module: Module = Module.LAYERS, units: int = 0) -> float:
    """Weights and KV of what is left."""
    kv_bytes = _used(instance) * instance.placement.block_bytes_per_gpu
    whole = instance.placement.weight_bytes_per_gpu + kv_bytes
    return whole - _away_bytes(instance, module, units)


def moved_step_time(
    instance: Instance, module: Module, units: int, over: LinkSpec
) -> MovedStepTime:
    """Step times of `instance` with `units` of its modules at another one."""
    if not units:
        return MovedStepTime(instance.step_time)
    share = _share(instance, module, units)
    if module is Module.LAYERS:
        toll = layer_toll(instance.placement, over)
        return MovedStepTime(instance.step_time, layer_share=share, layer_toll=toll)
    toll = head_toll(instance.placement, units, over)
    return MovedStepTime(instance.step_time, head_share=share, head_toll=toll)
