"""Several models' servers on several GPUs behind one address, where the simulator's policy decides.

The policy (`SharingPolicy`) sees the same `MultiModelCluster` as in the simulator: it says on which
GPU a model wakes up, which one leaves, and in which order requests go to their model's server. What
differs: how long prompts take is learned from the first bytes of answers, a model is ready when its
server says so, and of a request's KV the gateway counts the pages of the whole answer, as far as
there are any, from when it is sent until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ....workloads.errors import SloBenchError
from ...core.kv.pages import PAGE_BYTES
from ...core.multi_model_policy import ServedModel, SharingPolicy
from ...core.state import RequestState
from ..http.http_server import HttpRequest, Reply, refuse, respond, respond_json
from ..http.prometheus import Sample
from .health_checks import MECHANISMS, Say
from .replies import BufferedReply
from .served_gpus import MeasuredPrefill, ModelLifecycle, PlainMemory, ServedGpus, ServedInstance
from .states import state_of
from .upstream import ConnectionLostError, UnreachableError

_PLACE_PAGES = 1024


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


class SharedModels:
    """Serving of several models, whose requests a policy orders; it is its own server group."""

    role = "serve"
    any_up = True  # models are activated on demand

    def __init__(self, plan: SharedPlan, say: Say) -> None:
        self.groups = (self,)
        self.gpus = ServedGpus(
            plan.models,
            plan.lifecycle,
            plan.policy,
            plan.pages,
            plan.gpus,
            begins=plan.begins,
            clock=plan.clock,
            say=say,
        )
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
