"""The torch engine as an OpenAI-compatible server.

/v1/completions and /v1/chat/completions (where the model has a chat template), whole and as a
stream; /v1/embeddings where there is an encoder beside it; /v1/models, /health and /metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from ....workloads.errors import SloBenchError
from ...engine.loop.gc_control import heap_frozen
from ...engine.torch.live_engine import LiveEngine
from ...engine.torch.text import Text
from ..http.http_server import (
    HttpRequest,
    Ready,
    Reply,
    in_thread,
    refuse,
    respond,
    respond_json,
    serve,
)
from ..http.prometheus import CONTENT_TYPE
from .torch_embeddings import Embeds, answer_embeddings
from .torch_generation import BadRequestError, Generation, GenerationModel


@contextlib.contextmanager
def serving(
    live: LiveEngine,
    model: GenerationModel,
    embeds: Embeds | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    unix_socket: str = "",
) -> Iterator[str]:
    """Run a server and yield its address, for as long as the block lasts. With `unix_socket` it is
    at that path.

    Raises:
        SloBenchError: the port cannot be bound.
    """

    async def start(ready: Ready) -> None:
        handler = _Routes(live, model, embeds).answer
        await serve(handler, host=host, port=port, unix_socket=unix_socket, ready=ready)

    with in_thread(f"server at {host}:{port}", start) as server, heap_frozen():
        yield server.url


class _Routes:
    def __init__(self, live: LiveEngine, model: GenerationModel, embeds: Embeds | None) -> None:
        self._live = live
        self._model = model
        self._embeds = embeds
        self._created = int(time.time())

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        path = request.path
        if path == "/health":
            respond(reply, b"", "text/plain", 200 if self._live.running else 503)
        elif path == "/metrics":
            respond(reply, self._metrics().encode(), CONTENT_TYPE)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            self._models(reply, path.removeprefix("/v1/models").removeprefix("/"))
        elif path == "/v1/embeddings" and request.method == "POST" and self._embeds:
            await answer_embeddings(request, reply, self._embeds)
        elif path in ("/v1/completions", "/v1/chat/completions") and request.method == "POST":
            await self._generate(request, reply, chat="chat" in path)
        else:
            refuse(reply, 404, f"there is no {request.method} {path} here")

    def _models(self, reply: Reply, name: str) -> None:
        """The list of models, or the one of that name."""
        common = {"object": "model", "created": self._created, "owned_by": "slo-bench"}
        models = [{"id": self._model.name, **common, "max_model_len": self._model.most_tokens}]
        if self._embeds is not None:
            models.append({"id": self._embeds.name, **common})
        matches = [model for model in models if model["id"] == unquote(name)]
        if not name:
            respond_json(reply, {"object": "list", "data": models})
        elif matches:
            respond_json(reply, matches[0])
        else:
            refuse(reply, 404, f"there is no model {name!r:.100}", "model")

    async def _generate(self, request: HttpRequest, reply: Reply, *, chat: bool) -> None:
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body must be a JSON object")
            return
        try:
            generation = Generation(self._live, self._model, body, chat=chat)
        except BadRequestError as error:
            refuse(reply, error.status, str(error), error.param)
        except SloBenchError as error:
            refuse(reply, 400, str(error))
        else:
            await generation.answer(reply)

    def _metrics(self) -> str:
        live, counts = self._live, self._live.counts
        view, kv_manager = live.instance.view, live.instance.kv_manager
        carried = live.engine.runner.carrier.carried
        ran_s, waited_s = live.cpu_wait.seconds()
        lines = []
        for name, kind, value in (
            ("requests_total", "counter", counts.requests),
            ("requests_cancelled_total", "counter", counts.cancelled),
            ("requests_turned_away_total", "counter", counts.turned_away),
            ("prompt_tokens_total", "counter", counts.prompt_tokens),
            ("generation_tokens_total", "counter", counts.output_tokens),
            ("num_preemptions_total", "counter", live.instance.measures.preemptions),
            ("steps_total", "counter", live.instance.measures.steps),
            ("kv_store_loaded_bytes_total", "counter", carried.loaded_bytes),
            ("kv_store_stored_bytes_total", "counter", carried.stored_bytes),
            ("num_requests_waiting", "gauge", view.n_waiting + view.n_swapped),
            ("num_requests_running", "gauge", view.n_running),
            ("num_gpu_blocks_used", "gauge", kv_manager.total - kv_manager.free),
            ("num_gpu_blocks", "gauge", kv_manager.total),
            ("cpu_threads", "gauge", live.threads.threads),
            ("cpu_seconds_total", "counter", round(ran_s, 3)),
            ("cpu_wait_seconds_total", "counter", round(waited_s, 3)),
        ):
            lines += [f"# TYPE slo_bench_torch_{name} {kind}", f"slo_bench_torch_{name} {value}"]
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def serving_model(
    system_name: str,
    parameters: Mapping[str, bool | int | float | str],
    model: str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    served_name: str | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int = 16,
    num_cpu_blocks: int | None = None,
    embedder: str | None = None,
    stage_layers: Sequence[int] = (),
    kv_store: Sequence[str] = (),
    threads: int | None = None,
    port: int = 0,
    unix_socket: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Load a model, run a server with a policy and yield its address. Servers with the same folders
    in `kv_store` (`FOLDER=GIB`, fastest first) for the same model share prefix KV. Each
    pipeline stage of `stage_layers` is a process of its own, the first is this one. `threads`
    compute (see `thread_count`); `say` is told how many.

    Raises:
        SloBenchError: the model cannot be loaded, does not fit, or the system cannot run so.
    """
    from ...core.policy import Policy
    from ...engine.torch.build_engine import Engine, KvCacheConfig, swaps
    from ...engine.torch.build_engine import num_gpu_blocks as blocks_that_fit
    from ...engine.torch.load_decoder import load_decoder
    from ...engine.torch.threads import ThreadLayout
    from ...engine.torch.tiers import TierFolder
    from ...engine.torch.torch_workers import Workers
    from ...policies.systems import system as system_by_name
    from ..launch.backend_names import TORCH
    from ..launch.compatibility import check
    from ..launch.random_model import model_folder
    from ..launch.serve_settings import NUM_CPU_BLOCKS

    system = system_by_name(system_name).with_parameters(**parameters)
    check(system, TORCH)
    if not isinstance(system.policy, Policy):
        raise SloBenchError(f"{system_name} serves static batches, which no server streams")
    if system.cluster is not None:
        raise SloBenchError(
            f"{system_name} decides across several instances, which `run` executes; a server is one"
        )
    if kv_store and not system.prefix_cache:
        raise SloBenchError(
            f"{system_name} looks for no prefixes: there is nothing to keep in a KV store"
        )
    tiers = tuple(TierFolder.parse(tier) for tier in kv_store)
    folder: Path = model_folder(model)
    decoder = load_decoder(folder, device, dtype)
    embeds = None
    if embedder is not None:
        embeds = Embeds.load(Path(embedder), device)
    room = KvCacheConfig(
        num_gpu_blocks or blocks_that_fit(decoder, block_size),
        block_size,
        (NUM_CPU_BLOCKS if num_cpu_blocks is None else num_cpu_blocks)
        if swaps(system.policy)
        else 0,
        block_size if system.prefix_cache else 0,
        tiers,
    )
    count = max(0, len(stage_layers) - 1)
    if count and device != "cpu":
        raise SloBenchError("the stages of a device map compute on the CPU; leave --device out")
    layout = ThreadLayout.choose(threads, count)
    say(layout.text)
    with contextlib.ExitStack() as stack:
        workers = None
        if count:
            workers = stack.enter_context(Workers(count, cores=layout.worker_cores))
        engine = Engine(decoder, room, workers)
        if count:
            engine.place(stage_layers)
        max_tokens = engine.most_tokens(system.policy)
        live = stack.enter_context(LiveEngine(engine, system.policy, layout))
        served = GenerationModel(
            served_name or folder.name, Text(folder), decoder.config.eos, max_tokens
        )
        with serving(live, served, embeds, port=port, unix_socket=unix_socket) as url:
            yield url
