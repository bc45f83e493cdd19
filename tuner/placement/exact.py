"""The exact optimum over contiguous layer ranges.

For a given order of devices the times are linear in the layers, so layers go to the fastest devices
first, as many as fit, and every used device holds at least one. It remains to choose the devices
and their order: a shortest path that visits each chosen device once. Identical devices (same
hardware, same hops to all others) form a group; a state is the number of used devices of each
group, the group of the first and the group of the last. States are extended device by device, until
one more device cannot improve on the best map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from .problem import INF, Candidate, CostWeights, LayerRange, Map, Problem, no_room

MOST_STATES = 20_000_000
_EQUAL = 1e-12  # relative: costs that differ by rounding alone

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Groups:
    """Groups of identical devices: the same hardware and the same links to all others."""

    members: tuple[tuple[int, ...], ...]
    kinds: tuple[Candidate, ...]
    hop_s: Floats  # from group to group; within a group from one to another
    sizes: Ints
    strides: Ints  # of a count of each group in a code
    by_speed: tuple[int, ...]


def exact(problem: Problem, weights: CostWeights) -> Map:
    """The map with the least cost (see `problem`); ties by lower latency, then by fewer devices.

    Raises:
        SloBenchError: the layers do not fit, or there are too many distinct devices for an exact
            search.
    """
    usable = [i for i, device in enumerate(problem.devices) if device.room >= 1]
    if not usable:
        raise no_room(problem)
    groups = _grouped(problem, usable)
    levels: list[tuple[Ints, Floats]] = []
    best, best_latency_s, found = INF, INF, None
    codes, hops = _first_level(groups)
    least_s = _least_compute_s(problem, groups)
    hops_s = groups.hop_s[np.isfinite(groups.hop_s)]
    least_hop_s = float(hops_s.min()) if len(hops_s) else 0.0
    while len(codes) and len(levels) < problem.layers:
        levels.append((codes, hops))
        used = len(levels)
        latency_s = hops + _compute_s(problem, groups, codes, used)
        cost = np.full(latency_s.shape, INF)
        able = np.isfinite(latency_s)
        cost[able] = weights.latency / problem.ideal_s * latency_s[able] + weights.devices * used
        least = float(cost.min())
        if least < INF and least <= best * (1 + _EQUAL):
            tied = np.where(cost <= least * (1 + _EQUAL), latency_s, INF)
            at = np.unravel_index(int(tied.argmin()), tied.shape)
            if least < best * (1 - _EQUAL) or tied[at] < best_latency_s * (1 - _EQUAL):
                best, best_latency_s = least, float(tied[at])
                found = (used, int(codes[at[0]]), int(at[1]), int(at[2]))
        bound_s = least_s + used * least_hop_s
        if weights.latency * bound_s / problem.ideal_s + weights.devices * (used + 1) >= best:
            break
        codes, hops = _next_level(groups, codes, hops)
    if found is None:
        raise no_room(problem)
    return _filled(problem, _order(groups, levels, *found))


def _alike(problem: Problem, i: int, j: int) -> bool:
    a, b, hop_s = problem.devices[i], problem.devices[j], problem.hop_s
    return (
        replace(a, name="") == replace(b, name="")
        and hop_s[i][j] == hop_s[j][i]
        and all(
            hop_s[i][k] == hop_s[j][k] and hop_s[k][i] == hop_s[k][j]
            for k in range(len(problem.devices))
            if k not in (i, j)
        )
    )


def _grouped(problem: Problem, usable: Sequence[int]) -> _Groups:
    members: list[list[int]] = []
    for i in usable:
        for group in members:
            if _alike(problem, group[0], i):
                group.append(i)
                break
        else:
            members.append([i])
    n = len(members)
    hop_s = np.full((n, n), INF)
    for a, b in np.ndindex(n, n):
        if a != b:
            hop_s[a, b] = problem.hop_s[members[a][0]][members[b][0]]
        elif len(members[a]) > 1:
            hop_s[a, a] = problem.hop_s[members[a][0]][members[a][1]]
    sizes = np.array([len(group) for group in members], dtype=np.int64)
    if np.prod(sizes + 1.0) > 2**62:
        raise _too_many(n)
    kinds = tuple(problem.devices[group[0]] for group in members)
    return _Groups(
        tuple(map(tuple, members)),
        kinds,
        hop_s,
        sizes,
        np.concatenate([[1], np.cumprod(sizes[:-1] + 1)]).astype(np.int64),
        tuple(sorted(range(n), key=lambda k: kinds[k].layer_s)),
    )


def _too_many(groups: int) -> SloBenchError:
    return SloBenchError(
        f"{groups} kinds of devices that all differ (in figures or links) are too many for an "
        "exact search; leave some out, or search with --method optuna"
    )


def _first_level(groups: _Groups) -> tuple[Ints, Floats]:
    n = len(groups.members)
    order = np.argsort(groups.strides)
    hops = np.full((n, n, n), INF)
    for row, group in enumerate(order):
        hops[row, group, group] = 0.0
    return groups.strides[order], hops


def _next_level(groups: _Groups, codes: Ints, hops: Floats) -> tuple[Ints, Floats]:
    """Add one device: of every group that has one left, after every last one."""
    n = len(groups.members)
    counts = _counts(groups, codes)
    added = []
    for group in range(n):
        free = counts[:, group] < groups.sizes[group]
        reached = (hops[free] + groups.hop_s[:, group]).min(axis=2)  # by first group
        added.append((codes[free] + groups.strides[group], reached))
    together = np.unique(np.concatenate([more for more, _ in added]))
    if len(together) * n * n > MOST_STATES:
        raise _too_many(n)
    grown = np.full((len(together), n, n), INF)
    for group, (more, reached) in enumerate(added):
        grown[np.searchsorted(together, more), :, group] = reached
    return together, grown


def _counts(groups: _Groups, codes: Ints) -> Ints:
    return codes[:, None] // groups.strides % (groups.sizes + 1)


def _compute_s(problem: Problem, groups: _Groups, codes: Ints, used: int) -> Floats:
    """Seconds of the devices themselves, by code, first group and last group."""
    n, kinds = len(groups.members), groups.kinds
    counts = _counts(groups, codes)
    layer_s = np.array([kind.layer_s for kind in kinds])
    head_s = np.array([kind.head_s for kind in kinds])
    seconds = (counts @ layer_s)[:, None, None] + head_s[None, None, :]
    seconds = np.broadcast_to(seconds, (len(codes), n, n)).copy()
    rest = np.full((len(codes), n, n), float(problem.layers - used))
    first, last = np.arange(n)[:, None], np.arange(n)[None, :]
    for group in groups.by_speed:
        kind = kinds[group]
        lost = np.zeros((n, n))
        if used == 1:
            lost[group, group] = kind.room - kind.room_alone
        else:
            lost += np.where(first == group, kind.room - kind.room_first, 0)
            lost += np.where(last == group, kind.room - kind.room_last, 0)
        more = counts[:, group, None, None] * (kind.room - 1.0) - lost
        more = np.minimum(rest, np.maximum(more, 0.0))
        seconds += more * kind.layer_s
        rest -= more
    seconds[rest > 0] = INF
    for group, kind in enumerate(kinds):
        if used == 1 and kind.room_alone < 1:
            seconds[:, group, group] = INF
        if used > 1 and kind.room_first < 1:
            seconds[:, group, :] = INF
        if used > 1 and kind.room_last < 1:
            seconds[:, :, group] = INF
    return seconds


def _least_compute_s(problem: Problem, groups: _Groups) -> float:
    """No map computes for less: the fastest devices full, nothing lost to first and last."""
    rest, seconds = problem.layers, min(kind.head_s for kind in groups.kinds)
    for group in groups.by_speed:
        kind = groups.kinds[group]
        held = min(rest, kind.room * int(groups.sizes[group]))
        seconds += held * kind.layer_s
        rest -= held
    return seconds


def _order(
    groups: _Groups,
    levels: Sequence[tuple[Ints, Floats]],
    used: int,
    code: int,
    first: int,
    at: int,
) -> list[int]:
    """The devices of the shortest path that ends so, found backwards."""
    path = [at]
    for codes, hops in reversed(levels[: used - 1]):
        code -= int(groups.strides[at])
        row = int(np.searchsorted(codes, code))
        at = int((hops[row, first] + groups.hop_s[:, at]).argmin())
        path.append(at)
    left = [list(members) for members in groups.members]
    return [left[group].pop(0) for group in reversed(path)]


def _filled(problem: Problem, order: Sequence[int]) -> Map:
    """Layers on devices in this order: one each, and the rest where they run fastest."""
    last = len(order) - 1
    held = [1] * len(order)
    rest = problem.layers - len(order)
    for n in sorted(range(len(order)), key=lambda n: problem.devices[order[n]].layer_s):
        room = problem.devices[order[n]].holds(first=n == 0, last=n == last)
        more = min(rest, room - 1)
        held[n] += more
        rest -= more
    return tuple(LayerRange(device, layers) for device, layers in zip(order, held, strict=True))
