"""Prefill and decode on servers of their own: each request passes through one of either.

A prefill server computes the prompt and one token, its KV goes over to a decode server by a KV
connector of vLLM's, and that server gives the whole answer (it computes the prompt's last tokens
again, as vLLM's own proxies have it, so the first token is the decode server's).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ....workloads.errors import UnknownNameError
from ...core.wire import LOAD_KV, STORE_KV
from ..http.http_server import HttpRequest, Reply, refuse
from .health_checks import CheckedServers
from .replies import CollectedReply

_GENERATES = ("/v1/completions", "/v1/chat/completions")


class KvTransferMode(StrEnum):
    """Path of KV from a prefill server to a decode server."""

    FILES = "files"  # through a shared folder
    NIXL = "nixl"  # straight from memory to memory; the prefill server's answer says from where


def transfer_of(name: str) -> KvTransferMode:
    """A KV transfer mode by name.

    Raises:
        UnknownNameError: no such transfer.
    """
    names = [transfer.value for transfer in KvTransferMode]
    if name not in names:
        raise UnknownNameError("KV transfer", name, names)
    return KvTransferMode(name)


# Makes a server with vLLM's NixlConnector keep a prompt's KV until a decode server fetches it.
KEEP_FOR_OTHERS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_THE_ANSWER = (
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
)


def prefill_body(body: Mapping[str, Any], kv_transfer_params: object) -> dict[str, Any]:
    """Body of the prefill request: the same prompt, one output token, no stream."""
    prefill_request = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    prefill_request |= {"max_tokens": 1, "stream": False, "kv_transfer_params": kv_transfer_params}
    if "max_completion_tokens" in prefill_request:
        prefill_request["max_completion_tokens"] = 1
    return prefill_request


class DisaggregatedServing:
    """A prefill group and a decode group; each request passes through one server of each."""

    def __init__(
        self, prefill: CheckedServers, decode: CheckedServers, transfer: KvTransferMode
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._transfer = transfer
        self.groups = (prefill, decode)

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Prefill a request at one server and decode it at another; an error of the prefill server
        is the answer.
        """
        if not request.path.endswith(_GENERATES):
            await self._prefill.work(request, reply)
            return
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body is no JSON object")
            return
        name = uuid.uuid4().hex
        by_files = self._transfer is KvTransferMode.FILES
        keep = {STORE_KV: name} if by_files else KEEP_FOR_OTHERS
        first = CollectedReply()
        await self._prefill.work(request.with_json(prefill_body(body, keep)), first)
        if first.status != 200:
            first.pass_on(reply)
            return
        body["kv_transfer_params"] = (
            {LOAD_KV: name} if by_files else first.json().get("kv_transfer_params")
        )
        await self._decode.work(request.with_json(body), reply)
