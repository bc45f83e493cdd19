"""Routers: which instance serves a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ...workloads.errors import by_name
from ..core.cluster_policy import Router, T, Target, least_loaded
from ..core.state import RequestState
from .load_aware import LoadAware


class RoundRobin:
    """Routes requests to the instances in turn."""

    watches = False
    measures = False

    def __init__(self) -> None:
        self._next = 0

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        instance = instances[self._next % len(instances)]
        self._next += 1
        return instance


class RandomChoice:
    """Any of the instances, as a Kubernetes service draws one for each connection. The draw follows
    from the request and its arrival, so that it is the same in each run.
    """

    watches = False
    measures = False

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        return Random(f"{r.id} {r.arrival_s}").choice(instances)


class LeastLoaded:
    """The instance with the fewest requests; of equals the first."""

    watches = True
    measures = False

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        return least_loaded(instances)


class PrefixAware:
    """The instance that has seen the longest prefix, unless the load is out of balance.

    A prefix counts where it was sent, also before it has been computed. With no more than half
    of the request's blocks seen anywhere, or with loads further apart than both bounds, the
    least loaded instance gets it. Source: the cache-aware policy of the SGLang router (its
    defaults: match 0.5, 32 requests apart, ratio 1.1), here with exact block hashes instead of an
    approximate tree of characters; each instance's memory of hashes is bounded, oldest out first.
    """

    watches = True
    measures = False
    MATCH_SHARE = 0.5
    APART_REQUESTS = 32
    APART_RATIO = 1.1
    REMEMBERED_HASHES = 1 << 20

    def __init__(self) -> None:
        self._hashes: dict[int, dict[int, None]] = {}

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        chosen = self._choose(r, instances)
        hashes = self._hashes.setdefault(chosen.index, {})
        for h in r.prefix_blocks:
            hashes.pop(h, None)
            hashes[h] = None
        while len(hashes) > self.REMEMBERED_HASHES:
            del hashes[next(iter(hashes))]
        return chosen

    @classmethod
    def out_of_balance(cls, instances: Sequence[Target]) -> bool:
        """Are the loads further apart than both bounds?"""
        loads = [i.n_requests for i in instances]
        low, high = min(loads), max(loads)
        return high - low > cls.APART_REQUESTS and high > cls.APART_RATIO * low

    def _choose(self, r: RequestState, instances: Sequence[T]) -> T:
        if self.out_of_balance(instances):
            return least_loaded(instances)
        best, longest = instances[0], 0
        for instance in instances:
            matched = self._matched(r, instance.index)
            if matched > longest:
                best, longest = instance, matched
        if longest <= self.MATCH_SHARE * len(r.prefix_blocks):
            return least_loaded(instances)
        return best

    def _matched(self, r: RequestState, index: int) -> int:
        hashes = self._hashes.get(index, {})
        n = 0
        for h in r.prefix_blocks:
            if h not in hashes:
                break
            n += 1
        return n


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "random": RandomChoice,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
    "load-aware": LoadAware,
}


def router(name: str) -> Router:
    """A fresh router by name.

    Raises:
        UnknownNameError: no such router.
    """
    return by_name("router", name, ROUTERS)()
