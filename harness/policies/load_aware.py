"""Routing by measured load alone.

Source: BanaServe (docs/papers.md), Algorithm 4-2, Eq. 4-33.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar, cast

from ..core.compiled import mypyc_attr
from ..core.state import RequestState


class LoadedInstance(Protocol):
    """An instance with a measured load: simulated, or a real server that reports it."""

    @property
    def index(self) -> int:
        """Position among the instances of the router."""

    @property
    def queue(self) -> int:
        """Requests that wait there, or are on their way."""

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax (Eq. 4-28), with the compute of the next `window_s` seconds."""

    def adds(self, r: RequestState, window_s: float) -> float:
        """What `r` adds to U: EstimateLoad."""


T = TypeVar("T")


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadAware:
    """The least loaded by measured compute and memory; past a threshold the shortest queue.

    `window_s` and `threshold` as in `BanaServe`.
    """

    watches = True
    measures = True

    def __init__(self, window_s: float = 1.0, threshold: float = 1.2) -> None:
        self._window_s = window_s
        self._threshold = threshold
        self.past_threshold = False  # whether the last request went by the queues

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        """Choose the instance for `r`; each of them is a `LoadedInstance`."""
        loaded = cast("Sequence[LoadedInstance]", instances)
        loads = [instance.use(self._window_s) for instance in loaded]
        least = min(loads)
        self.past_threshold = least >= self._threshold
        if not self.past_threshold and loads.count(least) == 1:
            return instances[loads.index(least)]
        queues = [instance.queue for instance in loaded]
        estimate = loaded[0].adds(r, self._window_s)
        return instances[assign([estimate], loads, queues, self._threshold)[0]]


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
