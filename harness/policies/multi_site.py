"""Sites with instances that a WAN joins, and a router that may know how long the way is.

Not from a paper. Each site has demand of its own; a request that another site serves pays the round
trip in its TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ...workloads.errors import SloBenchError
from ..core.cluster_policy import (
    HOLD,
    ClusterPolicy,
    ClusterView,
    Role,
    RouteOutcome,
    least_loaded,
)
from ..core.instance import Instance
from ..core.policy import AnyPolicy, parameter
from ..core.state import Release, RequestState
from .shared.instance_load import ends_in_s

_SITE = "site-"
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class MultiSite(ClusterPolicy):
    """Instances at `sites` sites, as many at each as there can be; between any two a round trip
    takes `round_trip_s`.

    Of the requests a site is the origin of 1 + `imbalance` times its even share at its busiest time
    and of 1 - `imbalance` times at its quietest; the busiest time comes to one site after another
    within `period_s` (0: the first site is always the busiest). Origins are spread evenly over the
    order of the requests, the same for every system and routing.

    `routing` chooses the instance with the fewest requests at the origin (`home`) or anywhere
    (`requests`), or that with the earliest predicted end of an answer of `answer_tokens` (as in
    `mixed-gpus`), without (`step-times`) or with the round trip (`latency`).

    The way back is booked with the way there, so that an instance sees a request later by half a
    round trip than it would; the client does not.
    """

    sites: int = parameter(2, 2, 64, environment=True)
    round_trip_s: float = parameter(0.1, 0.0, 5.0, environment=True)
    imbalance: float = parameter(0.5, 0.0, 1.0, environment=True)
    period_s: float = parameter(0.0, 0.0, 86_400.0, environment=True)
    routing: str = parameter("latency", choices=("home", "requests", "step-times", "latency"))
    answer_tokens: int = parameter(200, 1, 65536, log=True)

    @property
    def least_instances(self) -> int:
        return self.sites

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        if instances < self.sites:
            raise SloBenchError(
                f"multi-site has sites = {self.sites} and {instances} instances: give at least one "
                "instance a site"
            )
        each, rest = divmod(instances, self.sites)
        return [Role(f"{_SITE}{k}", policy, each + (k < rest)) for k in range(self.sites)]

    def mechanisms(self) -> dict[str, str]:
        return {"crossings": "requests served at another site than their own"}

    def origin(self, r: RequestState) -> str:
        """The site where `r` comes from."""
        turn = r.arrival_s / self.period_s if self.period_s else 0.0
        drawn, last = r.id * _GOLDEN % 1.0, self.sites - 1
        for k in range(last):
            wave = math.cos(2 * math.pi * (turn - k / self.sites))
            drawn -= (1 + self.imbalance * wave) / self.sites
            if drawn < 0:
                return f"{_SITE}{k}"
        return f"{_SITE}{last}"

    def travel_s(self, r: RequestState, instance: Instance, cluster: ClusterView) -> float:
        return 0.0 if instance.role == self.origin(r) else self.round_trip_s

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        home = self.origin(r)
        instances = cluster.role(home) if self.routing == "home" else cluster.up
        if not instances:
            return HOLD
        if self.routing in ("home", "requests"):
            chosen = least_loaded(instances)
        else:
            chosen = min(instances, key=lambda i: (self._ends_in_s(r, i, cluster), i.index))
        if chosen.role != home:
            cluster.counters.add("crossings", r)
        return chosen

    def _ends_in_s(self, r: RequestState, instance: Instance, cluster: ClusterView) -> float:
        way_s = self.travel_s(r, instance, cluster) if self.routing == "latency" else 0.0
        return way_s + ends_in_s(r, instance, self.answer_tokens)

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        return self.route(release.request, cluster)
