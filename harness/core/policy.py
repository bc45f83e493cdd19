"""The policy interface: the decisions that an engine asks for, each over a read-only view.

All engines (simulator, torch, patched vLLM and SGLang) call the same hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ...workloads.errors import SloBenchError, UnknownNameError
from .decisions import Admission, Limits, Line, NextQueue, PreemptionMode, Timeout
from .state import RequestState
from .view import View

Key = float | tuple[float, ...]


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a parameter; the tuner searches this range."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    file: bool = False  # the name of a file; empty: none
    whole: bool = False  # no fractions
    environment: bool = False  # tells of the machine: searched only where it is named

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
    environment: bool = False,
) -> Any:
    """A dataclass field that the user may set and the tuner may search.

    `environment`: it says what the machine is like; the tuner searches it only where it is named.
    """
    if isinstance(default, bool) and choices is None:
        choices = (True, False)
    whole = isinstance(default, int) and choices is None
    bounds = Bounds(low, high, log, choices, file, whole, environment)
    return dataclasses.field(default=default, metadata={"bounds": bounds})


@dataclass(frozen=True)
class Parameters:
    """Parameters are the frozen fields of a policy, for one instance or for several."""

    def __post_init__(self) -> None:
        for name, bounds in self.bounds().items():
            bounds.check(f"{type(self).__name__}.{name}", getattr(self, name))

    def mechanisms(self) -> dict[str, str]:
        """Called once for each instance and each run. It reads the parameters alone.

        Returns:
            Names of what the policy counts, each with what one act of it is; a mechanism that the
            parameters switch off is left out. Names of `counters.FROM_RECORDS` are counted by the
            engine, all others with `counters.add` of the view that hooks are given.

        Example::

            def mechanisms(self) -> dict[str, str]:
                return {"spared": "requests that were not preempted because they were nearly done"}
        """
        return {}

    @classmethod
    def bounds(cls) -> dict[str, Bounds]:
        """Name to bounds of every parameter."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["bounds"] for f in fields if "bounds" in f.metadata}

    @property
    def drop_rule(self) -> str:
        """Requests that the policy drops or rejects although they could be served, in words for
        tables; empty: none.
        """
        return ""

    def with_parameters(self, **values: Any) -> Any:
        """The same policy with other parameters.

        Raises:
            SloBenchError: an unknown parameter, a wrong type or a value out of bounds.
        """
        bounds = self.bounds()
        for name, value in values.items():
            if name not in bounds:
                raise UnknownNameError(f"parameter of {type(self).__name__}", name, bounds)
            if bounds[name].whole and isinstance(value, float) and value.is_integer():
                values[name] = int(value)
            if isinstance(getattr(self, name), bool) and not isinstance(value, bool):
                raise SloBenchError(f"{name} must be true or false but is {value!r}")
        return dataclasses.replace(self, **values)


@dataclass(frozen=True)
class Policy(Parameters):
    """Scheduling policy of one instance with continuous batching. The defaults are vLLM V1's
    decisions; a subclass overrides the hooks that differ.

    Engines skip hooks that a subclass does not override. On equal keys the earlier arrival enters
    first and the later arrival is preempted first. Policies are immutable: what a policy learns
    lives in the object that `new_state` returns, which the engine keeps as `view.policy_state`.

    Example::

        @dataclass(frozen=True)
        class ShortestPromptFirst(Policy):
            def queue_key(self, r: RequestState, view: View) -> float:
                return r.prompt_tokens
    """

    # When `queue_key` is computed: once on entry, after changes of the prefix cache, or before
    # each admission, where it depends on anything else in the view (clock, queue, free blocks).
    # With "linear-in-time" each key is a straight line in time, which `queue_key_line` returns.
    queue_order: ClassVar[Literal["static", "prefix-cache", "linear-in-time", "dynamic"]] = "static"
    # The limits depend on the view: `limits` is called whenever the batch or the queue changed.
    dynamic_limits: ClassVar[bool] = False
    # A request may still enter the batch at the very moment of its timeout.
    may_start_at_timeout: ClassVar[bool] = False
    # The policy reads predicted output lengths; shown to users only.
    uses_predicted_lengths: ClassVar[bool] = False

    def new_state(self) -> Any:
        """Called once for each instance, before the first request. It reads the parameters alone.

        Returns:
            An empty, mutable object for what the policy learns; None if it learns nothing.

        Example::

            def new_state(self) -> list[int]:
                return []  # output lengths, appended by `on_finished`
        """
        return None

    def limits(self, view: View) -> Limits:
        """Called once before the first iteration; with `dynamic_limits` before each iteration whose
        batch or queue changed. It may read all of `view` if `dynamic_limits` is set, else only
        constants.

        Returns:
            The limits of the next iterations: token budget, batch size, kinds of batch.

        Example::

            def limits(self, view: View) -> Limits:
                return Limits(token_budget=self.token_budget, max_seqs=256)
        """
        return Limits()

    def admit(self, r: RequestState, view: View) -> Admission:
        """Called once when `r` arrives, before it enters the waiting queue. It may read all of `r`
        but its true output length, and all of `view`.

        Returns:
            `Admission.ADMIT`, or `Admission.REJECT`, which ends the request unserved.

        Example::

            def admit(self, r: RequestState, view: View) -> Admission:
                return Admission.REJECT if view.n_waiting >= self.max_waiting else Admission.ADMIT
        """
        return Admission.ADMIT

    def queue_key(self, r: RequestState, view: View) -> Key:
        """Called for waiting requests as often as `queue_order` says: once on entry ("static"),
        after changes of the prefix cache ("prefix-cache"), or before each admission ("dynamic").
        With "static" it must not read the clock or the load from `view`.

        Returns:
            A number or a tuple of numbers; the request with the smallest enters the batch next.

        Example::

            def queue_key(self, r: RequestState, view: View) -> float:
                return r.arrival_s + r.slo.ttft_s  # earliest deadline first
        """
        return r.arrival_s

    def queue(self, view: View) -> Queue | None:
        """Called once for each instance, with `queue_order = "dynamic"` alone. It may keep `view`,
        which stays valid.

        Returns:
            A queue that finds the request with the smallest `queue_key` without computing every
            key; None: the engine computes every key before each admission.

        Example::

            def queue(self, view: View) -> Queue | None:
                return RoomQueue(self.worth, self.blocks, room=lambda: view.free_blocks)
        """
        return None

    def queue_key_line(self, r: RequestState, view: View) -> Line:
        """Called once when `r` enters the queue, with `queue_order = "linear-in-time"` alone. It
        may read all of `r` but its true output length, and all of `view`.

        Returns:
            The line that the key of `r` follows over time; `queue_key` must return its value.

        Example::

            def queue_key_line(self, r: RequestState, view: View) -> Line:
                return Line(r.arrival_s, 0.0, -1.0 / r.prompt_tokens)  # waiting time per token
        """
        raise NotImplementedError(
            f"{type(self).__name__} has queue_order linear-in-time and must override queue_key_line"
        )

    def victim_key(self, r: RequestState, view: View) -> Key:
        """Called for the requests in the batch when free KV blocks run out. It may read all of `r`
        but its true output length, and all of `view`.

        Returns:
            A number or a tuple of numbers; the request with the smallest is preempted first.

        Example::

            def victim_key(self, r: RequestState, view: View) -> float:
                return -view.held_blocks(r)  # preempt the largest
        """
        return -r.arrival_s

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        """Called for each victim, after `victim_key` has chosen it. It may read all of `r` but its
        true output length, and all of `view`.

        Returns:
            RECOMPUTE, SWAP or STALL. A swap for which host memory has no room becomes a
            recomputation.

        Example::

            def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
                short = r.prompt_tokens < 512
                return PreemptionMode.RECOMPUTE if short else PreemptionMode.SWAP
        """
        return PreemptionMode.RECOMPUTE

    def next_queue(self, view: View) -> NextQueue:
        """Called before requests enter the batch, when requests wait or are swapped out. It may
        read all of `view`; `view.admissible(queue)` lists the requests of a queue that fit now.

        Returns:
            The queue whose requests enter next, in its order, until one does not fit; or NONE.

        Example::

            def next_queue(self, view: View) -> NextQueue:
                fits = view.admissible(NextQueue.WAITING)
                return NextQueue.WAITING if fits else NextQueue.SWAPPED
        """
        return NextQueue.SWAPPED if view.n_swapped else NextQueue.WAITING

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        """Called before `r` enters the batch. It may read all of `r` but its true output length,
        and all of `view`.

        Returns:
            KV blocks that must stay free beyond those that `r` needs to enter.

        Example::

            def headroom_blocks(self, r: RequestState, view: View) -> int:
                return view.n_decoding  # one block for each decoding request
        """
        return 0

    def reserved_blocks(self, r: RequestState, view: View) -> int:
        """Called when `r` is the next to enter the batch, and again when it enters; both calls must
        return the same. It may read all of `r` but its true output length, and constants of `view`.

        Returns:
            KV blocks reserved for `r` until it ends. A request enters only if all reservations
            together fit the instance's blocks.

        Example::

            def reserved_blocks(self, r: RequestState, view: View) -> int:
                return -(-(r.prompt_tokens + r.max_output_tokens) // view.block_size)
        """
        return 0

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        """Called once when `r` enters the waiting queue. It may read all of `r` but its true output
        length, and all of `view`.

        Returns:
            When `r` leaves the instance if its prefill has not begun, and whether it is dropped or
            offloaded; None: never.

        Example::

            def timeout(self, r: RequestState, view: View) -> Timeout | None:
                return Timeout(r.arrival_s + r.slo.ttft_s, ReleaseReason.DROP)
        """
        return None

    def on_finished(self, r: RequestState, view: View) -> None:
        """Called once when the last token of `r` is out. It may read all of `r` and `view`, and
        change `view.policy_state`. Returns nothing.

        Example::

            def on_finished(self, r: RequestState, view: View) -> None:
                view.policy_state.append(r.emitted_tokens)
        """


@dataclass(frozen=True)
class StaticPolicy(Parameters):
    """Scheduling policy of one instance with static batching: a batch forms when the engine is idle
    and runs until its longest answer ends.

    `continuous` names the system with continuous batching that runs on servers instead; empty:
    none.
    """

    continuous: ClassVar[str] = ""
    uses_predicted_lengths: ClassVar[bool] = False  # as `Policy` has it

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        """Called whenever the engine is idle and requests wait. `waiting` is in order of arrival;
        the hook may read all of it but true output lengths, and all of `view`.

        Returns:
            The next batch: at least one request of `waiting`, each once.

        Example::

            def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
                return list(waiting[: self.batch_size])
        """
        raise NotImplementedError

    def new_state(self) -> Any:
        """Called once for each instance, before the first request. It reads the parameters alone.

        Returns:
            An empty, mutable object for what the policy learns; None if it learns nothing.

        Example::

            def new_state(self) -> list[int]:
                return []  # output lengths, appended by `on_finished`
        """
        return None

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        """Called for each request of a batch when the batch forms. It may read all of `r` but its
        true output length, and all of `view`.

        Returns:
            Output tokens to reserve KV for. The engine cuts a batch of several requests to what
            fits.

        Example::

            def reserve_tokens(self, r: RequestState, view: View) -> int:
                return view.predict.output_tokens_p90(r)
        """
        return r.max_output_tokens

    def output_cap_tokens(self, batch: Sequence[RequestState], view: View) -> int | None:
        """Called once for each batch before it runs. It may read all of its requests but their true
        output lengths, and all of `view`. A policy that overrides it counts `answers_cut`.

        Returns:
            Output tokens, at least 1, at which the engine ends every answer of the batch; None: it
            ends none.

        Example::

            def output_cap_tokens(self, batch: Sequence[RequestState], view: View) -> int | None:
                return max(view.predict.output_tokens(r) for r in batch)
        """
        return None

    def on_finished(self, r: RequestState, view: View) -> None:
        """Called once when the batch of `r` has ended. It may read all of `r` and `view`, and
        change `view.policy_state`. Returns nothing.

        Example::

            def on_finished(self, r: RequestState, view: View) -> None:
                view.policy_state.append(r.emitted_tokens)
        """


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
    """Whether this policy overrides `hook`."""
    base: Callable[..., Any] = getattr(Policy, hook)
    return getattr(type(policy), hook) is not base


class Queue(Protocol):
    """Requests that wait for prefill. Whoever enters or leaves gets another `version`."""

    @property
    def live(self) -> int:
        """Number of waiting requests."""

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""

    def head(self) -> RequestState:
        """The next request; the queue must not be empty."""

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""

    def __iter__(self) -> Iterator[RequestState]: ...

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""

    def overtaken_s(self) -> float:
        """When another request becomes the next one if nothing else happens; infinite if never."""
