"""An instance as a cluster policy sees it: up to date whenever it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from ....predictors.placement import Placement
from ....predictors.roofline import StepTime
from ....workloads.errors import SloBenchError
from ...core.device import SplitStepTime, StageDevice
from ...core.instance import Instance, Sizes
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.kv.kv_store_manager import StoreKVCacheManager
from ...core.module_moves import Module
from ...core.state import WAITING, RequestState
from ...policies.shared.instance_load import compute_use, estimated, memory_use
from ..loop.engine_instance import EngineInstance, Movable
from ..loop.loop_view import LoopView
from ..simulator.simulated import SimulatedInstance

INF: Final = float("inf")
_FULL_TOKENS: Final = 2048  # of a prefill that keeps a GPU's arithmetic busy


class ClusterClock(Protocol):
    """The clock that advances instances."""

    now_s: float

    def bring(self, instance: LazyInstance) -> None:
        """Let the instance run up to the present."""

    def touch(self, instance: LazyInstance) -> None:
        """The instance shows something else now."""


@dataclass
class FrozenClock:
    """A clock that stands still: an instance is read in its present state."""

    now_s: float = 0.0

    def bring(self, instance: LazyInstance) -> None:
        return

    def touch(self, instance: LazyInstance) -> None:
        return


@dataclass(eq=False)
class DeviceGroup:
    """Instances that compute on common devices, so that none may run ahead of the others, or look
    into a common KV store, which they do in the order in which their iterations begin.
    """

    index: int
    instances: list[LazyInstance] = field(default_factory=list)
    earliest_release_s: float = float("inf")  # no request is released before this
    changed: bool = False  # since `earliest_release_s` was asked for

    def decode_only_until_s(self) -> float:
        """Until then nothing but decode steps happens here; see
        `SimulatedInstance.decode_only_until_s`. Below any time if that is not known, or if one of
        several has requests on their way.
        """
        instances = self.instances
        if len(instances) == 1:
            return instances[0].own_decode_only_s()
        decode_only_until_s = INF
        for instance in instances:
            if instance.engine.inbox:
                return -1.0
            own_s = instance.own_decode_only_s()
            if own_s < decode_only_until_s:
                decode_only_until_s = own_s
        return decode_only_until_s


class LazyInstance:
    """Implements `core.instance.Instance` over an `EngineInstance` (of `loop.instance`).

    Its requests, and its blocks and KV lengths while they only decode, are known beforehand: until
    `decode_only_until_s` the instance need not be run to answer for them.
    """

    __slots__ = (
        "_clock",
        "_movable",
        "_n_requests",
        "_own_decode_only_s",
        "_sizes",
        "alone",
        "bounds_known",
        "decode_only_until_s",
        "device_group",
        "earliest_s",
        "engine",
        "index",
        "kv_manager",
        "number",
        "placement",
        "role",
        "seen_s",
        "shares_devices",
        "shares_stages",
        "simulated",
        "spare",
        "step_time",
        "touched",
        "up",
    )

    def __init__(
        self,
        engine: SimulatedInstance | EngineInstance,
        index: int,
        role: str,
        number: int,
        placement: Placement,
        step_time: StepTime,
        *,
        up: bool = True,
        spare: bool = False,
    ) -> None:
        self.engine = engine
        self.simulated = engine if isinstance(engine, SimulatedInstance) else None
        self._movable = cast("Movable", engine) if hasattr(engine, "take_out") else None
        self.kv_manager: KVBlocks = engine.kv_manager
        self.index = index
        self.role = role
        self.number = number
        self.placement = placement
        self.step_time = step_time  # with all of the model on its own GPUs
        self.up = up
        self.spare = spare  # off until a policy starts it
        self.device_group = DeviceGroup(-1)
        self.alone = False  # in its device group
        self.shares_devices = self.shares_stages = False
        self.seen_s = -1.0  # up to when it has been brought
        self.decode_only_until_s = -1.0  # until then nothing but decode steps happens
        self.earliest_s = self._own_decode_only_s = -1.0  # see `find_bounds`
        self.bounds_known = False  # nothing has changed since these two were asked for
        self.touched = False  # it is on the list `touched` of its clock
        self._n_requests = 0
        self._sizes: Sizes | None = None
        self._clock: ClusterClock = FrozenClock()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """Its role and the number of the instance."""
        return f"{self.role or 'instance'} {self.number}"

    @property
    def s_per_token(self) -> float:
        """Compute time of a token of a prompt that keeps the GPUs' arithmetic busy."""
        return self.step_time.step_s(0, 0, ((0, _FULL_TOKENS),)) / _FULL_TOKENS

    @property
    def sizes(self) -> Sizes:
        """Constants that loads are computed from."""
        if self._sizes is None:
            place = self.placement
            self._sizes = Sizes(
                self.s_per_token,
                place.weight_bytes_per_gpu,
                place.block_bytes_per_gpu,
                place.usable_bytes_per_gpu,
            )
        return self._sizes

    def turn_s(self) -> float:
        """Lower bound of the begin of its next iteration that concerns others of its group: any, if
        it shares devices; else one that may look into the KV store, which decode steps do not.
        """
        engine = self.engine
        return engine.ready_s() if self.shares_devices else engine.next_lookup_s()

    def run_by(self, clock: ClusterClock) -> None:
        """`clock` lets the instance run up to the present."""
        self._clock = clock

    def follows(self) -> bool:
        """A request is on its way behind others. Whether nothing but the number of requests
        changes by that.
        """
        if self.bounds_known:
            self._n_requests += 1
            return True
        return False

    def expects(self, visible_s: float) -> bool:
        """The first request is on its way, to be seen at that time. Whether it is known what that
        changes.
        """
        if self.simulated is None or not self.bounds_known:
            return False
        self.earliest_s, self._own_decode_only_s = self.simulated.bounds_with(
            visible_s, self.earliest_s, self._n_requests
        )
        if self.alone:
            self.decode_only_until_s = self._own_decode_only_s
        else:
            for neighbour in self.device_group.instances:
                neighbour.decode_only_until_s = -1.0
        self._n_requests += 1
        return True

    def heeds_room(self) -> bool:
        """Whether blocks that become free may change what it does next: it waits for some, or its
        decodes may need them.
        """
        simulated = self.simulated
        if simulated is None:
            return True
        return bool(simulated.decoding) or simulated.blocked_till_s > simulated.now_s

    def own_decode_only_s(self) -> float:
        """Until when nothing but decode steps happens, as far as it depends on this one."""
        if not self.bounds_known:
            self.find_bounds()
        elif self.simulated is not None and self.simulated.owes():  # since then, perhaps
            return self.simulated.now_s
        return self._own_decode_only_s

    def find_bounds(self) -> float:
        """Ask the engine again how far it can be known: when it may release a request first."""
        if self.simulated is None:
            self.earliest_s, self._own_decode_only_s = self.engine.earliest_release_s(), -1.0
            self._n_requests = self.engine.n_requests
        else:
            bounds = self.simulated.bounds()
            self.earliest_s, self._own_decode_only_s, self._n_requests = bounds
            self.bounds_known = True
            if self.alone:
                self.decode_only_until_s = self._own_decode_only_s
        return self.earliest_s

    def _settle(self) -> None:
        device_group, now_s = self.device_group, self._clock.now_s
        if self.alone and self.bounds_known:
            self.decode_only_until_s = self._own_decode_only_s
        else:
            self.decode_only_until_s = device_group.decode_only_until_s()
        if self.decode_only_until_s < now_s:
            self._clock.bring(self)
            self.decode_only_until_s = max(now_s, self.own_decode_only_s()) if self.alone else now_s
        if not self.bounds_known:
            self.find_bounds()

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are in transit to it."""
        if self._clock.now_s > self.decode_only_until_s:
            self._settle()
        return self._n_requests

    @property
    def snapshot(self) -> LoopView:
        """Its queues, batch and remaining prompts. Lengths and blocks may lag."""
        if self._clock.now_s > self.decode_only_until_s:
            self._settle()
        return self.engine.view

    @property
    def inbox(self) -> Sequence[RequestState]:
        """Requests on their way to it."""
        if self._clock.now_s > self.decode_only_until_s:
            self._settle()
        return self.engine.inbox

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken (cached but unused ones included)."""
        return self.lengths()[0]

    def has_free(self, blocks: int) -> bool:
        """Whether so many KV blocks can be taken."""
        now_s = self._clock.now_s
        if now_s > self.decode_only_until_s:
            self._settle()
        if self.simulated is not None:
            return self.simulated.has_free(blocks, now_s)
        return blocks <= self.engine.view.free_blocks

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""
        return self.lengths()[1]

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far, also for requests that were preempted."""
        view = self.snapshot
        unfilled = view.remaining_prefill_tokens if view.n_prefilling else 0
        return self.engine.measures.prefill_tokens - unfilled

    def lengths(self) -> tuple[int, int]:
        """`free_blocks` and `decode_kv_tokens`, read together."""
        now_s = self._clock.now_s
        if now_s > self.decode_only_until_s:
            self._settle()
        if self.simulated is not None:
            return self.simulated.ahead(now_s)
        view = self.engine.view
        return view.free_blocks, view.decode_kv_tokens

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait there or are on their way."""
        if self._clock.now_s > self.decode_only_until_s:
            self._settle()
        engine = self.engine
        if not engine.inbox:
            return engine.waiting_tokens
        coming = [r.target_tokens for r in engine.inbox if r.phase is WAITING]
        return engine.waiting_tokens + sum(coming)

    @property
    def view(self) -> LoopView:
        """What a policy on the instance sees. An iteration that is under way counts as over."""
        self._clock.bring(self)
        return self.engine.view

    @property
    def ready_s(self) -> float:
        """When its next iteration may begin: now, or at the end of that which is under way."""
        self._clock.bring(self)
        return self.engine.now_s

    @property
    def queue(self) -> int:
        """Requests that wait there, or are on their way."""
        return self.snapshot.n_waiting + len(self.engine.inbox)

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax, with the compute of the next `window_s` seconds."""
        return compute_use(self, window_s) + memory_use(self)

    def adds(self, r: RequestState, window_s: float) -> float:
        """Share that `r` adds to `use`."""
        return estimated(r, self, window_s)

    @property
    def devices(self) -> Sequence[StageDevice]:
        return self.engine.stages

    def resize(self, blocks: int) -> None:
        self.kv_manager.resize(blocks)
        self.bounds_known = False  # blocks may end sooner
        self.decode_only_until_s = -1.0
        self._clock.touch(self)

    def bring_home(self, pause_s: float) -> None:
        self.movable.bring_home(self.step_time, pause_s)

    def offload(
        self,
        module: Module,
        units: int,
        helper: Instance,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        self.movable.offload(module, units, own(helper).movable, step_time, pause_s)

    def prefills(self, now_s: float) -> bool:
        """Does it compute prompts now, or has it any to compute?"""
        snapshot = self.snapshot
        if snapshot.n_prefilling or snapshot.n_waiting or self.engine.inbox:
            return True
        return bool(self.engine.chunks) and self.engine.now_s > now_s

    @property
    def movable(self) -> Movable:
        """The instance, if its requests can move to others.

        Raises:
            SloBenchError: it serves static batches, or embeds.
        """
        if self._movable is not None:
            return self._movable
        raise SloBenchError(
            f"requests of {self!r} cannot move to another instance: it serves static batches"
        )


def own(instance: Instance) -> LazyInstance:
    """An instance that a policy names, as this engine knows it."""
    assert isinstance(instance, LazyInstance)
    return instance


def device_groups(
    instances: Sequence[LazyInstance], joined: Sequence[tuple[LazyInstance, LazyInstance]] = ()
) -> list[DeviceGroup]:
    """The instances by the devices and the KV store they share, and those that are `joined`; tells
    each its device group.
    """
    users: dict[int, list[LazyInstance]] = {}  # of a device, a store, or a pair's link
    for instance in instances:
        shared = [id(stage) for stage in instance.engine.stages]
        shared += [-1 - position for position, pair in enumerate(joined) if instance in pair]
        for user in shared:
            users.setdefault(user, []).append(instance)
    for instance in instances:
        instance.shares_devices = instance.shares_stages = False
    for user, group in users.items():
        for instance in group if len(group) > 1 else ():
            instance.shares_devices = True
            instance.shares_stages |= user >= 0
    for instance in instances:
        if isinstance(instance.kv_manager, StoreKVCacheManager):
            users.setdefault(id(instance.kv_manager.store), []).append(instance)
    group_of = {instance: DeviceGroup(instance.index, [instance]) for instance in instances}
    for first, *others in users.values():
        for other in others:
            first_group, other_group = group_of[first], group_of[other]
            if first_group is not other_group:
                first_group.instances += other_group.instances
                group_of.update(dict.fromkeys(other_group.instances, first_group))
    for instance, device_group in group_of.items():
        instance.device_group = device_group
    groups = list(dict.fromkeys(group_of.values()))
    for device_group in groups:
        device_group.instances.sort(key=lambda instance: instance.index)
        device_group.index = device_group.instances[0].index
        for instance in device_group.instances:
            instance.alone = len(device_group.instances) == 1
    return groups
