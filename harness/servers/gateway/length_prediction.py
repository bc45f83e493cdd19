"""Servers whose policies are told how long answers will be: predicted by the gateway on arrival.

All requests that have come since the last were read are read together, in a thread of their own.
A request goes on when its length is known; what predicting takes is part of its TTFT.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from ....predictors.output_length import Constant, Learned, length_predictor
from ....workloads.errors import SloBenchError
from ...core.records import Outcome
from ...core.wire import Told, told_from_wire
from ...load_generator.http.answers import Raw, read_answer
from ...load_generator.http.faults import Fault
from ...load_generator.http.length_prediction import AT_ONCE
from ..http_server import HttpRequest, Reply
from .health_checks import Sample, Say
from .replies import Counted
from .routes import Serving
from .running import Behind
from .states import last_said, prompt_tokens

_GENERATES = ("/v1/completions", "/v1/chat/completions")
_NAME = "slo_bench_gateway_lengths"
_TIMES = 1_000  # requests, of which is said how long they waited for their prediction
_SHOWN = (0.5, 0.99)


@dataclass(frozen=True)
class AskedOf:
    """A request, as a predictor knows it."""

    text: str
    tokens: int
    model: str


class Foretells(Protocol):
    """Says of prompts how long their answers will be. `said` is what `read` gave for one."""

    def read(self, asked: Sequence[AskedOf]) -> Sequence[tuple[Told, Any]]:
        """In order; takes its time, so it is asked in a thread of its own."""
        ...

    @property
    def hears(self) -> bool:
        """Does it want to know what came?"""
        ...

    def came(self, said: Any, output_tokens: int) -> None:
        """An answer had so many tokens; returns at once."""
        ...

    def samples(self) -> Iterator[Sample]:
        """Name, labels and value of what it has learnt."""
        ...

    def close(self) -> None:
        """Nobody is asked of any more."""
        ...


class Always:
    """The same of every request."""

    hears = False

    def __init__(self, tokens: int) -> None:
        self._told = Told(tokens, tokens)

    def read(self, asked: Sequence[AskedOf]) -> Sequence[tuple[Told, Any]]:
        """See `Foretells`."""
        return [(self._told, None)] * len(asked)

    def came(self, said: Any, output_tokens: int) -> None:
        """See `Foretells`."""

    def samples(self) -> Iterator[Sample]:
        """See `Foretells`."""
        yield from ()

    def close(self) -> None:
        """See `Foretells`."""


class ReadOff:
    """What a trained predictor reads off prompts; with `online` it follows what comes."""

    def __init__(self, learned: Learned, say: Say) -> None:
        self._model = learned.model
        self._follower = learned.follower(say)

    def read(self, asked: Sequence[AskedOf]) -> Sequence[tuple[Told, Any]]:
        """See `Foretells`."""
        from ....predictors.lengths.online_predictor import Prompt

        prompts = [Prompt(one.text, one.tokens, self._model or one.model) for one in asked]
        return [(Told(said.half, said.most), said) for said in self._follower.read(prompts)]

    @property
    def hears(self) -> bool:
        """See `Foretells`."""
        return self._follower.online > 0

    def came(self, said: Any, output_tokens: int) -> None:
        """See `Foretells`."""
        self._follower.came(said, output_tokens)

    def samples(self) -> Iterator[Sample]:
        """See `Foretells`."""
        follower = self._follower
        yield f"{_NAME}_generation", "", follower.config.generation
        if not follower.online:
            return
        taken = sum(taught.step > 0 for _, taught in follower.taught)
        refused = len(follower.taught) - taken
        outcomes = {"taken": taken, "refused": refused, "failed": follower.failures}
        for outcome, times in outcomes.items():
            yield f"{_NAME}_updates_total", f'{{outcome="{outcome}"}}', times
        for window in list(follower.windows)[-1:]:
            for of in ("exact", "plain", "within_one", "ratio"):
                yield f"{_NAME}_window_{of}", "", round(getattr(window, of), 6)

    def close(self) -> None:
        """See `Foretells`."""
        self._follower.close()


def foretells(text: str, say: Say) -> Foretells:
    """A predictor by name, for requests that nobody knows beforehand.

    Raises:
        SloBenchError: there is no such predictor, or it needs to know the answer.
    """
    found = length_predictor(text)
    if isinstance(found, Constant):
        return Always(found.tokens)
    if isinstance(found, Learned):
        return ReadOff(found, say)
    raise SloBenchError(
        f"{text} cannot predict before real answers; --length-predictor of serve takes a folder "
        "of slo-bench predict-train, learned(DIR, …) or constant(N)"
    )


T = TypeVar("T")
U = TypeVar("U")


class Together(Generic[T, U]):
    """Asks for several at once: for all that came while the last were asked for."""

    def __init__(self, ask: Callable[[list[T]], Sequence[U]], at_once: int) -> None:
        self._ask = ask
        self._at_once = at_once
        self._waiting: deque[tuple[T, asyncio.Future[U]]] = deque()
        self._asks = False
        self.times = 0

    async def of(self, one: T) -> U:
        """What is said of `one`; raises what the asking raised."""
        go: asyncio.Future[U] = asyncio.get_running_loop().create_future()
        self._waiting.append((one, go))
        self._next()
        return await go

    def _next(self) -> None:
        if self._asks:
            return
        now: list[tuple[T, asyncio.Future[U]]] = []
        while self._waiting and len(now) < self._at_once:
            one = self._waiting.popleft()
            if not one[1].done():  # its client is still there
                now.append(one)
        if not now:
            return
        self._asks = True
        self.times += 1

        def answered(done: asyncio.Future[Sequence[U]]) -> None:
            self._asks = False
            error = done.exception()
            for place, (_, go) in enumerate(now):
                if go.done():
                    continue
                if error is None:
                    go.set_result(done.result()[place])
                else:
                    go.set_exception(error)
            self._next()

        asked = asyncio.get_running_loop().run_in_executor(None, self._ask, [one for one, _ in now])
        asked.add_done_callback(answered)


class Foretold:
    """What stands behind a gateway, told lengths. Its own group, for it has metrics.

    `field` is where the servers take values from.
    """

    role = "lengths"
    any_up = True

    def __init__(self, inner: Serving, field: str, predictor: Foretells, say: Say) -> None:
        self.groups = (*inner.groups, self)
        self._inner = inner
        self._field = field
        self._predictor = predictor
        self._say = say
        self._together: Together[AskedOf, tuple[Told, Any]] = Together(predictor.read, AT_ONCE)
        self._counts: Counter[str] = Counter()
        self._sum_s = 0.0
        self._last_s: deque[float] = deque(maxlen=_TIMES)

    async def work(self, asked: HttpRequest, reply: Reply) -> None:
        """See `Serving`. A request without a text, or told of already, goes on as it is."""
        body = asked.json() if asked.path.endswith(_GENERATES) else None
        if body is None:
            await self._inner.work(asked, reply)
            return
        values = body.get(self._field)
        values = values if isinstance(values, Mapping) else {}
        one = _asked_of(body)
        if told_from_wire(values) is not None:
            self._counts["told_already"] += 1
        elif one is None:
            self._counts["without_text"] += 1
        else:
            found = await self._read(one)
            if found is not None:
                told, said = found
                body = {**body, self._field: {**values, **told.to_wire()}}
                await self._follow(asked.with_json(body), reply, said, body)
                return
        await self._inner.work(asked, reply)

    async def _read(self, one: AskedOf) -> tuple[Told, Any] | None:
        begin_s = perf_counter()
        try:
            found = await self._together.of(one)
        except Exception as error:  # whatever it is: requests are served without
            if not self._counts["failed"]:
                self._say(f"lengths cannot be predicted: {error}")
            self._counts["failed"] += 1
            return None
        took_s = perf_counter() - begin_s
        self._counts["predicted"] += 1
        self._sum_s += took_s
        self._last_s.append(took_s)
        return found

    async def _follow(
        self, asked: HttpRequest, reply: Reply, said: Any, body: Mapping[str, Any]
    ) -> None:
        """Let it be answered, and tell the predictor how long the answer was."""
        if not self._predictor.hears:
            await self._inner.work(asked, reply)
            return
        loop, exact = asyncio.get_running_loop(), bool(body.get("ignore_eos"))

        def whole(raw: Raw) -> None:
            loop.run_in_executor(None, self._hear, said, raw, exact)

        await self._inner.work(asked, Counted(reply, whole))

    def _hear(self, said: Any, raw: Raw, exact: bool) -> None:
        answer = read_answer(raw)
        if answer.outcome is not Outcome.FINISHED or answer.fault is not Fault.NONE:
            return
        if answer.finish == "length" and not exact:
            self._counts["cut_off"] += 1  # it would have been longer: nobody knows how long
            return
        self._predictor.came(said, len(answer.token_s))

    async def forward(self, asked: HttpRequest, reply: Reply) -> None:
        """See `Group`."""
        await self._inner.groups[0].forward(asked, reply)

    def metrics(self) -> Iterator[Sample]:
        """See `Group`."""
        for what in ("predicted", "told_already", "without_text", "cut_off", "failed"):
            yield f"{_NAME}_requests_total", f'{{outcome="{what}"}}', self._counts[what]
        yield f"{_NAME}_batches_total", "", self._together.times
        yield f"{_NAME}_seconds_total", "", round(self._sum_s, 6)
        last_s = sorted(self._last_s)
        for share in _SHOWN if last_s else ():
            at = min(len(last_s) - 1, int(share * len(last_s)))
            yield f"{_NAME}_seconds", f'{{quantile="{share:g}"}}', round(last_s[at], 6)
        yield from self._predictor.samples()

    def close(self) -> None:
        """See `Group`. The predictor is closed by whoever made it."""


@dataclass(frozen=True)
class ForetoldPlan:
    """`plan` with lengths predicted before it."""

    plan: Behind
    field: str
    predictor: Foretells

    def check(self) -> None:
        """See `Behind`."""
        self.plan.check()

    def made(self, say: Say) -> Serving:
        """See `Behind`."""
        return Foretold(self.plan.made(say), self.field, self.predictor, say)


def _asked_of(body: Mapping[str, Any]) -> AskedOf | None:
    """What is known of a request before it is answered; None where it has no text."""
    text = last_said(body)
    if not text:
        return None
    model = body.get("model")
    return AskedOf(text, prompt_tokens({"prompt": text}), model if isinstance(model, str) else "")
