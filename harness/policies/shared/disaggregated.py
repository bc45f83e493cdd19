"""Prompts on some instances, answers on others: what all such systems share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ....predictors.placement import Placement
from ....predictors.specs import LinkSpec
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import (
    HOLD,
    ClusterPolicy,
    ClusterView,
    OnServers,
    Role,
    RouteOutcome,
    ServerRole,
    fewest_requests,
)
from ...core.instance import Instance, Links
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.phase_capacity import PhaseCapacity
from ...core.policy import AnyPolicy, parameter
from ...core.state import Release, RequestState
from .kv_transfer import KvNetwork, ReservedBlocks

PREFILL, DECODE = "prefill", "decode"
NETWORK_LATENCY_S = 10e-6  # of an RDMA network


class KvTransferPolicy(ClusterPolicy):
    """KV moves between instances over a link of `network_gb_per_s` from each GPU and to each (0:
    the GPUs' own link to their peers), one transfer at a time; the target reserves blocks.
    """

    network_gb_per_s: float

    def over(self, placement: Placement) -> LinkSpec:
        """Link of KV transfers: the network, or (0) what joins the GPUs of one host."""
        if not self.network_gb_per_s:
            return placement.peer_link
        return LinkSpec("network", self.network_gb_per_s * 1e9, NETWORK_LATENCY_S)

    def links(self, instances: Sequence[Instance]) -> Links:
        return KvNetwork(self.over(instances[0].placement))

    def new_state(self) -> ReservedBlocks:
        return ReservedBlocks()

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        """Prefill a request again if its instance has failed."""
        return self.route(release.request, cluster)


@dataclass(frozen=True)
class DisaggregatedPolicy(KvTransferPolicy):
    """Prefill instances hand each request over to a decode instance that has room for its KV.

    `prefill_instances` and `decode_instances` 0 (the default): the ratio at which the slower phase
    carries the most, by the estimated load of the workload (`PhaseCapacity`). This is how DistServe
    (§4.1), Splitwise (§4.4) and their successors size their pools. One of them 0: all the other
    instances. Neither 0: with several times as many instances as both together, both are
    multiplied.
    KV goes over a link of `network_gb_per_s` from each GPU and to each (0: the GPUs' own link to
    their peers), one transfer at a time. A request keeps its blocks on the prefill instance until
    the transfer ends, and the transfer begins when a decode instance has room: full decode
    instances hold up prefill.
    """

    prefill_instances: int = parameter(0, 0, 1024)
    decode_instances: int = parameter(0, 0, 1024)
    network_gb_per_s: float = parameter(0.0, 0.0, 10_000.0, environment=True)

    @property
    def least_instances(self) -> int:
        return max(1, self.prefill_instances) + max(1, self.decode_instances)

    def for_load(self, capacity: PhaseCapacity, instances: int) -> Self:
        if self.prefill_instances or self.decode_instances or instances < 2:
            return self
        return replace(self, prefill_instances=capacity.prefill_instances(instances))

    def mechanisms(self) -> dict[str, str]:
        return {"handovers": "requests whose KV went from a prefill to a decode instance"}

    def counts(self, instances: int) -> tuple[int, int]:
        """Numbers of prefill and of decode instances; half and half where both are 0, and
        `for_load` has not been called.

        Raises:
            SloBenchError: the parameters do not add up to `instances`.
        """
        prefill, decode = self.prefill_instances, self.decode_instances
        if prefill and decode:
            times, rest = divmod(instances, prefill + decode)
            if rest or not times:
                raise SloBenchError(
                    f"{instances} instances are no multiple of prefill_instances {prefill} + "
                    f"decode_instances {decode}; set those, or one of them to 0 for all the others"
                )
            return times * prefill, times * decode
        if instances <= max(1, prefill or decode):
            setting = f"prefill_instances {prefill}" if prefill else f"decode_instances {decode}"
            raise SloBenchError(
                f"{instances} instances with {setting} leave none to "
                f"{DECODE if prefill else PREFILL}"
            )
        prefill = prefill or (instances - decode if decode else instances // 2)
        return prefill, instances - prefill

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        prefill, decode = self.counts(instances)
        make_manager = self.kv_managers(placement, instances)
        return (
            Role(PREFILL, policy, prefill, prefill_only=True, kv_manager=make_manager),
            Role(DECODE, policy, decode, kv_manager=make_manager),
        )

    def split_servers(self, refusal: str, settled: tuple[str, ...] = ()) -> OnServers:
        """Real servers of either phase, one where no number is set; `refusal` if they cannot be."""
        return OnServers(
            (
                ServerRole(PREFILL, max(1, self.prefill_instances)),
                ServerRole(DECODE, max(1, self.decode_instances)),
            ),
            ("prefill_instances", "decode_instances"),
            splits=True,
            settled=settled,
            refusals={"": refusal} if refusal else {},
        )

    def kv_managers(self, placement: Placement, instances: int) -> Callable[..., KVCacheManager]:
        """What makes the KV cache managers of one run."""
        return KVCacheManager

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        """Choose the prefill instance with the fewest requests."""
        return fewest_requests(cluster, PREFILL) or HOLD

    def decode_instance(
        self, r: RequestState, source: Instance, cluster: ClusterView
    ) -> Instance | RouteOutcome:
        """Decode where the fewest are, among those that have room."""
        first = fewest_requests(cluster, DECODE)
        if first is None:
            return HOLD
        chosen = self.handed(r, (first,), cluster)
        if chosen is None:
            by_requests = sorted(cluster.role(DECODE), key=lambda s: (s.n_requests, s.index))
            chosen = self.handed(r, by_requests, cluster)
        return chosen or HOLD

    def handed(
        self, r: RequestState, instances: Sequence[Instance], cluster: ClusterView
    ) -> Instance | None:
        """The first of `instances` that has room for the KV of `r`, with blocks reserved there."""
        reserved: ReservedBlocks = cluster.state
        for instance in instances:
            if reserved.reserve(r, r.kv_tokens, instance):
                cluster.counters.add("handovers", r)
                return instance
        return None
