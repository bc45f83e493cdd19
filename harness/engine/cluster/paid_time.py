"""How long the GPUs of instances are paid for, where instances start and stop with the load."""

from __future__ import annotations

from collections.abc import Sequence

from .lazy_instance import LazyInstance


class PaidTime:
    """An instance is paid for from the decision to start it until it has served its last request
    after it was stopped.
    """

    def __init__(self, instances: Sequence[LazyInstance]) -> None:
        self._since_s = {instance: 0.0 for instance in instances if not instance.spare}
        self._stopped_s: dict[LazyInstance, float] = {}
        self._closed_s = dict.fromkeys(instances, 0.0)

    def starts(self, instance: LazyInstance, now_s: float) -> None:
        """`instance` is paid for from now on; it serves no request of before."""
        if instance in self._stopped_s:
            self._closed_s[instance] += self._open_s(instance, now_s)
            del self._stopped_s[instance]
        self._since_s[instance] = now_s

    def goes_on(self, instance: LazyInstance) -> None:
        """`instance` was stopped, but accepts requests again before it has served all."""
        self._stopped_s.pop(instance, None)

    def stops(self, instance: LazyInstance, now_s: float) -> None:
        """`instance` accepts no requests any more."""
        self._stopped_s[instance] = now_s

    def total_gpu_s(self, end_s: float) -> float:
        """GPU seconds of all instances until `end_s`, the end of the run."""
        return sum(
            (closed_s + self._open_s(instance, end_s)) * instance.placement.gpus
            for instance, closed_s in self._closed_s.items()
        )

    def _open_s(self, instance: LazyInstance, end_s: float) -> float:
        if instance not in self._since_s:
            return 0.0
        if instance in self._stopped_s:
            # The clock of an instance without requests stands at the end of its last one.
            end_s = max(self._stopped_s[instance], instance.engine.now_s)
        return max(0.0, end_s - self._since_s[instance])
