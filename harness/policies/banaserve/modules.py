"""Which instance has lent layers or heads to which, what could move next, and moving it.

Source: BanaServe (docs/papers.md), §4.3.1, §4.3.2, §4.4.3 and §4.4.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....predictors.specs import LinkSpec
from ...core.cluster_policy import ClusterControl
from ...core.instance import Site
from ...core.module_moves import Module, Move, Offers
from ..shared.disaggregated import DECODE, KvNetwork
from .module_costs import SYNC_S, MoveCost, head_move, head_toll, layer_move, layer_toll
from .module_step_time import MovedStepTime

_OFFERED = 0.5  # of a host's free blocks, for what it hosts
_AGAIN_S = 0.05  # until it is looked again whether blocks are free


@dataclass(frozen=True, slots=True)
class Use:
    """U = C/Cmax + M/Mmax of an instance's GPUs, Eq. 4-28."""

    compute: float
    memory: float

    @property
    def total(self) -> float:
        """From 0 to 2."""
        return self.compute + self.memory


@dataclass(slots=True)
class Lent:
    """Modules of `owner` that are on `host`: `units` layers, or KV heads of all layers."""

    owner: Site
    host: Site
    module: Module
    units: int
    hosted_blocks: int  # that `host` has given up for them

    @property
    def share(self) -> float:
        """Of the owner's KV that lies at the host."""
        return _share(self.owner, self.module, self.units)

    @property
    def weight_bytes(self) -> int:
        """That lie at the host, on each GPU."""
        return _weight_bytes(self.owner, self.module, self.units)


@dataclass(frozen=True, slots=True)
class Shifted:
    """A move that has been made."""

    begin_s: float
    end_s: float
    move: Move
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What a move would make of the two ledgers."""

    owner_total: int
    hosted: int


@dataclass
class Modules:
    """An instance lends modules of one kind to one other, which lends none and hosts no others'.

    The host computes them at once, on its owner's account: its own steps wait for what they take,
    so that a GPU never computes more than it can. The host gives up KV blocks for weights and KV.
    An instance that decodes then holds as many more blocks as the space that became free is worth;
    one that prefills, twice what it has in use, or four full contexts. Everybody keeps room for the
    longest request there can be.
    """

    lent: dict[int, Lent] = field(default_factory=dict)  # by the owner's index
    hosted: dict[int, Lent] = field(default_factory=dict)  # by the host's index
    own_blocks: dict[int, int] = field(default_factory=dict)  # before anything moved
    in_motion: set[int] = field(default_factory=set)
    history: list[Shifted] = field(default_factory=list)

    def loads(self, sites: Sequence[Site], asked: Mapping[int, float]) -> dict[int, Use]:
        """What each instance's GPUs do, given the share of compute that each model asks for."""
        return {site.index: self._use(site, asked) for site in sites}

    def _use(self, site: Site, asked: Mapping[int, float]) -> Use:
        lent, hosts = self.lent.get(site.index), self.hosted.get(site.index)
        compute = asked[site.index]
        memory = _own_bytes(site, lent.module, lent.units) if lent else _own_bytes(site)
        if lent and lent.module is Module.LAYERS:
            compute *= 1 - lent.share
        if hosts:
            memory += _away_bytes(hosts.owner, hosts.module, hosts.units)
            if hosts.module is Module.LAYERS and hosts.owner.index in asked:
                compute += asked[hosts.owner.index] * hosts.share
        return Use(compute, memory / site.placement.usable_bytes_per_gpu)

    # ---------------------------------------------------------------- what could move

    def offers(
        self,
        sites: Sequence[Site],
        loads: Mapping[int, Use],
        over: LinkSpec,
        *,
        layers: bool,
        heads: bool,
    ) -> Offers:
        """What could move of a kind from one to another, so that their loads are as near as can be.

        `layers` and `heads`: whether those may move at all.
        """
        by_index = {site.index: site for site in sites}
        allowed = {Module.LAYERS: layers, Module.HEADS: heads}

        def offer(module: Module, source: int, target: int, _: Mapping[int, float]) -> Move | None:
            if not allowed[module] or {source, target} & self.in_motion:
                return None
            giver, taker = by_index[source], by_index[target]
            back = self.hosted.get(source)
            if back is not None:
                fits = back.owner is taker and back.module is module
                return self._home(back, loads, over) if fits else None
            lent = self.lent.get(source)
            if lent is not None and (lent.host is not taker or lent.module is not module):
                return None
            if target in self.lent or (lent is None and target in self.hosted):
                return None
            if module is Module.HEADS and giver.role != DECODE:
                return None  # a prompt's Q, K, V and O are as large as its activations
            return self._best(module, giver, taker, loads, over)

        return offer

    def _best(
        self, module: Module, giver: Site, taker: Site, loads: Mapping[int, Use], over: LinkSpec
    ) -> Move | None:
        """As many more units as bring the two loads together."""
        lent = self.lent.get(giver.index)
        before = lent.units if lent else 0
        most = _units(giver, module) // 2
        best: Move | None = None
        for units in range(before + 1, most + 1):
            if self._blocks(module, units, giver, taker) is None:
                continue
            here, there = self._after(module, before, units, giver, taker, loads)
            cost = _cost(giver, module, units - before, over)
            move = Move(module, giver.index, taker.index, units, here, there, cost.seconds)
            if best is None or abs(here - there) < abs(best.source_load - best.target_load):
                best = move
        return best

    def _home(self, lent: Lent, loads: Mapping[int, Use], over: LinkSpec) -> Move | None:
        """All that an owner has lent, if it can do with the blocks it had."""
        owner, host = lent.owner, lent.host
        if _used(owner) > self.own_blocks[owner.index]:
            return None
        there, here = self._after(lent.module, lent.units, 0, owner, host, loads)
        cost = _cost(owner, lent.module, lent.units, over)
        return Move(lent.module, host.index, owner.index, 0, here, there, cost.seconds)

    @staticmethod
    def _after(
        module: Module,
        before: int,
        units: int,
        owner: Site,
        host: Site,
        loads: Mapping[int, Use],
    ) -> tuple[float, float]:
        """Loads of owner and host with `units` lent in place of `before`."""
        here, there = loads[owner.index], loads[host.index]
        kept = _own_bytes(owner, module, units) - _own_bytes(owner, module, before)
        away = _away_bytes(owner, module, units) - _away_bytes(owner, module, before)
        shift = 0.0
        if module is Module.LAYERS:
            asked = here.compute / (1 - _share(owner, module, before))
            shift = asked * (_share(owner, module, units) - _share(owner, module, before))
        return (
            here.total - shift + kept / owner.placement.usable_bytes_per_gpu,
            there.total + shift + away / host.placement.usable_bytes_per_gpu,
        )

    def _blocks(self, module: Module, units: int, owner: Site, host: Site) -> _Blocks | None:
        """None if the host has no room, or the owner would have too little."""
        share = _share(owner, module, units)
        own = self.own_blocks.get(owner.index, owner.ledger.total)
        weights = _weight_bytes(owner, module, units) / owner.placement.block_bytes_per_gpu
        total = math.floor((own + weights) / (1 - share))
        least = own
        if owner.role != DECODE:
            context = owner.ledger.blocks(owner.placement.model.context_tokens)
            least = min(own, max(_used(owner), 2 * context))
            total = min(total, own, max(2 * _used(owner), 4 * context))
        lent = self.lent.get(owner.index)
        hosted = lent.hosted_blocks if lent else 0
        longest = host.ledger.blocks(host.placement.model.context_tokens) + 1
        room = min(_OFFERED * host.free_blocks, host.ledger.total - longest) + hosted
        total = min(total, math.floor((room - weights) / share))
        if total < max(least, _used(owner)):
            return None
        return _Blocks(total, math.ceil(weights + total * share))

    # ---------------------------------------------------------------- moving

    def begin(self, move: Move, cluster: ClusterControl) -> None:
        """Start a transfer; what it changes holds from its end on."""
        by_index = {site.index: site for site in cluster.sites}
        giver, taker = by_index[move.source], by_index[move.target]
        back = self.hosted.get(move.source)
        owner, host = (taker, giver) if back else (giver, taker)
        before = self.lent[owner.index].units if owner.index in self.lent else 0
        blocks = None if back else self._blocks(move.module, move.units, owner, host)
        if not back:
            if blocks is None:
                return  # room went in the meantime
            self._set_aside(move.module, owner, host, blocks)
        cost = _cost(owner, move.module, abs(move.units - before), _network(cluster).network.spec)
        on_a_link = cost.moved_bytes // owner.placement.gpus
        now_s = cluster.now_s
        transfer = _network(cluster).network.send(giver.number, taker.number, on_a_link, now_s)
        self.in_motion |= {owner.index, host.index}
        self.history.append(Shifted(now_s, transfer.end_s + SYNC_S, move, cost.moved_bytes))
        cluster.at(
            transfer.end_s,
            lambda: self._settle(move.module, move.units, owner, host, blocks, cluster),
        )

    def _set_aside(self, module: Module, owner: Site, host: Site, blocks: _Blocks) -> None:
        """The host gives up its blocks before anything arrives."""
        self.own_blocks.setdefault(owner.index, owner.ledger.total)
        lent = self.lent.get(owner.index)
        if lent is None:
            lent = Lent(owner, host, module, 0, 0)
            self.lent[owner.index] = self.hosted[host.index] = lent
        host.resize(host.ledger.total - (blocks.hosted - lent.hosted_blocks))
        lent.hosted_blocks = blocks.hosted

    def _settle(
        self,
        module: Module,
        units: int,
        owner: Site,
        host: Site,
        blocks: _Blocks | None,
        cluster: ClusterControl,
    ) -> None:
        """Owner and host synchronise and go on with the modules where they are now."""
        cluster.bring(owner)  # what it has computed until now took as long as it did
        total = blocks.owner_total if blocks else self.own_blocks[owner.index]
        if _used(owner) > total:
            again_s = cluster.now_s + _AGAIN_S
            cluster.at(again_s, lambda: self._settle(module, units, owner, host, blocks, cluster))
            return
        owner.resize(total)
        lent = self.lent[owner.index]
        lent.units = units
        if not units:
            del self.lent[owner.index], self.hosted[host.index]
            host.resize(host.ledger.total + lent.hosted_blocks)
            owner.compute_by(owner.step_time)
            cluster.separate(owner, host)
        else:
            cluster.unite(owner, host)
            over = _network(cluster).network.spec
            owner.lend(_moved(owner, module, units, over), host.devices[0])
        owner.devices[0].owed_s += SYNC_S
        self.in_motion -= {owner.index, host.index}
        for site in (owner, host):
            cluster.reconsider(site)


@dataclass(frozen=True, slots=True)
class ShiftModules:
    """An action: carry out a planned move."""

    move: Move
    modules: Modules

    def carry_out(self, cluster: ClusterControl) -> None:
        self.modules.begin(self.move, cluster)


def _network(cluster: ClusterControl) -> KvNetwork:
    assert isinstance(cluster.links, KvNetwork)
    return cluster.links


def _units(site: Site, module: Module) -> int:
    model = site.placement.model
    return model.layers if module is Module.LAYERS else model.kv_heads


def _share(site: Site, module: Module, units: int) -> float:
    return units / _units(site, module)


def _used(site: Site) -> int:
    return site.ledger.total - site.free_blocks


def _weight_bytes(site: Site, module: Module, units: int) -> int:
    if module is Module.HEADS:
        return 0
    place = site.placement
    return units * place.model.layer_weight_bytes(place.weight_dtype) // place.tp


def _away_bytes(site: Site, module: Module, units: int) -> float:
    """Weights and KV of so many units, on each GPU."""
    kv_bytes = _used(site) * site.placement.block_bytes_per_gpu
    return _weight_bytes(site, module, units) + kv_bytes * _share(site, module, units)


def _own_bytes(site: Site, module: Module = Module.LAYERS, units: int = 0) -> float:
    """Weights and KV of what is left."""
    kv_bytes = _used(site) * site.placement.block_bytes_per_gpu
    whole = site.placement.weight_bytes_per_gpu + kv_bytes
    return whole - _away_bytes(site, module, units)


def _cost(site: Site, module: Module, units: int, over: LinkSpec) -> MoveCost:
    tokens = _used(site) * site.placement.block_tokens
    make = layer_move if module is Module.LAYERS else head_move
    return make(site.placement, units, tokens, over)


def _moved(site: Site, module: Module, units: int, over: LinkSpec) -> MovedStepTime:
    share = _share(site, module, units)
    if module is Module.LAYERS:
        toll = layer_toll(site.placement, over)
        return MovedStepTime(site.step_time, layer_share=share, layer_toll=toll)
    toll = head_toll(site.placement, units, over)
    return MovedStepTime(site.step_time, head_share=share, head_toll=toll)
