"""HELR as printed in the thesis, with corrections.

Source: UELLM (see docs/papers.md), Algorithm 3-2 and Eq. 3-7, 3-8. For every subset of the devices
that has the memory, the devices are filled in the order of performance and memory, and a dynamic
program over visited devices (a bit mask) and the last one finds the order of the shortest path.

Corrections:
- `dp[i][j]` in line 15 and Eq. 3-7 is read as `dp[mark without i][j]`; the base case is a single
  device.
- `layers[i]` in line 14 is what a device can hold, on every device; here it is that or what is
  left, so that the layers add up. A subset in which a device gets none is passed over: the subset
  without it is visited, too.
- Eq. 3-8 adds the compute of the last device once more, and the latency from it to all others;
  both are left out.
- a1 and a2 are named in §3.5.3 and used nowhere: the cost is that of `problem`.

Kept: all modules count as layers of the same size (`m = M / Layer(M)`), so embeddings and head are
spread over all layers. Where they are large, a map that looks feasible may not fit, and layers may
be misplaced; `Problem.fits` checks the map.
"""

from __future__ import annotations

from itertools import combinations

from ...workloads.errors import SloBenchError
from .problem import INF, CostWeights, LayerRange, Map, Problem, no_room

MOST_DEVICES = 10


def paper(problem: Problem, weights: CostWeights) -> Map:
    """The map of HELR with the corrections above; it may not fit.

    Raises:
        SloBenchError: the layers do not fit by its own count, or there are too many devices.
    """
    n = len(problem.devices)
    if n > MOST_DEVICES:
        raise SloBenchError(
            f"the paper's procedure visits every subset of the devices: {n} are too many "
            f"(at most {MOST_DEVICES}); use the exact one"
        )
    rooms = [device.room_spread for device in problem.devices]
    best, best_map = INF, None
    for size in range(1, min(n, problem.layers) + 1):
        for subset in combinations(range(n), size):
            layers = _layers(problem, subset, rooms)
            if layers is None:
                continue
            latency_s, order = _shortest(problem, subset, layers)
            cost = problem.cost_of(latency_s, size, weights)
            if cost < best:
                best, best_map = cost, tuple(LayerRange(i, layers[i]) for i in order)
    if best_map is None:
        raise no_room(problem)
    return best_map


def _layers(problem: Problem, subset: tuple[int, ...], rooms: list[int]) -> dict[int, int] | None:
    """Lines 9 to 14: the fastest and largest first; None if they do not add up."""
    rest, held = problem.layers, {}
    for i in sorted(subset, key=lambda i: (problem.devices[i].layer_s, -rooms[i])):
        held[i] = min(rest, rooms[i])
        rest -= held[i]
    return None if rest or not all(held.values()) else held


def _shortest(
    problem: Problem, subset: tuple[int, ...], layers: dict[int, int]
) -> tuple[float, list[int]]:
    """Lines 15 to 21: the least latency over all orders, and that order."""
    size = len(subset)
    own_s = [
        layers[i] * (problem.devices[i].layer_s + problem.devices[i].head_s / problem.layers)
        for i in subset
    ]
    dp: dict[tuple[int, int], tuple[float, int]] = {}
    for mark in range(1, 1 << size):
        for i in (i for i in range(size) if mark >> i & 1):
            before = mark ^ (1 << i)
            if not before:
                dp[mark, i] = (own_s[i], -1)
                continue
            dp[mark, i] = min(
                (dp[before, j][0] + problem.hop_s[subset[j]][subset[i]] + own_s[i], j)
                for j in range(size)
                if before >> j & 1
            )
    mark = (1 << size) - 1
    last = min(range(size), key=lambda i: dp[mark, i][0])
    latency_s, order = dp[mark, last][0], list[int]()
    while last >= 0:
        order.append(subset[last])
        mark, last = mark ^ (1 << last), dp[mark, last][1]
    return latency_s, order[::-1]
