"""Makes the simulated instances of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ....predictors.lora import Lora
from ....predictors.operators.assembly import default_step_time
from ....predictors.placement import Placement
from ....predictors.staged import StagedStepTime
from ....predictors.step_time import StepTime
from ....workloads.errors import SloBenchError
from ....workloads.workload import Workload
from ...core.cluster_policy import Role
from ...core.device import StageDevice
from ...core.kv.adapter_slots import NO_ADAPTER, AdapterSlots
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.policy import Policy, StaticPolicy, overrides
from ...core.predictions import ModelledPredictions, Predicts
from ...core.state import RequestState
from ...policies.shared.kv_store_parameters import SharedStoreLedgers
from ..cluster.lazy_instance import LazyInstance
from ..loop.engine_instance import EngineInstance, Iterating
from ..loop.measures import Measures
from ..loop.traced_instance import EngineTrace, TracedInstance, TracedStaticInstance
from .simulated import SimulatedInstance
from .static import StaticInstance

_SAMPLES = 300  # of an instance
_LEAST_SAMPLES = 60  # of each of many
_LEAST_STEP_S = 1e-3
_MANY = 16  # instances, beyond which each is looked at less often

Engine = Callable[..., Iterating]
Made = TypeVar("Made", bound=EngineInstance)


def _check_adapters(role: Role, placement: Placement) -> None:
    differs = role.placement is not None or role.step_time is not None
    if differs or isinstance(role.policy, StaticPolicy) or placement.pp > 1:
        raise SloBenchError(
            "adapters are simulated on instances that are alike, with pp 1 and without static "
            "batches; leave max_loras out, or use another system"
        )


def _adapters(workload: Workload, base: str) -> list[int]:
    """The adapter of each request; those that name the model itself, or nothing, have none."""
    numbers = [
        NO_ADAPTER if name in ("", base) else index
        for index, name in enumerate(workload.model_names)
    ]
    return [numbers[index] for index in workload.model_index]


class Builder:
    """Makes instances of one role.

    With pipeline parallelism an instance is `lanes` lanes over `pp` stages: `lanes` batches are in
    flight, each with its share of the KV blocks; a stage computes one step at a time.

    `beside`: an embedder uses the same devices. `engine` makes the instances that iterate, as a
    test's reference does; `SimulatedInstance` by default. `guess` and `longest`: predicted output
    lengths for policies; see `core.view.Predictions`. `step_time_of`: the step times of a role with
    a placement of its own; by default those of `default_step_time`. `lora`: the models that
    requests name are adapters of this one. `timeline`: the state is sampled over time.
    """

    def __init__(
        self,
        role: Role,
        workload: Workload,
        placement: Placement,
        steps: StepTime,
        guess: Callable[[RequestState], int],
        *,
        prefix_cache: bool,
        engine: Engine | None = None,
        trace: EngineTrace | None = None,
        beside: bool = False,
        longest: Callable[[RequestState], int] | None = None,
        step_time_of: Callable[[Placement], StepTime] | None = None,
        lora: Lora | None = None,
        timeline: bool = True,
    ) -> None:
        self.role = role
        if lora is not None:
            _check_adapters(role, placement)
        self._lora = lora
        self._adapter_of = _adapters(workload, placement.model.name) if lora else []
        self.placement = placement = role.placement or placement
        if placement.num_gpu_blocks < placement.lanes:
            raise SloBenchError("no memory is left for KV blocks; use more GPUs or a smaller model")
        self._engine = engine
        self._trace = trace
        self._alone = placement.lanes == 1 and not beside and not role.devices
        self._blocks = placement.num_gpu_blocks // placement.lanes
        self._num_cpu_blocks = placement.num_cpu_blocks // placement.lanes
        cached = prefix_cache if role.prefix_cache is None else role.prefix_cache
        self._caches_prefixes = cached
        self._tiers: SharedStoreLedgers | None = None
        cached = cached and workload.prefix_blocks is not None
        self._prefix_block_size = workload.prefix_block_size if cached else 0
        count = max(_MANY, role.instances * placement.lanes)
        samples = max(_LEAST_SAMPLES, _SAMPLES * _MANY // count)
        span_s, self._most_samples = workload.span_s, math.inf
        if workload.concurrency is not None:  # no shorter, perhaps much longer
            client_tokens = float(workload.output_tokens.sum()) / max(1, workload.concurrency)
            span_s, self._most_samples = client_tokens * _LEAST_STEP_S, samples
        self._sample_s = max(span_s, 1.0) / samples if timeline else math.inf
        if role.step_time is not None:
            steps = role.step_time
        elif role.placement is not None:
            of_own = step_time_of or (lambda its: default_step_time(its).model)
            steps = of_own(placement)
        self._steps = steps
        self._guess = guess
        self._longest = longest or guess
        self._predictions = self._predicts(steps)

    @property
    def reserves_maximum(self) -> bool:
        """Are blocks kept for the longest answer that a request may have?"""
        policy = self.role.policy
        return isinstance(policy, StaticPolicy) or overrides(policy, "reserved_blocks")

    def most_tokens_per_request(self) -> int:
        """Longest prompt + answer that one instance can hold."""
        spare = 0
        policy = self.role.policy
        if isinstance(policy, Policy):
            empty = self._loop(policy, 0, ())
            limits = policy.limits(empty.view)
            spare = limits.watermark_blocks + limits.decode_headroom_blocks
        tokens = (self._blocks - spare) * self.placement.block_size
        context = self.placement.model.context_tokens
        return min(tokens, context) if context else tokens

    def instances(
        self, first: int, number: int, devices: dict[str, tuple[StageDevice, ...]]
    ) -> list[LazyInstance]:
        """All instances; the first lane is number `first`, the first instance number `number`.

        `devices` has those that other roles have named, and gets those that this one names.
        """
        role, handles = self.role, list[LazyInstance]()
        for k in range(role.instances):
            self._tiers = self._below_gpu()
            stages = self._stages(f"instance {number + k}")
            if role.devices:
                stages = devices.setdefault(role.devices[k], stages)
            for _ in range(self.placement.lanes):
                lane = first + len(handles)
                engine = self._instance(lane, stages)
                engine.prefill_only = role.prefill_only
                handles.append(
                    LazyInstance(
                        engine,
                        lane,
                        role.name,
                        number + k,
                        self.placement,
                        self._steps,
                        up=role.start_s <= 0 and not role.spare,
                        spare=role.spare,
                    )
                )
        return handles

    def _stages(self, instance: str) -> tuple[StageDevice, ...]:
        pp, steps = self.placement.pp, self._steps
        shares, hops_s = (1 / pp,) * pp, (0.0,) * pp
        if isinstance(steps, StagedStepTime):
            shares, hops_s = steps.shares(), steps.hops_s
        return tuple(
            StageDevice(f"{instance} stage {stage}", share, hop_s)
            for stage, (share, hop_s) in enumerate(zip(shares, hops_s, strict=True))
        )

    def _instance(self, index: int, stages: tuple[StageDevice, ...]) -> EngineInstance:
        policy = self.role.policy
        if isinstance(policy, Policy):
            return self._loop(policy, index, stages)
        kind: Callable[..., StaticInstance] = StaticInstance
        if self._trace is not None:
            kind = partial(TracedStaticInstance, self._trace.log(index))
        return self._made(kind, policy, self._predictions, stages, index)

    def _loop(self, policy: Policy, index: int, stages: tuple[StageDevice, ...]) -> Iterating:
        if self._engine is not None:
            return self._made(self._engine, policy, self._predictions, stages, index)
        kind: Callable[..., SimulatedInstance] = SimulatedInstance
        if self._trace is not None:
            kind = partial(TracedInstance, self._trace.log(index))
        learner = self.role.learner(self.placement) if self.role.learner else None
        predictions = self._predictions if learner is None else self._predicts(learner)
        kind = partial(kind, alone=self._alone)
        engine = self._made(kind, policy, predictions, stages, index)
        engine.learner = learner
        if self._lora is not None:
            load_s = self._lora.load_s(self.placement.host_link)
            engine.adapters = AdapterSlots(self._adapter_of, self._lora.slots, load_s)
        if self.placement.dp > 1:
            engine.spread_over(self.placement.dp)
        if (slots := self.placement.state_slots) is not None:
            engine.keep_states(max(1, slots // self.placement.lanes))
        return engine

    def _made(
        self,
        kind: Callable[..., Made],
        policy: Policy | StaticPolicy,
        predictions: ModelledPredictions,
        stages: tuple[StageDevice, ...],
        index: int,
    ) -> Made:
        measures = Measures(self._sample_s, self._most_samples)
        return kind(policy, self._kv_manager(), predictions, self._steps, stages, measures, index)

    def _predicts(self, steps: Predicts) -> ModelledPredictions:
        swap_s = self.placement.swap_s_per_block
        return ModelledPredictions(steps, swap_s, self._guess, self._longest)

    def _kv_manager(self) -> KVCacheManager:
        block_size = self.placement.block_size
        make = self._tiers or self.role.kv_manager
        return make(self._blocks, block_size, self._num_cpu_blocks, self._prefix_block_size)

    def _below_gpu(self) -> SharedStoreLedgers | None:
        """What keeps prefixes of one instance in host memory and on disk."""
        place, role = self.placement, self.role
        if not (place.kv_offload_gib or place.kv_disk_gib):
            return None
        if role.kv_manager is not KVCacheManager or not self._caches_prefixes:
            has = "has no prefix cache" if not self._caches_prefixes else "has a store of its own"
            raise SloBenchError(
                f"the system {has}; leave kv_offload_gib and kv_disk_gib out, or use another, as "
                "vllm or sglang"
            )
        return SharedStoreLedgers(place, role.instances, place.kv_offload_gib, place.kv_disk_gib)


def instances_of(builders: Sequence[Builder]) -> list[LazyInstance]:
    """The instances of all roles, numbered through."""
    handles: list[LazyInstance] = []
    devices: dict[str, tuple[StageDevice, ...]] = {}
    number = 0
    for builder in builders:
        handles += builder.instances(len(handles), number, devices)
        number += builder.role.instances
    return handles
