"""Models on the same GPUs: they share compute, and KV memory page by page.

Compute: with MPS at 100 % (Prism, §7.1) models share a GPU's units in time, and in space where
possible. Here busy models on a GPU get equal shares of it, so that together they never have more
than one GPU's throughput; a tensor-parallel model is as slow as on its busiest GPU. Shares change
only between iterations: an iteration that was running when a model became busy is compensated in
the next one.

Memory: each model's KV cache manager takes pages from the pools of its GPUs.

Time: models that share a GPU, also by way of others, are a device group with one clock
(`SharedGpus`). It advances by slices in which no model becomes busy or idle, and each model skips
ahead within them. A slice is shorter where pages are scarce or requests wait for admission.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....predictors.step_time import StepTime
from ...core.kv.pages import PagePool, PooledKVCacheManager
from ...core.multi_model_policy import Backlog, Gpus
from ...core.policy import Policy
from ...core.predictions import ModelledPredictions
from ...core.state import RequestState
from ..loop.batch_state import INF
from ..loop.measures import Measures
from .simulated import SimulatedInstance

_SCARCE_SHARE = 0.03  # of a GPU's pages: below it slices are short
_SCARCE_SLICE_S = 0.25


class SharedStepTime:
    """A step-time model whose steps take `slowdown` times as long."""

    __slots__ = ("base", "slowdown")

    def __init__(self, base: StepTime) -> None:
        self.base = base
        self.slowdown = 1.0

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return self.base.step_s(decode_seqs, decode_kv_tokens, chunks) * self.slowdown

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        return self.base.span_s(decode_seqs, decode_kv_tokens, steps) * self.slowdown

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        return self.base.steps_within(decode_seqs, decode_kv_tokens, duration_s / self.slowdown)


class SharedGpuInstance:
    """Implements `Tenant`: a model on its GPUs with weights, engine and KV pages."""

    def __init__(
        self,
        model: int,
        gpus: Gpus,
        weight_pages: int,
        kv_manager: PooledKVCacheManager,
        policy: Policy,
        step_time: StepTime,
        *,
        ready_s: float,
        sample_s: float = INF,
        kind: Callable[..., SimulatedInstance] = SimulatedInstance,
    ) -> None:
        self.model = model
        self.gpus = gpus
        self.weight_pages = weight_pages  # on each GPU
        self.kv_manager = kv_manager
        self.ready_s = self.started_s = ready_s
        self.idle_since_s = ready_s
        self.leaving = False  # its successor serves: it goes when its last request has ended
        self.times = SharedStepTime(step_time)
        self.instance = kind(
            policy,
            kv_manager,
            ModelledPredictions(step_time, 0.0),
            self.times,
            (),
            Measures(sample_s),
            gpus[0],
        )
        self.instance.now_s = ready_s
        self._least_step_s = step_time.step_s(1, 1, ())
        self.quota_hits = 0  # preemptions and waits by the quota while memory was free
        self._was_short = False  # of memory for the next request

    @property
    def busy(self) -> bool:
        """Does it have requests (those on their way included)?"""
        return bool(self.instance.inbox) or not self.instance.idle

    @property
    def blocked(self) -> bool:
        """Whether its last attempt to admit a request failed for lack of memory."""
        return self.instance.blocked_till_s > self.instance.now_s

    def run(self, end_s: float) -> None:
        """Serve until `end_s`."""
        engine, kv_manager = self.instance, self.kv_manager
        before = engine.measures.preemptions
        engine.run(end_s, False)
        if kv_manager.quota_blocks is None:
            return
        short = bool(engine.waiting.live) and (
            kv_manager.free < kv_manager.blocks(engine.waiting.head().target_tokens)
        )
        if kv_manager.quota_binds:
            self.quota_hits += engine.measures.preemptions - before
            self.quota_hits += short and not self._was_short
        self._was_short = short

    @property
    def idle(self) -> bool:
        return self.instance.idle

    @property
    def n_waiting(self) -> int:
        return self.instance.waiting.live

    @property
    def n_admitted(self) -> int:
        return self.instance.view.n_running + len(self.instance.inbox)

    @property
    def unbegun_tokens(self) -> int:
        """Prompt tokens that are here and not computed."""
        engine = self.instance
        coming = sum(r.target_tokens for r in engine.inbox)
        return engine.prefill_pending + engine.waiting_tokens + coming

    @property
    def coming_pages(self) -> int:
        """Pages that requests on their way here will take."""
        blocks = sum(self.kv_manager.blocks(r.target_tokens) for r in self.instance.inbox)
        return self.kv_manager.pages_for(blocks)

    def receive(self, r: RequestState, now_s: float) -> None:
        """`r` is here; it is looked at as soon as the model is ready."""
        r.visible_s = max(now_s, self.ready_s)
        self.instance.inbox.append(r)

    def begins_s(self, now_s: float) -> float:
        """When it computes next; infinite if never."""
        engine = self.instance
        if not engine.idle:
            return max(now_s, engine.now_s)
        return max(now_s, engine.inbox[0].visible_s) if engine.inbox else INF

    def changes_s(self, now_s: float) -> float:
        """Lower bound of the time at which a prefill begins or ends or a request ends."""
        engine = self.instance
        if engine.prefilling or engine.waiting.live or engine.inbox or not engine.decoding:
            return self.begins_s(now_s)
        steps = engine.ends[0][0] - engine.tick
        span_s = self.times.span_s(len(engine.decoding), engine.kv_sum, steps)
        return max(now_s, engine.now_s) + span_s

    def busy_until_s(self, now_s: float) -> float:
        """It is busy until then at least: the longest answer, at the speed of one alone."""
        engine = self.instance
        begins_s = self.begins_s(now_s)
        if not engine.decoding:
            return begins_s
        last = max(end for end, _, version, r in engine.ends if version == r.version)
        return begins_s + (last - engine.tick) * self._least_step_s * self.times.slowdown

    def share(self, slowdown: float, now_s: float) -> None:
        """Set the factor by which steps take longer than alone."""
        engine, before = self.instance, self.times.slowdown
        if slowdown > before and engine.now_s > now_s and not engine.idle:
            # The rest of the step under way was counted at too high a speed.
            engine.now_s += (engine.now_s - now_s) * (slowdown / before - 1)
        self.times.slowdown = slowdown


class SharedGpus:
    """GPUs that models connect, and these models, up to `now_s`."""

    def __init__(
        self,
        gpus: Gpus,
        model_instances: list[SharedGpuInstance],
        pools: Sequence[PagePool],
        now_s: float,
        ended: Callable[[SharedGpuInstance], None],
        backlog: Backlog | None = None,
    ) -> None:
        """`ended` is called with a model instance when requests of it have ended."""
        self.gpus = gpus
        self.model_instances = model_instances
        self.now_s = now_s
        self._pools = pools
        self._ended = ended
        self._backlog = backlog

    def advance(self, to_s: float) -> None:
        """Serve until `to_s`."""
        backlog, gpus = self._backlog, self.gpus
        while self.now_s < to_s:
            waits = backlog is not None and backlog.waits(gpus)
            if waits:
                assert backlog is not None
                backlog.admit(gpus, self.now_s)
                waits = backlog.waits(gpus)
            # Blocked models go first: they see the memory of now, not what others free later.
            busy = sorted((t for t in self.model_instances if t.busy), key=lambda t: not t.blocked)
            end_s = to_s
            if waits:
                assert backlog is not None
                end_s = min(end_s, max(backlog.next_s(gpus, self.now_s), _after(self.now_s)))
            if busy:
                end_s = self._slice_end_s(busy, end_s, waits)
                for model_instance in busy:
                    model_instance.run(end_s)
                    self._collect(model_instance)
            self.now_s = end_s

    def _slice_end_s(self, busy: Sequence[SharedGpuInstance], most_s: float, waits: bool) -> float:
        """Shares the GPUs out, and says until when that holds."""
        now_s = self.now_s
        begins = [model_instance.begins_s(now_s) for model_instance in busy]
        working: dict[int, int] = {}
        computing = []
        later_s = most_s
        waits = waits or busy[0].blocked
        for model_instance, begins_s in zip(busy, begins, strict=True):
            if model_instance.blocked:
                continue
            if model_instance.instance.idle and begins_s > now_s:
                later_s = min(later_s, begins_s)
                continue
            computing.append(model_instance)
            for gpu in model_instance.gpus:
                working[gpu] = working.get(gpu, 0) + 1
        scarce = any(
            self._pools[gpu].free < _SCARCE_SHARE * self._pools[gpu].total for gpu in working
        )
        until_s = min(later_s, now_s + _SCARCE_SLICE_S) if scarce else later_s
        for model_instance in computing:
            among = max(working[gpu] for gpu in model_instance.gpus)
            model_instance.share(float(among), now_s)
            if waits or (scarce and among > 1):
                until_s = min(until_s, model_instance.changes_s(now_s))
            elif among > 1:
                until_s = min(until_s, model_instance.busy_until_s(now_s))
        if computing:
            until_s = max(
                until_s, _after(min(model_instance.begins_s(now_s) for model_instance in computing))
            )
        return min(until_s, later_s)

    def _collect(self, model_instance: SharedGpuInstance) -> None:
        engine = model_instance.instance
        if engine.finished or engine.outbox:
            self._ended(model_instance)
        if engine.idle and not engine.inbox:
            model_instance.idle_since_s = engine.now_s


def _after(time_s: float) -> float:
    return math.nextafter(time_s, INF)
