"""One simulated cell: a workload on instances of a system."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..predictors.embedder import Embedder
from ..predictors.placement import Placement
from ..predictors.step_time import StepTime
from ..workloads.errors import SloBenchError
from ..workloads.request import Kind
from ..workloads.workload import Workload
from .clusters.arrivals import Arrivals
from .clusters.by_kind import ByKind
from .clusters.cluster import Cluster
from .clusters.recorder import Recorder
from .clusters.routers import router as router_by_name
from .core.collocated import Collocated
from .core.ledger import BlockLedger
from .core.policy import Policy, StaticPolicy, overrides
from .core.records import Gaps, Result, Timeline, Totals
from .core.state import RequestState
from .engines.device import Device
from .engines.embedding import EmbeddingInstance
from .engines.instance import Instance
from .engines.measures import Measures
from .engines.plain import PlainInstance
from .engines.predictions import ModelledPredictions, true_output_tokens
from .engines.simulated import SimulatedInstance
from .engines.static import StaticInstance
from .engines.traced import Trace, TracedInstance, TracedStaticInstance
from .oversize import OVERSIZE, fit, fit_embeds
from .systems import System

_SAMPLES = 300


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
    predicted_output_tokens: np.ndarray | None = None,
    step: bool = False,
    progress: Callable[[int, float], None] | None = None,
    trace: Trace | None = None,
) -> Result:
    """Serve `workload` with `instances` of `system`, each placed as `placement` says.

    Args:
        workload: what arrives.
        system: the policy and its defaults.
        placement: model, GPU and parallelism of one instance; its KV blocks and swap times.
        step_time: the true duration of an iteration.
        instances: how many behind the router.
        router: name of the router; the system's own by default.
        oversize: what becomes of requests longer than the context or the KV cache: `error`,
            `reject` (they count as missed) or `truncate` (prompt cut from the front, then the
            answer, to fit).
        embedder: the embedding model beside each instance, for workloads with embedding requests;
            a policy that merges takes them into the language model's batches if both are one.
        predicted_output_tokens: what policies are told of each answer's length; the truth by
            default.
        step: run the plain reference engine, step by step (slow; same records, gaps and no more).
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that instances do (not those of `step`).

    Raises:
        SloBenchError: an unknown router or option, an oversize request under `error`, embedding
            requests without an embedder or for static batches, no memory for KV, or a policy that
            admits nobody.
    """
    if oversize not in OVERSIZE:
        raise SloBenchError(f"oversize must be one of {', '.join(OVERSIZE)} but is {oversize!r}")
    system.check_simulated()
    if instances < 1:
        raise SloBenchError(f"instances must be at least 1 but is {instances}")
    if placement.kv_blocks < placement.pp:
        raise SloBenchError("no KV block fits beside the model; use more GPUs or another model")
    if (workload.kind == Kind.EMBED).any():
        _check_embeds(workload, system, embedder)
    else:
        embedder = None
    guess: Callable[[RequestState], int] = true_output_tokens
    if predicted_output_tokens is not None:
        guess = _lookup(predicted_output_tokens, len(workload))
    if embedder is not None and _merges(system, embedder, placement):
        embedder = None  # texts are prompts of the language model
    builder = _Builder(
        workload, system, placement, step_time, step, guess, trace, beside=embedder is not None
    )
    limit = builder.most_tokens_per_request()
    workload, rejected = fit(
        workload,
        limit,
        oversize,
        reserved=builder.reserves_maximum,
        embeds_apart=embedder is not None,
    )
    if embedder is not None:
        workload, refused = fit_embeds(workload, embedder, placement.kv_blocks, oversize)
        rejected = np.union1d(rejected, refused)
    built = [builder.build(index) for index in range(instances * placement.pp)]
    by_kind = router_by_name(router or system.router)
    beside: list[EmbeddingInstance] = []
    if embedder is not None:
        beside = [EmbeddingInstance(_iterating(llm), embedder) for llm in built]
        by_kind = ByKind(by_kind, built, beside)
    recorder = Recorder(len(workload), workload.arrival_s)
    arrivals = Arrivals(workload, skip=rejected)
    recorder.rejected(rejected)
    cluster = Cluster(
        [*built, *beside],
        by_kind,
        arrivals,
        recorder,
        shared=placement.pp > 1 or bool(beside),
        progress=progress,
    )
    with _no_garbage_collection():
        cluster.run(closed=workload.closed)
    recorder.records.instance[:] //= placement.pp  # of lanes to that of their instance
    for instance in built:
        ledger = instance.ledger
        assert ledger.free == ledger.total, f"{ledger.total - ledger.free} KV blocks were lost"
        assert ledger.host_free == ledger.host_total, "host KV blocks were lost"
    return Result(
        recorder.records,
        _gaps(built),
        _timeline(built),
        _totals(built, recorder),
        tuple(instance.view.state for instance in built),
        oversize=len(rejected),
    )


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


def _iterating(llm: Instance) -> SimulatedInstance | PlainInstance:
    assert isinstance(llm, SimulatedInstance | PlainInstance)
    return llm


def _lookup(predicted: np.ndarray, requests: int) -> Callable[[RequestState], int]:
    if len(predicted) != requests:
        raise SloBenchError(
            f"predicted_output_tokens has {len(predicted)} values for {requests} requests"
        )
    told = [int(tokens) for tokens in predicted]
    return lambda r: told[r.id]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Requests come and go by the thousand and form no cycles: looking for some costs a tenth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Builder:
    """Makes instances.

    With pipeline parallelism an instance is `pp` lanes over `pp` stages: so many batches are in
    flight, each with its share of the KV blocks, and they meet at the stages, which compute one
    step at a time.
    """

    def __init__(
        self,
        workload: Workload,
        system: System,
        placement: Placement,
        step_time: StepTime,
        step: bool,
        guess: Callable[[RequestState], int],
        trace: Trace | None,
        *,
        beside: bool = False,
    ) -> None:
        self._beside = beside  # an embedder computes on the same devices
        self._system = system
        self._placement = placement
        self._step_time = step_time
        self._step = step
        self._trace = trace
        self._blocks = placement.kv_blocks // placement.pp
        self._host_blocks = placement.host_blocks // placement.pp
        cached = system.prefix_cache and workload.prefix_blocks is not None
        self._prefix_block_tokens = workload.prefix_block_tokens if cached else 0
        self._sample_s = max(workload.span_s, 1.0) / _SAMPLES
        self._stages: tuple[Device, ...] = ()
        self._predictions = ModelledPredictions(step_time, placement.swap_s_per_block, guess)

    @property
    def reserves_maximum(self) -> bool:
        policy = self._system.policy
        return isinstance(policy, StaticPolicy) or overrides(policy, "commit")

    def most_tokens_per_request(self) -> int:
        """Longest prompt + answer that one instance can hold."""
        spare = 0
        policy = self._system.policy
        if isinstance(policy, Policy):
            empty = self._loop(policy, 0)
            limits = policy.limits(empty.view)
            spare = limits.watermark_blocks + limits.headroom_blocks
        tokens = (self._blocks - spare) * self._placement.block_tokens
        context = self._placement.model.context_tokens
        return min(tokens, context) if context else tokens

    def build(self, index: int) -> Instance:
        placement = self._placement
        if index % placement.pp == 0:
            names = [f"instance {index // placement.pp} stage {k}" for k in range(placement.pp)]
            self._stages = tuple(Device(name) for name in names)
        policy = self._system.policy
        if isinstance(policy, Policy):
            return self._loop(policy, index)
        kind: Callable[..., StaticInstance] = StaticInstance
        if self._trace is not None:
            kind = partial(TracedStaticInstance, self._trace.log(index))
        return kind(
            policy,
            self._ledger(),
            self._predictions,
            self._step_time,
            self._stages,
            Measures(self._sample_s),
            index,
        )

    def _loop(self, policy: Policy, index: int) -> SimulatedInstance | PlainInstance:
        if self._step:
            return PlainInstance(
                policy,
                self._ledger(),
                self._predictions,
                self._step_time,
                self._stages,
                Measures(self._sample_s),
                index,
            )
        kind: Callable[..., SimulatedInstance] = SimulatedInstance
        if self._trace is not None:
            kind = partial(TracedInstance, self._trace.log(index))
        return kind(
            policy,
            self._ledger(),
            self._predictions,
            self._step_time,
            self._stages,
            Measures(self._sample_s),
            index,
            alone=self._placement.pp == 1 and not self._beside,
        )

    def _ledger(self) -> BlockLedger:
        block_tokens = self._placement.block_tokens
        return BlockLedger(self._blocks, block_tokens, self._host_blocks, self._prefix_block_tokens)


def _gaps(instances: list[Instance]) -> Gaps:
    parts = [i.measures.gaps() for i in instances]
    return Gaps(np.concatenate([p.gap_s for p in parts]), np.concatenate([p.count for p in parts]))


def _timeline(instances: list[Instance]) -> Timeline:
    """Samples of all instances on one axis; each holds its last state until its next sample.

    The last sample of each is the end of its work, when it is empty.
    """
    total = sum(i.ledger.total for i in instances)
    sampled = [np.array([*i.measures.samples, (i.now_s, 0, 0, 0)]) for i in instances]
    times = np.unique(np.concatenate([samples[:, 0] for samples in sampled]))
    sums = np.zeros((3, len(times)), dtype=np.int64)
    for samples in sampled:
        at = np.searchsorted(samples[:, 0], times, side="right") - 1
        state = samples[np.maximum(at, 0), 1:].astype(np.int64).T
        sums += np.where(at >= 0, state, 0)
    return Timeline(times, sums[0], sums[1], sums[2] / total)


def _totals(instances: list[Instance], recorder: Recorder) -> Totals:
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
        steps=sum(m.steps for m in measures),
        prefill_tokens=sum(m.prefill_tokens for m in measures),
        decode_tokens=sum(m.decode_tokens for m in measures),
        padded_tokens=sum(m.padded_tokens for m in measures),
        kv_peak_share=sum(m.kv_peak for m in measures) / total_blocks,
        kv_mean_share=kv_mean,
    )
