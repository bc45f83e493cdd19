"""An instance as a cluster policy sees it: up to date whenever it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from ....predictors.placement import Placement
from ....predictors.roofline import StepTime
from ....workloads.errors import SloBenchError
from ...core.device import Device, SplitStepTime
from ...core.instance import Site, Sizes
from ...core.kv_cache_manager import BlockLedger
from ...core.state import RequestState
from ...policies.shared.instance_load import compute_use, estimated, memory_use
from ..loop.instance import Instance, Movable
from ..loop.view import LoopView
from ..simulator.simulated import SimulatedInstance

_FULL_TOKENS = 2048  # of a prefill that keeps a GPU's arithmetic busy


class Clock(Protocol):
    """Whoever lets instances run."""

    now_s: float

    def bring(self, site: LazyInstance) -> None:
        """Let the instance run up to the present."""
        ...


@dataclass
class Present:
    """A clock that stands still: who looks at an instance sees it as it is."""

    now_s: float = 0.0

    def bring(self, site: LazyInstance) -> None:
        return


@dataclass(eq=False)
class Island:
    """Sites that compute on common devices, so that none may run ahead of the others."""

    index: int
    sites: list[LazyInstance] = field(default_factory=list)
    gives_back_s: float = float("inf")  # nobody here gives a request back before this

    def steady_s(self) -> float:
        """Until then nothing but decode steps happens here; see `SimulatedInstance.steady_s`."""
        steady_s = float("inf")
        for site in self.sites:
            instance = site.instance
            if not isinstance(instance, SimulatedInstance):
                return -1.0
            steady_s = min(steady_s, instance.steady_s())
        return steady_s


class LazyInstance:
    """Implements `core.instance.Site` over an `Instance` (of `loop.instance`).

    What it says of who is there, and of blocks and KV lengths while they only decode, is known
    beforehand: as long as nothing else happens (`steady_s`) the instance need not be run for it.
    """

    __slots__ = (
        "_clock",
        "_n_requests",
        "_sizes",
        "index",
        "instance",
        "island",
        "ledger",
        "number",
        "placement",
        "role",
        "seen_s",
        "steady_s",
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
        self.ledger: BlockLedger = instance.ledger
        self.index = index
        self.role = role
        self.number = number
        self.placement = placement
        self.step_time = step_time  # with all of the model on its own GPUs
        self.up = up
        self.island = Island(-1)
        self.seen_s = -1.0  # up to when it has been brought
        self.steady_s = -1.0  # until then nothing but decode steps happens
        self._n_requests = 0
        self._sizes: Sizes | None = None
        self._clock: Clock = Present()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """Its role and the number of the instance."""
        return f"{self.role or 'instance'} {self.number}"

    @property
    def sizes(self) -> Sizes:
        """What loads are reckoned by."""
        if self._sizes is None:
            place = self.placement
            self._sizes = Sizes(
                self.step_time.step_s(0, 0, ((0, _FULL_TOKENS),)) / _FULL_TOKENS,
                place.weight_bytes_per_gpu,
                place.block_bytes_per_gpu,
                place.usable_bytes_per_gpu,
            )
        return self._sizes

    def run_by(self, clock: Clock) -> None:
        """`clock` lets the instance run up to the present."""
        self._clock = clock

    def _settle(self) -> None:
        now_s = self._clock.now_s
        steady_s = self.island.steady_s()
        if steady_s < now_s:
            self._clock.bring(self)
            steady_s = max(now_s, self.island.steady_s())
        self.steady_s = steady_s
        self._n_requests = self.instance.n_requests

    @property
    def n_requests(self) -> int:
        """Who waits, runs, or is on the way here."""
        if self._clock.now_s > self.steady_s:
            self._settle()
        return self._n_requests

    @property
    def roster(self) -> LoopView:
        """Who waits, who runs, and what prompts still lack. Lengths and blocks may lag."""
        if self._clock.now_s > self.steady_s:
            self._settle()
        return self.instance.view

    @property
    def inbox(self) -> Sequence[RequestState]:
        """Requests on their way to it."""
        if self._clock.now_s > self.steady_s:
            self._settle()
        return self.instance.inbox

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken (cached but unused ones included)."""
        return self.lengths()[0]

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""
        return self.lengths()[1]

    def lengths(self) -> tuple[int, int]:
        """`free_blocks` and `decode_kv_tokens`."""
        now_s = self._clock.now_s
        if now_s > self.steady_s:
            self._settle()
        instance = self.instance
        if isinstance(instance, SimulatedInstance):
            return instance.ahead(now_s)
        return instance.view.free_blocks, instance.view.decode_kv_tokens

    @property
    def view(self) -> LoopView:
        """What a policy on the instance sees. An iteration that is under way counts as over."""
        self._clock.bring(self)
        return self.instance.view

    @property
    def ready_s(self) -> float:
        """When its next iteration may begin: now, or at the end of that which is under way."""
        self._clock.bring(self)
        return self.instance.now_s

    @property
    def queue(self) -> int:
        """Requests that wait there, or are on their way."""
        return self.roster.n_waiting + len(self.instance.inbox)

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax, with the compute of the next `window_s` seconds."""
        return compute_use(self, window_s) + memory_use(self)

    def adds(self, r: RequestState, window_s: float) -> float:
        """What `r` adds to `use`."""
        return estimated(r, self, window_s)

    @property
    def devices(self) -> Sequence[Device]:
        return self.instance.stages

    def resize(self, blocks: int) -> None:
        self.ledger.resize(blocks)
        self.steady_s = -1.0  # blocks may end sooner

    def compute_by(self, step_time: StepTime) -> None:
        self.movable.compute_by(step_time)

    def lend(self, step_time: SplitStepTime, device: Device) -> None:
        self.movable.lend(step_time, device)

    def prefills(self, now_s: float) -> bool:
        """Does it compute prompts now, or has it any to compute?"""
        roster = self.roster
        if roster.n_prefilling or roster.n_waiting or self.instance.inbox:
            return True
        return bool(self.instance.chunks) and self.instance.now_s > now_s

    @property
    def movable(self) -> Movable:
        """The instance, if its requests can go elsewhere.

        Raises:
            SloBenchError: it serves static batches, or embeds.
        """
        instance = self.instance
        if hasattr(instance, "take_out"):
            return cast("Movable", instance)
        raise SloBenchError(f"requests of {self!r} cannot go elsewhere: it runs batch by batch")


def own(site: Site) -> LazyInstance:
    """An instance that a policy names, as this engine knows it."""
    assert isinstance(site, LazyInstance)
    return site


def islands(
    sites: Sequence[LazyInstance], joined: Sequence[tuple[LazyInstance, LazyInstance]] = ()
) -> list[Island]:
    """The sites by the devices they share, and those that are `joined`; tells each its island."""
    of_device: dict[int, Island] = {}
    found: list[Island] = []
    for site in sites:
        stages = [id(stage) for stage in site.instance.stages]
        stages += [id(pair) for pair in joined if site in pair]
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
