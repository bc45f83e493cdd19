"""A policy: a handful of small decisions over a read-only view. Every engine asks the same ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...workloads.errors import SloBenchError, UnknownNameError
from .decisions import Admission, Limits, Line, NextQueue, PreemptionMode, Timeout
from .queue import Queue
from .state import RequestState
from .view import View

Key = float | tuple[float, ...]


@dataclass(frozen=True)
class Bounds:
    """What a parameter may be; the tuner searches this range."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    file: bool = False  # the name of a file; empty: none
    whole: bool = False  # no fractions

    def __str__(self) -> str:
        if self.choices is not None:
            return " | ".join(str(choice).lower() for choice in self.choices)
        if self.file:
            return "a file, or empty"
        least = "-∞" if self.low is None else f"{self.low:,g}"
        return f"{least} to {'∞' if self.high is None else f'{self.high:,g}'}"

    def check(self, name: str, value: Any) -> None:
        """Raise SloBenchError if `value` is out of bounds."""
        if self.choices is not None:
            if value not in self.choices:
                options = ", ".join(str(c) for c in self.choices)
                raise SloBenchError(f"{name} must be one of {options} but is {value!r}")
            return
        if self.file:
            if not isinstance(value, str):
                raise SloBenchError(f"{name} must be the name of a file but is {value!r}")
            return
        low, high = self.low, self.high
        if self.whole and not isinstance(value, int):
            raise SloBenchError(f"{name} must be a whole number but is {value!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SloBenchError(f"{name} must be a number from {low} to {high} but is {value!r}")
        if not ((low is None or value >= low) and (high is None or value <= high)):
            raise SloBenchError(f"{name} must be from {low} to {high} but is {value!r}")


def parameter(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    log: bool = False,
    choices: tuple[Any, ...] | None = None,
    file: bool = False,
) -> Any:
    """A dataclass field that the user may set and the tuner may search."""
    if isinstance(default, bool) and choices is None:
        choices = (True, False)
    whole = isinstance(default, int) and choices is None
    bounds = Bounds(low, high, log, choices, file, whole)
    return dataclasses.field(default=default, metadata={"bounds": bounds})


@dataclass(frozen=True)
class Parameters:
    """Parameters are the frozen fields of a policy, for one instance or for several."""

    def __post_init__(self) -> None:
        for name, bounds in self.bounds().items():
            bounds.check(f"{type(self).__name__}.{name}", getattr(self, name))

    @classmethod
    def bounds(cls) -> dict[str, Bounds]:
        """Name to bounds of every parameter."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["bounds"] for f in fields if "bounds" in f.metadata}

    def with_parameters(self, **values: Any) -> Any:
        """The same policy with other parameters.

        Raises:
            SloBenchError: an unknown parameter, a wrong type or a value out of bounds.
        """
        known = self.bounds()
        for name, value in values.items():
            if name not in known:
                raise UnknownNameError(f"parameter of {type(self).__name__}", name, known)
            if known[name].whole and isinstance(value, float) and value.is_integer():
                values[name] = int(value)
            if isinstance(getattr(self, name), bool) and not isinstance(value, bool):
                raise SloBenchError(f"{name} must be true or false but is {value!r}")
        return dataclasses.replace(self, **values)


@dataclass(frozen=True)
class Policy(Parameters):
    """Continuous batching with vLLM V1's answers. Override what a system changes.

    Engines skip hooks that nobody overrides. Ties go to the request that came first; of equal
    `victim_key` the later comer is preempted. Policies hold no state: what one learns lives in the
    object that `new_state` makes and the engine keeps (`view.policy_state`).
    """

    # When `queue_key` is asked: once on entering the queue, again when the prefix cache changed, or
    # whenever somebody may enter, where it hangs on anything in the view (who else waits, room).
    # With "linear-in-time" the keys are straight lines in time, and `queue_key_line` says which.
    queue_order: ClassVar[Literal["static", "prefix-cache", "linear-in-time", "dynamic"]] = "static"
    # Do the limits depend on the view? Then they are asked whenever the composition changed.
    dynamic_limits: ClassVar[bool] = False
    # May a request whose time to leave has come still enter at that moment?
    may_start_at_timeout: ClassVar[bool] = False
    # May it look at predicted lengths of answers? Only said to users.
    uses_predicted_lengths: ClassVar[bool] = False

    def new_state(self) -> Any:
        """What this policy learns on one instance, empty."""
        return None

    def limits(self, view: View) -> Limits:
        """What the next iterations may hold; asked once, or see `dynamic_limits`."""
        return Limits()

    def admit(self, r: RequestState, view: View) -> Admission:
        """On arrival."""
        return Admission.ADMIT

    def queue_key(self, r: RequestState, view: View) -> Key:
        """Order of the queue: the smallest key goes next. Times in seconds compare with times."""
        return r.arrival_s

    def queue(self, view: View) -> Queue | None:
        """Where `queue_order` is "dynamic": a queue that finds the smallest `queue_key` without
        asking all.

        Called once an instance. None: the engine asks for every key each time.
        """
        return None

    def queue_key_line(self, r: RequestState, view: View) -> Line:
        """The line on which `queue_key` moves, where `queue_order` is "linear-in-time"; asked on
        entering.
        """
        raise NotImplementedError(f"{type(self).__name__} orders by time but gives no line")

    def victim_key(self, r: RequestState, view: View) -> Key:
        """Under KV pressure the request in the batch with the smallest key is preempted."""
        return -r.arrival_s

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        """How the victim goes. A swap for which host memory has no room is a recomputation."""
        return PreemptionMode.RECOMPUTE

    def next_queue(self, view: View) -> NextQueue:
        """Who enters next, asked when either group waits; asked again after anybody entered.

        `view.admissible(group)` names those of a group for whom there is room now.
        """
        return NextQueue.SWAPPED if view.n_swapped else NextQueue.WAITING

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        """Blocks that must stay free beyond what `r` needs to enter."""
        return 0

    def reserved_blocks(self, r: RequestState, view: View) -> int:
        """Blocks promised to `r` for life; promises never exceed the instance's blocks."""
        return 0

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        """When `r` goes if it has not begun by then; asked once, on entering the queue."""
        return None

    def on_finished(self, r: RequestState, view: View) -> None:
        """`r` is done: learn from it."""


@dataclass(frozen=True)
class StaticPolicy(Parameters):
    """Static batching: a batch is formed when the engine idles and runs until its longest ends.

    `continuous` names the system that is what a server can run of it, if there is one.
    """

    continuous: ClassVar[str] = ""
    uses_predicted_lengths: ClassVar[bool] = False  # as `Policy` has it

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        """The batch to run next, at least one request, from `waiting` (in order of arrival)."""
        raise NotImplementedError

    def new_state(self) -> Any:
        """What this policy learns on one instance, empty."""
        return None

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        """Answer tokens that KV is reserved for; a batch of more than one never exceeds memory."""
        return r.max_output_tokens

    def on_finished(self, r: RequestState, view: View) -> None:
        """`r` is done: learn from it."""


AnyPolicy = Policy | StaticPolicy


def key_is_kept(policy: Policy) -> bool:
    """Whether `queue_key` is computed once, or only when the prefix cache changes."""
    return policy.queue_order in ("static", "prefix-cache")


def clock_read_error(policy: Policy) -> SloBenchError:
    """The error for a `queue_key` that reads the clock but is not computed again as time passes."""
    return SloBenchError(
        f"queue_key of {type(policy).__name__} reads view.now_s, but queue_order is "
        f"{policy.queue_order!r}, so the key is not computed again as time passes: "
        'set queue_order = "dynamic", or "linear-in-time" with queue_key_line'
    )


def overrides(policy: Policy, hook: str) -> bool:
    """Does this policy answer the hook itself?"""
    base: Callable[..., Any] = getattr(Policy, hook)
    return getattr(type(policy), hook) is not base
