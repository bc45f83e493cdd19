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
from typing import Final

from ...core.state import RequestState
from .cluster_arrivals import INF
from .lazy_instance import DeviceGroup, LazyInstance, device_groups

LOOK_EVERY: Final = 4096  # steps after which all instances are brought up to the present
_PARKED: Final = 2  # turns of two that share a device in which neither could act


def _lags(instance: LazyInstance, now_s: float) -> bool:
    """Whether it has anything to do before that time."""
    if (simulated := instance.simulated) is not None:
        return simulated.now_s < now_s and simulated.ready_s() < now_s
    return instance.engine.ready_s() < now_s


def _ran(instance: LazyInstance) -> None:
    """It has run: its own state has changed, and that of those which compute beside it on the same
    devices.
    """
    instance.bounds_known = False
    if instance.simulated is None or instance.shares_stages:
        for neighbour in instance.device_group.instances:
            neighbour.bounds_known = False


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
        # By when they may give a request back; stale where the group has another time.
        self.emitters: list[tuple[float, int, DeviceGroup]] = []
        self.changed: list[DeviceGroup] = []  # their time is asked for before the next run
        self.touched: list[LazyInstance] = []  # of which a policy may see something else now
        for instance in instances:
            instance.run_by(self)

    # ---------------------------------------------------------------- coupled instances

    def unite(self, instance: LazyInstance, other: LazyInstance) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        if (instance, other) not in self._joined:
            self._regroup([*self._joined, (instance, other)])

    def separate(self, instance: LazyInstance, other: LazyInstance) -> None:
        """They were united, and compute for each other no longer."""
        self._regroup([pair for pair in self._joined if pair != (instance, other)])

    def _regroup(self, joined: list[tuple[LazyInstance, LazyInstance]]) -> None:
        for instance in self.instances:
            self.bring(instance)
        self.emitters.clear()
        self.changed.clear()
        self._joined = joined
        self.device_groups = device_groups(self.instances, joined)
        for device_group in self.device_groups:
            self.note(device_group)

    def note(self, device_group: DeviceGroup) -> None:
        """Something happened there: before the next run, ask anew when it may give a request
        back.
        """
        for instance in device_group.instances:
            instance.bounds_known = False
        self._note_changed(device_group)

    def note_one(self, instance: LazyInstance) -> None:
        """Something happened to this one alone, as a request that is sent to it."""
        instance.bounds_known = False
        self._note_changed(instance.device_group)

    def touch(self, instance: LazyInstance) -> None:
        """What its snapshot, its inbox or its KV cache manager shows may be something else."""
        if not instance.touched:
            instance.touched = True
            self.touched.append(instance)

    def _note_changed(self, device_group: DeviceGroup) -> None:
        for instance in device_group.instances:
            instance.decode_only_until_s = -1.0
            if not instance.touched:
                self.touch(instance)
        if not device_group.changed:
            device_group.changed = True
            self.changed.append(device_group)

    def expects(self, instance: LazyInstance, visible_s: float) -> bool:
        """A request is on its way there, the first. Whether it is known what that changes."""
        if not instance.expects(visible_s):
            return False
        device_group, first_s = instance.device_group, instance.earliest_s
        if not device_group.changed and first_s < device_group.earliest_release_s:
            device_group.earliest_release_s = first_s
            heappush(self.emitters, (first_s, device_group.index, device_group))
        return True

    def ask_changed(self) -> None:
        """Ask the device groups that have changed when they may give a request back."""
        for device_group in self.changed:
            device_group.changed = False
            self._ask(device_group)
        self.changed.clear()

    def _ask(self, device_group: DeviceGroup) -> None:
        """Note when the instances of the group may give a request back, in simulated seconds."""
        instances = device_group.instances
        earliest_release_s = min(
            [i.earliest_s if i.bounds_known else i.find_bounds() for i in instances]
        )
        if earliest_release_s != device_group.earliest_release_s:
            device_group.earliest_release_s = earliest_release_s
            if earliest_release_s < INF:
                heappush(self.emitters, (earliest_release_s, device_group.index, device_group))

    # ---------------------------------------------------------------- running

    def bring(self, instance: LazyInstance) -> None:
        """Run `instance` up to the present, so that it releases nothing before it. Requests that
        arrive during an iteration are delivered as if it had ended.
        """
        engine, device_group, now_s = instance.engine, instance.device_group, self.now_s
        if instance.alone:
            self.catch_up(instance)
        elif instance.seen_s < now_s:
            instance.seen_s = now_s
            # What ends later than now interrupts; those that share devices then still lag behind.
            for neighbour in device_group.instances:
                while _lags(neighbour, now_s):
                    self._advance(device_group, now_s)
        if engine.inbox:
            engine.run(now_s, True)
            if engine.outbox:
                self._collect(instance)
            _ran(instance)
            self._note_changed(device_group)

    def catch_up(self, instance: LazyInstance) -> None:
        """As `bring`, but what arrives during an iteration of one that is alone stays on its way
        until the iteration ends.
        """
        now_s = self.now_s
        if not instance.alone:
            self.bring(instance)
        elif instance.seen_s < now_s:
            instance.seen_s = now_s
            while _lags(instance, now_s):
                self._advance(instance.device_group, now_s)

    def run_first(self, until_s: float) -> None:
        """Run the instances with the earliest possible release: the first of `emitters`, which is
        not stale and before `until_s`.
        """
        emitters = self.emitters
        first_s, _, first = heappop(emitters)
        first.earliest_release_s = -1.0  # it is not in the heap
        horizon_s = until_s
        while emitters and emitters[0][0] < until_s:
            if emitters[0][0] == emitters[0][2].earliest_release_s:
                horizon_s = emitters[0][0]
                break
            heappop(emitters)
        if horizon_s <= first_s:  # both at once: this one goes on for an iteration
            ready_s = min([instance.engine.ready_s() for instance in first.instances])
            horizon_s = max(horizon_s, math.nextafter(ready_s, INF))
        instance = first.instances[0]
        simulated = instance.simulated
        if simulated is None or not instance.alone:
            self._advance(first, horizon_s)
            return
        simulated.run(horizon_s, True)
        if simulated.outbox:
            self._collect(instance)
        if not instance.touched:
            self.touch(instance)
        first.earliest_release_s = release_s = instance.find_bounds()
        if release_s < INF:
            heappush(emitters, (release_s, first.index, first))

    def run_busy(self) -> bool:
        """One that has anything to do runs for as long as it has; False if there is none."""
        for instance in self.instances:
            if instance.engine.ready_s() < INF:
                self._advance(instance.device_group, INF)
                return True
        return False

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
            instance.bounds_known = False
        else:
            self._take_turns(device_group.instances, horizon_s)
        self._note_changed(device_group)

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
                    lags = self._alternate(llm, embedder, r.arrival_s, self._release)
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
                    lags = self._alternate(llm, embedder, horizon_s, self._release)
                    lags = lags or horizon_s < until_s
                elif releases_s and releases_s[0] <= until_s:
                    heappop(releases_s)
                else:
                    break
                self._count_step(llm, embedder)
        while lags and end_s == INF:
            lags = self._alternate(llm, embedder, end_s, self._release)

    def _alternate(
        self,
        first: LazyInstance,
        second: LazyInstance,
        horizon_s: float,
        give_back: Callable[[LazyInstance], None],
    ) -> bool:
        """`_take_turns` of two that share devices; whether one has given a request back."""
        parked = 0
        first_s, second_s = first.engine.ready_s(), second.engine.ready_s()
        while True:
            in_order = first_s <= second_s
            instance = first if in_order else second
            now_s, upto_s = (first_s, second_s) if in_order else (second_s, first_s)
            if now_s >= horizon_s:
                return False
            if upto_s <= now_s:
                upto_s = math.nextafter(now_s, INF)
            if upto_s > horizon_s or parked > _PARKED:
                upto_s = horizon_s
            engine = instance.engine
            engine.run(upto_s, True)
            _ran(instance)
            if engine.outbox:
                give_back(instance)
                return True
            parked = parked + 1 if engine.now_s == upto_s and not engine.idle else 0
            if in_order:
                first_s = engine.ready_s()
            else:
                second_s = engine.ready_s()

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
        if len(instances) == 2 and instances[0].shares_devices and instances[1].shares_devices:
            self._alternate(instances[0], instances[1], horizon_s, self._collect)
            return
        parked = 0
        while True:
            # A run of one may bring forward, or put off, what others look into.
            turns = [instance.turn_s() for instance in instances]
            now_s, others_s, *_ = sorted(turns)
            if now_s >= horizon_s:
                self._catch_up(instances, horizon_s)
                return
            upto_s = min(horizon_s, max(others_s, math.nextafter(now_s, INF)))
            if parked > len(instances):
                # All wait and none can act: they would hand each other the least of time for ever.
                upto_s = horizon_s
            instance = instances[turns.index(now_s)]
            engine = instance.engine
            engine.run(upto_s, True)
            _ran(instance)
            parked = parked + 1 if engine.now_s == upto_s and not engine.idle else 0
            if engine.outbox:
                self._collect(instance)
                return

    def _catch_up(self, instances: Sequence[LazyInstance], horizon_s: float) -> None:
        """Run those that only decode until the horizon."""
        for instance in instances:
            if instance.engine.ready_s() < horizon_s:
                instance.engine.run(horizon_s, True)
                _ran(instance)
                if instance.engine.outbox:
                    self._collect(instance)
