"""Several instances under one router and one clock.

Co-simulation is conservative: an instance runs on alone up to the earliest moment at which
anything could be sent to it (the next arrival, or the clock of another instance that may give a
request back), so instances may leap between such moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..core.decisions import Why
from ..engines.instance import Instance
from .arrivals import INF, Arrivals
from .recorder import Recorder
from .routers import Router

Progress = Callable[[int, float], None]


class Cluster:
    """Runs a workload over instances.

    `shared`: instances compute on common devices, so that none may run ahead of the others.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        router: Router,
        arrivals: Arrivals,
        recorder: Recorder,
        *,
        shared: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._instances = instances
        self._router = router
        self._arrivals = arrivals
        self._recorder = recorder
        self._shared = shared
        self._closed = False
        self._progress = progress

    def run(self, *, closed: bool) -> None:
        """Serve everything. `closed`: some arrivals wait for answers."""
        self._closed = closed
        free = len(self._instances) == 1 or not (self._router.watches or self._shared)
        if free and not closed:
            self._run_apart()
        else:
            self._run_together()
        for instance in self._instances:
            self._collect(instance)
        self._recorder.cancelled(self._arrivals.cancelled)

    def _run_apart(self) -> None:
        """Nothing that happens on one instance matters to another: each gets long slices."""
        instances, arrivals = self._instances, self._arrivals
        while True:
            requests = arrivals.pop_slice()
            if len(instances) == 1:
                instances[0].inbox.extend(requests)
            else:
                for r in requests:
                    self._router.dispatch(r, instances).inbox.append(r)
            horizon_s = arrivals.next_s()
            for instance in instances:
                instance.run(horizon_s, False)
                self._collect(instance)
            if horizon_s == INF:
                return

    def _run_together(self) -> None:
        instances, arrivals = self._instances, self._arrivals
        steps = parked = 0
        while True:
            arrival_s = arrivals.next_s()
            ready = [i.ready_s() for i in instances]
            now_s = min(ready)
            if arrival_s <= now_s:
                if arrival_s == INF:
                    return
                r = arrivals.pop()
                instance = self._router.dispatch(r, instances)
                r.visible_s = arrival_s
                instance.inbox.append(r)
                parked = 0
                continue
            at = ready.index(now_s)
            horizon_s = arrival_s
            for k, instance in enumerate(instances):
                if k != at and ready[k] < horizon_s and self._concerns(instance):
                    horizon_s = ready[k]
            instance = instances[at]
            horizon_s = max(horizon_s, math.nextafter(now_s, INF))
            if parked > len(instances):
                # All wait and none can act: they would hand each other the least of time for ever.
                horizon_s = arrival_s
            instance.run(horizon_s, True)
            parked = parked + 1 if instance.now_s == horizon_s and not instance.idle else 0
            if instance.outbox or len(instance.finished) >= 1024:
                self._collect(instance)
            steps += 1
            if steps % 4096 == 0:
                self._report(now_s)

    def _concerns(self, instance: Instance) -> bool:
        """May what `instance` does before the next arrival matter to others?"""
        return self._shared or self._closed or instance.may_release

    def _collect(self, instance: Instance) -> None:
        recorder = self._recorder
        eventful = bool(
            self._closed or instance.measures.preemptions or instance.ledger.unit_tokens
        )
        recorder.finished(instance.finished, instance.index, eventful=eventful)
        for r in instance.finished:
            if r.notify:
                self._arrivals.ended(r.id, r.finish_s, answered=True)
        instance.finished.clear()
        for release in instance.outbox:
            if release.why is not Why.FINISH:
                recorder.gone(release)
                if release.request.notify:
                    self._arrivals.ended(release.request.id, instance.now_s, answered=False)
        instance.outbox.clear()
        self._report(instance.now_s)

    def _report(self, now_s: float) -> None:
        if self._progress is not None:
            self._progress(self._recorder.ended, now_s)
