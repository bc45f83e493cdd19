"""Embedding requests go to embedders, all others to language models."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.state import RequestState
from .policy import Instead, Routed, View
from .routers import load
from .site import Site

EMBEDS = "embedder"  # the role


@dataclass(frozen=True)
class ByKind(Routed):
    """A router for language models; embedders get what they embed, the fewest first."""

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        if not r.texts:
            return self.router.dispatch(r, cluster.role(""))
        return min(cluster.role(EMBEDS), key=lambda site: (load(site), site.index))
