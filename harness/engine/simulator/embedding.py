"""An embedder on the device of a language model: one pass computes a batch, whose requests are then
done.

It is an instance of its own rather than a kind of request in the iteration loop. An embedding
request has no KV, no decode and no preemption, so the loop's bookkeeping would have nothing to
keep; a pass of another model is a step of its own on the device, and `Device` makes instances take
turns already. What the two models share is the KV cache manager of memory: a pass holds the blocks
of its activations from its beginning to its end. The language model's policy decides for both, with
one state, and decides again whenever something changed here. Runs without embeddings do not use
this code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ....predictors.embedder import Embedder, Texts
from ....workloads.errors import SloBenchError
from ...core.collocated_policy import Beside, Collocated
from ...core.counters import Counters
from ...core.decisions import Admission, ReleaseReason
from ...core.device import occupy
from ...core.state import Phase, Release, RequestState
from ..loop.arrival_queue import BatchInstance
from ..loop.batch_state import INF
from ..loop.engine_instance import EngineStuckError, Iterating
from ..loop.measures import Measures


class EmbeddingInstance(BatchInstance):
    """Serves the embedding requests on the device of `llm`, pass by pass."""

    def __init__(self, llm: Iterating, embedder: Embedder) -> None:
        super().__init__(
            llm.policy_state,
            llm.counters,
            llm.kv_manager,
            llm.predictions,
            llm.stages,
            Measures(),
            llm.index,
        )
        self.policy = llm.policy if isinstance(llm.policy, Collocated) else Collocated()
        self.held_blocks = 0
        self.passes: list[tuple[float, float, int]] = []  # begin and end in seconds, blocks
        self.llm = llm
        self._embedder = embedder
        self._least_pass_s = embedder.pass_s([(1, 1)])
        self._view = _View(self, embedder)
        if isinstance(llm.policy_state, Beside):
            llm.policy_state.embedder = self._view

    def earliest_release_s(self) -> float:
        """The end of the pass in progress, or of the shortest there can be; an arrival may be
        rejected at once.
        """
        if self.decoding:
            return self.now_s
        arrives_s = max(self.now_s, self.inbox[0].visible_s) if self.inbox else INF
        return min(arrives_s, self.now_s + self._least_pass_s if self.waiting.live else INF)

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        inbox = self.inbox
        while True:
            if self.decoding and self.now_s < horizon_s:
                self._give_back()
            if not self.decoding:
                self._arrive()
            if stop_on_release and self.outbox:
                return
            if self.idle:
                if not inbox or inbox[0].visible_s >= horizon_s:
                    return
                self.measures.idle(self.now_s, inbox[0].visible_s)
                self.now_s = inbox[0].visible_s
                continue
            if self.now_s >= horizon_s:
                return
            batch = self.policy.embed_batch(self._view)
            if batch:
                self._begin(batch)
            else:
                self._wait(horizon_s)

    def _arrive(self) -> None:
        while self.inbox and self.inbox[0].visible_s <= self.now_s:
            r = self._next_arrival()
            if self.policy.embed_admit(r, self._view) is Admission.REJECT:
                self.outbox.append(Release(r, ReleaseReason.REJECT, self.now_s))
            else:
                self.waiting.push(r)
            self.llm.reconsider()

    def _begin(self, batch: Sequence[RequestState]) -> None:
        """Begin a pass. Raises SloBenchError if the policy chose a request that does not wait, or
        more than fits.
        """
        blocks, waits = self._view.blocks(batch), self.waiting.live
        self.waiting.remove_all(batch)
        name, kv_manager = type(self.policy).__name__, self.kv_manager
        if waits - self.waiting.live != len(batch):
            raise SloBenchError(
                f"{name}.embed_batch chose a request twice, or one that is not here"
            )
        if blocks > kv_manager.free:
            raise SloBenchError(
                f"{name}.embed_batch chose a pass of {blocks} blocks, but {kv_manager.free} are "
                "free"
            )
        kv_manager.free -= blocks
        if kv_manager.idle_blocks > kv_manager.free:
            kv_manager.evict()
        self.held_blocks = kv_manager.activation_blocks = blocks
        # A step of the language model may be under way; what it frees at its end is free by then.
        begin_s = max(self.now_s, self.stages[0].free_at_s)
        for r in batch:
            r.first_scheduled_s = begin_s
            r.cached_tokens = 0
            r.phase = Phase.PREFILL
            self.decoding[r] = None
        begin_s, self.now_s = self.now_s, occupy(self.stages, self.now_s, self._view.pass_s(batch))
        self.passes.append((begin_s, self.now_s, blocks))
        self.measures.steps += 1
        self.llm.reconsider()

    def _give_back(self) -> None:
        """The pass has ended: its memory is free, and its requests are done."""
        self.kv_manager.free += self.held_blocks
        self.held_blocks = self.kv_manager.activation_blocks = 0
        for r in self.decoding:
            r.finish_s = self.now_s
            r.phase = Phase.DONE
            self.finished.append(r)
            if r.notify_on_finish or self.reports_all_ends:
                self.outbox.append(Release.finish(r))
        self.decoding.clear()
        self.llm.reconsider()

    def _wait(self, horizon_s: float) -> None:
        """There is no memory: let the clock go on."""
        arrival_s = self.inbox[0].visible_s if self.inbox else INF
        next_s = min(arrival_s, horizon_s)
        if next_s == INF:
            raise EngineStuckError(
                f"embedder {self.index} is stuck at {self.now_s:.3f} s: {self.waiting.live} "
                f"requests wait, {self.kv_manager.free} of {self.kv_manager.total} blocks are free "
                f"and nothing runs; the policy {type(self.policy).__name__} begins none"
            )
        self.now_s = max(next_s, math.nextafter(self.now_s, INF))


class _View:
    """Implements `core.collocated_policy.EmbedView` over an embedder."""

    def __init__(self, instance: EmbeddingInstance, embedder: Embedder) -> None:
        self._instance = instance
        self._embedder = embedder
        # What was asked for last: policy and engine ask the same in turn.
        self._sized: tuple[tuple[RequestState, ...], int] = ((), 0)
        self._timed: tuple[tuple[RequestState, ...], float] = ((), 0.0)

    @property
    def now_s(self) -> float:
        return self._instance.now_s

    @property
    def policy_state(self) -> object:
        return self._instance.policy_state

    @property
    def counters(self) -> Counters:
        return self._instance.counters

    @property
    def total_blocks(self) -> int:
        return self._instance.kv_manager.total

    @property
    def free_blocks(self) -> int:
        return self._instance.kv_manager.free

    @property
    def held_blocks(self) -> int:
        return self._instance.held_blocks

    @property
    def llm_running(self) -> int:
        return self._instance.llm.view.n_running

    def waiting(self, now_s: float) -> Sequence[RequestState]:
        inbox = self._instance.inbox
        if not inbox or inbox[0].visible_s > now_s:
            return list(self._instance.waiting)
        return [*self._instance.waiting, *_arrived(inbox, now_s)]

    def next_waiting(self, now_s: float) -> RequestState | None:
        instance = self._instance
        if instance.waiting.live:
            return next(iter(instance.waiting))
        inbox = instance.inbox
        return inbox[0] if inbox and inbox[0].visible_s <= now_s else None

    def running(self) -> Sequence[RequestState]:
        return list(self._instance.decoding)

    def oldest_llm_arrival_s(self) -> float:
        llm = self._instance.llm
        came = [r.arrival_s for r in llm.waiting]
        came += [r.arrival_s for r in _arrived(llm.inbox, self._instance.now_s)]
        return min(came, default=INF)

    def blocks(self, batch: Iterable[RequestState]) -> int:
        batch = tuple(batch)
        if batch != self._sized[0]:
            self._sized = batch, self._embedder.blocks(_texts(batch))
        return self._sized[1]

    def pass_s(self, batch: Iterable[RequestState]) -> float:
        batch = tuple(batch)
        if batch != self._timed[0]:
            self._timed = batch, self._embedder.pass_s(_texts(batch))
        return self._timed[1]


def _texts(batch: Iterable[RequestState]) -> list[Texts]:
    return [(r.num_inputs, r.prompt_tokens // r.num_inputs) for r in batch]


def _arrived(inbox: Iterable[RequestState], now_s: float) -> Iterable[RequestState]:
    """The first of an inbox, which have arrived by then."""
    return takewhile(lambda r: r.visible_s <= now_s, inbox)
