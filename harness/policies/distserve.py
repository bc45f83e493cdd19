"""DistServe: prompts on some instances, answers on others, KV goes over between them.

Source: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving" (OSDI 2024), §3, §4.1 (Algorithm 1), §4.2 (Algorithm 2) and §4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...predictors.placement import TP_DEGREES, Placement
from ...predictors.specs import LinkSpec
from ...workloads.errors import SloBenchError
from ..core.cluster_policy import ClusterView, OnServers, Role, RouteOutcome
from ..core.instance import Instance, Links
from ..core.network import NodeNetwork
from ..core.phase_capacity import PhaseCapacity
from ..core.policy import AnyPolicy, parameter
from ..core.state import RequestState
from .shared.disaggregated import DECODE, DisaggregatedPolicy
from .shared.kv_transfer import KvNetwork


@dataclass(frozen=True)
class DistServe(DisaggregatedPolicy):
    """First come, first served everywhere; each request goes where the fewest are (§4.3).

    `prefill_tp` and `decode_tp` (0, the default): each phase has the tensor-parallel degree that
    is chosen with the ratio, for the GPUs of the run (Algorithm 1); where the ratio is set, the
    degree of the run. `prefill_instances` and `decode_instances` count instances of these degrees.

    `nodes`: the instances of each phase are spread evenly over that many hosts; KV goes between
    hosts over `network_gb_per_s`, within one over the GPUs' own link. `near_first`: an
    answer is decoded on the host of its prefill where there is room (§4.2 keeps it there).

    Deviates: every instance schedules as vLLM does, where the paper batches prompts up to a length
    that saturates the GPU. The goodput of a phase is estimated by the paper's queueing formulas,
    not simulated; pipeline stages are those of the run. There is one real server of each kind
    unless more are set, all of one degree.
    """

    executed = True

    prefill_tp: int = parameter(0, choices=(0, *TP_DEGREES))
    decode_tp: int = parameter(0, choices=(0, *TP_DEGREES))
    nodes: int = parameter(1, 1, 64, environment=True)
    near_first: bool = parameter(True)

    @property
    def least_instances(self) -> int:
        prefill = max(1, self.prefill_instances) * max(1, self.prefill_tp)
        return prefill + max(1, self.decode_instances) * max(1, self.decode_tp)

    def for_load(self, capacity: PhaseCapacity, instances: int) -> Self:
        if self.prefill_instances or self.decode_instances or instances < 2:
            return self
        split = capacity.split(instances, self.prefill_tp, self.decode_tp)
        if split is None:
            return self
        return replace(
            self,
            prefill_instances=split.prefill_instances,
            prefill_tp=split.prefill_tp,
            decode_tp=split.decode_tp,
        )

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        degrees = self.prefill_tp or placement.tp, self.decode_tp or placement.tp
        if set(degrees) == {placement.tp}:
            return super().layout(policy, placement, instances)
        prefill, decode = self._counts_by_tp(instances * placement.tp, *degrees)
        counted = replace(
            self, prefill_instances=prefill, decode_instances=decode, prefill_tp=0, decode_tp=0
        )
        roles = counted.layout(policy, placement, prefill + decode)
        return tuple(
            role if tp == placement.tp else replace(role, placement=replace(placement, tp=tp))
            for role, tp in zip(roles, degrees, strict=True)
        )

    def links(self, instances: Sequence[Instance]) -> Links:
        if self.nodes == 1:
            return super().links(instances)
        within = instances[0].placement.peer_link
        across = self.over(instances[0].placement)
        return NodeKvNetwork(within, across, _nodes(instances, self.nodes))

    def decode_instance(
        self, r: RequestState, source: Instance, cluster: ClusterView
    ) -> Instance | RouteOutcome:
        if self.nodes == 1 or not self.near_first:
            return super().decode_instance(r, source, cluster)
        network = cluster.links
        assert isinstance(network, NodeKvNetwork)
        near = [i for i in cluster.role(DECODE) if network.near(i, source)]
        near.sort(key=lambda i: (i.n_requests, i.index))
        return self.handed(r, near, cluster) or super().decode_instance(r, source, cluster)

    def _counts_by_tp(self, gpus: int, prefill_tp: int, decode_tp: int) -> tuple[int, int]:
        """Numbers of prefill and decode instances on `gpus` GPUs of each pipeline stage."""
        prefill, decode = self.prefill_instances, self.decode_instances
        if prefill and decode:
            times = gpus // (prefill * prefill_tp + decode * decode_tp)
            prefill, decode = times * prefill, times * decode
        elif decode:
            prefill = (gpus - decode * decode_tp) // prefill_tp
        else:
            prefill = prefill or max(1, gpus // 2 // prefill_tp)
            decode = (gpus - prefill * prefill_tp) // decode_tp
        if min(prefill, decode) < 1 or prefill * prefill_tp + decode * decode_tp != gpus:
            raise SloBenchError(
                f"{gpus} GPUs cannot be shared out to prefill_instances {self.prefill_instances} "
                f"of tp {prefill_tp} and decode_instances {self.decode_instances} of tp "
                f"{decode_tp} (0: all the others); change one of these or the number of GPUs"
            )
        return prefill, decode

    def on_servers(self, policy: AnyPolicy) -> OnServers:
        alike = "its servers have one tensor-parallel degree (tp): leave prefill_tp, decode_tp out"
        stand = "real servers stand where they are: leave nodes out"
        refusal = alike if self.prefill_tp or self.decode_tp else stand if self.nodes > 1 else ""
        return self.split_servers(refusal)


class NodeKvNetwork(KvNetwork):
    """KV between instances on several hosts."""

    def __init__(self, within: LinkSpec, across: LinkSpec, node_of: dict[int, int]) -> None:
        super().__init__(across, NodeNetwork(within, across, node_of))
        self._node_of = node_of

    def near(self, instance: Instance, other: Instance) -> bool:
        """Whether they stand on one host."""
        return self._node_of[instance.number] == self._node_of[other.number]


def _nodes(instances: Sequence[Instance], nodes: int) -> dict[int, int]:
    """The host of each instance by its number: those of each role are spread evenly."""
    of_role: dict[str, list[int]] = {}
    for instance in instances:
        numbers = of_role.setdefault(instance.role, [])
        if instance.number not in numbers:
            numbers.append(instance.number)
    return {
        number: place * nodes // len(numbers)
        for numbers in of_role.values()
        for place, number in enumerate(numbers)
    }
