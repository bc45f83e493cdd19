"""Several models' servers on several GPUs behind one address, where the simulator's policy decides.

The policy (`SharingPolicy`) sees the same `MultiModelCluster` as in the simulator: it says on which
GPU a model wakes up, which one leaves, and in which order requests go to their model's server. What
differs: how long prompts take is learned from the first bytes of answers, a model is ready when its
server says so, and of a request's KV the gateway counts the pages of the whole answer, as far as
there are any, from when it is sent until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ....predictors.placement import OVERHEAD_BYTES
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import INF
from ...core.counters import Counters
from ...core.kv.pages import PAGE_BYTES, PooledKVCacheManager
from ...core.multi_model_policy import Gpus, ServedModel, SharingPolicy
from ...core.state import RequestState
from ...core.wire import REJECTED
from ...engine.cluster.placed_models import PlacedModels
from ...load_generator.http.endpoint import Endpoint
from ..http.http_server import HttpRequest, Reply, refuse, respond, respond_json
from ..http.prometheus import Sample
from .health_checks import MECHANISMS, Say
from .replies import BufferedReply
from .states import state_of
from .upstream import ConnectionLostError, UnreachableError, Upstream

T = TypeVar("T")

_NEW = 0.2  # weight of the last prompt in the mean time per prompt token
_PLACE_PAGES = 1024


class ModelLifecycle(Protocol):
    """Starts and stops the servers of models, or wakes them up; both may take long and run in a
    thread. A start waits for the stops on its GPUs.
    """

    def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
        """Start or wake up a model on these GPUs, with KV memory for so many tokens (None: what the
        server takes); returns the address of its server.

        Raises:
            SloBenchError: it does not come up.
        """

    def evict(self, model: str, gpus: Gpus) -> None:
        """Free the memory of a model, which has no requests there."""


@dataclass(frozen=True)
class PlainMemory:
    """Implements `ModelMemory`; JSON can carry it."""

    weight_bytes_per_gpu: int
    kv_bytes_per_token: int
    block_size: int
    block_bytes_per_gpu: int
    reserve_bytes_per_gpu: int = OVERHEAD_BYTES
    tp: int = 1
    stage_layers: int = 1


class MeasuredPrefill:
    """Implements `StepTime`: prompts take as long as those that were measured; `decode_s` is the
    time of any other step.
    """

    def __init__(self, s_per_token: float = 0.0, decode_s: float = 0.0) -> None:
        self.s_per_token = s_per_token
        self.decode_s = decode_s
        self._measured = False

    def measured(self, s_per_token: float) -> None:
        """Update the mean time per prompt token; the first measurement replaces the estimate."""
        weight = _NEW if self._measured else 1.0
        self.s_per_token += (s_per_token - self.s_per_token) * weight
        self._measured = True

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of a step."""
        prefill_s = self.s_per_token * sum(tokens for _, tokens in chunks)
        return prefill_s + (self.decode_s if decode_seqs else 0.0)

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """Seconds of so many decode steps."""
        return steps * self.decode_s

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        """Decode steps that fit into `duration_s`."""
        return int(duration_s / self.decode_s) if self.decode_s else 0


@dataclass(frozen=True)
class SharedPlan:
    """Models behind a gateway, on `gpus` GPUs of `pages` pages each.

    With `begins` the policy places models before the first request, and all of these come up before
    `/health` answers with status 200; without, a model comes up for its first request.
    """

    models: Sequence[ServedModel]
    lifecycle: ModelLifecycle
    policy: SharingPolicy
    pages: int
    gpus: int = 1
    begins: bool = False
    clock: Callable[[], float] = time.monotonic

    def check(self) -> None:
        """Check the names of the models.

        Raises:
            SloBenchError: no model, or two of one name.
        """
        if not self.models:
            raise SloBenchError("a gateway needs a model behind it")
        names = Counter(model.name for model in self.models)
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            raise SloBenchError(f"two models are named {twice[0]}: name them apart")

    def build(self, say: Say) -> SharedModels:
        """The queue with the models' servers."""
        return SharedModels(self, say)


def plan_in_places(
    names: Sequence[str],
    lifecycle: ModelLifecycle,
    policy: SharingPolicy,
    max_active_models: int | None = None,
) -> SharedPlan:
    """Models of which nothing is known, on one GPU that has a place for each, or for so many.

    Raises:
        SloBenchError: no place, or a policy that must know how much memory there is.
    """
    if max_active_models is not None and max_active_models < 1:
        raise SloBenchError(f"max_active_models must be at least 1 but is {max_active_models}")
    if policy.in_places is None:
        raise SloBenchError(
            f"{type(policy).__name__} places models by their memory, which is not known here: "
            "measure it with slo-bench run"
        )
    weight_bytes = _PLACE_PAGES * PAGE_BYTES
    memory = PlainMemory(weight_bytes, kv_bytes_per_token=1, block_size=16, block_bytes_per_gpu=1)
    models = [
        ServedModel(index, name, memory, MeasuredPrefill(), 0.0, 0.0, 0.0)
        for index, name in enumerate(names)
    ]
    pages = ((max_active_models or len(models)) + 1) * _PLACE_PAGES - 1
    policy = policy.with_parameters(**policy.in_places)
    return SharedPlan(models, lifecycle, policy, pages)


class ServedInstance:
    """Implements `PlacedInstance`: a model's server on its GPUs. Requests that the policy sends
    before the server is ready wait in `inbox`.
    """

    n_waiting = 0  # of what is sent everything is as good as begun
    coming_pages = 0  # a request's pages are taken when it is sent

    def __init__(
        self, served: ServedModel, gpus: Gpus, kv_manager: PooledKVCacheManager, now_s: float
    ) -> None:
        self.served = served
        self.model = served.index
        self.gpus = gpus
        self.weight_pages = served.weight_pages
        self.kv_manager = kv_manager
        self.ready_s = INF
        self.idle_since_s = now_s
        self.leaving = False
        self.upstream: Upstream | None = None
        self.inbox: list[RequestState] = []
        self.unbegun: dict[RequestState, float] = {}  # since when
        self._blocks: dict[RequestState, int] = {}  # of all its requests
        self.go: Callable[[RequestState, ServedInstance], None] = lambda r, instance: None

    @property
    def busy(self) -> bool:
        return bool(self._blocks)

    @property
    def idle(self) -> bool:
        return not self._blocks

    @property
    def n_admitted(self) -> int:
        return len(self._blocks)

    @property
    def unbegun_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(r.prompt_tokens for r in (*self.inbox, *self.unbegun))

    def receive(self, r: RequestState, now_s: float) -> None:
        kv_manager = self.kv_manager
        needed = kv_manager.blocks(r.prompt_tokens + r.output_tokens)
        self._blocks[r] = blocks = max(0, min(needed, kv_manager.free))
        kv_manager.free -= blocks
        self.inbox.append(r)
        if self.upstream is not None:
            self.deliver(now_s)

    def deliver(self, now_s: float) -> None:
        """Let the requests go that wait for the server."""
        for r in self.inbox:
            self.unbegun[r] = now_s
            self.go(r, self)
        self.inbox.clear()

    def begun(self, r: RequestState, now_s: float) -> None:
        """Record the first byte of `r`, and update the measured time per prompt token."""
        tokens = self.unbegun_tokens
        if isinstance(times := self.served.step_time, MeasuredPrefill):
            times.measured((now_s - self.unbegun[r]) / tokens)
        del self.unbegun[r]

    def left(self, r: RequestState, now_s: float) -> None:
        """Forget a request that has ended, for any reason; its pages are free."""
        if r not in self._blocks:
            return
        self.kv_manager.free += self._blocks.pop(r)
        self.unbegun.pop(r, None)
        if r in self.inbox:
            self.inbox.remove(r)
        if not self._blocks:
            self.idle_since_s = now_s


class ServedGpus(PlacedModels[ServedInstance]):
    """Implements `MultiModelCluster` with servers, whose starts and stops take their time."""

    def __init__(self, plan: SharedPlan, say: Say) -> None:
        self._clock = plan.clock
        self._begin_s = plan.clock()
        self._lifecycle = plan.lifecycle
        self._say = say
        self._stops: list[list[asyncio.Task[None]]] = [[] for _ in range(plan.gpus)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.model_by_request: dict[
            RequestState, int
        ] = {}  # the model of each request that is in progress
        self.outcomes: dict[RequestState, asyncio.Future[ServedInstance | str]] = {}
        self.counts: dict[str, Counter[int]] = {"activations": Counter(), "evictions": Counter()}
        self.failed: dict[int, str] = {}  # models whose last start failed, and why
        self._sizes_kv = plan.begins
        counters = Counters(plan.policy.mechanisms())
        super().__init__(list(plan.models), plan.gpus, plan.pages, plan.policy, counters)
        if plan.begins:
            self._policy.begin(self)

    @property
    def now_s(self) -> float:  # type: ignore[override]
        """Seconds since the gateway began."""
        return self._clock() - self._begin_s

    def model_of(self, r: RequestState) -> int:
        return self.model_by_request[r]

    def reject(self, r: RequestState) -> None:
        self.refuse(r, f"{REJECTED}: no room for {self.models[self.model_by_request[r]].name}")

    def refuse(self, r: RequestState, why: str) -> None:
        """End `r`, which waits here, with status 503."""
        self.outcomes.pop(r).set_result(why)

    # ---------------------------------------------------------------- requests

    def arrive(self, r: RequestState, model: int) -> asyncio.Future[ServedInstance | str]:
        """Let the policy place `r`; the result is the instance that serves it, or why none does."""
        self.model_by_request[r] = model
        served = self.models[model]
        if served.slo_s == INF and r.slo.ttft_s < INF:  # the first that is known of it
            self.models[model] = replace(served, slo_s=r.slo.ttft_s)
        future: asyncio.Future[ServedInstance | str] = asyncio.get_running_loop().create_future()
        self.outcomes[r] = future
        self._arrive(r)
        self.admit()
        return future

    def admit(self) -> None:
        """Let the policy send on what has room."""
        if self.requests is not None:
            self.requests.admit(range(self.gpus), self.now_s)

    def gone(self, r: RequestState, instance: ServedInstance | None) -> None:
        """Forget a request that has ended, for any reason."""
        if self.outcomes.pop(r, None) is not None and self.requests is not None:
            self.requests.forget(r)
        for holder in [instance] if instance is not None else self.model_instances:
            holder.left(r, self.now_s)
        self._idle_since_s[self.model_by_request.pop(r)] = self.now_s
        self._remove_left()
        self.admit()

    async def review(self) -> None:
        """Let the policy look at everything at its interval."""
        while True:
            await asyncio.sleep(self._policy.control_interval_s)
            self._review(self._policy.control_interval_s)
            self.admit()

    # ---------------------------------------------------------------- starts and stops

    def _ready_s(self, model: ServedModel, gpus: Gpus, loaded: bool) -> float:
        return INF

    def _made_instance(
        self, model: ServedModel, gpus: Gpus, kv_manager: PooledKVCacheManager, ready_s: float
    ) -> ServedInstance:
        instance = ServedInstance(model, gpus, kv_manager, self.now_s)
        instance.go = self._go
        before = {stop for gpu in gpus for stop in self._stops[gpu]}
        self._do(self._start(instance, before))
        return instance

    def _kv_tokens(self, instance: ServedInstance) -> int | None:
        """Room of a server: its quota, or all that its weights leave of a GPU."""
        if not self._sizes_kv:
            return None
        kv_manager, pool = instance.kv_manager, self.pools[instance.gpus[0]]
        blocks = kv_manager.quota_blocks
        if blocks is None:
            blocks = kv_manager.blocks_in(pool.total - instance.weight_pages)
        return blocks * kv_manager.block_size

    def _go(self, r: RequestState, instance: ServedInstance) -> None:
        self.outcomes.pop(r).set_result(instance)

    def _removed(self, model_instance: ServedInstance) -> None:
        if model_instance.upstream is not None:  # it has come up
            model_instance.upstream.close()
            self.counts["evictions"][model_instance.model] += 1
            stop = self._do(self._stop(model_instance))
            for gpu in model_instance.gpus:
                self._stops[gpu] = [*(t for t in self._stops[gpu] if not t.done()), stop]

    def _do(self, act: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(
        self, instance: ServedInstance, before: Collection[asyncio.Task[None]]
    ) -> None:
        """Start a server, or wake it up, when those that make room for it have gone."""
        if before:
            await asyncio.wait(before)
        model, begin_s, kv_tokens = instance.served, self.now_s, self._kv_tokens(instance)
        start = partial(self._lifecycle.activate, model.name, instance.gpus, kv_tokens)
        endpoint, problem = await _in_thread(start)
        if instance not in self.model_instances:  # evicted meanwhile
            await self._stop(instance)
            return
        if endpoint is None:
            self._say(f"{model.name} does not come up: {problem}")
            self._lose(instance, problem)
            return
        now_s = self.now_s
        self.failed.pop(model.index, None)
        instance.upstream = Upstream(endpoint)
        instance.ready_s = instance.idle_since_s = now_s
        self.counts["activations"][model.index] += 1
        where = f" on GPU {', '.join(map(str, instance.gpus))}" if self.gpus > 1 else ""
        self._say(f"{model.name} is at {endpoint.url}{where}: {now_s - begin_s:.1f} s")
        instance.deliver(now_s)
        self.admit()

    async def _stop(self, instance: ServedInstance) -> None:
        stop = partial(self._lifecycle.evict, instance.served.name, instance.gpus)
        _, problem = await _in_thread(stop)
        if problem:
            self._say(f"{instance.served.name} does not go: {problem}")
        self._say(f"{instance.served.name} has left")

    def lost(self, instance: ServedInstance, why: Exception) -> None:
        """Note that a server is gone; the next request for its model starts it again."""
        if instance in self.model_instances and not instance.leaving:
            self._say(f"{instance.served.name} is lost: {why}")
            instance.leaving = True  # when its other requests have failed, too
            self._serves_no_more(instance)
            for r in [r for r in self.outcomes if self.model_by_request[r] == instance.model]:
                if self.requests is not None:
                    self.requests.forget(r)
                instance.left(r, self.now_s)
                self._policy.arrived(r, instance.model, self)

    def _lose(self, instance: ServedInstance, why: str) -> None:
        """Take an instance that has not come up off its GPUs, and refuse what waits for it."""
        self.failed[instance.model] = why
        moving = self.serving[instance.model] is not instance
        for r in [
            r for r in self.outcomes if self.model_by_request[r] == instance.model and not moving
        ]:
            if self.requests is not None:
                self.requests.forget(r)
            instance.left(r, self.now_s)
            self.refuse(r, f"{instance.served.name} does not come up")
        self.evict(instance)
        self.admit()

    def close(self) -> None:
        """Close all connections; the owner of the servers stops them."""
        for task in self._tasks:
            task.cancel()
        for instance in self.model_instances:
            if instance.upstream is not None:
                instance.upstream.close()


class SharedModels:
    """Serving of several models, whose requests a policy orders; it is its own server group."""

    role = "serve"
    any_up = True  # models are activated on demand

    def __init__(self, plan: SharedPlan, say: Say) -> None:
        self.groups = (self,)
        self.gpus = ServedGpus(plan, say)
        self._index = {model.name: model.index for model in plan.models}
        self._number = 0
        self._review = asyncio.get_running_loop().create_task(self.gpus.review())
        self._answers: Counter[int] = Counter()
        self._losses: Counter[int] = Counter()

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Queue a request until its model can begin it, then let the model's server answer."""
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body is no JSON object")
            return
        index = self._index.get(str(body.get("model")))
        if index is None:
            names = ", ".join(self._index)
            refuse(reply, 404, f"there is no model {body.get('model')!r} here, but {names}")
            return
        self._number += 1
        r = state_of(body, self._number, self.gpus.now_s)
        outcome: ServedInstance | str | None = None
        try:
            outcome = await self.gpus.arrive(r, index)
            if isinstance(outcome, str):
                refuse(reply, 503, outcome)
            else:
                await self._serve(outcome, r, request, reply)
        finally:
            self.gpus.gone(r, outcome if isinstance(outcome, ServedInstance) else None)

    async def _serve(
        self, instance: ServedInstance, r: RequestState, request: HttpRequest, reply: Reply
    ) -> None:
        upstream = instance.upstream
        assert upstream is not None
        held = BufferedReply(reply, lambda: instance.begun(r, self.gpus.now_s))
        try:
            await upstream.exchange(request, held)
        except (UnreachableError, ConnectionLostError) as error:
            self._losses[instance.model] += 1
            self.gpus.lost(instance, error)
            if not reply.begun:
                name = instance.served.name
                refuse(reply, 502, f"the server of {name} was lost: {error}")
            return
        self._answers[instance.model] += 1

    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing: the list of models here, everything else at the
        named model's server.
        """
        gpus = self.gpus
        if request.path == "/health":
            coming = [t.served.name for t in gpus.model_instances if t.upstream is None]
            if gpus.failed:
                failures = (f"{gpus.models[m].name}: {why}" for m, why in gpus.failed.items())
                refuse(reply, 500, "; ".join(failures))
            elif coming:
                refuse(reply, 503, f"{', '.join(coming)} not up yet")
            else:
                respond(reply, b"", "text/plain")
            return
        if request.path == "/v1/models":
            data = [{"id": name, "object": "model"} for name in self._index]
            respond_json(reply, {"object": "list", "data": data})
            return
        index = self._index.get(str((request.json() or {}).get("model")))
        instance = None if index is None else gpus.serving[index]
        if instance is None or instance.upstream is None:
            refuse(reply, 503, "the model that should answer is away, or none is named")
            return
        await instance.upstream.exchange(request, reply)

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""
        gpus = self.gpus
        queued = Counter(gpus.model_by_request[r] for r in gpus.outcomes)
        in_progress = Counter(gpus.model_by_request.values())
        for name, index in self._index.items():
            labels = f'{{model="{name}"}}'
            standing = gpus.serving[index]
            up = standing is not None and standing.upstream is not None
            yield "slo_bench_gateway_up", labels, int(up)
            yield "slo_bench_gateway_queued", labels, queued[index]
            yield "slo_bench_gateway_in_flight", labels, in_progress[index] - queued[index]
            yield "slo_bench_gateway_answers_total", labels, self._answers[index]
            yield "slo_bench_gateway_losses_total", labels, self._losses[index]
            yield "slo_bench_gateway_activations_total", labels, gpus.counts["activations"][index]
            yield "slo_bench_gateway_evictions_total", labels, gpus.counts["evictions"][index]
        for mechanism, count in gpus.counters.of_policy().items():
            yield MECHANISMS, f'{{mechanism="{mechanism}"}}', count

    def close(self) -> None:
        """Close all connections; the owner of the servers stops them."""
        self._review.cancel()
        self.gpus.close()


async def _in_thread(act: Callable[[], T]) -> tuple[T | None, str]:
    """Run `act` in a thread; its result, or the text of its error.

    The thread is a daemon, so that the process can exit while a server starts.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T | None, str]] = loop.create_future()

    def ended(outcome: tuple[T | None, str]) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        outcome: tuple[T | None, str]
        try:
            outcome = act(), ""
        except SloBenchError as error:
            outcome = None, str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(ended, outcome)

    threading.Thread(target=work, daemon=True).start()
    return await future
