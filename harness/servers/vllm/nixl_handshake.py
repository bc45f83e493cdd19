"""Handshake of servers that transfer KV by NIXL, before the first measured request.

With the first prompt from a prefill server, a decode server asks it for the location of its KV.
vLLM's connector waits 5 s for the answer, which is not a setting, and otherwise fails the request.
Without this handshake the first request of a busy machine would be lost, and on any machine it
would include the time of the handshake.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from ..gateway.split import KEEP_FOR_OTHERS, prefill_body
from ..launch.server_process import Say, ServerError, ServerProcess

_PROMPT = [1, 1]  # any vocabulary has it
_AGAIN_S = 1.0


def nixl_handshake(
    prefill: ServerProcess, decode: ServerProcess, model: str, within_s: float, say: Say
) -> None:
    """Send a short prompt from `prefill` to `decode`, until one succeeds.

    Args:
        prefill: computes the prompt and keeps its KV.
        decode: fetches that and answers.
        model: the name that both serve it under.
        within_s: how long to try, seconds.
        say: told of each failure.

    Raises:
        ServerError: they have not met in time, or one has died.
    """
    begin_s = time.monotonic()
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 2, "ignore_eos": True}
    while True:
        left_s = max(_AGAIN_S, within_s - (time.monotonic() - begin_s))
        try:
            kept = _ask(prefill, prefill_body(body, KEEP_FOR_OTHERS), left_s)
            _ask(decode, {**body, "kv_transfer_params": kept.get("kv_transfer_params")}, left_s)
            return
        except httpx.HTTPError as error:  # refused, timed out, or an answer that is an error
            failed = str(error).partition("\n")[0]
        for server in (prefill, decode):
            server.check()
        if time.monotonic() - begin_s > within_s:
            problem = f"no KV came from {prefill.name} to {decode.name} within {within_s:.0f} s"
            raise ServerError(decode.with_log(f"{problem} ({failed})"))
        say(f"no KV came from {prefill.name} to {decode.name} ({failed}); once more")
        time.sleep(_AGAIN_S)


def _ask(server: ServerProcess, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    with server.http(timeout_s) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status()
    completion: dict[str, Any] = answer.json()
    return completion
