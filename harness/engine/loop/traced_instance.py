"""Instances that log their actions, for explanations and traces.

Decisions and times equal those of the base classes bit for bit, skipped decode steps included: each
method calls the base method and records its effect. Untraced runs pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ...core.counters import TimedCounters
from ...core.state import Phase, RequestState
from ..simulator.simulated import SimulatedInstance
from ..simulator.static import StaticInstance


class State(Enum):
    """Where a request stands; it waits in the queue before the first of these."""

    PREFILL = "prefill"  # in the batch, its prompt not yet computed
    RECOMPUTE = "recompute"  # likewise, for the second time
    DECODE = "decode"
    PREEMPTED = "preempted"  # back in the queue, its KV thrown away
    SWAPPED = "swapped"  # its KV in host memory
    STALLED = "stalled"  # keeps its KV, sits out
    PADDING = "padding"  # answered, but its batch goes on
    DONE = "done"


class StateChange(NamedTuple):
    """From `time_s` on a request is in `state`."""

    time_s: float
    state: State


class TracedChunk(NamedTuple):
    """Tokens of one prompt that a step computes."""

    request: int
    tokens: int


class TracedStep(NamedTuple):
    """One iteration, or a leap over `repeats` of them that only decode.

    From `begin_s` it waits for busy pipeline stages (where other lanes share them), then `swap_s`
    for KV blocks on their way, then computes for `compute_s`, which ends at `end_s`. Without
    prefill it would have computed for `decode_s`.
    """

    begin_s: float
    end_s: float
    swap_s: float
    compute_s: float
    decode_s: float
    decode_seqs: int
    kv_tokens: int
    chunks: tuple[TracedChunk, ...]
    waiting: int
    num_gpu_blocks: int
    repeats: int = 1
    shared_s: float = 0.0  # of `compute_s`, for other models on the same GPU


class Place(Enum):
    """Where a request is between its arrival and its end."""

    HELD = "held"  # in a queue before the instances
    INSTANCE = "instance"
    LOADING = "loading"  # at a model whose weights are on their way to the GPU
    PREFILLED = "prefilled"  # at a prefill instance, without a decode instance yet
    TRANSFER = "transfer"  # its KV goes from one instance to another


class Stop(NamedTuple):
    """From `time_s` on a request is at `place`; `log` is the index of that instance's log."""

    time_s: float
    place: Place
    name: str
    why: str
    log: int = -1


class Act(NamedTuple):
    """A mechanism acted on a request."""

    time_s: float
    mechanism: str


class TracedCounters(TimedCounters):
    """Counters that note the acts on each request."""

    def __init__(
        self, mechanisms: Iterable[str], clock: Callable[[], float], acts: dict[int, list[Act]]
    ) -> None:
        super().__init__(mechanisms, clock)
        self._acts = acts

    def add(self, name: str, r: RequestState | None = None, why: str = "") -> None:
        super().add(name, r, why)
        if r is not None:
            self._acts.setdefault(r.id, []).append(Act(self._clock(), name))


@dataclass
class InstanceLog:
    """What one instance did: steps in order of time, and the moves of each request."""

    steps: list[TracedStep] = field(default_factory=list)
    moves: dict[int, list[StateChange]] = field(default_factory=dict)
    acts: dict[int, list[Act]] = field(default_factory=dict)  # shared by all instances

    def move(self, request: int, time_s: float, state: State) -> None:
        """Record a change of state of `request`."""
        self.moves.setdefault(request, []).append(StateChange(time_s, state))


@dataclass
class EngineTrace:
    """The logs of all instances (with pipeline parallelism of all lanes), by index, and the stops
    and acts of each request. A request without stops was on one instance all the time.
    """

    instances: dict[int, InstanceLog] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of instances
    stops: dict[int, list[Stop]] = field(default_factory=dict)
    acts: dict[int, list[Act]] = field(default_factory=dict)

    def log(self, index: int) -> InstanceLog:
        """The log of one instance."""
        return self.instances.setdefault(index, InstanceLog(acts=self.acts))

    def stop(self, request: int, stop: Stop) -> None:
        """Record where `request` is from now on."""
        self.stops.setdefault(request, []).append(stop)

    def last_place(self, request: int) -> Place | None:
        """Where `request` is now; None before its first stop."""
        stops = self.stops.get(request)
        return stops[-1].place if stops else None

    def where(self, request: int) -> list[int]:
        """The instances (lanes) in whose batches a request was."""
        return [index for index, log in self.instances.items() if request in log.moves]

    def log_of(self, request: int) -> InstanceLog | None:
        """The log in which a request occurs; None if it never entered a batch."""
        return next((log for log in self.instances.values() if request in log.moves), None)


_LEFT = {
    Phase.WAITING: State.PREEMPTED,
    Phase.SWAPPED: State.SWAPPED,
    Phase.STALLED: State.STALLED,
}


class TracedInstance(SimulatedInstance):
    """A `SimulatedInstance` that keeps a log."""

    __slots__ = ("_before", "log")

    def __init__(self, log: InstanceLog, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log = log
        self.counters = TracedCounters(self.counters, lambda: self.now_s, log.acts)
        self._before: tuple[float, float] = (0.0, 0.0)  # clock and swap time as a step begins

    def schedule(self) -> bool:
        runs = super().schedule()
        self._before = (self.now_s, self.swap_s)
        return runs

    def complete(self) -> bool:
        begin_s, swap_s = self._before
        step_s, seqs, kv_tokens = self._step_of, self.decode_seqs, self.decode_kv_tokens
        compute_s = step_s(seqs, kv_tokens, self.chunks)
        swap_s = self._lim.exposed_swap_s(compute_s, swap_s, self.chunks)
        alone_s = compute_s
        if self.chunks:
            alone_s = step_s(seqs, kv_tokens, ()) if seqs else 0.0
        owners = zip(self.prefilling, self.chunks, strict=False)
        chunks = tuple(TracedChunk(r.id, tokens) for r, (_, tokens) in owners)
        self._note(begin_s, swap_s, compute_s, min(alone_s, compute_s), chunks)
        return super().complete()

    def _note(
        self,
        begin_s: float,
        swap_s: float,
        compute_s: float,
        decode_s: float,
        chunks: tuple[TracedChunk, ...],
        repeats: int = 1,
    ) -> None:
        kv_manager = self.kv_manager
        self.log.steps.append(
            TracedStep(
                begin_s=begin_s,
                end_s=self.now_s,
                swap_s=swap_s,
                compute_s=compute_s,
                decode_s=decode_s,
                decode_seqs=self.decode_seqs,
                kv_tokens=self.decode_kv_tokens,
                chunks=chunks,
                waiting=self.waiting.live + len(self.swapped) + len(self.stalled),
                num_gpu_blocks=kv_manager.total - kv_manager.free,
                repeats=repeats,
                shared_s=compute_s * self._shared_share(),
            )
        )

    def _shared_share(self) -> float:
        """Share of the time of a step that other models on the same GPU take."""
        return 0.0

    def _leap(self, horizon_s: float, step_s: float) -> None:
        begin_s, tick = self.now_s, self.tick
        super()._leap(horizon_s, step_s)
        if self.tick > tick:
            span_s = self.now_s - begin_s
            self._note(begin_s, 0.0, span_s, span_s, (), self.tick - tick)

    def _pass_time(self, horizon_s: float) -> bool:
        begin_s, swap_s = self.now_s, self.swap_s
        goes_on = super()._pass_time(horizon_s)
        if swap_s:
            self._note(begin_s, swap_s, 0.0, 0.0, ())
        return goes_on

    def _enter_batch(self, r: RequestState) -> None:
        super()._enter_batch(r)
        if r.phase is Phase.PREFILL:
            self.log.move(r.id, self.now_s, State.RECOMPUTE if r.recomputes else State.PREFILL)

    def _start_decode(self, r: RequestState) -> None:
        super()._start_decode(r)
        self.log.move(r.id, self.now_s, State.DECODE)

    def _preempt(self) -> None:
        there = [*self.decoding, *self.prefilling, *self.stalled]
        phases = [r.phase for r in there]
        super()._preempt()
        for r, before in zip(there, phases, strict=True):
            if r.phase is not before:
                self.log.move(r.id, self.now_s, _LEFT[r.phase])

    def _finish(self, r: RequestState) -> None:
        super()._finish(r)
        self.log.move(r.id, self.now_s, State.DONE)


class TracedStaticInstance(StaticInstance):
    """A `StaticInstance` that keeps a log; a batch is one step of prefill and one of decoding."""

    def __init__(self, log: InstanceLog, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log = log
        self.counters = TracedCounters(self.counters, lambda: self.now_s, log.acts)

    def _run_batch(self, batch: list[RequestState]) -> None:
        begin_s = self.now_s
        again = [bool(r.recomputes) for r in batch]
        super()._run_batch(batch)
        self._note(batch, begin_s)
        for r, was_there in zip(batch, again, strict=True):
            self._note_moves(r, batch, begin_s, was_there)

    def _note(self, batch: Sequence[RequestState], begin_s: float) -> None:
        first_s = self.prefill_end_s
        prompt = max(r.prompt_tokens for r in batch)
        moments = ((begin_s, first_s, True), (first_s, self.now_s, False))
        for start_s, end_s, prefill in moments:
            self.log.steps.append(
                TracedStep(
                    begin_s=start_s,
                    end_s=end_s,
                    swap_s=0.0,
                    compute_s=end_s - start_s,
                    decode_s=0.0 if prefill else end_s - start_s,
                    decode_seqs=0 if prefill else len(batch),
                    kv_tokens=0 if prefill else len(batch) * prompt,
                    chunks=tuple(TracedChunk(r.id, prompt) for r in batch) if prefill else (),
                    waiting=self.waiting.live,
                    num_gpu_blocks=0,
                    repeats=1 if prefill else max(r.output_tokens for r in batch) - 1,
                )
            )

    def _note_moves(
        self, r: RequestState, batch: Sequence[RequestState], begin_s: float, again: bool
    ) -> None:
        move, first_s = self.log.move, self.prefill_end_s
        move(r.id, begin_s, State.RECOMPUTE if again else State.PREFILL)
        move(r.id, first_s, State.DECODE)
        if r.phase is Phase.WAITING:
            move(r.id, self.now_s, State.PREEMPTED)
            return
        prompt = max(member.prompt_tokens for member in batch)
        own_s = self.step_time.span_s(len(batch), len(batch) * prompt, r.output_tokens - 1)
        if first_s + own_s < r.finish_s and r.output_tokens < max(m.output_tokens for m in batch):
            move(r.id, first_s + own_s, State.PADDING)
        move(r.id, r.finish_s, State.DONE)
