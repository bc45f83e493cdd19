"""Why devices stay unused: what one more of them would change."""

from __future__ import annotations

from .exact import filled
from .problem import CostWeights, Map, Problem


def unused_reasons(problem: Problem, weights: CostWeights, placed: Map) -> dict[str, list[int]]:
    """Devices outside the map by the reason why they are.

    Of a device on which layers fit, the reason is the best map with it beside the used ones.
    """
    held = {one.device for one in placed}
    found: dict[str, list[int]] = {}
    cost, known = problem.cost(placed, weights), dict[object, str]()
    for device, figures in enumerate(problem.devices):
        if device in held:
            continue
        hops = tuple((problem.hop_s[i][device], problem.hop_s[device][i]) for i in sorted(held))
        alike = (figures.layer_s, figures.room, figures.head_s, hops)
        if alike not in known:
            known[alike] = _reason(problem, weights, placed, device, cost)
        found.setdefault(known[alike], []).append(device)
    return found


def _reason(problem: Problem, weights: CostWeights, placed: Map, device: int, cost: float) -> str:
    if problem.devices[device].room < 1:
        return "no layer fits there"
    order = [held.device for held in placed]
    if len(order) == problem.layers:
        return "every layer has a device of its own"
    tried = [filled(problem, [*order[:at], device, *order[at:]]) for at in range(len(order) + 1)]
    best = min(tried, key=lambda one: problem.cost(one, weights))
    if not problem.fits(best):
        return "at an end of the map the embeddings or the head do not fit there"
    more_ms = 1e3 * (problem.latency_s(best) - problem.latency_s(placed))
    more = problem.cost(best, weights) / cost - 1
    return f"with one more, a pass takes {more_ms:+.2g} ms and the cost is {100 * more:+.2g} %"
