"""Settings of the mock server: latencies, slots and injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ....workloads.errors import SloBenchError


class InjectedFault(StrEnum):
    """Fault that replaces a complete answer."""

    TOO_LONG = "400"  # refused at any rate
    TOO_MANY = "429"  # refused with a status
    BROKEN = "500"
    REFUSED_IN_STREAM = "error-event"  # status 200, then an error as the first event
    OFFLOADED = "offloaded"  # given back, as by a policy of ours inside a server
    RESET = "reset"  # the connection is reset in mid-stream
    CUT = "cut"  # closed in mid-stream without the end of the body
    STALL = "stall"  # nothing comes any more, the connection stays
    MALFORMED = "malformed"  # an event that is no JSON
    NO_DONE = "no-done"  # a whole answer without [DONE]
    EMPTY_FIRST = "empty-first"  # a first event without text, as some servers send: no fault
    SILENT = "silent"  # accepted, never answered
    DIE = "die"  # the whole server goes away


@dataclass(frozen=True)
class MockConfig:
    """Latencies, slots and faults of the mock server.

    The first token is sent `ttft_s` after a slot took the request, each further one `itl_s` later.
    With `slots` None all requests are served at once; otherwise `slots` requests at a time, first
    come first served (with equal answers: an M/D/c queue under Poisson arrivals). `service_s`
    stretches the gaps so that every answer takes that time in its slot, whatever its length.
    `fault` happens to every `fault_every`-th request, after `fault_after` tokens if it happens in
    mid-stream. An answer has `answer_tokens`, whatever the request allows; None: as many as that.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    slots: int | None = None
    service_s: float | None = None
    tokens_per_chunk: int = 1
    answer_tokens: int | None = None
    model: str = "mock"
    fault: InjectedFault | None = None
    fault_every: int = 1
    fault_after: int = 2

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s", "fault_after"):
            if getattr(self, name) < 0:
                raise SloBenchError(f"{name} must not be negative but is {getattr(self, name)}")
        for name in ("tokens_per_chunk", "fault_every"):
            if getattr(self, name) < 1:
                raise SloBenchError(f"{name} must be at least 1 but is {getattr(self, name)}")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise SloBenchError(f"answer_tokens must be at least 1 but is {self.answer_tokens}")
        if self.slots is not None and self.slots < 1:
            raise SloBenchError(f"slots must be at least 1 but is {self.slots}")
        if self.service_s is not None and self.service_s < self.ttft_s:
            raise SloBenchError(
                f"service_s = {self.service_s} must not be below ttft_s = {self.ttft_s}"
            )

    def gap_s(self, tokens: int) -> float:
        """Seconds between tokens of an answer of `tokens` tokens."""
        if self.service_s is None:
            return self.itl_s
        return (self.service_s - self.ttft_s) / max(1, tokens - 1)
