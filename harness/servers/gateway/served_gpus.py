"""GPUs with models' servers, as the simulator's policies see them (`MultiModelCluster`)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ....predictors.placement import OVERHEAD_BYTES
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import INF
from ...core.counters import Counters
from ...core.kv.pages import PooledKVCacheManager
from ...core.multi_model_policy import Gpus, ServedModel, SharingPolicy
from ...core.state import RequestState
from ...core.wire import REJECTED
from ...engine.cluster.placed_models import PlacedModels
from ...load_generator.http.endpoint import Endpoint
from .health_checks import Say
from .upstream import Upstream

T = TypeVar("T")

_NEW = 0.2  # weight of the last prompt in the mean time per prompt token


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

    def __init__(
        self,
        models: Sequence[ServedModel],
        lifecycle: ModelLifecycle,
        policy: SharingPolicy,
        pages: int,
        gpus: int,
        *,
        begins: bool,
        clock: Callable[[], float],
        say: Say,
    ) -> None:
        """As `SharedPlan` has them."""
        self._clock = clock
        self._begin_s = clock()
        self._lifecycle = lifecycle
        self._say = say
        self._stops: list[list[asyncio.Task[None]]] = [[] for _ in range(gpus)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.model_by_request: dict[
            RequestState, int
        ] = {}  # the model of each request that is in progress
        self.outcomes: dict[RequestState, asyncio.Future[ServedInstance | str]] = {}
        self.counts: dict[str, Counter[int]] = {"activations": Counter(), "evictions": Counter()}
        self.failed: dict[int, str] = {}  # models whose last start failed, and why
        self._sizes_kv = begins
        counters = Counters(policy.mechanisms())
        super().__init__(list(models), gpus, pages, policy, counters)
        if begins:
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
        self._settle(r, why)

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
            try:
                self._review(self._policy.control_interval_s)
                self.admit()
            except Exception as error:  # the next review may go well
                self._say(f"the policy failed: {type(error).__name__}: {error}")

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
        self._settle(r, instance)

    def _settle(self, r: RequestState, outcome: ServedInstance | str) -> None:
        if not (future := self.outcomes.pop(r)).cancelled():  # by a client that has just left
            future.set_result(outcome)

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
