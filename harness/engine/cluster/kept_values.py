"""A value of every instance, computed anew only where something has happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from ....workloads.arrays import Floats
from ...core.instance import Instance
from .cluster_arrivals import INF
from .lazy_instance import LazyInstance
from .scheduling import InstanceRunner


class KeptValues:
    """What `ClusterView.kept` returns, of these instances and of this function.

    An instance is read again when `note` was called, and when it has to be brought up to the
    present, in the order of the instances: so all are run as far as if each were read every time.
    """

    def __init__(
        self,
        value: Callable[[Instance], float],
        instances: Sequence[LazyInstance],
        runner: InstanceRunner,
    ) -> None:
        self._value = value
        self._instances = instances
        self._runner = runner
        self._positions = {instance: place for place, instance in enumerate(instances)}
        self._values = np.full(len(instances), np.nan)
        self._expires = [(-INF, place) for place in range(len(instances))]  # a heap
        self._due: set[int] = set()

    def note(self, instance: LazyInstance) -> None:
        """Its value may be another one now."""
        place = self._positions.get(instance)
        if place is not None:
            self._due.add(place)

    def values(self) -> Floats:
        """The values now, in the order of the instances; not to be changed."""
        runner, expires, due = self._runner, self._expires, self._due
        now_s = runner.now_s
        while expires and expires[0][0] < now_s:
            due.add(heappop(expires)[1])
        places = sorted(due)
        due.clear()
        # One that shares devices may run others, before or after these are read.
        coupled = len(runner.device_groups) < len(runner.instances)
        for place in range(len(self._instances)) if coupled else places:
            instance = self._instances[place]
            self._values[place] = self._value(instance)
            if instance.decode_only_until_s < INF:
                heappush(expires, (instance.decode_only_until_s, place))
        return self._values
