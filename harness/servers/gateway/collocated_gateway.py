"""A language model's server and an embedding server behind one address.

Generation requests go to the language model. Embedding requests wait here for the scheduler inside
its server (`plugins.embedding_scheduler`), where the policy admits or rejects them and forms the
passes of the embedder. Without it nothing coordinates the two: each embedding request is a pass of
its own, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.wire import VLLM_FIELD
from ...load_generator.http.endpoint import Endpoint
from ..http.http_server import HttpRequest, Reply, error_body, json_object, refuse, respond_json
from ..http.prometheus import Sample
from .health_checks import Say
from .instances import RoutedServerGroup
from .replies import CollectedReply
from .states import prompt_tokens, wire_of

EMBEDDINGS = "/v1/embeddings"
# Fields that the embedding server does not know; there is one model, whatever its name.
_OURS = ("model", "priority", VLLM_FIELD)
_PASSES = "slo_bench_gateway_embed_passes_total"

_Answer = tuple[int, dict[str, Any]]


class _Pending:
    """An embedding request without an answer."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = {name: value for name, value in body.items() if name not in _OURS}
        self.answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: _Answer) -> None:
        """Answer it, unless its client has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)


class CollocatedServing:
    """`endpoint` is the language model's server, `embedder` the embedding server."""

    def __init__(
        self,
        endpoint: Endpoint,
        embedder: Endpoint,
        scheduler_socket: str | None,
        health_path: str,
        say: Say,
    ) -> None:
        """Without the Unix socket of the scheduler there is no policy."""
        self._llm = RoutedServerGroup(
            [endpoint], "round-robin", "generate", health_path=health_path, say=say
        )
        self._embedder = _EmbedderGroup([embedder], "round-robin", "embed", say=say)
        self.groups = (self._llm, self._embedder)
        self._scheduler = (
            None if scheduler_socket is None else _SchedulerClient(scheduler_socket, self._embedder)
        )

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Send a generation request on, or answer an embedding request when its pass has ended."""
        if request.path != EMBEDDINGS:
            await self._llm.forward(request, reply, ())
            return
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body must be a JSON object")
            return
        pending = _Pending(body)
        if self._scheduler is None:
            [(status, content)], _ = await self._embedder.run_pass([pending])
        else:
            status, content = await self._scheduler.answer(pending, body)
        respond_json(reply, content, status)


class _EmbedderGroup(RoutedServerGroup):
    """The embedding server, with counts of its passes."""

    _passes = 0

    async def run_pass(self, pending: Sequence[_Pending]) -> tuple[list[_Answer], float | None]:
        """Compute requests in one pass; returns their answers and its seconds, None: it failed."""
        self._passes += 1
        reply = CollectedReply()
        content = {"requests": [entry.body for entry in pending]}
        await self.forward(HttpRequest("POST", "/passes", []).with_json(content), reply, ())
        payload = json_object(reply.body) or {}
        answers, pass_s = payload.get("answers"), payload.get("pass_s")
        if reply.status != 200 or not isinstance(answers, list) or len(answers) != len(pending):
            return [(502, error_body(502, "the embedding server failed"))] * len(pending), None
        return [(int(answer["status"]), answer["body"]) for answer in answers], pass_s

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""
        yield from super().metrics()
        yield _PASSES, "", self._passes


class _SchedulerClient:
    """The conversation with the scheduler; its connection is made with the first request."""

    def __init__(self, path: str, embedder: _EmbedderGroup) -> None:
        self._path = path
        self._embedder = embedder
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, pending: _Pending, body: Mapping[str, Any]) -> _Answer:
        """Wait for the decision about a request, and for its pass."""
        try:
            async with self._connecting:
                if self._writer is None:
                    reader, self._writer = await asyncio.open_unix_connection(self._path)
                    self._start(self._listen(reader))
        except OSError as error:
            return 503, error_body(
                503, f"the embedder's scheduler does not answer: {error.strerror}"
            )
        self._number += 1
        number, tokens = self._number, prompt_tokens(body)
        self._pending[number] = pending
        self._say(
            arrive=number,
            num_inputs=num_inputs(body),
            prompt_tokens=tokens,
            values=dict(wire_of(body)),
        )
        try:
            return await pending.answer
        finally:
            if self._pending.pop(number, None) is not None and pending.answer.cancelled():
                self._say(leave=number)

    def _say(self, **message: Any) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        self._writer = None
        for pending in self._pending.values():
            pending.settle((503, error_body(503, "the embedder's scheduler has gone")))

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "begin" in message:
            self._start(self._pass(message["begin"]))
            return
        pending = self._pending.get(message["reject"])
        if pending is not None:
            pending.settle((503, error_body(503, message["because"])))

    async def _pass(self, numbers: Sequence[int]) -> None:
        """Run the pass that the policy has chosen, without requests whose clients have gone."""
        batch = [self._pending[number] for number in numbers if number in self._pending]
        pass_s: float | None = None
        try:
            if batch:
                answers, pass_s = await self._embedder.run_pass(batch)
                for pending, answer in zip(batch, answers, strict=True):
                    pending.settle(answer)
        finally:
            self._say(end=pass_s)


def num_inputs(body: Mapping[str, Any]) -> int:
    """Number of texts of an embedding request."""
    inputs = body.get("input")
    texts = isinstance(inputs, list) and inputs and not isinstance(inputs[0], int)
    return len(inputs) if texts and isinstance(inputs, list) else 1
