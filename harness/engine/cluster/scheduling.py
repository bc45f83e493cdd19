"""Instances between events: which of them runs, and until when.

Each runs on its own for as long as nothing could be sent to it: up to the next event, or to the
earliest moment at which another may give a request back (`Instance.gives_back_s`). One that gives
nothing back lags behind until it is looked at. Those that share devices are an island and take
turns within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from .arrivals import INF
from .instance import Island, LazyInstance, islands


class Instances:
    """The clock of all sites; `collect` is told of a site when its instance has told anything."""

    def __init__(
        self, sites: Sequence[LazyInstance], collect: Callable[[LazyInstance], None]
    ) -> None:
        self.sites = sites
        self.now_s = 0.0
        self.islands = islands(sites)
        self._collect = collect
        self._joined: list[tuple[LazyInstance, LazyInstance]] = []  # compute for each other
        self._emitters: list[tuple[float, int, Island]] = []  # stale where the time differs
        for site in sites:
            site.run_by(self)

    # ---------------------------------------------------------------- who must keep pace with whom

    def unite(self, one: LazyInstance, other: LazyInstance) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        if (one, other) not in self._joined:
            self._regroup([*self._joined, (one, other)])

    def separate(self, one: LazyInstance, other: LazyInstance) -> None:
        """They were united, and compute for each other no longer."""
        self._regroup([pair for pair in self._joined if pair != (one, other)])

    def _regroup(self, joined: list[tuple[LazyInstance, LazyInstance]]) -> None:
        for site in self.sites:
            self.bring(site)
        self._emitters.clear()
        self._joined = joined
        self.islands = islands(self.sites, joined)
        for island in self.islands:
            self.note(island)

    def note(self, island: Island) -> None:
        """Something changed there: ask anew when it may give a request back."""
        sites = island.sites
        if len(sites) == 1:
            sites[0].steady_s = -1.0
            gives_back_s = sites[0].instance.gives_back_s()
        else:
            for site in sites:
                site.steady_s = -1.0
            gives_back_s = min(site.instance.gives_back_s() for site in sites)
        if gives_back_s != island.gives_back_s:
            island.gives_back_s = gives_back_s
            if gives_back_s < INF:
                heappush(self._emitters, (gives_back_s, island.index, island))

    # ---------------------------------------------------------------- running

    def bring(self, site: LazyInstance) -> None:
        """Up to the present: who is asked about then gives nothing back before it.

        Who came while an iteration is under way is let in, as if that were over.
        """
        instance, island, now_s = site.instance, site.island, self.now_s
        if site.seen_s < now_s:
            site.seen_s = now_s
            # What ends later than now interrupts; those that share devices then still lag behind.
            if len(island.sites) == 1:
                while instance.ready_s() < now_s:
                    self._advance(island, now_s)
            else:
                while any(one.instance.ready_s() < now_s for one in island.sites):
                    self._advance(island, now_s)
        if instance.inbox:
            instance.run(now_s, True)
            if instance.outbox:
                self._collect(site)
            self.note(island)

    def run_first(self, until_s: float) -> bool:
        """Whoever may give a request back first runs; False if nobody may before `until_s`."""
        first = self._first_emitter()
        if first is None or first.gives_back_s >= until_s:
            return False
        first_s = heappop(self._emitters)[0]
        first.gives_back_s = -1.0  # it is not in the heap
        second = self._first_emitter()
        horizon_s = until_s if second is None else min(until_s, second.gives_back_s)
        if horizon_s <= first_s:  # both at once: this one goes on for an iteration
            ready_s = min(site.instance.ready_s() for site in first.sites)
            horizon_s = max(horizon_s, math.nextafter(ready_s, INF))
        self._advance(first, horizon_s)
        return True

    def run_busy(self) -> bool:
        """One that has anything to do runs for as long as it has; False if there is none."""
        for site in self.sites:
            if site.instance.ready_s() < INF:
                self._advance(site.island, INF)
                return True
        return False

    def _first_emitter(self) -> Island | None:
        """Where a request may be given back first."""
        emitters = self._emitters
        while emitters:
            gives_back_s, _, island = emitters[0]
            if gives_back_s == island.gives_back_s:
                return island
            heappop(emitters)
        return None

    def _advance(self, island: Island, horizon_s: float) -> None:
        """Run until the horizon, or until a request is given back."""
        if len(island.sites) == 1:
            site = island.sites[0]
            site.instance.run(horizon_s, True)
            if site.instance.outbox:
                self._collect(site)
        else:
            self._take_turns(island.sites, horizon_s)
        self.note(island)

    def _take_turns(self, sites: Sequence[LazyInstance], horizon_s: float) -> None:
        """Those that share devices: always the one that is furthest behind."""
        parked = 0
        while True:
            ready = [site.instance.ready_s() for site in sites]
            now_s = min(ready)
            if now_s >= horizon_s:
                return
            at = ready.index(now_s)
            others_s = min(s for k, s in enumerate(ready) if k != at)
            upto_s = min(horizon_s, max(others_s, math.nextafter(now_s, INF)))
            if parked > len(sites):
                # All wait and none can act: they would hand each other the least of time for ever.
                upto_s = horizon_s
            instance = sites[at].instance
            instance.run(upto_s, True)
            parked = parked + 1 if instance.now_s == upto_s and not instance.idle else 0
            if instance.outbox:
                self._collect(sites[at])
                return
