"""Slots, the queue before them, and when each token leaves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from .mock_config import InjectedFault, MockConfig


@dataclass
class Truth:
    """True times of a request, by `time.perf_counter`; NaN for an event that did not happen."""

    request_id: str
    received_s: float
    prompt_tokens: int
    started_s: float = float("nan")
    first_token_s: float = float("nan")
    last_token_s: float = float("nan")
    tokens: int = 0
    token_s: list[float] = field(default_factory=list)


class Listener(Protocol):
    """Receiver of an answer's tokens, end and faults."""

    def tokens(self, first: int, count: int) -> None:
        """Tokens `first` to `first + count - 1` are sent now."""

    def finished(self) -> None:
        """The last token has been sent."""

    def failed(self, fault: InjectedFault) -> None:
        """Called when an injected fault happens."""


@dataclass(eq=False)
class MockJob:
    """A request in the mock's queue or in a slot."""

    listener: Listener
    truth: Truth
    output_tokens: int
    fault: InjectedFault | None
    sent: int = 0
    timer: asyncio.TimerHandle | None = None
    in_slot: bool = False
    stalled: bool = False


_IN_STREAM = (
    InjectedFault.RESET,
    InjectedFault.CUT,
    InjectedFault.STALL,
    InjectedFault.MALFORMED,
    InjectedFault.DIE,
)


class Service:
    """Queue and slots of the mock server."""

    def __init__(self, config: MockConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.truths: list[Truth] = []
        self.arrived = 0
        self.running = 0
        self.waiting: deque[MockJob] = deque()
        self._loop = loop

    def next_fault(self) -> InjectedFault | None:
        """Fault of the request that arrives now, or None."""
        self.arrived += 1
        return self.config.fault if self.arrived % self.config.fault_every == 0 else None

    def submit(self, job: MockJob) -> None:
        """Serve it when a slot is free."""
        self.truths.append(job.truth)
        if job.fault is InjectedFault.SILENT:
            return
        if self.config.slots is None or self.running < self.config.slots:
            self._start(job)
        else:
            self.waiting.append(job)

    def cancel(self, job: MockJob) -> None:
        """Remove a job whose client has disconnected."""
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if job.in_slot:
            self._leave(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def _start(self, job: MockJob) -> None:
        self.running += 1
        job.in_slot = True
        job.truth.started_s = time.perf_counter()
        self._sleep(job)

    def _leave(self, job: MockJob) -> None:
        job.in_slot = False
        self.running -= 1
        if self.waiting:
            self._start(self.waiting.popleft())

    def _sleep(self, job: MockJob) -> None:
        """Wait until the last token of the next chunk is due; the times do not drift."""
        config = self.config
        last = min(job.sent + config.tokens_per_chunk, job.output_tokens) - 1
        due_s = job.truth.started_s + config.ttft_s + last * config.gap_s(job.output_tokens)
        wait_s = due_s - time.perf_counter()
        job.timer = self._loop.call_later(max(0.0, wait_s), self._act, job, due_s)

    def _act(self, job: MockJob, due_s: float) -> None:
        if due_s - time.perf_counter() > 1e-4:  # the loop's clock is coarse, and was early
            self._sleep(job)
            return
        job.timer = None
        if job.fault in _IN_STREAM and job.sent >= self.config.fault_after:
            if job.fault is not InjectedFault.STALL:
                job.listener.failed(job.fault)
            return
        count = min(self.config.tokens_per_chunk, job.output_tokens - job.sent)
        now_s = time.perf_counter()
        truth = job.truth
        if not job.sent:
            truth.first_token_s = now_s
        truth.last_token_s = now_s
        truth.token_s.append(now_s)
        job.listener.tokens(job.sent, count)
        job.sent += count
        truth.tokens = job.sent
        if job.sent < job.output_tokens:
            self._sleep(job)
            return
        job.listener.finished()
        self._leave(job)
