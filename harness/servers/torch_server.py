"""The torch engine as an OpenAI-compatible server.

/v1/completions and /v1/chat/completions (where the model has a chat template), whole and as a
stream; /v1/embeddings where there is an encoder beside it; /v1/models, /health and /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...workloads.errors import SloBenchError
from ..core.decisions import ReleaseReason
from ..core.wire import (
    DROPPED,
    REJECTED,
    VLLM_FIELD,
    predicted_length_from_wire,
    priority_from_wire,
    slo_from_wire,
)
from ..engine.loop.gc_control import heap_frozen
from ..engine.torch.encoder import Encoder
from ..engine.torch.live import GenerationRequest, LiveEngine
from ..engine.torch.sequence import Sampling
from ..engine.torch.text import Text, TextStream
from .http_server import HttpRequest, Ready, Reply, in_thread, refuse, respond, respond_json, serve

_DEFAULT_TOKENS = 16  # as OpenAI's completions


@dataclass(frozen=True)
class HttpModel:
    """Served model: its name for clients, its tokenizer, its end tokens and its longest request."""

    name: str
    text: Text
    eos: frozenset[int]
    most_tokens: int
    embeds: Embeds | None = None


@contextlib.contextmanager
def serving(
    live: LiveEngine, model: HttpModel, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """Run a server and yield its address, for as long as the block lasts.

    Raises:
        SloBenchError: the port cannot be bound.
    """

    async def start(ready: Ready) -> None:
        await serve(_Routes(live, model).answer, host=host, port=port, ready=ready)

    with in_thread(f"server at {host}:{port}", start) as server, heap_frozen():
        yield server.url


@dataclass(frozen=True)
class Embeds:
    """Encoder for embedding requests, with its name and tokenizer."""

    name: str
    encoder: Encoder
    text: Text

    def tokens(self, told: object) -> list[list[int]]:
        """Token ids of each input.

        Raises:
            _BadRequestError: it is no text, no tokens, and no list of either.
        """
        many: list[Any] = [told]
        if isinstance(told, list) and told and not _are_tokens(told):
            many = told
        texts = [self.text.tokens(one) if isinstance(one, str) else one for one in many]
        vocabulary = self.encoder.config.vocab
        if not all(_are_tokens(one) and max(one) < vocabulary for one in texts):
            raise _BadRequestError(
                f"input must be a text, ids of tokens below {vocabulary}, or a list of either"
            )
        return texts


def _are_tokens(told: object) -> bool:
    return isinstance(told, list) and bool(told) and all(type(n) is int and n >= 0 for n in told)


class _BadRequestError(Exception):
    pass


class _Routes:
    def __init__(self, live: LiveEngine, model: HttpModel) -> None:
        self._live = live
        self._model = model

    async def answer(self, asked: HttpRequest, reply: Reply) -> None:
        path = asked.path
        if path == "/health":
            respond(reply, b"", "text/plain", 200 if self._live.running else 503)
        elif path == "/metrics":
            respond(reply, self._metrics().encode(), "text/plain; version=0.0.4")
        elif path == "/v1/models":
            most = self._model.most_tokens
            one = {"id": self._model.name, "object": "model", "max_model_len": most}
            respond_json(reply, {"object": "list", "data": [{**one, "owned_by": "slo-bench"}]})
        elif path == "/v1/embeddings" and asked.method == "POST" and self._model.embeds:
            await self._embed(asked, reply, self._model.embeds)
        elif path in ("/v1/completions", "/v1/chat/completions") and asked.method == "POST":
            await self._generate(asked, reply, chat="chat" in path)
        else:
            refuse(reply, 400, f"there is no {asked.method} {path} here")

    async def _embed(self, asked: HttpRequest, reply: Reply, embeds: Embeds) -> None:
        body = asked.json() or {}
        try:
            if body.get("encoding_format", "float") != "float":
                raise _BadRequestError("encoding_format must be float")
            texts = embeds.tokens(body.get("input"))
            found = await asyncio.to_thread(lambda: embeds.encoder.embed(texts).tolist())
        except (_BadRequestError, SloBenchError) as error:
            refuse(reply, 400, str(error))
            return
        tokens = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": n, "embedding": one} for n, one in enumerate(found)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        respond_json(reply, {"object": "list", "data": data, "model": embeds.name, "usage": usage})

    async def _generate(self, asked: HttpRequest, reply: Reply, *, chat: bool) -> None:
        body = asked.json()
        if body is None:
            refuse(reply, 400, "the body must be a JSON object")
            return
        try:
            generation = _Generation(self._live, self._model, body, chat=chat)
        except (_BadRequestError, SloBenchError) as error:
            refuse(reply, 400, str(error))
            return
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


class _Generation:
    """A client's generation request, from its body to its last token."""

    def __init__(
        self, live: LiveEngine, model: HttpModel, body: Mapping[str, Any], *, chat: bool
    ) -> None:
        self._live = live
        self._model = model
        self._chat = chat
        self._stream = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        self._with_usage = not self._stream or bool(options.get("include_usage"))
        self._stop = _stops(body.get("stop"))
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        if body.get("n", 1) != 1 or body.get("best_of", 1) != 1:
            raise _BadRequestError("n and best_of must be 1")
        self._prompt = self._tokens(body)
        self._asked = self._as_asked(body)
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._said = TextStream(model.text)
        self._given = 0

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        text = self._model.text
        if self._chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise _BadRequestError("messages must be a list with one message at least")
            return text.chat(messages)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return text.tokens(prompt) or [0]
        vocabulary = self._live.engine.decoder.config.vocab
        if not (
            isinstance(prompt, list)
            and prompt
            and all(type(one) is int and 0 <= one < vocabulary for one in prompt)
        ):
            raise _BadRequestError(
                f"prompt must be a text, or ids of tokens below {vocabulary}, one at least"
            )
        return prompt

    def _as_asked(self, body: Mapping[str, Any]) -> GenerationRequest:
        room = self._model.most_tokens - len(self._prompt)
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        most = given if given is not None else room if self._chat else _DEFAULT_TOKENS
        if type(most) is not int or most < 1:
            raise _BadRequestError(f"max_tokens must be a whole number above 0 but is {most!r}")
        if most > room:
            raise _BadRequestError(
                f"{len(self._prompt)} prompt and {most} answer tokens are more than the "
                f"{self._model.most_tokens} that fit"
            )
        least = body.get("min_tokens") or 0
        free = bool(body.get("ignore_eos")) or least >= most
        if least and not free:
            raise _BadRequestError("min_tokens below max_tokens is not supported")
        wire = body.get(VLLM_FIELD)
        wire = wire if isinstance(wire, Mapping) else {}
        loop = asyncio.get_running_loop()

        def tell(kind: str) -> Callable[[Any], None]:
            def told(value: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the server is gone
                    loop.call_soon_threadsafe(self._events.put_nowait, (kind, value))

            return told

        return GenerationRequest(
            tokens=self._prompt,
            max_tokens=most,
            sampling=Sampling(
                temperature=_number(body, "temperature", 1.0, 0, 10),
                top_p=_number(body, "top_p", 1.0, 0, 1),
                top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31))),
                seed=int(_number(body, "seed", hash(self._id) & 0xFFFF_FFFF, 0, 1 << 62)),
            ),
            ends=frozenset() if free else self._model.eos,
            slo=lambda arrival_s: slo_from_wire(wire, arrival_s),
            predicted_output_tokens=predicted_length_from_wire(wire),
            priority=priority_from_wire(wire)
            or int(_number(body, "priority", 0, -(1 << 31), 1 << 31)),
            gave=tell("token"),
            ended=tell("end"),
            lost=tell("lost"),
        )

    async def answer(self, reply: Reply) -> None:
        r = self._live.submit(self._asked)
        over = False
        try:
            text, tokens, reason = "", [], "length"
            while not over:
                kind, value = await self._events.get()
                if kind == "lost":
                    over = True
                    self._lost(reply, value)
                    return
                piece = ""
                if kind == "token":
                    tokens.append(value)
                    if value not in self._asked.ends:
                        piece = self._said.add(value)
                else:
                    over, reason, piece = True, value, self._said.rest()
                cut = _first(text + piece, self._stop)
                if cut is not None:
                    piece, reason = (text + piece)[len(text) : cut], "stop"
                text += piece
                if self._stream and (piece or kind == "token"):
                    self._send(reply, piece, value if kind == "token" else None, None)
                if cut is not None:
                    break
            if self._stream:
                self._send(reply, "", None, reason)
                if self._with_usage:
                    self._event(reply, {**self._frame([]), "usage": self._usage(len(tokens))})
                reply.pieces([b"data: [DONE]\n\n"])
                reply.end()
            else:
                choice = self._choice(text, tokens, reason)
                respond_json(reply, {**self._frame([choice]), "usage": self._usage(len(tokens))})
        finally:
            if not over:
                self._live.cancel(r)

    def _lost(self, reply: Reply, reason: ReleaseReason) -> None:
        message = REJECTED if reason is ReleaseReason.REJECT else DROPPED
        if not reply.begun:
            refuse(reply, 503, message)
            return
        self._event(reply, {"error": {"message": message, "code": 503}})
        reply.end()

    def _send(self, reply: Reply, piece: str, token: int | None, reason: str | None) -> None:
        if not reply.begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            reply.begin(200, b"OK", headers)
            if self._chat:
                first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
                self._event(reply, self._frame([first]))
        tokens = [] if token is None else [token]
        self._event(reply, self._frame([self._choice(piece, tokens, reason, part=True)]))

    def _choice(
        self, text: str, tokens: list[int], reason: str | None, *, part: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._chat and part:
            choice["delta"] = {"content": text} if text else {}
        elif self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if tokens:
            choice["token_ids"] = tokens
        return choice

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        if self._chat and self._stream:
            kind += ".chunk"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    @staticmethod
    def _event(reply: Reply, content: Mapping[str, Any]) -> None:
        reply.pieces([b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"])


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _BadRequestError(f"{name} must be a number from {low} to {high} but is {value!r}")
    return value


def _stops(told: object) -> list[str]:
    found = [told] if isinstance(told, str) else told or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise _BadRequestError("stop must be a text or a list of texts")
    return found


def _first(text: str, stops: list[str]) -> int | None:
    """Position of the first stop text; None if there is none."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(places, default=None)


@contextlib.contextmanager
def serving_model(
    system_name: str,
    parameters: Mapping[str, bool | int | float | str],
    model: str,
    *,
    device: str = "cpu",
    served_name: str | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int = 16,
    num_cpu_blocks: int | None = None,
    embedder: str | None = None,
    kv_store: Sequence[str] = (),
    threads: int | None = None,
    port: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Load a model, run a server with a policy and yield its address. Servers with the same folders
    in `kv_store` (`FOLDER=GIB`, fastest first) for the same model share prefix KV. `threads`
    compute (see `thread_count`); `say` is told how many.

    Raises:
        SloBenchError: the model cannot be loaded, does not fit, or the system cannot run so.
    """
    from ..core.policy import Policy
    from ..engine.torch.build import Engine, KvCacheConfig, swaps
    from ..engine.torch.build import num_gpu_blocks as blocks_that_fit
    from ..engine.torch.load import load_decoder
    from ..engine.torch.threads import ThreadLayout
    from ..engine.torch.tiers import TierFolder
    from ..policies.systems import system as system_by_name
    from .launch.backend_names import TORCH
    from .launch.compatibility import check
    from .launch.model_folders import model_folder
    from .launch.serve import NUM_CPU_BLOCKS

    found = system_by_name(system_name).with_parameters(**parameters)
    check(found, TORCH)
    if not isinstance(found.policy, Policy):
        raise SloBenchError(f"{system_name} serves static batches, which no server streams")
    if kv_store and not found.prefix_cache:
        raise SloBenchError(
            f"{system_name} looks for no prefixes: there is nothing to keep in a KV store"
        )
    tiers = tuple(TierFolder.parse(tier) for tier in kv_store)
    folder: Path = model_folder(model)
    decoder = load_decoder(folder, device)
    embeds = None
    if embedder is not None:
        beside = Path(embedder)
        embeds = Embeds(beside.resolve().name, Encoder(beside, device), Text(beside))
    room = KvCacheConfig(
        num_gpu_blocks or blocks_that_fit(decoder, block_size),
        block_size,
        (NUM_CPU_BLOCKS if num_cpu_blocks is None else num_cpu_blocks)
        if swaps(found.policy)
        else 0,
        block_size if found.prefix_cache else 0,
        tiers,
    )
    engine = Engine(decoder, room)
    layout = ThreadLayout.choose(threads)
    say(layout.text)
    with LiveEngine(engine, found.policy, layout) as live:
        limits = found.policy.limits(live.instance.view)
        spare = limits.watermark_blocks + limits.decode_headroom_blocks
        most = min(decoder.config.context, (room.blocks - spare) * block_size)
        served = HttpModel(
            served_name or folder.name, Text(folder), decoder.config.eos, most, embeds
        )
        with serving(live, served, port=port) as url:
            yield url
