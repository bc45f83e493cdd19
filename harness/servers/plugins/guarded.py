"""A policy whose errors end requests, not the server.

In a server's process an exception of a policy would end the engine, and all requests with it. Here
every hook is called in a guard: the request that it was asked about fails with the error, and the
answer is one that changes as little as possible.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ....workloads.errors import SloBenchError
from ...core.decisions import Admission, Line, PreemptionMode
from ...core.policy import Policy, overrides
from ...core.state import RequestState
from ...core.wire import FAILED


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
            text = f"{FAILED}: {hook} of {policy} raised {type(error).__name__}: {error}"
            self._failed.setdefault(r, text[:500])

    def failed(self) -> dict[RequestState, str]:
        """Requests that have failed since the last call, with the messages for their clients."""
        found, self._failed = self._failed, {}
        return found


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
    made: Policy = object.__new__(
        type(kind.__name__, (kind,), {**hooks, "__module__": kind.__module__})
    )
    for name, value in vars(policy).items():
        object.__setattr__(made, name, value)
    return made


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
