"""Live migration: KV is copied while its request goes on decoding.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024),
§4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.state import Phase, RequestState
from ...policies.shared.disaggregated import Promised
from .instance import Site

if TYPE_CHECKING:
    from .cluster import Cluster


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

    def carry_out(self, cluster: Cluster) -> None:
        if not self._decodes():
            self.promised.drop(self.request, self.target)
            return
        kv_tokens = self.source.view.kv_tokens(self.request)
        ends_s = cluster.links.ends_s(self.source, self.target, kv_tokens, cluster.now_s)
        cluster.at(ends_s, lambda: self._last_stage(cluster, kv_tokens))

    def _last_stage(self, cluster: Cluster, copied_tokens: int) -> None:
        if self._decodes() and self.target.up:
            cluster.migrate(self.request, self.source, self.target, copied_tokens=copied_tokens)
        else:
            self.promised.drop(self.request, self.target)

    def _decodes(self) -> bool:
        view, r = self.source.view, self.request
        return r.instance == self.source.index and r.phase is Phase.DECODE and view.n_decoding > 0
