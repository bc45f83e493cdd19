"""Requests that wait for each other: conversations, and the tasks of agents.

Conversations are chains of turns whose prompts contain all earlier turns. Tasks are graphs. A task
is an agent's steps, one after the other. Between two steps a tool runs, or several sub-agents, in
parallel and each with a context of its own; the next step waits for all of them. Tasks are drawn
(`Agents`) or read from a file (`readers.agents`); `graph_of` joins them to a workload.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints
from .arrivals import MADE_BYTES, ArrivalProcess, Concurrency
from .call_parser import Convert, build, parse_call
from .errors import SloBenchError, UnknownNameError
from .lengths import (
    Fixed,
    Geometric,
    LengthDistribution,
    Lognormal,
    PairLengths,
    mean_tokens,
    parse_lengths,
)
from .machine_memory import check_memory
from .prefixes import BLOCK_SIZE, PrefixRows, SessionBlocks
from .streams import Streams
from .workload import Workload

N = TypeVar("N", np.int64, np.float64)


class Volume(NamedTuple):
    """How much to make at a rate: a number of requests, a duration, or whichever ends first."""

    rate_rps: float
    requests: int | None
    duration_s: float | None

    def start_s(self, arrivals: ArrivalProcess, streams: Streams, each: float) -> Floats:
        """When things of `each` requests in the mean begin."""
        rng = streams.rng("arrivals")
        return arrivals.times_s(
            self.rate_rps / each, rng, requests=self.requests, duration_s=self.duration_s
        )


Pauses = LengthDistribution
"""A distribution of whole seconds."""


@dataclass(frozen=True)
class NoPause:
    """Think time of zero seconds."""

    def at(self, u: Floats) -> Ints:
        return np.zeros(len(u), dtype=np.int64)


def _check_context(system_prompt_tokens: int, max_context_tokens: int) -> None:
    if system_prompt_tokens < 0:
        raise SloBenchError("system_prompt_tokens must not be negative")
    if max_context_tokens < system_prompt_tokens + 2:
        raise SloBenchError("max_context_tokens must exceed the system prompt")


@dataclass(frozen=True)
class Sessions:
    """Distributions of the number of turns and of think times of conversations.

    A turn's prompt is the shared system prompt, every earlier message and answer of the session,
    and a new message. Messages and answers have the workload's prompt and output lengths. A
    session ends early before a prompt and answer would exceed `max_context_tokens`.

    `think_s` is a distribution of whole seconds between an answer and the next message. With
    `closed`, a turn waits for the real answer; without, answers are taken to last `answer_s` each
    and all arrivals are drawn in advance.
    """

    turns: LengthDistribution = dataclasses.field(default_factory=lambda: Geometric(4.0))
    think_s: Pauses = dataclasses.field(default_factory=lambda: Lognormal(median=30.0, sigma=1.0))
    system_prompt_tokens: int = 0
    closed: bool = True
    answer_s: float = 10.0
    max_context_tokens: int = 131072

    def __post_init__(self) -> None:
        if not self.answer_s >= 0:
            raise SloBenchError(f"answer_s must not be negative but is {self.answer_s}")
        _check_context(self.system_prompt_tokens, self.max_context_tokens)

    def make(
        self, lengths: PairLengths, arrivals: ArrivalProcess, streams: Streams, volume: Volume
    ) -> Workload:
        """Sessions that begin by the arrival process, so that turns come at the rate on average.

        The rate of sessions is the rate of requests over the mean number of turns, before any
        session is cut at `max_context_tokens`; it is reached once sessions of all ages are under
        way, since all begin after time 0. `requests` keeps the first turns to arrive.

        Raises:
            SloBenchError: the arrivals are a closed loop over single requests.
        """
        if isinstance(arrivals, Concurrency):
            raise SloBenchError("sessions set the order of requests already; leave out concurrency")
        start_s = volume.start_s(arrivals, streams, mean_tokens(self.turns))
        turns = self.turns.at(streams.rng("turns").random(len(start_s)))
        requested = float(turns.sum(dtype=np.float64))
        check_memory(requested * MADE_BYTES, f"making {requested:,.0f} turns of sessions")
        session = np.repeat(np.arange(len(turns)), turns)
        begin = np.repeat(np.cumsum(turns) - turns, turns)
        pairs = lengths.draw(len(session), streams.rng("lengths"))
        turn_tokens = pairs.prompt_tokens + pairs.output_tokens
        context = self.system_prompt_tokens + _since(np.cumsum(turn_tokens) - turn_tokens, begin)
        prompt = context + pairs.prompt_tokens
        think = self.think_s.at(streams.rng("think").random(len(session))).astype(np.float64)
        think[begin == np.arange(len(session))] = 0.0
        waits = think + (0.0 if self.closed else self.answer_s)
        waits[begin == np.arange(len(session))] = 0.0
        arrival_s = start_s[session] + _since(np.cumsum(waits), begin)
        # Tokens only grow within a session, so that dropping rows drops its last turns.
        keep = prompt + pairs.output_tokens <= self.max_context_tokens
        keep &= arrival_s < (volume.duration_s or np.inf)
        order = np.flatnonzero(keep)
        order = order[np.argsort(arrival_s[order], kind="stable")][: volume.requests]
        if not len(order):
            raise SloBenchError(
                f"no first turn fits into max_context_tokens={self.max_context_tokens}"
            )
        where = np.full(len(session), -1, dtype=np.int64)
        where[order] = np.arange(len(order))
        previous = np.where(begin[order] == order, -1, where[order - 1])
        covered = (prompt + pairs.output_tokens)[order]
        blocks = SessionBlocks.of(session[order], covered, self.system_prompt_tokens, BLOCK_SIZE)
        return Workload(
            arrival_s=arrival_s[order],
            prompt_tokens=prompt[order],
            output_tokens=pairs.output_tokens[order],
            max_output_tokens=pairs.max_output_tokens[order],
            session=session[order],
            follows=previous if self.closed else np.full(len(order), -1),
            think_s=think[order] if self.closed else np.zeros(len(order)),
            prefix_blocks=blocks,
            prefix_block_size=BLOCK_SIZE,
        )


def _since(cumulative: NDArray[N], begin: Ints) -> NDArray[N]:
    """A running sum that starts anew in each session."""
    return cumulative - cumulative[begin]


def parse_sessions(text: str) -> Sessions:
    """Read `sessions` or `sessions(turns=uniform(2,8), think_s=lognormal(median=30, sigma=1),
    system_prompt_tokens=500, closed=true)`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
    """
    call = parse_call(text)
    if call.name != "sessions":
        raise UnknownNameError("session setting", call.name, ("sessions",))
    return build(Sessions, call, CONVERTERS)


def parse_pauses(text: str) -> Pauses:
    """Read a length distribution as whole seconds, or `0` for none."""
    return NoPause() if text.strip() in ("0", "fixed(0)") else parse_lengths(text)


CONVERTERS: Mapping[str, Convert] = {
    "LengthDistribution": lambda value, label: parse_lengths(value),
    "Pauses": lambda value, label: parse_pauses(value),
}


AGENT, SUBAGENT = 0, 1
CLASSES = ("agent", "subagent")
TASK_BITS = 40  # of a block's number: above them its task


@dataclass(slots=True)
class Step:
    """One request of a task.

    `waits_for` are earlier steps of the task, the one whose context it continues first; it begins
    `delay_s` after the last of their answers. `blocks` are numbers of its prefix blocks, alike in
    one task only; below 0 those that all tasks share.
    """

    prompt_tokens: int
    output_tokens: int
    waits_for: tuple[int, ...] = ()
    delay_s: float = 0.0
    kind: int = AGENT
    blocks: Sequence[int] = ()


Task = list[Step]


@dataclass(frozen=True)
class TaskBlocks(PrefixRows):
    """Prefix hashes of tasks: those of the steps, apart between tasks."""

    blocks: Sequence[Sequence[int]]
    task: Sequence[int]

    def __len__(self) -> int:
        return len(self.blocks)

    def row(self, row: int) -> tuple[int, ...]:
        """The hashes of one request's blocks."""
        base = (self.task[row] + 1) << TASK_BITS
        return tuple(base + block if block >= 0 else ~block for block in self.blocks[row])

    def take(self, rows: Ints) -> TaskBlocks:
        """The blocks of the given rows, in their order."""
        return TaskBlocks([self.blocks[r] for r in rows], [self.task[r] for r in rows])


def graph_of(
    tasks: Sequence[Task],
    start_s: Floats,
    block_size: int,
    requests: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Tasks that start at these times as a workload; `requests` keeps the first to arrive.

    A request's `arrival_s` is the earliest that it could arrive, if answers took no time.
    """
    rows: list[tuple[float, int, int]] = []  # earliest arrival, task, step
    for number, (task, begin_s) in enumerate(zip(tasks, start_s.tolist(), strict=True)):
        earliest: list[float] = []
        for index, step in enumerate(task):
            after_s = max((earliest[awaited] for awaited in step.waits_for), default=begin_s)
            earliest.append(after_s + step.delay_s)
            rows.append((earliest[-1], number, index))
    rows.sort()
    rows = [row for row in rows if row[0] < (duration_s or np.inf)][:requests]
    place = {(number, index): row for row, (_, number, index) in enumerate(rows)}
    steps = [tasks[number][index] for _, number, index in rows]
    numbers = [number for _, number, _ in rows]
    waits = [
        tuple(place[number, awaited] for awaited in step.waits_for)
        for step, number in zip(steps, numbers, strict=True)
    ]
    column = np.array
    return Workload(
        arrival_s=column([at_s for at_s, _, _ in rows]),
        prompt_tokens=column([step.prompt_tokens for step in steps]),
        output_tokens=column([step.output_tokens for step in steps]),
        class_index=column([step.kind for step in steps]),
        class_names=CLASSES if any(step.kind for step in steps) else CLASSES[:1],
        session=column(numbers),
        follows=column([awaited[0] if awaited else -1 for awaited in waits]),
        joins=[awaited[1:] for awaited in waits] if any(awaited[1:] for awaited in waits) else None,
        think_s=column([step.delay_s if step.waits_for else 0.0 for step in steps]),
        prefix_blocks=TaskBlocks([step.blocks for step in steps], numbers),
        prefix_block_size=block_size,
    )


@dataclass(frozen=True)
class Agents:
    """Distributions of an agent's tasks; messages and answers have the workload's lengths.

    A task has `steps` steps. Each prompt holds the system prompt and all earlier messages and
    answers, and ends with a new message of the workload's prompt length: what a tool said. Before a
    step a tool runs for `tool_s` seconds (whole); with probability `spawn`, `subagents` sub-agents
    of `subagent_steps` steps each run in its place, and their last answers are the message.
    `think_tokens` are generated before each answer and stand in no later prompt. A task ends before
    a prompt and answer would exceed `max_context_tokens`.
    """

    steps: LengthDistribution = field(default_factory=lambda: Geometric(8.0))
    spawn: float = 0.2
    subagents: LengthDistribution = field(default_factory=lambda: Fixed(3))
    subagent_steps: LengthDistribution = field(default_factory=lambda: Geometric(4.0))
    tool_s: Pauses = field(default_factory=lambda: Lognormal(median=2.0, sigma=1.0))
    think_tokens: Pauses = field(default_factory=NoPause)
    system_prompt_tokens: int = 0
    max_context_tokens: int = 131072

    def __post_init__(self) -> None:
        if not 0 <= self.spawn <= 1:
            raise SloBenchError(f"spawn must lie in 0..1 but is {self.spawn}")
        _check_context(self.system_prompt_tokens, self.max_context_tokens)

    @property
    def mean_requests(self) -> float:
        """Mean number of requests of a task, before any is cut at `max_context_tokens`."""
        steps = mean_tokens(self.steps)
        spawned = mean_tokens(self.subagents) * mean_tokens(self.subagent_steps)
        return steps + (steps - 1) * self.spawn * spawned

    def make(
        self, lengths: PairLengths, arrivals: ArrivalProcess, streams: Streams, volume: Volume
    ) -> Workload:
        """Tasks that begin by the arrival process, so that requests come at the rate on average.

        Raises:
            SloBenchError: the arrivals are a closed loop over single requests.
        """
        rng = streams.rng("agents"), streams.rng("lengths")
        tasks = (_Drawing(self, lengths, rng).task() for _ in itertools.count())
        return begun(tasks, self.mean_requests, BLOCK_SIZE, arrivals, streams, volume)


def begun(
    tasks: Iterator[Task],
    mean_requests: float,
    block_size: int,
    arrivals: ArrivalProcess,
    streams: Streams,
    volume: Volume,
) -> Workload:
    """Tasks that begin by the arrival process, at the rate over their mean number of requests.

    Raises:
        SloBenchError: the arrivals are a closed loop over single requests, or too many for memory.
    """
    if isinstance(arrivals, Concurrency):
        raise SloBenchError("agents set the order of requests already; leave out concurrency")
    start_s, requests = volume.start_s(arrivals, streams, mean_requests), volume.requests
    made_at_once = len(start_s) * mean_requests if requests is None else 2.0 * requests
    check_memory(made_at_once * MADE_BYTES, f"making {made_at_once:,.0f} requests of agents")
    drawn: list[Task] = []
    while True:
        # Tasks that begin after the last request that is kept are not drawn.
        enough = len(start_s) if requests is None else math.ceil(requests / mean_requests)
        count = min(len(start_s), max(2 * len(drawn), enough))
        drawn += itertools.islice(tasks, count - len(drawn))
        workload = graph_of(drawn, start_s[:count], block_size, requests, volume.duration_s)
        last_s = workload.span_s if len(workload) == requests else math.inf
        if count == len(start_s) or start_s[count] > last_s:
            return workload


class _Drawing:
    """Draws one task."""

    def __init__(
        self,
        agents: Agents,
        lengths: PairLengths,
        rng: tuple[np.random.Generator, np.random.Generator],
    ) -> None:
        self._agents, self._lengths = agents, lengths
        self._rng, self._rng_lengths = rng
        self._steps: Task = []
        self._blocks = 0  # given to contexts so far

    def _draw_one(self, pauses: Pauses) -> int:
        return int(pauses.at(self._rng.random(1))[0])

    def task(self) -> Task:
        self._context((), AGENT)
        return self._steps

    def _context(self, after: tuple[int, ...], kind: int) -> tuple[int, int] | None:
        """Add the steps of an agent that begins after others; the last one and the tokens of its
        answer, None if none fits.
        """
        agents = self._agents
        count = self._draw_one(agents.steps if kind == AGENT else agents.subagent_steps)
        pairs = self._lengths.draw(count, self._rng_lengths)
        base = self._blocks
        self._blocks += agents.max_context_tokens // BLOCK_SIZE + 1
        held, waits = agents.system_prompt_tokens, after
        last: int | None = None
        answer = 0
        for turn in range(count):
            message = int(pairs.prompt_tokens[turn])
            delay_s = 0.0
            spawned: list[tuple[int, int]] = []
            if last is not None:
                if kind == AGENT and self._rng.random() < agents.spawn:
                    spawned = self._spawn(last)
                    message = sum(spoken for _, spoken in spawned) or message
                else:
                    delay_s = float(self._draw_one(agents.tool_s))
            thought = self._draw_one(agents.think_tokens)
            prompt, new = held + message, int(pairs.output_tokens[turn])
            if prompt + thought + new > agents.max_context_tokens:
                break
            answer, held = new, prompt + new
            if last is not None:
                waits = (last, *(step for step, _ in spawned))
            blocks = self._shared(base, prompt if thought else held)
            self._steps.append(Step(prompt, thought + answer, waits, delay_s, kind, blocks))
            last = len(self._steps) - 1
        return None if last is None else (last, answer)

    def _spawn(self, parent: int) -> list[tuple[int, int]]:
        """Last step and answer's tokens of each sub-agent."""
        count = self._draw_one(self._agents.subagents)
        contexts = [self._context((parent,), SUBAGENT) for _ in range(count)]
        return [context for context in contexts if context is not None]

    def _shared(self, base: int, tokens: int) -> Sequence[int]:
        system = self._agents.system_prompt_tokens // BLOCK_SIZE
        full = tokens // BLOCK_SIZE
        return [*(~block for block in range(min(system, full))), *range(base + system, base + full)]


def parse_agents(text: str) -> Agents:
    """Read "agents" or `agents(steps=geometric(8), spawn=0.3, subagents=uniform(2,4),
    tool_s=lognormal(median=2, sigma=1), think_tokens=fixed(200))`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
    """
    return build(Agents, parse_call(text), CONVERTERS)
