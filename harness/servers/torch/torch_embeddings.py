"""An encoder as an OpenAI-compatible server: in the torch engine's server, or in a process alone.

    python -m slo_bench.harness.servers.torch.torch_embeddings

The process receives the folder of the model and the device as JSON, sends its address and the
memory of a pass in bytes a token, and ends at EOF. It serves /v1/embeddings, /v1/models and
/health, and /passes for a gateway that forms batches:
{"requests": [body of /v1/embeddings, …]} is computed in one pass and answered with
{"answers": [{"status": …, "body": …}, …], "pass_s": seconds of the encoder}.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....predictors.embedder import activation_bytes
from ....workloads.child_process import Parent
from ....workloads.errors import SloBenchError
from ...engine.torch.encoder import Encoder
from ...engine.torch.text import Text
from ..http.http_server import (
    HttpRequest,
    Ready,
    Reply,
    error_body,
    in_thread,
    refuse,
    respond,
    respond_json,
    serve,
)
from .torch_generation import BadRequestError, check_model

_VALUE_BYTES = 4  # the encoder computes in 32 bits
_FIELDS = {"model", "input", "encoding_format", "user"}


@dataclass(frozen=True)
class Embeds:
    """Encoder for embedding requests, with its name and tokenizer."""

    name: str
    encoder: Encoder
    text: Text

    @classmethod
    def load(cls, folder: Path, device: str) -> Embeds:
        """The encoder in a folder.

        Raises:
            SloBenchError: it is no encoder that the torch engine has, or does not fit.
        """
        return cls(folder.resolve().name, Encoder(folder, device), Text(folder))

    def tokens(self, body_input: object) -> list[list[int]]:
        """Token ids of each input.

        Raises:
            BadRequestError: it is no text, no tokens, and no list of either.
        """
        inputs: list[Any] = [body_input]
        if isinstance(body_input, list) and body_input and not _are_tokens(body_input):
            inputs = body_input
        texts = [self.text.tokens(entry) if isinstance(entry, str) else entry for entry in inputs]
        vocabulary = self.encoder.config.vocab
        if not all(_are_tokens(ids) and max(ids) < vocabulary for ids in texts):
            raise BadRequestError(
                f"input must be a text, ids of tokens below {vocabulary}, or a list of either"
            )
        context = self.encoder.config.context
        if (longest := max(map(len, texts))) > context:
            raise BadRequestError(
                f"texts must have at most {context} tokens, but one has {longest}", "input"
            )
        return texts

    def answers(self, bodies: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Status and body of the answers to several requests, computed in one pass."""
        parsed = [self._read(body) for body in bodies]
        texts = [t for entry in parsed if not isinstance(entry, BadRequestError) for t in entry[0]]
        vectors = iter(self.encoder.embed(texts).tolist() if texts else ())
        answers: list[tuple[int, dict[str, Any]]] = []
        for entry in parsed:
            if isinstance(entry, BadRequestError):
                answers.append((entry.status, error_body(entry.status, str(entry), entry.param)))
            else:
                inputs, form = entry
                answers.append((200, self._answer(inputs, [next(vectors) for _ in inputs], form)))
        return answers

    def _read(self, body: Mapping[str, Any]) -> tuple[list[list[int]], str] | BadRequestError:
        """Token ids of each input and the encoding format, or why the request is refused."""
        try:
            check_model(body, self.name)
            for name in body.keys() - _FIELDS:
                raise BadRequestError(f"{name} is not supported by the torch engine", name)
            form = body.get("encoding_format") or "float"
            if form not in ("float", "base64"):
                raise BadRequestError("encoding_format must be float or base64", "encoding_format")
            return self.tokens(body.get("input")), form
        except BadRequestError as error:
            return error
        except SloBenchError as error:
            return BadRequestError(str(error))

    def _answer(
        self, texts: Sequence[Sequence[int]], vectors: list[Any], form: str
    ) -> dict[str, Any]:
        if form == "base64":  # what OpenAI's client asks for: 32-bit floats, the lowest byte first
            vectors = [b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
        tokens = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": n, "embedding": vector}
            for n, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.name, "usage": usage}


def _are_tokens(ids: object) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(n) is int and n >= 0 for n in ids)


async def answer_embeddings(request: HttpRequest, reply: Reply, embeds: Embeds) -> None:
    """Answer a request to /v1/embeddings."""
    body = request.json() or {}
    [(status, answer)] = await asyncio.to_thread(embeds.answers, [body])
    respond_json(reply, answer, status)


class _Routes:
    def __init__(self, embeds: Embeds) -> None:
        self._embeds = embeds
        self._created = int(time.time())

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        path = request.path
        if path == "/health":
            respond(reply, b"", "text/plain")
        elif path == "/v1/models":
            model = {"id": self._embeds.name, "object": "model", "owned_by": "slo-bench"}
            respond_json(reply, {"object": "list", "data": [model | {"created": self._created}]})
        elif path == "/v1/embeddings" and request.method == "POST":
            await answer_embeddings(request, reply, self._embeds)
        elif path == "/passes" and request.method == "POST":
            await self._passes(request, reply)
        else:
            refuse(reply, 404, f"there is no {request.method} {path} here")

    async def _passes(self, request: HttpRequest, reply: Reply) -> None:
        bodies = (request.json() or {}).get("requests")
        if not isinstance(bodies, list) or not all(isinstance(body, dict) for body in bodies):
            refuse(reply, 400, "requests must be a list of bodies of /v1/embeddings", "requests")
            return

        def compute() -> tuple[list[tuple[int, dict[str, Any]]], float]:
            begin_s = time.perf_counter()
            return self._embeds.answers(bodies), time.perf_counter() - begin_s

        answers, pass_s = await asyncio.to_thread(compute)
        entries = [{"status": status, "body": body} for status, body in answers]
        respond_json(reply, {"answers": entries, "pass_s": pass_s})


def main() -> None:
    """Serve an encoder until the parent process closes the connection."""
    parent = Parent()
    messages = parent.messages()
    try:
        options = next(messages)
        embeds = Embeds.load(Path(options["folder"]), options["device"])

        async def start(ready: Ready) -> None:
            await serve(_Routes(embeds).answer, ready=ready)

        with in_thread("embedding server", start) as server:
            config = embeds.encoder.config
            memory = activation_bytes(config.hidden, 2 * config.inner, _VALUE_BYTES)
            parent.send({"url": server.url, "activation_bytes_per_token": memory})
            next(messages, None)
    except SloBenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
