"""One simulated cell: a workload on instances of a system."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from ....predictors.embedder import Embedder
from ....predictors.lora import Lora
from ....predictors.operators.front_end import FrontEnd
from ....predictors.placement import Placement
from ....predictors.step_time import StepTime
from ....workloads.arrays import Ints
from ....workloads.blocks import WorkloadBlocks
from ....workloads.errors import SloBenchError
from ....workloads.request import RequestType
from ....workloads.workload import Workload
from ...core.cluster_policy import EMBEDS, INF, ClusterPolicy, Failure, Role, Routed, overrides
from ...core.collocated_policy import Collocated
from ...core.counters import ADAPTER_LOADS, STORE_HITS, Counters, summed
from ...core.kv.kv_store_manager import StoreKVCacheManager
from ...core.phase_capacity import phase_capacity
from ...core.policy import StaticPolicy
from ...core.predictions import true_output_tokens
from ...core.records.request_records import EndedBlock, InstanceTotals, Result, TimeseriesRow
from ...core.state import RequestState
from ...policies.routers import router as router_by_name
from ...policies.systems import System
from ..cluster.cluster import Cluster
from ..cluster.cluster_arrivals import Arrivals, BlockArrivals
from ..cluster.lazy_instance import LazyInstance
from ..cluster.recorder import (
    BlockRecorder,
    Recorder,
    acts_of,
    memory_rows,
    state_rows,
    timeline_of,
    totals_of,
)
from ..loop.engine_instance import EngineInstance, Iterating
from ..loop.gc_control import collections_off
from ..loop.overlong_requests import OVERLONG_REQUESTS, fit, fit_blocks, fit_embeds
from ..loop.traced_instance import EngineTrace
from .embedding import EmbeddingInstance
from .simulated import SimulatedInstance
from .simulated_instances import Builder, Engine, instances_of

_EMBEDS_ONLY = "embeds only"  # the role of a language model that never gets a request


def simulate(
    workload: Workload,
    system: System,
    placement: Placement,
    step_time: StepTime,
    *,
    instances: int = 1,
    router: str | None = None,
    overlong_requests: str = "error",
    embedder: Embedder | None = None,
    embed_instances: int = 0,
    predicted_output_tokens: np.ndarray | None = None,
    output_tokens_p90: np.ndarray | None = None,
    failures: Sequence[Failure] = (),
    ready_s: float = 0.0,
    lora: Lora | None = None,
    engine: Engine | None = None,
    cluster: Callable[..., Cluster] | None = None,
    progress: Callable[[int, float], None] | None = None,
    trace: EngineTrace | None = None,
    step_time_of: Callable[[Placement], StepTime] | None = None,
    front_end: FrontEnd | None = None,
    timeline: bool = True,
) -> Result:
    """Serve `workload` with `instances` of `system`, each placed as `placement` says.

    Args:
        workload: what arrives.
        system: the policy and its defaults.
        placement: model, GPU and parallelism of one instance; its KV blocks and swap times.
        step_time: the true duration of an iteration.
        instances: how many behind the router, or in the cluster's roles together.
        router: name of the router; the system's own by default. A system with a cluster policy
            takes none.
        overlong_requests: treatment of requests longer than the context or the KV cache: `error`,
            `reject` (they count as missed) or `truncate` (prompt cut from the front, then the
            answer, to fit).
        embedder: the embedding model on each instance's device, for workloads with embedding
            requests; a policy that merges takes them into the language model's batches if both are
            one.
        embed_instances: number of instances that embed and generate nothing; 0: every language
            model has an embedder on its device. Their language model stays loaded, and idle.
        predicted_output_tokens: predicted output length of each request, for policies; by default
            the true one.
        output_tokens_p90: predicted 90 % quantile of each output length, for policies that reserve
            memory; by default as predicted.
        failures: which instances fail, and when.
        ready_s: when instances begin to serve; earlier arrivals wait.
        lora: slots for adapters: the models that requests name are adapters of the placement's;
            those that name it, or none, use the model itself.
        engine: makes the instances in place of `SimulatedInstance`, by the same arguments.
        cluster: likewise, in place of `Cluster`. With both, `engine.torch.cluster` executes what is
            simulated here.
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that instances do (not those of an `engine`).
        step_time_of: the true step times of a role with a placement of its own; by default those
            of `default_step_time`.
        front_end: what requests pass at each instance before it sees them; None: nothing.
        timeline: the state is sampled over time. Without, times of requests are the same up to
            rounding, and a mean stands for more gaps between tokens: where one to four answers
            of 20,000 to 60,000 tokens decode alone, their p99 is up to 1 % off and the mean use of
            KV blocks 2 to 7 % lower.

    Raises:
        SloBenchError: an unknown router or option, an overlong request under `error`, embedding
            requests without an embedder or for static batches, no instance left to generate, no
            memory for KV, or a policy that admits no request.
    """
    if overlong_requests not in OVERLONG_REQUESTS:
        raise SloBenchError(
            f"overlong_requests must be one of {', '.join(OVERLONG_REQUESTS)} but is "
            f"{overlong_requests!r}"
        )
    if instances < 1:
        raise SloBenchError(f"instances must be at least 1 but is {instances}")
    if (workload.request_type == RequestType.EMBED).any():
        _check_embeds(workload, system, embedder)
    else:
        embedder, embed_instances = None, 0
    if embed_instances >= instances:
        raise SloBenchError(
            f"embed_instances = {embed_instances} leaves none of {instances} instances to generate"
        )
    guess: Callable[[RequestState], int] = true_output_tokens
    if predicted_output_tokens is not None:
        guess = _lookup("predicted_output_tokens", predicted_output_tokens, workload)
    longest = guess
    if output_tokens_p90 is not None:
        longest = _lookup("output_tokens_p90", output_tokens_p90, workload)
    if embedder is not None and _merges(system, embedder, placement):
        embedder = None  # texts are prompts of the language model
        embed_instances = 0
    system = system_for_load(system, workload, placement, step_time, instances - embed_instances)
    across, roles = _across(system, placement, instances - embed_instances, router)
    roles = [replace(role, start_s=max(role.start_s, ready_s)) for role in roles]
    apart = [Role(_EMBEDS_ONLY, Collocated(), embed_instances, start_s=INF)]
    builders = [
        Builder(
            role,
            workload,
            placement,
            step_time,
            guess,
            prefix_cache=system.prefix_cache,
            engine=engine,
            trace=trace,
            beside=embedder is not None,
            longest=longest,
            step_time_of=step_time_of,
            lora=lora,
            timeline=timeline,
        )
        for role in (*roles, *(apart if embed_instances else ()))
    ]
    original = workload
    workload, rejected = fit(
        workload,
        min(builder.most_tokens_per_request() for builder in builders),
        overlong_requests,
        reserved=any(builder.reserves_maximum for builder in builders),
        embeds_apart=embedder is not None,
    )
    if embedder is not None:
        workload, refused = fit_embeds(
            workload, embedder, placement.num_gpu_blocks, overlong_requests
        )
        rejected = np.union1d(rejected, refused)
    handles = instances_of(builders)
    beside: list[LazyInstance] = []
    if embedder is not None:
        for instance in handles:
            if embed_instances and instance.role != _EMBEDS_ONLY:
                continue
            embeds = EmbeddingInstance(cast("Iterating", instance.engine), embedder)
            beside.append(
                LazyInstance(
                    embeds,
                    instance.index,
                    EMBEDS,
                    instance.number,
                    instance.placement,
                    instance.step_time,
                )
            )
    recorder = Recorder(len(workload), workload.arrival_s)
    recorder.rejected(rejected)
    arrivals = Arrivals(workload, skip=rejected)
    kind = cluster or Cluster
    if cluster is None and trace is not None:
        from ..cluster.traced_cluster import TracedCluster

        kind = partial(TracedCluster, trace=trace)
    ran = kind(
        [*handles, *beside],
        across,
        arrivals,
        recorder,
        failures=failures,
        progress=progress,
        front_end=front_end,
    )
    result = _run(ran, across, roles, placement, handles, beside, recorder, closed=workload.closed)
    return replace(
        result, overlong=len(rejected), served=None if workload is original else workload
    )


def simulate_blocks(
    workload: WorkloadBlocks,
    system: System,
    placement: Placement,
    step_time: StepTime,
    consume: Callable[[EndedBlock], None],
    *,
    instances: int = 1,
    router: str | None = None,
    overlong_requests: str = "error",
    failures: Sequence[Failure] = (),
    ready_s: float = 0.0,
    progress: Callable[[int, float], None] | None = None,
    step_time_of: Callable[[Placement], StepTime] | None = None,
    front_end: FrontEnd | None = None,
) -> Result:
    """Serve a workload of any length in constant memory.

    Args:
        workload: what arrives.
        system: the policy and its defaults.
        placement: as for `simulate`, and so are the other arguments.
        step_time: the true duration of an iteration.
        consume: receives the requests in blocks, in order of arrival, once they have ended.
        instances: how many behind the router, or in the cluster's roles together.
        router: name of the router; the system's own by default.
        overlong_requests: `error`, `reject` or `truncate`.
        failures: which instances fail, and when.
        ready_s: when instances begin to serve; earlier arrivals wait.
        progress: called now and then with (requests ended, clock in seconds).
        step_time_of: the true step times of a role with a placement of its own.
        front_end: what requests pass at each instance; None: nothing.

    Returns:
        What `simulate` returns, but without records of the requests; gaps between tokens are
        summarised (`QuantileSketch`).

    Raises:
        SloBenchError: as `simulate`.
    """
    if system.cluster is not None:  # the load is judged by the first requests
        system = system_for_load(system, next(workload.draw()), placement, step_time, instances)
    across, roles = _across(system, placement, instances, router)
    roles = [replace(role, start_s=max(role.start_s, ready_s)) for role in roles]
    one_token = np.ones(1, dtype=np.int64)
    # Instances are made by the span alone.
    last = Workload(np.array([workload.last_s]), one_token, one_token)
    builders = [
        Builder(
            role,
            last,
            placement,
            step_time,
            true_output_tokens,
            prefix_cache=system.prefix_cache,
            step_time_of=step_time_of,
        )
        for role in roles
    ]
    handles = instances_of(builders)
    recorder = BlockRecorder(consume, _numbers(handles))
    fitted = fit_blocks(
        workload,
        min(builder.most_tokens_per_request() for builder in builders),
        overlong_requests,
        reserved=any(builder.reserves_maximum for builder in builders),
    )
    arrivals = BlockArrivals(recorder.begun(fitted))
    ran = Cluster(
        handles,
        across,
        arrivals,
        recorder,
        failures=failures,
        progress=progress,
        front_end=front_end,
    )
    result = _run(ran, across, roles, placement, handles, (), recorder, closed=False)
    return replace(result, overlong=recorder.refused)


def _run(
    ran: Cluster,
    across: ClusterPolicy,
    roles: Sequence[Role],
    placement: Placement,
    handles: Sequence[LazyInstance],
    beside: Sequence[LazyInstance],
    recorder: Recorder,
    *,
    closed: bool,
) -> Result:
    """Run to the end, and what the instances and the recorder know then."""
    built = [instance.engine for instance in handles]
    for role in roles:
        ran.expect(role)
    with collections_off():
        ran.run(closed=closed)
    recorder.number(_numbers(handles))
    for engine in built:
        kv_manager = engine.kv_manager
        assert kv_manager.free == kv_manager.total, (
            f"{kv_manager.total - kv_manager.free} KV blocks were lost"
        )
        assert kv_manager.host_free == kv_manager.host_total, "host KV blocks were lost"
    managers = (engine.kv_manager for engine in built)
    stores = [manager for manager in managers if isinstance(manager, StoreKVCacheManager)]
    if STORE_HITS in ran.counters or placement.kv_offload_gib or placement.kv_disk_gib:
        ran.counters[STORE_HITS] = sum(store.store_hits for store in stores)
    adapter_loads = [
        {ADAPTER_LOADS: engine.adapters.loads}
        for engine in built
        if isinstance(engine, SimulatedInstance) and engine.adapters is not None
    ]
    totals = totals_of(built, recorder.last_finish_s())
    return Result(
        recorder.records,
        recorder.gaps(engine.measures for engine in built),
        dataclasses.replace(
            timeline_of(built),
            timeseries=(
                *_timeseries(handles, across, ran.state, ran.counters, totals.makespan_s),
                *_memory(handles, beside, totals.makespan_s),
            ),
        ),
        dataclasses.replace(
            totals,
            gpu_busy_s=sum(map(_gpu_busy_s, handles)),
            gpu_paid_s=ran.paid.total_gpu_s(totals.makespan_s)
            if any(role.spare for role in roles)
            else math.nan,
        ),
        tuple(engine.view.policy_state for engine in built),
        instances=_by_instance(handles, totals.makespan_s),
        cluster=ran.state,
        counts=summed((ran.counters, *(engine.counters for engine in built), *adapter_loads)),
    )


def system_for_load(
    system: System,
    workload: Workload,
    placement: Placement,
    step_time: StepTime,
    instances: int,
) -> System:
    """The system with the parameters that its cluster policy chooses by the load."""
    cluster = system.cluster
    if cluster is None or not overrides(cluster, "for_load"):
        return system
    capacity = phase_capacity(workload, placement, step_time)
    if capacity is None:
        return system
    return replace(system, cluster=cluster.for_load(capacity, instances))


def _across(
    system: System, placement: Placement, instances: int, router: str | None
) -> tuple[ClusterPolicy, Sequence[Role]]:
    """What decides across instances, and which there are."""
    if system.cluster is None:
        routed = Routed(router=router_by_name(router or system.router))
        return routed, routed.layout(system.policy, placement, instances)
    if router is not None:
        raise SloBenchError(f"{system.name} decides across instances itself; leave router out")
    return system.cluster, system.cluster.layout(system.policy, placement, instances)


def _numbers(handles: Sequence[LazyInstance]) -> Ints:
    """The instance of each lane; the last is that of requests without one."""
    return np.array([instance.number for instance in handles] + [-1])


def _timeseries(
    handles: Sequence[LazyInstance],
    across: ClusterPolicy,
    state: object,
    counters: Counters,
    now_s: float,
) -> tuple[TimeseriesRow, ...]:
    """Of every instance, and what the cluster policy has to tell; lanes stand for no instance."""
    if len(handles) < 2 or len({instance.number for instance in handles}) < len(handles):
        return ()
    rows: list[TimeseriesRow] = []
    for instance in (i for i in handles if i.role != _EMBEDS_ONLY):
        rows += state_rows(instance)
    acts = acts_of([counters, *(instance.engine.counters for instance in handles)], now_s)
    return (*rows, *acts, *across.extra_records(state, handles))


def _memory(
    handles: Sequence[LazyInstance], beside: Sequence[LazyInstance], end_s: float
) -> Iterator[TimeseriesRow]:
    """Of every device that an embedder shares (MemoryMonitor of the collocation paper)."""
    by_engine = {id(instance.engine): instance for instance in handles}
    for embedding in beside:
        assert isinstance(embedding.engine, EmbeddingInstance)
        yield from memory_rows(by_engine[id(embedding.engine.llm)], embedding.engine.passes, end_s)


def _prediction_error(engine: EngineInstance) -> float:
    learner = engine.learner if isinstance(engine, SimulatedInstance) else None
    return float("nan") if learner is None else learner.error


def _by_instance(handles: Sequence[LazyInstance], makespan_s: float) -> tuple[InstanceTotals, ...]:
    totals: dict[int, InstanceTotals] = {}
    for instance in handles:
        engine, m = instance.engine, instance.engine.measures
        before = totals.get(instance.number) or InstanceTotals(instance.role)
        totals[instance.number] = InstanceTotals(
            instance.role,
            busy_s=before.busy_s + engine.now_s - m.idle_s,
            steps=before.steps + m.steps,
            prefill_tokens=before.prefill_tokens + m.prefill_tokens,
            decode_tokens=before.decode_tokens + m.decode_tokens,
            preemptions=before.preemptions + m.preemptions,
            prediction_error=_prediction_error(engine),
            placement=instance.placement,
            **(_usage(instance, makespan_s) if len(handles) > 1 else {}),
        )
    return tuple(totals.values())


def _usage(instance: LazyInstance, makespan_s: float) -> dict[str, float]:
    """Mean use of its arithmetic, KV blocks and time by one of several instances without lanes."""
    measures = instance.engine.measures
    if makespan_s <= 0 or instance.placement.pp > 1:
        return {}
    computed = measures.prefill_tokens + measures.decode_tokens
    return {
        "compute_usage": computed * instance.s_per_token / makespan_s,
        "kv_blocks_mean": measures.kv_block_s / makespan_s,
        "gpu_utilisation": _gpu_busy_s(instance) / instance.placement.tp / makespan_s,
    }


def _check_embeds(workload: Workload, system: System, embedder: Embedder | None) -> None:
    if embedder is None:
        raise SloBenchError(
            f"{workload.name} has embedding requests: name the embedding "
            "model (embedder, as in --embedder bge-m3)"
        )
    if isinstance(system.policy, StaticPolicy):
        raise SloBenchError(f"{system.name} serves static batches, and no embedding requests")


def _merges(system: System, embedder: Embedder, placement: Placement) -> bool:
    merges = isinstance(system.policy, Collocated) and system.policy.merges
    return merges and embedder.model == placement.model


def _lookup(name: str, tokens: np.ndarray, workload: Workload) -> Callable[[RequestState], int]:
    if len(tokens) != len(workload):
        raise SloBenchError(f"{name} has {len(tokens)} values for {len(workload)} requests")
    values = [int(count) for count in tokens]
    return lambda r: values[r.id]


def _gpu_busy_s(instance: LazyInstance) -> float:
    """Busy GPU seconds of a lane, whose batch is in one stage at a time: on the GPUs of a
    tensor-parallel group.
    """
    measures = instance.engine.measures
    return (instance.engine.now_s - measures.idle_s - measures.waited_s) * instance.placement.tp
