"""One simulated cell: a workload on instances of a system."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from ....predictors.embedder import Embedder
from ....predictors.placement import Placement
from ....predictors.step_time import StepTime
from ....workloads.errors import SloBenchError
from ....workloads.request import Kind
from ....workloads.workload import Workload
from ...core.cluster_policy import EMBEDS, INF, ClusterPolicy, Failure, Role, Routed
from ...core.collocated_policy import Collocated
from ...core.policy import StaticPolicy
from ...core.predictions import true_output_tokens
from ...core.records import InstanceTotals, Result, Timeline, Told, Totals
from ...core.state import RequestState
from ...policies.routers import router as router_by_name
from ...policies.systems import System
from ..cluster.arrivals import Arrivals
from ..cluster.cluster import Cluster
from ..cluster.instance import LazyInstance
from ..cluster.recorder import Recorder
from ..loop.gc_control import collections_off
from ..loop.instance import Instance, Iterating
from ..loop.measures import gaps_of, summed
from ..loop.overlong_requests import OVERSIZE, fit, fit_embeds
from ..loop.traced import Trace
from .embedding import EmbeddingInstance
from .simulated import SimulatedInstance
from .simulated_instances import Builder, Engine, sites_of

_EMBEDS_ONLY = "embeds only"  # the role of a language model that never gets a request


def simulate(
    workload: Workload,
    system: System,
    placement: Placement,
    step_time: StepTime,
    *,
    instances: int = 1,
    router: str | None = None,
    oversize: str = "error",
    embedder: Embedder | None = None,
    embed_instances: int = 0,
    predicted_output_tokens: np.ndarray | None = None,
    longest_output_tokens: np.ndarray | None = None,
    failures: Sequence[Failure] = (),
    ready_s: float = 0.0,
    engine: Engine | None = None,
    progress: Callable[[int, float], None] | None = None,
    trace: Trace | None = None,
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
        oversize: what becomes of requests longer than the context or the KV cache: `error`,
            `reject` (they count as missed) or `truncate` (prompt cut from the front, then the
            answer, to fit).
        embedder: the embedding model beside each instance, for workloads with embedding requests;
            a policy that merges takes them into the language model's batches if both are one.
        embed_instances: so many of the instances embed and generate nothing; 0: an embedder stands
            beside every language model. Their language model stays loaded, and idle.
        predicted_output_tokens: what policies are told of each answer's length; the truth by
            default.
        longest_output_tokens: what nine in ten such answers do not exceed, for those that reserve
            memory; as predicted by default.
        failures: which instances fail, and when.
        ready_s: when instances begin to serve; who comes before waits.
        engine: makes the instances in place of `SimulatedInstance`, by the same arguments.
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that instances do (not those of an `engine`).

    Raises:
        SloBenchError: an unknown router or option, an oversize request under `error`, embedding
            requests without an embedder or for static batches, no instance left to generate, no
            memory for KV, or a policy that admits nobody.
    """
    if oversize not in OVERSIZE:
        raise SloBenchError(f"oversize must be one of {', '.join(OVERSIZE)} but is {oversize!r}")
    if instances < 1:
        raise SloBenchError(f"instances must be at least 1 but is {instances}")
    if (workload.kind == Kind.EMBED).any():
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
    if longest_output_tokens is not None:
        longest = _lookup("longest_output_tokens", longest_output_tokens, workload)
    if embedder is not None and _merges(system, embedder, placement):
        embedder = None  # texts are prompts of the language model
        embed_instances = 0
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
        )
        for role in (*roles, *(apart if embed_instances else ()))
    ]
    workload, rejected = fit(
        workload,
        min(builder.most_tokens_per_request() for builder in builders),
        oversize,
        reserved=any(builder.reserves_maximum for builder in builders),
        embeds_apart=embedder is not None,
    )
    if embedder is not None:
        workload, refused = fit_embeds(workload, embedder, placement.kv_blocks, oversize)
        rejected = np.union1d(rejected, refused)
    sites = sites_of(builders)
    built = [site.instance for site in sites]
    beside: list[LazyInstance] = []
    if embedder is not None:
        for site in sites:
            if embed_instances and site.role != _EMBEDS_ONLY:
                continue
            embeds = EmbeddingInstance(cast("Iterating", site.instance), embedder)
            beside.append(
                LazyInstance(
                    embeds, site.index, EMBEDS, site.number, site.placement, site.step_time
                )
            )
    recorder = Recorder(len(workload), workload.arrival_s)
    arrivals = Arrivals(workload, skip=rejected)
    recorder.rejected(rejected)
    cluster = Cluster(
        [*sites, *beside], across, arrivals, recorder, failures=failures, progress=progress
    )
    for role in roles:
        cluster.expect(role)
    with collections_off():
        cluster.run(closed=workload.closed)
    _number(recorder, sites)
    for instance in built:
        ledger = instance.ledger
        assert ledger.free == ledger.total, f"{ledger.total - ledger.free} KV blocks were lost"
        assert ledger.host_free == ledger.host_total, "host KV blocks were lost"
    return Result(
        recorder.records,
        gaps_of(instance.measures for instance in built),
        dataclasses.replace(_timeline(built), told=_told(sites, across, cluster.state)),
        _totals(sites, recorder),
        tuple(instance.view.state for instance in built),
        oversize=len(rejected),
        instances=_by_instance(sites),
        cluster=cluster.state,
    )


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


def _number(recorder: Recorder, sites: Sequence[LazyInstance]) -> None:
    """From lanes to their instances."""
    numbers = np.array([site.number for site in sites] + [-1])  # nobody: the last
    lanes = recorder.records.instance
    lanes[:] = numbers[lanes]


def _told(sites: Sequence[LazyInstance], across: ClusterPolicy, state: object) -> tuple[Told, ...]:
    """Of every instance, and what the cluster policy has to tell; lanes stand for no instance."""
    if len(sites) < 2 or len({site.number for site in sites}) < len(sites):
        return ()
    known = [
        Told(time_s, "requests", site.name, waiting + running)
        for site in sites
        for time_s, waiting, running, _ in (
            *site.instance.measures.samples,
            (site.instance.now_s, 0, 0, 0),
        )
        if site.role != _EMBEDS_ONLY
    ]
    return (*known, *across.told(state, sites))


def _prediction_error(instance: Instance) -> float:
    learner = instance.learner if isinstance(instance, SimulatedInstance) else None
    return float("nan") if learner is None else learner.error


def _by_instance(sites: Sequence[LazyInstance]) -> tuple[InstanceTotals, ...]:
    found: dict[int, InstanceTotals] = {}
    for site in sites:
        instance, m = site.instance, site.instance.measures
        before = found.get(site.number) or InstanceTotals(site.role)
        found[site.number] = InstanceTotals(
            site.role,
            busy_s=before.busy_s + instance.now_s - m.idle_s,
            steps=before.steps + m.steps,
            prefill_tokens=before.prefill_tokens + m.prefill_tokens,
            decode_tokens=before.decode_tokens + m.decode_tokens,
            preemptions=before.preemptions + m.preemptions,
            prediction_error=_prediction_error(instance),
        )
    return tuple(found.values())


def _check_embeds(workload: Workload, system: System, embedder: Embedder | None) -> None:
    if embedder is None:
        raise SloBenchError(
            f"{workload.name} has embedding requests: say which model embeds beside the language "
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
    told = [int(one) for one in tokens]
    return lambda r: told[r.id]


def _timeline(instances: list[Instance]) -> Timeline:
    """Of all instances; the last sample of each is the end of its work, when it is empty."""
    total = sum(i.ledger.total for i in instances)
    times, sums = summed([*i.measures.samples, (i.now_s, 0, 0, 0)] for i in instances)
    return Timeline(times, sums[0], sums[1], sums[2] / total)


def _gpu_busy_s(site: LazyInstance) -> float:
    """Of a lane, whose batch is in one stage at a time: on the GPUs of a tensor-parallel group."""
    measures = site.instance.measures
    return (site.instance.now_s - measures.idle_s - measures.waited_s) * site.placement.tp


def _totals(sites: Sequence[LazyInstance], recorder: Recorder) -> Totals:
    instances = [site.instance for site in sites]
    measures = [i.measures for i in instances]
    total_blocks = sum(i.ledger.total for i in instances)
    finish_s = recorder.records.finish_s
    makespan_s = float(np.nanmax(finish_s)) if np.isfinite(finish_s).any() else 0.0
    kv_mean = 0.0
    if makespan_s:
        kv_mean = sum(m.kv_block_s for m in measures) / (makespan_s * total_blocks)
    return Totals(
        makespan_s=makespan_s,
        busy_s=sum(i.now_s - i.measures.idle_s for i in instances),
        gpu_busy_s=sum(map(_gpu_busy_s, sites)),
        steps=sum(m.steps for m in measures),
        prefill_tokens=sum(m.prefill_tokens for m in measures),
        decode_tokens=sum(m.decode_tokens for m in measures),
        padded_tokens=sum(m.padded_tokens for m in measures),
        kv_peak_share=sum(m.kv_peak for m in measures) / total_blocks,
        kv_mean_share=kv_mean,
    )
