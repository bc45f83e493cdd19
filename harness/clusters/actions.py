"""What a controller can do on its own account (`ClusterPolicy.review`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.state import RequestState
from .site import Site

if TYPE_CHECKING:
    from .cluster import Cluster


@dataclass(frozen=True)
class MigrateRequest:
    """`request` leaves `source` between two iterations and goes on at `target`."""

    request: RequestState
    source: Site
    target: Site

    def carry_out(self, cluster: Cluster) -> None:
        cluster.migrate(self.request, self.source, self.target)


@dataclass(frozen=True)
class SendHeld:
    """A request from the controller's own queue goes to `target`."""

    request: RequestState
    target: Site

    def carry_out(self, cluster: Cluster) -> None:
        cluster.send(self.request, self.target)
