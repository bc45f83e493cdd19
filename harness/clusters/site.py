"""An instance as a cluster policy sees it: up to date whenever it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field

from ...predictors.placement import Placement
from ...predictors.roofline import StepTime
from ...workloads.errors import SloBenchError
from ..core.state import RequestState
from ..engines.instance import Instance, Movable
from ..engines.plain import PlainInstance
from ..engines.simulated import SimulatedInstance
from ..engines.view import LoopView
from .loads import compute_use, estimated, memory_use


@dataclass(eq=False)
class Island:
    """Sites that compute on common devices, so that none may run ahead of the others."""

    index: int
    sites: list[Site] = field(default_factory=list)
    gives_back_s: float = float("inf")  # nobody here gives a request back before this


class Site:
    """A simulated instance. `number` is that of the instance, `index` that of the lane."""

    __slots__ = (
        "_bring",
        "index",
        "instance",
        "island",
        "number",
        "placement",
        "role",
        "seen_s",
        "step_time",
        "up",
    )

    def __init__(
        self,
        instance: Instance,
        index: int,
        role: str,
        number: int,
        placement: Placement,
        step_time: StepTime,
        *,
        up: bool = True,
    ) -> None:
        self.instance = instance
        self.index = index
        self.role = role
        self.number = number
        self.placement = placement
        self.step_time = step_time  # with all of the model on its own GPUs
        self.up = up
        self.island = Island(-1)
        self.seen_s = -1.0  # up to when it has been brought
        self._bring: Callable[[Site], None] = lambda site: None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """Its role and the number of the instance."""
        return f"{self.role or 'instance'} {self.number}"

    def brought_by(self, bring: Callable[[Site], None]) -> None:
        """`bring` lets the instance run up to the present."""
        self._bring = bring

    @property
    def view(self) -> LoopView:
        """What a policy on the instance sees. An iteration that is under way counts as over."""
        self._bring(self)
        return self.instance.view

    @property
    def inbox(self) -> Sized:
        """Requests on their way to it."""
        self._bring(self)
        return self.instance.inbox

    @property
    def stalled(self) -> Sized:
        """Requests that sit out."""
        self._bring(self)
        return self.instance.stalled

    @property
    def n_parked(self) -> int:
        """Requests whose KV is here and which decode elsewhere, or will."""
        self._bring(self)
        return len(self.movable.parked)

    @property
    def ready_s(self) -> float:
        """When its next iteration may begin: now, or at the end of that which is under way."""
        self._bring(self)
        return self.instance.now_s

    @property
    def queue(self) -> int:
        """Requests that wait there, or are on their way."""
        return self.view.n_waiting + len(self.inbox)

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax of BanaServe's Eq. 4-28, compute in the next `window_s` seconds."""
        return compute_use(self, window_s) + memory_use(self)

    def adds(self, r: RequestState, window_s: float) -> float:
        """What `r` adds to `use`."""
        return estimated(r, self, window_s)

    def prefills(self, now_s: float) -> bool:
        """Does it compute prompts now, or has it any to compute?"""
        view = self.view
        if view.n_prefilling or view.n_waiting or self.instance.inbox:
            return True
        return bool(self.instance.chunks) and self.instance.now_s > now_s

    @property
    def movable(self) -> Movable:
        """The instance, if its requests can go elsewhere.

        Raises:
            SloBenchError: it serves static batches, or embeds.
        """
        instance = self.instance
        if isinstance(instance, SimulatedInstance | PlainInstance):
            return instance
        raise SloBenchError(f"requests of {self!r} cannot go elsewhere: it runs batch by batch")


def islands(sites: Sequence[Site]) -> list[Island]:
    """The sites by the devices they share; tells each site its island."""
    of_device: dict[int, Island] = {}
    found: list[Island] = []
    for site in sites:
        stages = [id(stage) for stage in site.instance.stages]
        met = list(dict.fromkeys(of_device[s] for s in stages if s in of_device))
        island = met[0] if met else Island(site.index)
        if not met:
            found.append(island)
        for other in met[1:]:
            island.sites += other.sites
            found.remove(other)
            for s, of in of_device.items():
                if of is other:
                    of_device[s] = island
        island.sites.append(site)
        of_device.update((s, island) for s in stages)
    for island in found:
        island.sites.sort(key=lambda site: site.index)
        for site in island.sites:
            site.island = island
    return found
