"""Llumnix: requests move between instances while they decode.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024),
§4.2 and §4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ...predictors.specs import LinkSpec
from ..core.cluster_policy import HOLD, Action, ClusterControl, ClusterPolicy, Instead, View
from ..core.instance import Site
from ..core.links import Links
from ..core.policy import knob
from ..core.release import Release
from ..core.state import Phase, RequestState
from .shared.disaggregated import KvNetwork, Promised, has_room, link_between, needed_blocks
from .shared.instance_load import waiting_tokens


@dataclass(frozen=True)
class Llumnix(ClusterPolicy):
    """Freeness F = (M - sum of V) / B: KV tokens that are free and that nobody who waits needs, for
    each request in the batch: the iterations that memory lasts for (§4.4.1).

    A new request goes where F is greatest. Every `review_every_s`, instances below `low` are paired
    with instances above `high`, the extremes first, and each pair moves one request: of those that
    decode, the one with the shortest KV, if the target has room for it. KV is copied while the
    request goes on decoding; only what was computed meanwhile is copied while it stands still.

    Deviates: no priorities, no draining of instances that are to be shut down; all who wait count
    for V, where the paper counts the first.
    """

    low: float = knob(100.0, -100_000.0, 100_000.0)
    high: float = knob(200.0, -100_000.0, 100_000.0)
    review_every_s: float = knob(0.5, 0.01, 3600.0)
    network_gb_per_s: float = knob(0.0, 0.0, 10_000.0)

    def over(self, placement: Placement) -> LinkSpec:
        """What KV moves over."""
        return link_between(placement, self.network_gb_per_s)

    def links(self, sites: Sequence[Site]) -> Links:
        return KvNetwork(self.over(sites[0].placement))

    def new_state(self) -> Promised:
        return Promised()

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        if not cluster.up:
            return HOLD
        return max(cluster.up, key=lambda s: (freeness(s), -s.index))

    def returned(self, release: Release, cluster: View) -> Site | Instead:
        return self.dispatch(release.request, cluster)

    @property
    def review_s(self) -> float:
        return self.review_every_s

    def review(self, cluster: View) -> Sequence[Action]:
        free = {site.index: freeness(site) for site in cluster.up}
        order = sorted(cluster.up, key=lambda s: (free[s.index], s.index))
        givers = [site for site in order if free[site.index] < self.low]
        takers = [site for site in reversed(order) if free[site.index] > self.high]
        promised: Promised = cluster.state
        actions: list[Action] = []
        for source, target in zip(givers, takers, strict=False):
            r = _shortest(source)
            if r is None:
                continue
            kv_tokens = source.view.kv_tokens(r)
            if has_room(kv_tokens, target, promised):
                promised.promise(r, target, needed_blocks(kv_tokens, target))
                actions.append(MigrateLive(r, source, target, promised))
        return actions


@dataclass(frozen=True)
class MigrateLive:
    """`request`, which decodes at `source`, goes on at `target`, where blocks are promised to it.

    What it has is copied first, beside its steps; then it stops, and what it has got meanwhile is
    copied. If it has ended or been preempted by then, it stays.
    """

    request: RequestState
    source: Site
    target: Site
    promised: Promised

    def carry_out(self, cluster: ClusterControl) -> None:
        if not self._decodes():
            self.promised.drop(self.request, self.target)
            return
        kv_tokens = self.source.view.kv_tokens(self.request)
        ends_s = cluster.links.ends_s(self.source, self.target, kv_tokens, cluster.now_s)
        cluster.at(ends_s, lambda: self._last_stage(cluster, kv_tokens))

    def _last_stage(self, cluster: ClusterControl, copied_tokens: int) -> None:
        if self._decodes() and self.target.up:
            cluster.migrate(self.request, self.source, self.target, copied_tokens=copied_tokens)
        else:
            self.promised.drop(self.request, self.target)

    def _decodes(self) -> bool:
        view, r = self.source.view, self.request
        return r.instance == self.source.index and r.phase is Phase.DECODE and view.n_decoding > 0


def freeness(site: Site) -> float:
    """F of §4.4.1, in iterations."""
    free_tokens = site.free_blocks * site.ledger.block_tokens
    return (free_tokens - waiting_tokens(site)) / max(1, site.roster.n_running)


def _shortest(site: Site) -> RequestState | None:
    view = site.view
    decoding = [r for r in view.running() if r.phase is Phase.DECODE]
    return min(decoding, key=lambda r: (view.kv_tokens(r), r.id), default=None)
