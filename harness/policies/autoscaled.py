"""Autoscaling: instances start and stop with the number of requests in the system.

Source: the algorithm of Kubernetes' horizontal pod autoscaler: desired = ceil(current · metric /
target), no change within a tolerance, and the largest recommendation of the last minutes before
instances are stopped. The metric is requests that wait or run, per instance.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...predictors.placement import Placement
from ...predictors.specs import GIB
from ...workloads.errors import SloBenchError
from ..core.cluster_policy import (
    HOLD,
    Action,
    ClusterControl,
    ClusterPolicy,
    ClusterView,
    Role,
    RouteOutcome,
    least_loaded,
)
from ..core.instance import Instance
from ..core.policy import AnyPolicy, parameter
from ..core.state import Release, RequestState

BASE, SPARE = "base", "spare"
_REMEMBERED = 1000  # requests whose prefixes count


@dataclass
class HotPrefixes:
    """Hashes of the units of the latest prompts, by how many of them begin with each."""

    _lately: deque[Sequence[int]] = field(default_factory=deque)
    _uses: Counter[int] = field(default_factory=Counter)

    def observe(self, units: Sequence[int]) -> None:
        """Count the units of a prompt in place of those of the oldest remembered one."""
        self._lately.append(units)
        self._uses.update(units)
        if len(self._lately) > _REMEMBERED:
            oldest = self._lately.popleft()
            self._uses.subtract(oldest)
            for h in oldest:
                if not self._uses[h]:
                    del self._uses[h]

    def hottest(self, units: int) -> list[int]:
        """At most so many units that several prompts share, the most used first. None comes before
        the beginning of its own prefix, which was used as often and counted before it.
        """
        return [h for h, uses in self._uses.most_common(units) if uses > 1]


@dataclass
class Recommendations:
    """Numbers of instances that were recommended lately, with their times, and what was started."""

    prefixes: HotPrefixes = field(default_factory=HotPrefixes)

    lately: deque[tuple[float, int]] = field(default_factory=deque)
    starts_s: dict[int, float] = field(default_factory=dict)  # by index, when they serve

    def is_on(self, instance: Instance, now_s: float) -> bool:
        """Whether `instance` serves or starts, which it may do at this very moment."""
        return instance.up or self.starts_s.get(instance.index, -math.inf) >= now_s


@dataclass(frozen=True)
class Autoscaled(ClusterPolicy):
    """Of all instances `min_instances` are always on, the others when the load needs them.

    Every `control_every_s` as many instances are wanted as bring the requests of an instance to
    `target_requests`, unless the ratio is within `tolerance` of 1. A start takes `startup_s`, for
    which its GPUs are paid already. An instance is stopped when fewer were enough for
    `stabilization_s`; it serves the requests that it has. Requests go to the instance with the
    fewest.

    `target_requests` is the number that an instance serves within the SLO: `slo-bench capacity`
    finds the rate, and the requests are rate times latency (Little's law).

    An instance that starts has an empty prefix cache. With `prewarm_gib` it loads so much KV at
    most of the prefixes that the last 1,000 prompts share, the most frequent first, from a store
    over a link of `store_gb_per_s`, and serves later by as long.
    """

    min_instances: int = parameter(1, 1, 1024)
    target_requests: float = parameter(32.0, 0.1, 8192.0, log=True)
    startup_s: float = parameter(120.0, 0.0, 3600.0, environment=True)
    control_every_s: float = parameter(15.0, 0.1, 3600.0)
    stabilization_s: float = parameter(300.0, 0.0, 7200.0)
    tolerance: float = parameter(0.1, 0.0, 1.0)
    prewarm_gib: float = parameter(0.0, 0.0, 1024.0)
    store_gb_per_s: float = parameter(3.0, 0.01, 1000.0, log=True, environment=True)

    @property
    def least_instances(self) -> int:
        return self.min_instances

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        spare = instances - self.min_instances
        if spare < 0:
            raise SloBenchError(
                f"autoscaled keeps min_instances = {self.min_instances} on, and there are "
                f"{instances}: give more instances, the most that may be on"
            )
        base = Role(BASE, policy, self.min_instances)
        return (base, Role(SPARE, policy, spare, spare=True)) if spare else (base,)

    def mechanisms(self) -> dict[str, str]:
        warmed = {"warmed_units": "units of prefix KV loaded before an instance served"}
        return {
            "starts": "instances started",
            "stops": "instances stopped",
            **(warmed if self.prewarm_gib else {}),
        }

    def new_state(self) -> Recommendations:
        return Recommendations()

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        if not cluster.up:
            return HOLD
        chosen = least_loaded(cluster.up)
        stride = chosen.kv_manager.stride
        if self.prewarm_gib and stride:
            state: Recommendations = cluster.state
            state.prefixes.observe(r.prefix_blocks[stride - 1 :: stride])
        return chosen

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        return self.route(release.request, cluster)

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        state: Recommendations = cluster.state
        now_s = cluster.now_s
        off = [i for i in cluster.instances if not state.is_on(i, now_s)]
        on = len(cluster.instances) - len(off)
        target = self.wanted(sum(i.n_requests for i in cluster.instances), on)
        target = min(max(target, self.min_instances), len(cluster.instances))
        lately = state.lately
        lately.append((now_s, target))
        while lately[0][0] < now_s - self.stabilization_s:
            lately.popleft()
        if target > on:
            draining_first = sorted(off, key=lambda i: (-i.n_requests, i.index))
            chosen = draining_first[: target - on]
            return [self._start(instance, cluster) for instance in chosen]
        surplus = on - max(number for _, number in lately)
        spare = sorted(cluster.role(SPARE), key=lambda i: (i.n_requests, -i.index))
        stopped = spare[: max(0, surplus)]
        for instance in stopped:
            state.starts_s.pop(instance.index, None)
            cluster.counters.add("stops")
        return [Switch(instance) for instance in stopped]

    def _start(self, instance: Instance, cluster: ClusterView) -> Switch:
        state: Recommendations = cluster.state
        units, startup_s = list[int](), self.startup_s
        if self.prewarm_gib and not instance.n_requests:  # else it still has what it had
            place, unit_blocks = instance.placement, instance.kv_manager.unit_blocks
            unit_bytes = unit_blocks * place.block_bytes_per_gpu * place.gpus
            units = state.prefixes.hottest(int(self.prewarm_gib * GIB / max(1, unit_bytes)))
            startup_s += len(units) * unit_bytes / (self.store_gb_per_s * 1e9)
        state.starts_s[instance.index] = cluster.now_s + startup_s
        cluster.counters.add("starts")
        return Switch(instance, startup_s, units)

    def wanted(self, requests: int, on: int) -> int:
        """Instances that bring `requests` to the target, when `on` are on or start."""
        ratio = requests / (self.target_requests * max(1, on))
        return on if abs(ratio - 1) <= self.tolerance else math.ceil(ratio * max(1, on))


@dataclass(frozen=True)
class Switch:
    """Start an instance, which takes `startup_s`, with `units` in its prefix cache; None: stop
    it.
    """

    instance: Instance
    startup_s: float | None = None
    units: Sequence[int] = ()

    def apply(self, cluster: ClusterControl) -> None:
        if self.startup_s is None:
            cluster.stop(self.instance)
        else:
            cluster.start(self.instance, self.startup_s)
            if self.units:
                cluster.counters["warmed_units"] += self.instance.kv_manager.warm(self.units)
