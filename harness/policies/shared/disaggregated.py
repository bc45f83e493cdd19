"""Prompts on some instances, answers on others: what all such systems share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....predictors.placement import Placement
from ....predictors.specs import LinkSpec
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import HOLD, ClusterPolicy, Instead, Role, View
from ...core.instance import Site
from ...core.kv_cache_manager import BlockLedger
from ...core.links import Links
from ...core.network import Network
from ...core.policy import AnyPolicy, knob
from ...core.release import Release
from ...core.routing import least_loaded
from ...core.state import Phase, RequestState

PREFILL, DECODE = "prefill", "decode"
NETWORK_LATENCY_S = 10e-6  # of an RDMA network


class KvNetwork:
    """KV over a network: every GPU of an instance sends its part over a link of its own."""

    def __init__(self, over: LinkSpec) -> None:
        self.network = Network(over)

    def ends_s(self, source: Site, target: Site, kv_tokens: int, now_s: float) -> float:
        return self.network.send(
            source.number, target.number, self.bytes_on_a_link(source, target, kv_tokens), now_s
        ).end_s

    @staticmethod
    def bytes_on_a_link(source: Site, target: Site, kv_tokens: int) -> int:
        """What the busiest link carries: the side with fewer GPUs sets it."""
        gpus = min(source.placement.gpus, target.placement.gpus)
        return kv_tokens * source.placement.kv_bytes_per_token // gpus


@dataclass
class Promised:
    """Blocks that are set aside at instances for requests that have not entered there yet."""

    at: dict[int, dict[RequestState, int]] = field(default_factory=dict)  # in order
    total: dict[int, int] = field(default_factory=dict)

    def blocks(self, site: Site) -> int:
        """Those of one instance. Who has entered, or has none to bring, needs them no longer; that
        is noticed when all who were promised some before have, too.
        """
        promised = self.at.get(site.index)
        while promised:
            r = next(iter(promised))
            if not _settled(r, site):
                return self.total[site.index]
            self.drop(r, site)
        return 0

    def promise(self, r: RequestState, site: Site, blocks: int) -> None:
        """Set aside so many for `r`."""
        self.at.setdefault(site.index, {})[r] = blocks
        self.total[site.index] = self.total.get(site.index, 0) + blocks

    def drop(self, r: RequestState, site: Site) -> None:
        """`r` does not come."""
        self.total[site.index] -= self.at[site.index].pop(r, 0)


def _settled(r: RequestState, site: Site) -> bool:
    entered = r.instance == site.index and r.phase is not Phase.RESIDENT
    return entered or r.phase in (Phase.WAITING, Phase.DONE)


@dataclass(frozen=True)
class Apart(ClusterPolicy):
    """Prefill instances hand each request over to a decode instance that has room for its KV.

    With several times as many instances as `prefill_instances` and `decode_instances` together,
    both kinds are multiplied; with `decode_instances` 0 all instances that do not prefill decode.
    KV goes over a link of `network_gb_per_s` from each GPU and to each (0: the GPUs' own link to
    their peers), one transfer at a time. A request keeps its blocks on the prefill instance until
    the transfer ends, and the transfer begins when a decode instance has room: full decode
    instances hold up prefill.
    """

    prefill_instances: int = knob(1, 1, 64)
    decode_instances: int = knob(1, 0, 64)
    network_gb_per_s: float = knob(0.0, 0.0, 10_000.0)

    @property
    def least_instances(self) -> int:
        return self.prefill_instances + max(1, self.decode_instances)

    def counts(self, instances: int) -> tuple[int, int]:
        """How many prefill and how many decode.

        Raises:
            SloBenchError: the knobs do not make so many.
        """
        prefill, decode = self.prefill_instances, self.decode_instances
        if not decode:
            if instances <= prefill:
                raise SloBenchError(
                    f"{instances} instances with prefill_instances {prefill} leave none to decode"
                )
            return prefill, instances - prefill
        times, rest = divmod(instances, prefill + decode)
        if rest or not times:
            raise SloBenchError(
                f"{instances} instances are no multiple of prefill_instances {prefill} + "
                f"decode_instances {decode}; set those, or decode_instances 0 for all the others"
            )
        return times * prefill, times * decode

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        prefill, decode = self.counts(instances)
        made = self.ledgers(placement, instances)
        return (
            Role(PREFILL, self.prefill_policy(policy), prefill, hands_over=True, ledger=made),
            Role(DECODE, policy, decode, ledger=made),
        )

    def prefill_policy(self, policy: AnyPolicy) -> AnyPolicy:
        """What prefill instances decide by."""
        return policy

    def ledgers(self, placement: Placement, instances: int) -> Callable[..., BlockLedger]:
        """What makes the ledgers of one run."""
        return BlockLedger

    def over(self, placement: Placement) -> LinkSpec:
        """What KV moves over."""
        return link_between(placement, self.network_gb_per_s)

    def links(self, sites: Sequence[Site]) -> Links:
        return KvNetwork(self.over(sites[0].placement))

    def new_state(self) -> Promised:
        return Promised()

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        """Prefill where the fewest are."""
        sites = cluster.role(PREFILL)
        return least_loaded(sites) if sites else HOLD

    def returned(self, release: Release, cluster: View) -> Site | Instead:
        """Whom an instance has lost is prefilled again."""
        return self.dispatch(release.request, cluster)

    def hand_over(self, r: RequestState, source: Site, cluster: View) -> Site | Instead:
        """Decode where the fewest are, among those that have room."""
        sites = cluster.role(DECODE)
        if sites and has_room(r.kv_tokens, first := least_loaded(sites), cluster.state):
            return self.handed(r, first, cluster)
        for site in sorted(sites, key=lambda s: (s.n_requests, s.index)):
            if has_room(r.kv_tokens, site, cluster.state):
                return self.handed(r, site, cluster)
        return HOLD

    def handed(self, r: RequestState, site: Site, cluster: View) -> Site:
        """`site`, with blocks promised to `r` there."""
        promised: Promised = cluster.state
        promised.promise(r, site, needed_blocks(r.kv_tokens, site))
        return site


def needed_blocks(kv_tokens: int, site: Site) -> int:
    """Blocks for so much KV and the next token."""
    return site.ledger.blocks(kv_tokens + 1)


def has_room(kv_tokens: int, site: Site, promised: Promised) -> bool:
    """Could somebody with so much KV enter there if nobody else came?"""
    return needed_blocks(kv_tokens, site) + promised.blocks(site) <= site.free_blocks


def link_between(placement: Placement, network_gb_per_s: float) -> LinkSpec:
    """The network, or (0) what joins the GPUs of one host."""
    if not network_gb_per_s:
        return placement.peer_link
    return LinkSpec("network", network_gb_per_s * 1e9, NETWORK_LATENCY_S)
