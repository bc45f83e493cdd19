"""One simulated cell: a workload on instances of a system."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np

from ..predictors.placement import Placement
from ..predictors.step_time import StepTime
from ..workloads.errors import SloBenchError
from ..workloads.request import Kind
from ..workloads.workload import Workload
from .clusters.arrivals import Arrivals
from .clusters.cluster import Cluster
from .clusters.recorder import Recorder
from .clusters.routers import router as router_by_name
from .core.ledger import BlockLedger
from .core.policy import Policy, StaticPolicy, overrides
from .core.records import Gaps, Result, Timeline, Totals
from .core.state import RequestState
from .engines.device import Device
from .engines.instance import Instance
from .engines.measures import Measures
from .engines.plain import PlainInstance
from .engines.predictions import ModelledPredictions, true_output_tokens
from .engines.simulated import SimulatedInstance
from .engines.static import StaticInstance
from .engines.traced import Trace, TracedInstance, TracedStaticInstance
from .systems import System

_SAMPLES = 300
OVERSIZE = ("error", "reject", "truncate")


def simulate(
    workload: Workload,
    system: System,
    placement: Placement,
    step_time: StepTime,
    *,
    instances: int = 1,
    router: str | None = None,
    oversize: str = "error",
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
        predicted_output_tokens: what policies are told of each answer's length; the truth by
            default.
        step: run the plain reference engine, step by step (slow; same records, gaps and no more).
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that instances do (not those of `step`).

    Raises:
        SloBenchError: an unknown router or option, an oversize request under `error`, requests
            of a kind that this engine does not serve, no memory for KV, or a policy that admits
            nobody.
    """
    if oversize not in OVERSIZE:
        raise SloBenchError(f"oversize must be one of {', '.join(OVERSIZE)} but is {oversize!r}")
    if instances < 1:
        raise SloBenchError(f"instances must be at least 1 but is {instances}")
    if placement.kv_blocks < placement.pp:
        raise SloBenchError("no KV block fits beside the model; use more GPUs or another model")
    if (workload.kind != Kind.GENERATE).any():
        raise SloBenchError("embedding requests are not simulated yet; leave them out")
    guess: Callable[[RequestState], int] = true_output_tokens
    if predicted_output_tokens is not None:
        guess = _lookup(predicted_output_tokens, len(workload))
    builder = _Builder(workload, system, placement, step_time, step, guess, trace)
    limit = builder.most_tokens_per_request()
    workload, rejected = _fit(workload, limit, oversize, reserved=builder.reserves_maximum)
    built = [builder.build(index) for index in range(instances * placement.pp)]
    recorder = Recorder(len(workload), workload.arrival_s)
    arrivals = Arrivals(workload, skip=rejected)
    recorder.rejected(rejected)
    cluster = Cluster(
        built,
        router_by_name(router or system.router),
        arrivals,
        recorder,
        shared=placement.pp > 1,
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
    )


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
    ) -> None:
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
            alone=self._placement.pp == 1,
        )

    def _ledger(self) -> BlockLedger:
        block_tokens = self._placement.block_tokens
        return BlockLedger(self._blocks, block_tokens, self._host_blocks, self._prefix_block_tokens)


def _fit(
    workload: Workload, limit_tokens: int, oversize: str, *, reserved: bool
) -> tuple[Workload, np.ndarray]:
    """The workload with every request within the limit, and the rows to refuse."""
    answers = workload.max_output_tokens if reserved else workload.output_tokens
    rows = np.flatnonzero(workload.prompt_tokens + answers > limit_tokens)
    nobody = np.empty(0, dtype=np.int64)
    if not len(rows):
        return workload, nobody
    if oversize == "error":
        row = int(rows[0])
        raise SloBenchError(
            f"{len(rows)} of {len(workload)} requests are too long: request {row} has "
            f"{workload.prompt_tokens[row]} prompt and {answers[row]} "
            f"{'maximum ' if reserved else ''}output tokens, {limit_tokens} fit the context and "
            "the KV cache; use --oversize reject or truncate, more GPUs or another model"
        )
    if oversize == "reject":
        return workload, rows
    if limit_tokens < 2:
        raise SloBenchError(
            f"{max(limit_tokens, 0)} tokens fit the KV cache, so that nothing can be truncated to "
            "fit; use more GPUs or another model"
        )
    most = np.minimum(workload.max_output_tokens, limit_tokens - 1)
    output = np.minimum(workload.output_tokens, most)
    kept = most if reserved else output
    prompt = np.minimum(workload.prompt_tokens, limit_tokens - kept)
    prefixes = workload.prefix_blocks
    if prefixes is not None:
        # What is left of a prompt begins elsewhere: it shares no prefix any more.
        cut = frozenset(np.flatnonzero(prompt < workload.prompt_tokens).tolist())
        prefixes = _Without(prefixes, cut)
    return (
        dataclasses.replace(
            workload,
            prompt_tokens=prompt,
            output_tokens=output,
            max_output_tokens=most,
            prefix_blocks=prefixes,
        ),
        nobody,
    )


@dataclass(frozen=True)
class _Without(Sequence[tuple[int, ...]]):
    """Prefix blocks row by row, none for the rows in `cut`."""

    blocks: Sequence[tuple[int, ...]]
    cut: frozenset[int]

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, row: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, row: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, row: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        return () if row in self.cut else self.blocks[row]


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
