"""The optimum over contiguous layer ranges, with a bound on how far a map is from it.

A map is a path through devices. Devices that nothing tells apart (same hardware, same hops to all
others) form a group, and a path is a walk through groups: how often it goes from one to another is
a flow of whole numbers, and each group takes a number of layers. A mixed-integer program (HiGHS)
finds the cheapest flow. A flow may have loops beside the walk; they are forbidden, and the program
is solved again. Each such solution, its loops inserted where they cost least, is also a map: the
search ends when a map is as cheap as the program's lower bound, or when its time is spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from ...workloads.arrays import Floats, Ints
from .problem import INF, Candidate, CostWeights, LayerRange, Map, Problem, no_room

LIMIT_S = 1.3  # of the search; the solver may exceed it by a few tenths
EQUAL = 1e-7  # costs that differ by less, as a share, are equal
_SCALE = 1e3  # of the objective: HiGHS stops at a gap of 1e-6
_LONGEST_MOVED = 3  # devices moved together by the local search

Walk = list[int]  # groups in the order of the pass, one entry a device


@dataclass(frozen=True)
class Optimum:
    """A map, and by what share its cost exceeds the lower bound: 0 for the optimum.

    Where latency has no weight, the number of devices is the least and `gap` is of the latency.
    """

    placed: Map
    gap: float


@dataclass(frozen=True)
class Groups:
    """Groups of devices that nothing tells apart: same hardware, same hops to all others."""

    members: tuple[tuple[int, ...], ...]
    kinds: tuple[Candidate, ...]
    hop_s: Floats  # from group to group; within a group from one device to another
    sizes: Ints

    def device_walk(self, walk: Walk) -> list[int]:
        """Its devices: the first ones of each group."""
        left = [list(group) for group in self.members]
        return [left[group].pop(0) for group in walk]


def exact(problem: Problem, weights: CostWeights) -> Map:
    """The placement of layers that `optimum` finds."""
    return optimum(problem, weights).placed


def optimum(
    problem: Problem, weights: CostWeights, *, limit_s: float | None = None, enough: float = EQUAL
) -> Optimum:
    """The map with the least cost (see `problem`), or the best one found in `limit_s` seconds.

    `limit_s` is LIMIT_S by default; a map whose cost is within the share `enough` of the bound
    ends the search.

    Where latency has no weight, the map has the least latency of those with the fewest devices.

    Raises:
        SloBenchError: the layers do not fit.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    end_s = time.monotonic() + limit_s
    alone = _alone(problem)
    if alone is not None and not weights.latency:
        return Optimum(alone, 0.0)
    groups = grouped(problem)
    capacity = _Program(problem, groups, CostWeights(1e-4, 1.0), walks=False)
    least = capacity.solved(INF)
    if least.x is None:
        if alone is None:
            raise no_room(problem)
        return Optimum(alone, 0.0)
    weighed = weights if weights.latency else CostWeights(1.0, 0.0)
    fewest = sum(map(len, capacity.loose(least.x)))
    max_devices = problem.layers if weights.latency else fewest
    program = _Program(problem, groups, weighed, counts=(fewest, max_devices))
    quick = _Program(problem, groups, weighed, walks=False, counts=(fewest, max_devices))
    at_once = quick.solved(limit_s, enough)
    best = program.map_of(quick.loose(least.x if at_once.x is None else at_once.x))
    cost, bound = problem.cost(best, weighed), program.relaxed()
    if alone is not None and problem.cost(alone, weights) <= cost:
        best, cost = alone, problem.cost(alone, weights)
    while cost > bound * (1 + enough) and (left_s := end_s - time.monotonic()) > 0:
        solution = program.solved(left_s, enough)
        if solution.mip_dual_bound is not None:
            bound = max(bound, solution.mip_dual_bound / _SCALE)
        if solution.x is None:
            break
        parts = program.parts(solution.x)
        placed = program.map_of(parts)
        if problem.cost(placed, weighed) < cost:
            best, cost = placed, problem.cost(placed, weighed)
        if solution.status == 0 and len(parts) == 1:
            break
        program.cut(parts[1:])
    gap = cost / bound - 1 if bound > 0 else INF
    return Optimum(best, gap if gap > EQUAL else 0.0)


def _alone(problem: Problem) -> Map | None:
    """The fastest map on one device."""
    fitting = [i for i, device in enumerate(problem.devices) if device.room_alone >= problem.layers]
    maps = [(LayerRange(i, problem.layers),) for i in fitting]
    return min(maps, key=problem.latency_s, default=None)


def grouped(problem: Problem) -> Groups:
    """The devices on which a layer fits, in groups.

    Raises:
        SloBenchError: no layer fits on any device.
    """
    usable = [i for i, device in enumerate(problem.devices) if device.room >= 1]
    if not usable:
        raise no_room(problem)
    hop_s = np.array(problem.hop_s)
    kinds = [replace(device, name="") for device in problem.devices]
    members: list[list[int]] = []
    for i in usable:
        for group in members:
            if kinds[i] == kinds[group[0]] and _interchangeable(hop_s, group[0], i):
                group.append(i)
                break
        else:
            members.append([i])
    firsts = [group[0] for group in members]
    between = hop_s[np.ix_(firsts, firsts)]
    for n, group in enumerate(members):
        between[n, n] = hop_s[group[0], group[1]] if len(group) > 1 else 0.0
    sizes = np.array([len(group) for group in members])
    return Groups(
        tuple(map(tuple, members)), tuple(problem.devices[i] for i in firsts), between, sizes
    )


def _interchangeable(hop_s: Floats, i: int, j: int) -> bool:
    """Whether exchanging two of them changes no hop."""
    swapped = np.arange(len(hop_s))
    swapped[[i, j]] = j, i
    return bool(
        (hop_s[[j, i]][:, swapped] == hop_s[[i, j]]).all()
        and (hop_s[swapped][:, [j, i]] == hop_s[:, [i, j]]).all()
    )


@dataclass
class _Program:
    """The program over groups; `walks` False: every device costs the shortest hop to it.

    Variables in order: hops from group to group, then for each group the number of its devices,
    whether it holds the first and the last one, whether it is used, and its layers.
    """

    problem: Problem
    groups: Groups
    weights: CostWeights
    walks: bool = True
    counts: tuple[int, int] | None = None  # least and largest number of devices
    _rows: list[tuple[Floats, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups, n = self.groups, len(self.groups.sizes)
        sizes = groups.sizes
        a, b = np.nonzero(np.full((n, n), self.walks))
        able = (a != b) | (sizes[a] > 1)
        self._from, self._to = a[able], b[able]
        hops = len(self._from)
        self._at = {
            name: hops + k * n + np.arange(n)
            for k, name in enumerate(("devices", "first", "last", "used", "layers"))
        }
        self._size = hops + 5 * n
        kinds, scale = groups.kinds, self.weights.latency / self.problem.ideal_s
        cost = np.zeros(self._size)
        cost[:hops] = scale * groups.hop_s[self._from, self._to]
        cost[self._at["devices"]] = self.weights.devices
        if not self.walks:
            cost[self._at["devices"]] += scale * _nearest_s(groups)
        cost[self._at["last"]] = [scale * kind.head_s for kind in kinds]
        cost[self._at["layers"]] = [scale * kind.layer_s for kind in kinds]
        self._cost = cost
        high = np.ones(self._size)
        high[:hops] = np.minimum(sizes[self._from], sizes[self._to])
        high[self._at["devices"]] = sizes
        high[self._at["first"]] = [kind.room_first >= 1 for kind in kinds]
        high[self._at["last"]] = [kind.room_last >= 1 for kind in kinds]
        high[self._at["layers"]] = self.problem.layers
        self._high = high
        self._capacity()
        if self.walks:
            self._flow()
        self._order_equal_groups()
        if self.counts is not None:
            self._count(*self.counts)

    def _add(self, low: float, high: float, **terms: dict[int, float]) -> None:
        """A row over the named blocks: coefficients by group."""
        row = np.zeros(self._size)
        for name, of_groups in terms.items():
            for group, factor in of_groups.items():
                row[self._at[name][group]] = factor
        self._rows.append((row, low, high))

    def _capacity(self) -> None:
        everywhere = dict.fromkeys(range(len(self.groups.sizes)), 1.0)
        for name in ("first", "last"):
            self._add(1, 1, **{name: everywhere})
        self._add(self.problem.layers, self.problem.layers, layers=everywhere)
        for g, (kind, size) in enumerate(zip(self.groups.kinds, self.groups.sizes, strict=True)):
            self._add(-INF, 0, devices={g: 1}, used={g: -float(size)})
            self._add(0, INF, layers={g: 1}, devices={g: -1})
            self._add(0, INF, devices={g: 1}, first={g: -1}, last={g: -1})
            less: dict[str, dict[int, float]] = {
                "first": {g: kind.room - kind.room_first},
                "last": {g: kind.room - kind.room_last},
            }
            self._add(-INF, 0, layers={g: 1}, devices={g: -kind.room}, **less)

    def _flow(self) -> None:
        for g in range(len(self.groups.sizes)):
            leaves: Floats = (self._from == g).astype(np.float64)
            enters: Floats = (self._to == g).astype(np.float64)
            self._add_flow(leaves, 0, 0, devices={g: -1}, last={g: 1})
            self._add_flow(enters, 0, 0, devices={g: -1}, first={g: 1})
            self._enter({g}, g)

    def _add_flow(self, hops: Floats, low: float, high: float, **terms: dict[int, float]) -> None:
        self._add(low, high, **terms)
        self._rows[-1][0][: len(hops)] = hops

    def _enter(self, part: set[int], group: int) -> None:
        """If `group` is used, the walk begins in `part` or enters it."""
        inside = np.isin(self._to, list(part)) & ~np.isin(self._from, list(part))
        self._add_flow(
            inside.astype(np.float64), 0, INF, used={group: -1}, first=dict.fromkeys(part, 1.0)
        )

    def _order_equal_groups(self) -> None:
        """Of groups that can be exchanged, such as equal nodes, earlier ones hold more devices."""
        groups = self.groups
        kinds = [replace(kind, name="") for kind in groups.kinds]
        last_alike: list[int] = []
        for g, kind in enumerate(kinds):
            for place, h in enumerate(last_alike):
                same = kinds[h] == kind and groups.sizes[h] == groups.sizes[g]
                if same and _interchangeable(groups.hop_s, h, g):
                    self._add(0, INF, devices={h: 1, g: -1})
                    last_alike[place] = g
                    break
            else:
                last_alike.append(g)

    def _count(self, fewest: int, max_devices: int) -> None:
        """Limit the number of devices."""
        self._add(fewest, max_devices, devices=dict.fromkeys(range(len(self.groups.sizes)), 1.0))

    def cut(self, loops: Sequence[Walk]) -> None:
        """Add constraints that exclude these loops from later solutions."""
        for loop in loops:
            for group in set(loop):
                self._enter(set(loop), group)

    def solved(self, limit_s: float, enough: float = 0.0) -> OptimizeResult:
        """Solve to within the share `enough`; `OptimizeResult.x` is None where there is no
        solution, or none was found in time.
        """
        whole = np.ones(self._size)
        whole[self._at["layers"]] = 0
        return self._solved(whole, time_limit=limit_s, mip_rel_gap=max(enough / 2, 1e-9))

    def _solved(self, whole: Floats, **options: float) -> OptimizeResult:
        rows, low, high = zip(*self._rows, strict=True)
        return milp(
            _SCALE * self._cost,
            constraints=LinearConstraint(csr_array(np.array(rows)), low, high),
            bounds=Bounds(0, self._high),
            integrality=whole,
            options=options,
        )

    def relaxed(self) -> float:
        """A lower bound of the cost: devices may be shared, but their number is whole.

        The least cost is convex in the number of devices, so the two whole numbers beside the best
        one decide.
        """
        whole = self._solved(np.zeros(self._size))
        count = float(whole.x[self._at["devices"]].sum())
        bounds = list[float]()
        for low, high in ((0, math.floor(count)), (math.ceil(count), self.problem.layers)):
            self._count(low, high)
            solution = self._solved(np.zeros(self._size))
            self._rows.pop()
            if solution.status == 0:
                bounds.append(solution.fun / _SCALE)
        return min(bounds, default=-INF)

    def parts(self, x: Floats) -> list[Walk]:
        """The walk and the loops of a solution."""
        first = int(x[self._at["first"]].argmax())
        hops = np.rint(x[: len(self._from)]).astype(int)
        after: list[Walk] = [[] for _ in self.groups.sizes]
        for source, target, times in zip(self._from, self._to, hops, strict=True):
            after[source] += [int(target)] * int(times)
        walks = [_trail(after, first)]
        walks += [_trail(after, g)[:-1] for g in range(len(after)) if after[g]]
        return walks

    def loose(self, x: Floats) -> list[Walk]:
        """A walk over first and last device, and every other one apart."""
        devices = np.rint(x[self._at["devices"]]).astype(int)
        ends = [int(x[self._at[name]].argmax()) for name in ("first", "last")]
        for end in ends:
            devices[end] -= 1
        return [ends, *([g] for g, count in enumerate(devices) for _ in range(count))]

    def map_of(self, parts: Sequence[Walk]) -> Map:
        """The map of a walk and loops, joined."""
        walk = _improved(self.groups, _joined(self.groups, parts))
        return filled(self.problem, self.groups.device_walk(walk))


def _nearest_s(groups: Groups) -> Floats:
    """Seconds of the shortest hop to a device of each group."""
    hop_s = groups.hop_s.copy()
    single = np.flatnonzero(groups.sizes == 1)
    hop_s[single, single] = INF
    shortest: Floats = hop_s.min(axis=0)
    return np.where(np.isfinite(shortest), shortest, 0.0)


def _trail(after: list[Walk], start: int) -> Walk:
    """A walk from `start` that uses up every hop that it can reach (Hierholzer)."""
    stack, walk = [start], Walk()
    while stack:
        if after[stack[-1]]:
            stack.append(after[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def _added_s(hop_s: Floats, walk: Sequence[int], part: Walk) -> Floats:
    """Seconds that `part` adds in each place between two devices of the walk."""
    before, after = np.array(walk[:-1]), np.array(walk[1:])
    added_s: Floats = hop_s[before, part[0]] + hop_s[part[-1], after] - hop_s[before, after]
    return added_s


def _joined(groups: Groups, parts: Sequence[Walk]) -> Walk:
    """One walk of a walk and loops, each inserted where it adds least; first and last remain."""
    walk = list(parts[0])
    for loop in parts[1:]:
        least_s, joined = INF, walk
        for k in range(len(loop)):
            turned = loop[k:] + loop[:k]
            added_s = _added_s(groups.hop_s, walk, turned)
            position = int(added_s.argmin())
            within_s = groups.hop_s[turned[:-1], turned[1:]].sum()
            if added_s[position] + within_s < least_s:
                least_s = added_s[position] + within_s
                joined = [*walk[: position + 1], *turned, *walk[position + 1 :]]
        walk = joined
    return walk


def _improved(groups: Groups, walk: Walk) -> Walk:
    """Move short ranges of devices while that shortens the walk; first and last remain."""
    hop_s, better = groups.hop_s, True
    while better:
        better = False
        for length in range(1, _LONGEST_MOVED + 1):
            for begin in range(1, len(walk) - length):
                part, rest = walk[begin : begin + length], walk[:begin] + walk[begin + length :]
                added_s = _added_s(hop_s, rest, part)
                position = int(added_s.argmin())
                if added_s[position] < added_s[begin - 1] - EQUAL * abs(added_s[begin - 1]):
                    walk, better = [*rest[: position + 1], *part, *rest[position + 1 :]], True
    return walk


def filled(problem: Problem, order: Sequence[int]) -> Map:
    """Layers on devices in this order: one each, and the rest where they run fastest."""
    last = len(order) - 1
    held = [1] * len(order)
    rest = problem.layers - len(order)
    for n in sorted(range(len(order)), key=lambda n: problem.devices[order[n]].layer_s):
        room = problem.devices[order[n]].holds(first=n == 0, last=n == last)
        more = max(0, min(rest, room - 1))
        held[n] += more
        rest -= more
    return tuple(LayerRange(device, layers) for device, layers in zip(order, held, strict=True))
