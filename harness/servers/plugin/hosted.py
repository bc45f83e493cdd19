"""A policy inside a server's process: its errors, and what is kept for it.

An exception of a policy would end the engine, and all requests with it. Here every hook is called
in a guard: the request that it was asked about fails with the error, and the answer is one that
changes as little as possible.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Protocol

from ....workloads.errors import SloBenchError
from ...core.counters import Counters
from ...core.decisions import Admission, Line, PreemptionMode, ReleaseReason
from ...core.policy import Key, Policy, clock_read_error, key_is_kept, overrides
from ...core.predictions import LearnedPredictions
from ...core.records.decision_counts import DecisionCounts
from ...core.state import RequestState
from ...core.view import Predictions, View
from ...core.wire import FAILED
from ...policies.policy_faults import fault_text
from .contract import StepLog, Tally


@functools.total_ordering
class _First:
    """A key below all others, of any type."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _First)

    def __lt__(self, other: object) -> bool:
        return not isinstance(other, _First)

    def __hash__(self) -> int:
        return 0


FIRST = _First()
# Answers in place of those that a policy failed to give about a request.
_ANSWERS: dict[str, Any] = {
    "admit": Admission.ADMIT,
    "queue_key": FIRST,
    "queue_key_line": Line(0.0, -sys.float_info.max, 0.0),
    "victim_key": FIRST,
    "preemption_mode": PreemptionMode.RECOMPUTE,
    "headroom_blocks": 0,
    "reserved_blocks": 0,
    "timeout": None,
    "on_finished": None,
}


class PolicyErrors:
    """Errors of a policy: how many, and the requests that fail because of them."""

    def __init__(self) -> None:
        self.count = 0
        self._failed: dict[RequestState, str] = {}

    def note(self, policy: str, hook: str, error: Exception, r: RequestState | None) -> None:
        """A hook raised; the first error goes to the server's log with its traceback."""
        self.count += 1
        if self.count == 1:
            traceback.print_exception(error)
        if r is not None:
            problem = fault_text(error) or f"{type(error).__name__}: {error}"
            text = f"{FAILED}: {hook} of {policy} raised {problem}"
            self._failed.setdefault(r, text[:500])

    def failed(self) -> dict[RequestState, str]:
        """Requests that have failed since the last call, with the messages for their clients."""
        failures, self._failed = self._failed, {}
        return failures


def guarded(policy: Policy, errors: PolicyErrors) -> Policy:
    """The same policy; what its hooks raise is noted in `errors`.

    `limits` is not guarded when it is first called: the server does not start.
    """
    kind = type(policy)
    hooks = {
        name: _about_request(name, getattr(kind, name), kind.__name__, errors)
        for name in _ANSWERS
        if overrides(policy, name)
    }
    if overrides(policy, "next_queue"):
        hooks["next_queue"] = _next_queue(kind.next_queue, kind.__name__, errors)
    hooks["limits"] = _limits(kind.limits, kind.__name__, errors)
    guarded_policy: Policy = object.__new__(
        type(kind.__name__, (kind,), {**hooks, "__module__": kind.__module__})
    )
    for name, value in vars(policy).items():
        object.__setattr__(guarded_policy, name, value)
    return guarded_policy


def _about_request(
    name: str, hook: Callable[..., Any], policy: str, errors: PolicyErrors
) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(self: Policy, r: RequestState, view: Any) -> Any:
        try:
            return hook(self, r, view)
        except SloBenchError:  # it uses the interface wrongly, whatever the request
            raise
        except Exception as error:
            errors.note(policy, name, error, r)
            return _ANSWERS[name]

    return called


def _next_queue(hook: Callable[..., Any], policy: str, errors: PolicyErrors) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(self: Policy, view: Any) -> Any:
        try:
            return hook(self, view)
        except Exception as error:
            errors.note(policy, "next_queue", error, None)
            return Policy.next_queue(self, view)

    return called


def _limits(hook: Callable[..., Any], policy: str, errors: PolicyErrors) -> Callable[..., Any]:
    last: list[Any] = []

    @functools.wraps(hook)
    def called(self: Policy, view: Any) -> Any:
        try:
            last[:] = [hook(self, view)]
        except Exception as error:
            if not last:
                raise
            errors.note(policy, "limits", error, None)
        return last[0]

    return called


class ClockedView(View, Protocol):
    """A view whose clock can be closed while a key is computed that is kept."""

    clock_is_closed: bool


class HostedPolicy:
    """A guarded policy of a server, with its state, predictions, counters, log and timeouts."""

    def __init__(self, policy: Policy) -> None:
        self.errors = PolicyErrors()
        self.policy = guarded(policy, self.errors)
        self.state = policy.new_state()
        self.counters = Counters(policy.mechanisms())
        self.predictions = LearnedPredictions()
        self.decisions = DecisionCounts()
        self.log = StepLog()
        self._tally = Tally()
        self._timeouts: list[tuple[float, int, RequestState, ReleaseReason]] = []
        self._calls_admit = overrides(policy, "admit")
        self._calls_timeout = overrides(policy, "timeout")
        self._keeps_keys = key_is_kept(policy)

    def rejects(self, r: RequestState, view: ClockedView) -> bool:
        """Whether the policy rejects a request that arrives."""
        return self._calls_admit and self.policy.admit(r, view) is Admission.REJECT

    def add_timeout(self, r: RequestState, view: ClockedView) -> None:
        """Ask for the timeout of a request that has entered the queue."""
        if self._calls_timeout and (timeout := self.policy.timeout(r, view)) is not None:
            heappush(self._timeouts, (timeout.time_s, r.seq, r, timeout.reason))

    def timed_out(self, now_s: float) -> Iterator[tuple[RequestState, ReleaseReason]]:
        """Requests whose timeout has passed, with the reason, also those that have begun."""
        while self._timeouts and self._timeouts[0][0] <= now_s:
            _, _, r, reason = heappop(self._timeouts)
            yield r, reason

    def queue_key(self, r: RequestState, view: ClockedView) -> Key:
        """The policy's key of a request; one that is kept cannot read the clock."""
        if not self._keeps_keys:
            return self.policy.queue_key(r, view)
        view.clock_is_closed = True
        try:
            return self.policy.queue_key(r, view)
        finally:
            view.clock_is_closed = False

    def write_tally(self, **server_counters: int) -> None:
        """Write all counters, with the server's own, for the process that started the server."""
        totals = {"policy_errors": self.errors.count, **self.decisions.totals()}
        self._tally.write(self.counters, **totals, **server_counters)


class HostedView:
    """What the views of all servers have in common: time, predictions, state and counters."""

    def __init__(self, hosted: HostedPolicy) -> None:
        self.predict: Predictions = hosted.predictions
        self.policy_state: Any = hosted.state
        self.counters = hosted.counters
        self.time_s = 0.0
        self.clock_is_closed = False
        self._policy = hosted.policy

    @property
    def now_s(self) -> float:
        if self.clock_is_closed:
            raise clock_read_error(self._policy)
        return self.time_s
