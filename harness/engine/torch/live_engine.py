"""An instance that serves whoever comes: requests from other threads, one iteration at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ....workloads.request import Slo
from ...core.decisions import ReleaseReason
from ...core.policy import Policy
from ...core.state import RequestState
from ...core.wire import PredictedLength
from .build_engine import Engine
from .clock import RealClock
from .execution import PagedInstance
from .sequence import Sampling, Sequence, TokenLogprobs
from .threads import CpuWait, ThreadLayout

_IDLE_S = 0.02  # wait when no request can run now
_DIGEST = (1 << 62) - 1


@dataclass(frozen=True)
class GenerationRequest:
    """A request from outside. Functions are called from the engine's thread.

    `gave` gets every token; then one of `ended` (with the reason, `stop` or `length`) and `lost`
    (why the policy let it go).
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    slo: Callable[[float], Slo]  # from the moment of arrival
    predicted_output_tokens: PredictedLength | None  # of its length
    priority: int
    logprobs: TokenLogprobs | None  # filled before `gave` is called; None: not wanted
    gave: Callable[[int], None]
    ended: Callable[[str], None]
    lost: Callable[[ReleaseReason], None]


@dataclass
class ServedCounts:
    """What has been served so far."""

    requests: int = 0
    cancelled: int = 0
    turned_away: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class LiveEngine:
    """Runs an instance in a thread of its own, for as long as the block lasts; it computes by the
    layout `threads`.

    Raises:
        Exception: on leaving the block: what ended the thread before.
    """

    def __init__(self, engine: Engine, policy: Policy, threads: ThreadLayout) -> None:
        self.engine = engine
        self.threads = threads
        self.cpu_wait = CpuWait(threads)
        self.counts = ServedCounts()
        self._clock = RealClock()
        self._requests: dict[RequestState, GenerationRequest] = {}
        instance = engine.instance(policy, self._opens, self._clock)
        assert isinstance(instance, PagedInstance)
        self.instance = instance
        instance.gave = self._gave
        instance.ended = self._ended
        self._new: list[RequestState] = []
        self._unwanted: list[RequestState] = []
        self._wake = threading.Condition()
        self._stops = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="torch engine", daemon=True)

    def __enter__(self) -> LiveEngine:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        with self._wake:
            self._stops = True
            self._wake.notify()
        self._thread.join()
        self.instance.kv_manager.flush()

    @property
    def running(self) -> bool:
        """Whether the engine's thread runs and has had no error."""
        return self._thread.is_alive() and self._problem is None

    def submit(self, request: GenerationRequest) -> RequestState:
        """Submit a request, which arrives now."""
        now_s = self._clock.now_s()
        tokens = request.tokens
        prompt, max_tokens = len(tokens), request.max_tokens
        r = RequestState(
            self.counts.requests,
            now_s,
            prompt,
            max_tokens,
            max_tokens,
            request.slo(now_s),
            self._hashes(tokens),
        )
        r.priority, r.predicted_output_tokens = request.priority, request.predicted_output_tokens
        with self._wake:
            self.counts.requests += 1
            self.counts.prompt_tokens += prompt
            self._requests[r] = request
            self._new.append(r)
            self._wake.notify()
        return r

    def cancel(self, r: RequestState) -> None:
        """Cancel a request that no client waits for."""
        with self._wake:
            self._unwanted.append(r)
            self._wake.notify()

    def _hashes(self, tokens: list[int]) -> tuple[int, ...]:
        """Each block's name: its tokens and all before them."""
        size = self.engine.room.prefix_block_size
        if not size:
            return ()
        hashes, last = [], 0
        for end in range(size, len(tokens) + 1, size):
            last = hash((last, *tokens[end - size : end])) & _DIGEST
            hashes.append(last)
        return tuple(hashes)

    # ---------------------------------------------------------------- in the engine's thread

    def _work(self) -> None:
        try:
            with self.threads.pinned():
                while self._took():
                    self._step()
        except BaseException as error:
            self._problem = error
            for r in list(self._requests):
                self._requests.pop(r).lost(ReleaseReason.FAIL)
            raise

    def _took(self) -> bool:
        """Accept new requests and cancel abandoned ones; False: stop."""
        instance = self.instance
        with self._wake:
            while not (self._new or self._unwanted or self._stops) and self._is_idle():
                self._wake.wait()
            new, self._new = self._new, []
            unwanted, self._unwanted = self._unwanted, []
        for r in new:
            # Between two iterations the clock stands at the end of the last.
            r.visible_s = r.arrival_s if self._is_idle() else min(r.arrival_s, instance.now_s)
            instance.inbox.append(r)
        for r in unwanted:
            if self._requests.pop(r, None) is not None:
                self.counts.cancelled += 1
                instance.cancel(r)
        return not self._stops

    def _is_idle(self) -> bool:
        return self.instance.idle and not self.instance.inbox

    def _step(self) -> None:
        instance = self.instance
        if self._is_idle():
            return
        steps = instance.measures.steps
        begin_s = max(instance.now_s, instance.ready_s())
        instance.run(math.nextafter(begin_s, math.inf), True)
        for release in instance.outbox:
            request = self._requests.pop(release.request, None)
            if request is not None and release.reason is not ReleaseReason.FINISH:
                self.counts.turned_away += 1
                request.lost(release.reason)
        instance.outbox.clear()
        instance.finished.clear()
        if instance.measures.steps == steps and not instance.idle:
            with self._wake:
                if not (self._new or self._unwanted or self._stops):
                    self._wake.wait(_IDLE_S)
            instance.now_s = max(instance.now_s, self._clock.now_s())

    def _opens(self, r: RequestState) -> Sequence:
        request = self._requests[r]
        return Sequence(
            list(request.tokens), request.sampling, request.ends, logprobs=request.logprobs
        )

    def _gave(self, r: RequestState, token: int) -> None:
        self.counts.output_tokens += 1
        request = self._requests.get(r)
        if request is not None:
            request.gave(token)

    def _ended(self, r: RequestState, sequence: Sequence) -> None:
        request = self._requests.pop(r, None)
        if request is not None:
            request.ended("stop" if sequence.tokens[-1] in request.ends else "length")
