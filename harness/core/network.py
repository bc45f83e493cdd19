"""What moves bytes between instances and hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...predictors.specs import LinkSpec
from ...workloads.errors import SloBenchError


class Link:
    """One direction of a link. It carries one transfer at a time, in the order of the requests, as
    copy engines and the queues of a network card do: the last of several transfers ends as early as
    if they had shared the bandwidth. The latency of a transfer does not block the next one.
    """

    __slots__ = ("bandwidth_bytes_per_s", "carried_bytes", "free_at_s", "latency_s")

    def __init__(self, spec: LinkSpec) -> None:
        self.bandwidth_bytes_per_s = spec.bandwidth_bytes_per_s
        self.latency_s = spec.latency_s
        self.free_at_s = 0.0
        self.carried_bytes = 0


class LinkPath:
    """Links that a transfer holds at once, as soon as all of them are free: the slowest sets the
    pace, and latencies add up.
    """

    __slots__ = ("_bytes_per_s", "_latency_s", "_links")

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._bytes_per_s = min([link.bandwidth_bytes_per_s for link in links], default=math.inf)
        self._latency_s = sum([link.latency_s for link in links])

    def send(self, moved_bytes: int, now_s: float) -> float:
        """Send `moved_bytes`; when all of it is there. Nothing to move is there at once.

        Raises:
            SloBenchError: a negative number of bytes.
        """
        if moved_bytes <= 0 or not self._links:
            if moved_bytes < 0:
                raise SloBenchError(f"a transfer must have at least 0 bytes but has {moved_bytes}")
            return now_s
        begin_s = now_s
        for link in self._links:
            if link.free_at_s > begin_s:
                begin_s = link.free_at_s
        free_at_s = begin_s + moved_bytes / self._bytes_per_s
        for link in self._links:
            link.free_at_s = free_at_s
            link.carried_bytes += moved_bytes
        return free_at_s + self._latency_s


class InstanceNetwork(Protocol):
    """What carries bytes between instances."""

    @property
    def spec(self) -> LinkSpec:
        """Specification of the slowest link between two instances."""

    def send(self, source: int, target: int, moved_bytes: int, now_s: float) -> float:
        """From one instance to another; when it is there. Within one, at once."""


class SwitchNetwork:
    """A switch between instances: each has one link out and one link in, all alike.

    The switch itself is never the narrow place. A hop has the latency of one link: it is booked
    on the way out.
    """

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._free_of_charge = LinkSpec(spec.name, spec.bandwidth_bytes_per_s, 0.0, spec.origin)
        self._out: dict[int, Link] = {}
        self._into: dict[int, Link] = {}
        self._paths: dict[tuple[int, int], LinkPath] = {}

    def out(self, instance: int) -> Link:
        """Link away from an instance."""
        link = self._out.get(instance)
        if link is None:
            link = self._out[instance] = Link(self.spec)
        return link

    def into(self, instance: int) -> Link:
        """The link from the switch to an instance."""
        link = self._into.get(instance)
        if link is None:
            link = self._into[instance] = Link(self._free_of_charge)
        return link

    def send(self, source: int, target: int, moved_bytes: int, now_s: float) -> float:
        """From one instance to another; when it is there. Within one, at once."""
        if source == target:
            return now_s
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = LinkPath((self.out(source), self.into(target)))
        return path.send(moved_bytes, now_s)

    @property
    def sent_bytes(self) -> int:
        """What has gone out of all instances."""
        return sum(link.carried_bytes for link in self._out.values())

    @property
    def received_bytes(self) -> int:
        """What has come into all instances."""
        return sum(link.carried_bytes for link in self._into.values())


class NodeNetwork:
    """Hosts that a network joins: instances of one host have links of their own to each other.

    `node_of` says on which host an instance stands; `within` is the link between GPUs of a host,
    `across` that of each instance into the network.
    """

    def __init__(self, within: LinkSpec, across: LinkSpec, node_of: Mapping[int, int]) -> None:
        self.spec = across
        self._within, self._across = SwitchNetwork(within), SwitchNetwork(across)
        self._node_of = node_of

    def send(self, source: int, target: int, moved_bytes: int, now_s: float) -> float:
        """From one instance to another; when it is there. Within one, at once."""
        near = self._node_of[source] == self._node_of[target]
        network = self._within if near else self._across
        return network.send(source, target, moved_bytes, now_s)

    @property
    def across_bytes(self) -> int:
        """What has gone from one host to another."""
        return self._across.sent_bytes
