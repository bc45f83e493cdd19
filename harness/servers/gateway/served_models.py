"""Several models' servers behind one queue, with activation on demand.

The policy (`SharingPolicy`) gives the queue and the order of eviction, as in the simulator. A
request goes to its model's server when it would begin there at once, as on a simulated GPU. How
long prompts take is learned from the first bytes of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from ....workloads.errors import SloBenchError
from ...core.idle_gaps import IdleGaps
from ...core.multi_model_policy import IdleModel, SharingPolicy
from ...core.state import RequestState
from ...load_generator.http.endpoint import Endpoint
from ..http.http_server import HttpRequest, Reply, refuse, respond, respond_json
from ..http.prometheus import Sample
from .health_checks import Say
from .replies import BufferedReply
from .states import state_of
from .upstream import ConnectionLostError, UnreachableError, Upstream

T = TypeVar("T")

_NEW = 0.2  # weight of the last prompt in the mean time per prompt token


class ModelLifecycle(Protocol):
    """Activates and evicts models; both may take long and run in a thread."""

    def activate(self, model: str) -> Endpoint:
        """Start or wake up a model; returns the address of its server.

        Raises:
            SloBenchError: it does not come up.
        """

    def evict(self, model: str) -> None:
        """Free the memory of a model, which has no requests."""


class ModelState(Enum):
    """Place of a model: not on the device, starting, serving, or being evicted."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    GOING = "going"


@dataclass
class GatewayModel:
    """A model's server, requests, measured prefill speed and counters."""

    name: str
    index: int
    place: ModelState = ModelState.AWAY
    upstream: Upstream | None = None
    unbegun: dict[RequestState, float] = field(default_factory=dict)  # since when
    running: set[RequestState] = field(default_factory=set)
    s_per_token: float = 0.0
    gaps: IdleGaps = field(default_factory=IdleGaps)
    slo_s: float = float("inf")  # TTFT, of its last request that has one
    idle_since_s: float = 0.0
    answers: int = 0
    losses: int = 0
    activations: int = 0
    evictions: int = 0

    @property
    def n_requests(self) -> int:
        """Number of requests at the model's server."""
        return len(self.unbegun) + len(self.running)

    @property
    def unbegun_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(r.prompt_tokens for r in self.unbegun)

    def sent(self, r: RequestState, now_s: float) -> None:
        """Record that `r` was sent to the model's server."""
        self.unbegun[r] = now_s

    def begun(self, r: RequestState, now_s: float) -> None:
        """Record the first byte of `r`, and update the measured time per prompt token."""
        tokens = self.unbegun_tokens
        each_s = (now_s - self.unbegun.pop(r)) / tokens
        self.running.add(r)
        self.s_per_token += (each_s - self.s_per_token) * (_NEW if self.s_per_token else 1.0)

    def left(self, r: RequestState, now_s: float) -> None:
        """Remove a request that has ended, for any reason."""
        self.unbegun.pop(r, None)
        self.running.discard(r)
        if not self.n_requests:
            self.idle_since_s = now_s


@dataclass(frozen=True)
class SharedPlan:
    """Models by name behind a gateway, of which at most `max_active_models` are on the device."""

    models: Sequence[str]
    standing: ModelLifecycle
    policy: SharingPolicy
    max_active_models: int | None = None
    clock: Callable[[], float] = time.monotonic

    def check(self) -> None:
        """Check the names of the models and their number.

        Raises:
            SloBenchError: no model, or two of one name.
        """
        if not self.models:
            raise SloBenchError("a gateway needs a model behind it")
        twice = [name for name, times in Counter(self.models).items() if times > 1]
        if twice:
            raise SloBenchError(f"two models are named {twice[0]}: name them apart")
        if self.max_active_models is not None and self.max_active_models < 1:
            raise SloBenchError(
                f"max_active_models must be at least 1 but is {self.max_active_models}"
            )

    def build(self, say: Say) -> SharedModels:
        """The queue with the models' servers."""
        return SharedModels(self, say)


class SharedModels:
    """Serving of several models with one queue; it is its own server group."""

    role = "serve"
    any_up = True  # models are activated on demand

    def __init__(self, plan: SharedPlan, say: Say) -> None:
        self.groups = (self,)
        self._models = {name: GatewayModel(name, k) for k, name in enumerate(plan.models)}
        self._places = plan.max_active_models or len(self._models)
        self._standing = plan.standing
        self._policy = plan.policy
        self._clock = plan.clock
        self._say = say
        self._queue = plan.policy.server_queue()
        self._waiting: dict[RequestState, tuple[GatewayModel, asyncio.Future[str]]] = {}
        self._number = 0
        # The last request id that may be admitted while a model lacks a place; None: all.
        self._last: int | None = None

    # ---------------------------------------------------------------- requests

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Queue a request until its model can begin it, then let the model's server answer."""
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body is no JSON object")
            return
        model = self._models.get(str(body.get("model")))
        if model is None:
            names = ", ".join(self._models)
            refuse(reply, 404, f"there is no model {body.get('model')!r} here, but {names}")
            return
        now_s = self._clock()
        self._number += 1
        r = state_of(body, self._number, now_s)
        if not (model.n_requests or self._wanted(model)):
            model.gaps.add(now_s - model.idle_since_s)
        if r.slo.ttft_s < float("inf"):
            model.slo_s = r.slo.ttft_s
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[r] = model, future
        self._queue.push(r, model.s_per_token * r.prompt_tokens)
        try:
            self._admit()
            problem = await future
            if problem:
                refuse(reply, 503, problem)
            else:
                await self._serve(model, r, request, reply)
        finally:
            if r in self._waiting:
                self._queue.remove(r)
                del self._waiting[r]
            model.left(r, self._clock())
            self._admit()

    async def _serve(
        self, model: GatewayModel, r: RequestState, request: HttpRequest, reply: Reply
    ) -> None:
        upstream = model.upstream
        assert upstream is not None
        held = BufferedReply(reply, lambda: model.begun(r, self._clock()))
        try:
            await upstream.exchange(request, held)
        except (UnreachableError, ConnectionLostError) as error:
            model.losses += 1
            self._lost(model, upstream, error)
            if not reply.begun:
                refuse(reply, 502, f"the server of {model.name} was lost: {error}")
            return
        model.answers += 1

    def _lost(self, model: GatewayModel, upstream: Upstream, why: Exception) -> None:
        """Mark a model whose server is gone as away; the next request for it starts the server
        again.
        """
        if model.upstream is upstream and model.place is ModelState.HERE:
            self._say(f"{model.name} is lost: {why}")
            self._go(model)

    def _passes(self, r: RequestState) -> bool:
        """Whether a request may be admitted while an earlier one waits for its model."""
        return self._last is None or r.id <= self._last

    def _wanted(self, model: GatewayModel) -> bool:
        """Whether an admissible request waits for the model."""
        waiting = self._waiting.items()
        return any(awaited is model and self._passes(r) for r, (awaited, _) in waiting)

    def _admit(self) -> None:
        """Admit requests, in the queue's order, that their model can begin at once.

        If a model has no place and no model is idle to make room, requests that have already
        arrived are still admitted and later ones wait. So the models in its place become idle, and
        a change costs no more than the requests that have arrived.
        """
        now_s = self._clock()
        lacks = False
        for r in self._queue.ordered(now_s):
            model, go = self._waiting[r]
            if model.place is not ModelState.HERE:
                if model.place is ModelState.AWAY and not self._makes_room(model, now_s):
                    lacks = True
                    if self._last is None and not self._any(ModelState.COMING):
                        self._last = self._number
            elif self._passes(r) and self._begins_at_once(model):
                self._queue.remove(r)
                del self._waiting[r]
                model.sent(r, now_s)
                go.set_result("")
        if not lacks:
            self._last = None

    def _begins_at_once(self, model: GatewayModel) -> bool:
        """Whether the model's next iteration has room for the request."""
        return self._policy.begins_at_once(model.n_requests, model.unbegun_tokens)

    # ---------------------------------------------------------------- coming and going

    def _makes_room(self, model: GatewayModel, now_s: float) -> bool:
        """Whether the model is activated or another one is evicted for it; False if all models on
        the device have requests.
        """
        models = self._models.values()
        if sum(other.place is not ModelState.AWAY for other in models) < self._places:
            self._come(model)
            return True
        if self._any(ModelState.GOING):
            return True
        idle = [
            other
            for other in models
            if other.place is ModelState.HERE and not (other.n_requests or self._wanted(other))
        ]
        order = self._policy.leaving_order(
            IdleModel(
                other.index,
                other.slo_s if other.slo_s < float("inf") else 1.0,
                now_s - other.idle_since_s,
                other.gaps,
            )
            for other in idle
        )
        for index in order[:1]:
            self._go(next(other for other in idle if other.index == index))
        return bool(order)

    def _any(self, place: ModelState) -> bool:
        return any(model.place is place for model in self._models.values())

    def _come(self, model: GatewayModel) -> None:
        model.place = ModelState.COMING
        begin_s = self._clock()

        def came(endpoint: Endpoint | None, problem: str) -> None:
            if endpoint is None:
                model.place = ModelState.AWAY
                self._say(f"{model.name} does not come up: {problem}")
                for r in [r for r, (awaited, _) in self._waiting.items() if awaited is model]:
                    self._queue.remove(r)
                    self._waiting.pop(r)[1].set_result(f"{model.name} does not come up")
            else:
                now_s = self._clock()
                model.place, model.upstream = ModelState.HERE, Upstream(endpoint)
                model.idle_since_s = now_s
                model.activations += 1
                self._say(f"{model.name} is at {endpoint.url}: {now_s - begin_s:.1f} s")
            self._admit()

        _in_thread(lambda: self._standing.activate(model.name), came)

    def _go(self, model: GatewayModel) -> None:
        model.place = ModelState.GOING

        def went(_: None, problem: str) -> None:
            if problem:
                self._say(f"{model.name} does not go: {problem}")
            if model.upstream is not None:
                model.upstream.close()
            model.place, model.upstream = ModelState.AWAY, None
            model.evictions += 1
            self._say(f"{model.name} has left")
            self._admit()

        _in_thread(lambda: self._standing.evict(model.name), went)

    # ---------------------------------------------------------------- all else

    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing: the list of models here, everything else at the
        named model's server.
        """
        if request.path == "/health":
            respond(reply, b"", "text/plain")
            return
        if request.path == "/v1/models":
            data = [{"id": name, "object": "model"} for name in self._models]
            respond_json(reply, {"object": "list", "data": data})
            return
        model = self._models.get(str((request.json() or {}).get("model")))
        if model is None or model.upstream is None or model.place is not ModelState.HERE:
            refuse(reply, 503, "the model that should answer is away, or none is named")
            return
        await model.upstream.exchange(request, reply)

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""
        for model in self._models.values():
            labels = f'{{model="{model.name}"}}'
            waiting = sum(awaited is model for awaited, _ in self._waiting.values())
            yield "slo_bench_gateway_up", labels, int(model.place is ModelState.HERE)
            yield "slo_bench_gateway_queued", labels, waiting
            yield "slo_bench_gateway_in_flight", labels, model.n_requests
            yield "slo_bench_gateway_answers_total", labels, model.answers
            yield "slo_bench_gateway_losses_total", labels, model.losses
            yield "slo_bench_gateway_activations_total", labels, model.activations
            yield "slo_bench_gateway_evictions_total", labels, model.evictions

    def close(self) -> None:
        """Close all connections; the owner of the servers stops them."""
        for model in self._models.values():
            if model.upstream is not None:
                model.upstream.close()


def _in_thread(act: Callable[[], T], then: Callable[[T | None, str], None]) -> None:
    """Run `act` in a thread; call `then` in the event loop with its result, or with its error text.

    The thread is a daemon, so that the process can exit while a server starts.
    """
    loop = asyncio.get_running_loop()

    def work() -> None:
        outcome, problem = None, ""
        try:
            outcome = act()
        except SloBenchError as error:
            problem = str(error)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(then, outcome, problem)

    threading.Thread(target=work, daemon=True).start()
