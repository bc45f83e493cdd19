"""Llumnix: requests move between instances while they decode.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024),
§4.2 and §4.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.cluster_policy import (
    HOLD,
    MANY,
    Action,
    ClusterControl,
    ClusterView,
    RouteOutcome,
)
from ..core.instance import Instance
from ..core.policy import parameter
from ..core.state import Phase, RequestState
from .shared.disaggregated import KvTransferPolicy
from .shared.kv_transfer import ReservedBlocks


@dataclass(frozen=True)
class Llumnix(KvTransferPolicy):
    """Freeness F = (M - sum of V) / B: KV tokens that are free and not needed by waiting requests,
    per request in the batch: the iterations until memory runs out (§4.4.1).

    A new request goes where F is greatest. Every `control_every_s`, instances below `low` are
    paired with instances above `high`, the extremes first, and each pair moves one request: of
    those that decode, the one with the shortest KV, if the target has room for it. KV is copied
    while the request goes on decoding; only the KV computed meanwhile is copied while it pauses.

    Deviates: no priorities, no draining of instances that are to be shut down; all waiting requests
    count for V, where the paper counts the first.
    """

    low: float = parameter(100.0, -100_000.0, 100_000.0)
    high: float = parameter(200.0, -100_000.0, 100_000.0)
    control_every_s: float = parameter(0.5, 0.01, 3600.0)
    network_gb_per_s: float = parameter(0.0, 0.0, 10_000.0, environment=True)

    def mechanisms(self) -> dict[str, str]:
        return {
            "migrations": "requests that went on decoding on another instance",
            "migrations_cancelled": "requests that ended or were preempted while KV was copied",
        }

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        up = cluster.up
        if len(up) < MANY:
            freest, greatest = -1, -math.inf
            for place, instance in enumerate(up):
                free = freeness(instance, greatest)
                if free > greatest:
                    freest, greatest = place, free
            return up[freest] if up else HOLD
        bounds = cluster.kept(freeness_bound)
        first = int(bounds.argmax())
        best = up[first]
        greatest = freeness(best)
        for place in np.flatnonzero(bounds >= greatest).tolist():
            if place == first or bounds[place] < greatest:
                continue  # it has no more
            other = up[place]
            free = freeness(other)
            if free > greatest or (free == greatest and other.index < best.index):
                best, greatest = other, free
        return best

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        free = {instance.index: freeness(instance) for instance in cluster.up}
        order = sorted(cluster.up, key=lambda s: (free[s.index], s.index))
        givers = [instance for instance in order if free[instance.index] < self.low]
        takers = [instance for instance in reversed(order) if free[instance.index] > self.high]
        promised: ReservedBlocks = cluster.state
        actions: list[Action] = []
        for source, target in zip(givers, takers, strict=False):
            r = _shortest(source)
            if r is None:
                continue
            if promised.reserve(r, source.view.kv_tokens(r), target):
                actions.append(MigrateLive(r, source, target, promised))
        return actions


@dataclass(frozen=True)
class MigrateLive:
    """Live migration of `request`, which decodes at `source`, to `target`, where blocks are
    reserved for it. Its KV is copied first, in parallel to its steps; then it pauses, and the KV
    computed meanwhile is copied. If it has ended or been preempted by then, it stays.
    """

    request: RequestState
    source: Instance
    target: Instance
    promised: ReservedBlocks

    def apply(self, cluster: ClusterControl) -> None:
        if not self._decodes():
            self.promised.drop(self.request, self.target)
            return
        kv_tokens = self.source.view.kv_tokens(self.request)
        ends_s = cluster.links.ends_s(self.source, self.target, kv_tokens, cluster.now_s)
        cluster.at(ends_s, lambda: self._last_stage(cluster, kv_tokens))

    def _last_stage(self, cluster: ClusterControl, copied_tokens: int) -> None:
        if self._decodes() and self.target.up:
            cluster.counters.add("migrations", self.request)
            cluster.migrate(self.request, self.source, self.target, copied_tokens=copied_tokens)
        else:
            cluster.counters.add("migrations_cancelled", self.request)
            self.promised.drop(self.request, self.target)

    def _decodes(self) -> bool:
        view, r = self.source.view, self.request
        return r.instance == self.source.index and r.phase is Phase.DECODE and view.n_decoding > 0


def freeness(instance: Instance, at_least: float = -math.inf) -> float:
    """Freeness F of §4.4.1, in iterations; where it is less than `at_least`, perhaps a bound that
    is less, too: as if its decodes had taken no blocks lately.
    """
    waiting_tokens, kv_manager = instance.waiting_tokens, instance.kv_manager
    batch = max(1, instance.snapshot.n_running)
    bound = (kv_manager.free * kv_manager.block_size - waiting_tokens) / batch
    if bound < at_least:
        return bound
    return (instance.free_blocks * kv_manager.block_size - waiting_tokens) / batch


def freeness_bound(instance: Instance) -> float:
    """At least its freeness."""
    return freeness(instance, math.inf)


def _shortest(instance: Instance) -> RequestState | None:
    view = instance.view
    decoding = [r for r in view.running() if r.phase is Phase.DECODE]
    return min(decoding, key=lambda r: (view.kv_tokens(r), r.id), default=None)
