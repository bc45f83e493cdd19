"""Instances between events: which of them runs, and until when.

Each runs on its own for as long as nothing could be sent to it: up to the next event, or to the
earliest moment at which another may give a request back (`Instance.earliest_release_s`). One that
gives nothing back lags behind until it is looked at. Those that share devices or a KV store are a
device group and take turns within it: iterations that look into the store do so in the order in
which they begin, and what an iteration puts there is found by those that begin later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from ...core.state import RequestState
from .arrivals import INF
from .instance import DeviceGroup, LazyInstance, device_groups

LOOK_EVERY = 4096  # steps after which all instances are brought up to the present
_PARKED = 2  # turns of two that share a device in which neither could act


def _lags(instance: LazyInstance, now_s: float) -> bool:
    """Whether it has anything to do before that time."""
    if (simulated := instance.simulated) is not None:
        return simulated.now_s < now_s and simulated.ready_s() < now_s
    return instance.engine.ready_s() < now_s


def _earliest_release_s(instance: LazyInstance) -> float:
    if (simulated := instance.simulated) is not None:
        return simulated.earliest_release_s()
    return instance.engine.earliest_release_s()


class InstanceRunner:
    """The clock of all instances; `collect` is called with an instance whose engine has
    releases.
    """

    def __init__(
        self, instances: Sequence[LazyInstance], collect: Callable[[LazyInstance], None]
    ) -> None:
        self.instances = instances
        self.now_s = 0.0
        self.device_groups = device_groups(instances)
        self._collect = collect
        # Of a pair: steps as `Cluster` counts them, and releases that are not past yet.
        self._steps = 0
        self._releases_s: list[float] = []
        self._joined: list[tuple[LazyInstance, LazyInstance]] = []  # compute for each other
        self._emitters: list[tuple[float, int, DeviceGroup]] = []  # stale where the time differs
        self._changed: list[DeviceGroup] = []  # their time is asked for before the next run
        for instance in instances:
            instance.run_by(self)

    # ---------------------------------------------------------------- coupled instances

    def unite(self, one: LazyInstance, other: LazyInstance) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        if (one, other) not in self._joined:
            self._regroup([*self._joined, (one, other)])

    def separate(self, one: LazyInstance, other: LazyInstance) -> None:
        """They were united, and compute for each other no longer."""
        self._regroup([pair for pair in self._joined if pair != (one, other)])

    def _regroup(self, joined: list[tuple[LazyInstance, LazyInstance]]) -> None:
        for instance in self.instances:
            self.bring(instance)
        self._emitters.clear()
        self._changed.clear()
        self._joined = joined
        self.device_groups = device_groups(self.instances, joined)
        for device_group in self.device_groups:
            self.note(device_group)

    def note(self, device_group: DeviceGroup) -> None:
        """Something changed there: before the next run, ask anew when it may give a request
        back.
        """
        for instance in device_group.instances:
            instance.decode_only_until_s = -1.0
        if not device_group.changed:
            device_group.changed = True
            self._changed.append(device_group)

    def _ask_changed(self) -> None:
        """Ask the device groups that have changed when they may give a request back."""
        for device_group in self._changed:
            device_group.changed = False
            instances = device_group.instances
            earliest_release_s = _earliest_release_s(instances[0])
            if len(instances) > 1:
                for instance in instances[1:]:
                    earliest_release_s = min(earliest_release_s, _earliest_release_s(instance))
            if earliest_release_s != device_group.earliest_release_s:
                device_group.earliest_release_s = earliest_release_s
                if earliest_release_s < INF:
                    heappush(self._emitters, (earliest_release_s, device_group.index, device_group))
        self._changed.clear()

    # ---------------------------------------------------------------- running

    def bring(self, instance: LazyInstance) -> None:
        """Run `instance` up to the present, so that it releases nothing before it. Requests that
        arrive during an iteration are delivered as if it had ended.
        """
        engine, device_group, now_s = instance.engine, instance.device_group, self.now_s
        if len(device_group.instances) == 1:
            self.catch_up(instance)
        elif instance.seen_s < now_s:
            instance.seen_s = now_s
            # What ends later than now interrupts; those that share devices then still lag behind.
            while any(_lags(one, now_s) for one in device_group.instances):
                self._advance(device_group, now_s)
        if engine.inbox:
            engine.run(now_s, True)
            if engine.outbox:
                self._collect(instance)
            self.note(device_group)

    def catch_up(self, instance: LazyInstance) -> None:
        """As `bring`, but what arrives during an iteration of one that is alone stays on its way
        until the iteration ends.
        """
        device_group, now_s = instance.device_group, self.now_s
        if len(device_group.instances) > 1:
            self.bring(instance)
        elif instance.seen_s < now_s:
            instance.seen_s = now_s
            while _lags(instance, now_s):
                self._advance(device_group, now_s)

    def run_first(self, until_s: float) -> bool:
        """Run the instance with the earliest possible release; False if none is before
        `until_s`.
        """
        if self._changed:
            self._ask_changed()
        first_s = self._first_release_s()
        if first_s >= until_s:
            return False
        first = heappop(self._emitters)[2]
        first.earliest_release_s = -1.0  # it is not in the heap
        second_s = self._first_release_s()
        horizon_s = second_s if second_s < until_s else until_s
        if horizon_s <= first_s:  # both at once: this one goes on for an iteration
            ready_s = min(instance.engine.ready_s() for instance in first.instances)
            horizon_s = max(horizon_s, math.nextafter(ready_s, INF))
        self._advance(first, horizon_s)
        return True

    def run_busy(self) -> bool:
        """One that has anything to do runs for as long as it has; False if there is none."""
        for instance in self.instances:
            if instance.engine.ready_s() < INF:
                self._advance(instance.device_group, INF)
                return True
        return False

    def _first_release_s(self) -> float:
        """When a request may be given back first, by the first in the heap; infinite if never."""
        emitters = self._emitters
        while emitters:
            earliest_release_s, _, device_group = emitters[0]
            if earliest_release_s == device_group.earliest_release_s:
                return earliest_release_s
            heappop(emitters)
        return INF

    def _advance(self, device_group: DeviceGroup, horizon_s: float) -> None:
        """Run until the horizon, or until a request is given back."""
        if len(device_group.instances) == 1:
            instance = device_group.instances[0]
            if (simulated := instance.simulated) is not None:
                simulated.run(horizon_s, True)
                released = bool(simulated.outbox)
            else:
                instance.engine.run(horizon_s, True)
                released = bool(instance.engine.outbox)
            if released:
                self._collect(instance)
        else:
            self._take_turns(device_group.instances, horizon_s)
        self.note(device_group)

    def run_pair(
        self,
        llm: LazyInstance,
        embedder: LazyInstance,
        requests: Sequence[RequestState],
        end_s: float,
    ) -> None:
        """Send these requests to a language model and the embedder on its device, which nothing
        else touches, and run both until `end_s`.
        """
        generates, embeds, releases_s = llm.engine, embedder.engine, self._releases_s
        next_s = [r.arrival_s for r in requests[1:]]
        next_s.append(end_s)
        lags = True
        for r, until_s in zip(requests, next_s, strict=False):
            self.now_s = r.arrival_s
            target = llm
            if r.num_inputs:  # `Cluster` looks at the embedder before it sends anything there
                target = embedder
                while lags:
                    lags = self._alternate(llm, embedder, r.arrival_s)
                if embeds.inbox:
                    self._deliver(embedder)
            target.engine.inbox.append(r)
            self._count_step(llm, embedder)
            lags = True
            while True:
                horizon_s = releases_s[0] if releases_s else until_s
                if horizon_s > until_s:
                    horizon_s = until_s
                # Asking the language model also makes it forget timeouts of what has begun.
                if (
                    generates.earliest_release_s() < horizon_s
                    or embeds.earliest_release_s() < horizon_s
                ):
                    lags = self._alternate(llm, embedder, horizon_s) or horizon_s < until_s
                elif releases_s and releases_s[0] <= until_s:
                    heappop(releases_s)
                else:
                    break
                self._count_step(llm, embedder)
        while lags and end_s == INF:
            lags = self._alternate(llm, embedder, end_s)

    def _alternate(self, llm: LazyInstance, embedder: LazyInstance, horizon_s: float) -> bool:
        """`_take_turns` of two that share a device."""
        parked = 0
        llm_s, embedder_s = llm.engine.ready_s(), embedder.engine.ready_s()
        while True:
            llm_first = llm_s <= embedder_s
            first = llm if llm_first else embedder
            now_s, upto_s = (llm_s, embedder_s) if llm_first else (embedder_s, llm_s)
            if now_s >= horizon_s:
                return False
            if upto_s <= now_s:
                upto_s = math.nextafter(now_s, INF)
            if upto_s > horizon_s or parked > _PARKED:
                upto_s = horizon_s
            engine = first.engine
            engine.run(upto_s, True)
            parked = parked + 1 if engine.now_s == upto_s and not engine.idle else 0
            if engine.outbox:
                self._release(first)
                return True
            if llm_first:
                llm_s = engine.ready_s()
            else:
                embedder_s = engine.ready_s()

    def _count_step(self, llm: LazyInstance, embedder: LazyInstance) -> None:
        """Look at both after as many steps as `Cluster` does."""
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            for instance in (llm, embedder):
                if instance.engine.inbox:
                    self._deliver(instance)

    def _deliver(self, instance: LazyInstance) -> None:
        """Deliver what arrived during an iteration as if it had ended."""
        instance.engine.run(self.now_s, True)
        if instance.engine.outbox:
            self._release(instance)

    def _release(self, instance: LazyInstance) -> None:
        for release in instance.engine.outbox:
            heappush(self._releases_s, max(release.time_s, self.now_s))
        self._collect(instance)

    def _take_turns(self, instances: Sequence[LazyInstance], horizon_s: float) -> None:
        """Those that share devices or a KV store: always the one whose turn is first, of equals the
        one with the smallest index.
        """
        parked = 0
        while True:
            turns = [instance.turn_s() for instance in instances]
            now_s, others_s, *_ = sorted(turns)
            if now_s >= horizon_s:
                self._catch_up(instances, horizon_s)
                return
            at = turns.index(now_s)
            upto_s = min(horizon_s, max(others_s, math.nextafter(now_s, INF)))
            if parked > len(instances):
                # All wait and none can act: they would hand each other the least of time for ever.
                upto_s = horizon_s
            engine = instances[at].engine
            engine.run(upto_s, True)
            parked = parked + 1 if engine.now_s == upto_s and not engine.idle else 0
            if engine.outbox:
                self._collect(instances[at])
                return

    def _catch_up(self, instances: Sequence[LazyInstance], horizon_s: float) -> None:
        """Run those that only decode until the horizon."""
        for instance in instances:
            if instance.engine.ready_s() < horizon_s:
                instance.engine.run(horizon_s, True)
                if instance.engine.outbox:
                    self._collect(instance)
