"""Whom a request goes to by measured load alone.

Source: BanaServe (docs/papers.md), Algorithm 4-2, Eq. 4-33.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def assign(
    estimates: Iterable[float],
    loads: Sequence[float],
    queues: Sequence[int],
    threshold: float,
) -> list[int]:
    """The instance of each request, in order.

    The least loaded, of equals the one with the shorter queue, then the first; if even that one's
    load is not under `threshold`, the one with the shortest queue.

    Mended: the algorithm sorts once and counts no request as queued, so that every request of a
    batch past the threshold would go to one instance. Here each assignment counts for the next.

    Args:
        estimates: what each request adds to its instance's load.
        loads: U = compute use + memory use of each instance, from 0 to 2.
        queues: requests that wait at each.
        threshold: delta_L.
    """
    load, queue = list(loads), list(queues)
    every = range(len(load))
    chosen: list[int] = []
    for estimate in estimates:
        target = min(every, key=lambda k: (load[k], queue[k], k))
        if load[target] >= threshold:
            target = min(every, key=lambda k: (queue[k], load[k], k))
        load[target] += estimate
        queue[target] += 1
        chosen.append(target)
    return chosen
