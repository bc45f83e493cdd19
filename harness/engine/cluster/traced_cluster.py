"""A cluster that logs where every request is, for explanations.

Decisions and times equal those of the base class: each method calls the base method and records its
effect. Untraced runs pay nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...core.cluster_policy import EMBEDS, HOLD, RouteOutcome
from ...core.decisions import ReleaseReason
from ...core.instance import Instance
from ...core.state import Release, RequestState
from ..loop.traced_instance import EngineTrace, Place, Stop, TracedCounters
from .cluster import Cluster
from .lazy_instance import LazyInstance

_RETURNED = {
    ReleaseReason.OFFLOAD: "offloaded before its prefill began",
    ReleaseReason.FAIL: "its instance failed",
}
_SENT = {
    None: "on arrival",
    Place.HELD: "an instance was chosen",
    Place.INSTANCE: "the controller moved it, without KV",
    Place.PREFILLED: "it decodes where it was prefilled",
    Place.TRANSFER: "its KV has arrived",
}


class TracedCluster(Cluster):
    """A `Cluster` that keeps the stops of requests in a trace."""

    def __init__(self, *args: Any, trace: EngineTrace, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trace = trace
        self._why: dict[int, str] = {}  # requests that were given back
        self.counters = TracedCounters(self.counters, lambda: self.now_s, trace.acts)
        lanes = Counter(i.number for i in self.instances if i.role != EMBEDS)
        for i in (i for i in self.instances if i.role != EMBEDS):
            lane = f" lane {i.index % lanes[i.number]}" if lanes[i.number] > 1 else ""
            trace.names[i.index] = i.name + lane

    def _apart(self) -> bool:
        return not self._embedders and super()._apart()  # each request to one of two has a stop

    def _pair(self) -> tuple[LazyInstance, LazyInstance] | None:
        return None  # `send` is to see every request

    def send(self, r: RequestState, instance: LazyInstance, travel_s: float = 0.0) -> None:
        why = self._why.pop(r.id, "") or _SENT[self._trace.last_place(r.id)]
        name = self._trace.names[instance.index] if instance.role != EMBEDS else EMBEDS
        stop = Stop(self.now_s, Place.INSTANCE, name, why, instance.index)
        self._trace.stop(r.id, stop)
        super().send(r, instance, travel_s)

    def _given_back(self, release: Release) -> None:
        self._why[release.request.id] = _RETURNED[release.reason]
        super()._given_back(release)

    def _sent(self, r: RequestState, answer: Instance | RouteOutcome) -> None:
        if answer is HOLD and self._trace.last_place(r.id) is not Place.HELD:
            why = self._why.pop(r.id, "") or "no instance was chosen"
            self._trace.stop(r.id, Stop(self.now_s, Place.HELD, "controller", why))
        super()._sent(r, answer)

    def _process(self, release: Release, instance: LazyInstance, version: int) -> None:
        r = release.request
        handed = release.reason is ReleaseReason.HAND_OVER and r.version == version
        if handed and r in instance.movable.in_transfer:
            stop = Stop(release.time_s, Place.PREFILLED, instance.name, "its prompt is computed")
            self._trace.stop(r.id, stop)
        super()._process(release, instance, version)

    def _transfer(
        self,
        r: RequestState,
        source: LazyInstance,
        target: LazyInstance,
        begin_s: float,
        copied_tokens: int = 0,
    ) -> None:
        prefilled = self._trace.last_place(r.id) is Place.PREFILLED
        why = f"{target.name} has room" if prefilled else "the controller migrates it"
        name = f"{source.name} to {target.name}"
        self._trace.stop(r.id, Stop(begin_s, Place.TRANSFER, name, why))
        super()._transfer(r, source, target, begin_s, copied_tokens)
