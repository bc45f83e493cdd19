"""The models that a running server lists, and where their files are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_json
from .http.endpoint import Endpoint, is_loopback
from .http.faults import OVERLOAD
from .http.odd_answers import message_of
from .http.single_request import NoAnswerError, get

_ANSWER_S = 10.0
_INFO_S = 2.0
_MOST_ANSWER_BYTES = 16 << 20
_MOST_NAME = 4096
_MOST_NAMED = 5


def listed_models(
    endpoint: Endpoint, headers: Mapping[str, str] | None = None, *, needed: bool = True
) -> list[dict[str, Any]]:
    """The models that the server lists, as it describes them; none if it lists none.

    Raises:
        SloBenchError: the server does not answer or refuses access; or it is `needed` to know a
            model, and the list is none, or the server is busy.
    """
    target = endpoint.target("/models")
    try:
        status, body = get(
            endpoint, target, headers, limit_s=_ANSWER_S, most_bytes=_MOST_ANSWER_BYTES
        )
    except NoAnswerError as error:
        raise SloBenchError(_no_server(endpoint, target, error)) from None
    if status in (401, 403):
        raise SloBenchError(
            f"{endpoint.url} answers with status {status}: it needs an API key; "
            "--api-key-env names the environment variable that holds it"
        )
    try:
        if needed and status in OVERLOAD:
            raise ValueError(f"status {status}: {message_of(body)[:200]}; --model NAME needs none")
        return [] if status >= 400 else _models_in(status, body)
    except ValueError as error:
        if needed:
            raise SloBenchError(_no_server(endpoint, target, error)) from None
        return []


def _no_server(endpoint: Endpoint, target: str, error: Exception) -> str:
    why = f"no OpenAI-compatible server answers at {endpoint.url}: GET {target}: {error}"
    if not endpoint.tls and str(error).startswith("closed"):
        why += "; does it speak TLS (https://)?"
    proxies = [name for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") if _has(name)]
    if proxies and not is_loopback(endpoint.host):
        why += f" (proxies are not used, and {' and '.join(proxies)} name one)"
    return why


def _has(variable: str) -> bool:
    return bool(os.environ.get(variable) or os.environ.get(variable.lower()))


def _models_in(status: int, body: bytes) -> list[dict[str, Any]]:
    """The entries of a list of models.

    Raises:
        ValueError: it is no such list.
    """
    if status != 200:
        raise ValueError(f"status {status}; redirects are not followed, give the address itself")
    reply = parse_json(body)
    if not isinstance(reply, dict):
        raise ValueError("the answer is no JSON object")
    models = reply.get("data") or []
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ValueError("data is no list of models")
    for model in models:
        name = model.get("id", "")
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise ValueError(f"the id of a model is no text of at most {_MOST_NAME} characters")
    return models


def entry_of(
    endpoint: Endpoint, entries: Sequence[Mapping[str, Any]], model: str
) -> Mapping[str, Any]:
    """The listed entry of a model, which is given by its served name or by its folder here; empty
    if none is listed under that name.

    A folder is that of the entry that names it as its `root` or ends it, else of the only model.

    Raises:
        SloBenchError: it is a folder, and which of several models is meant cannot be told.
    """
    named = next((entry for entry in entries if entry.get("id") == model), None)
    if named is not None or not entries or not _is_folder(model):
        return named or {}
    folder = str(Path(model).resolve())
    for entry in entries:
        names = (str(Path(entry[key])) for key in ("id", "root") if isinstance(entry.get(key), str))
        if any(name == folder or folder.endswith(f"/{name}") for name in names):
            return entry
    base_models = [entry for entry in entries if not entry.get("parent")]  # others are adapters
    if len(base_models) == 1:
        return base_models[0]
    listed = ", ".join(str(entry.get("id", "")) for entry in entries[:_MOST_NAMED])
    raise SloBenchError(
        f"{endpoint.url} serves {len(entries)} models ({listed}), and which of them the folder "
        f"{model} is cannot be told: --model NAME --tokenizer {model}"
    )


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # longer than names of files are
        return False


def folders_of(
    endpoint: Endpoint, served: Mapping[str, Any], headers: Mapping[str, str]
) -> Iterator[str]:
    """Yield where the served model's files may be on this machine, as the server says it."""
    if isinstance(root := served.get("root"), str):
        yield root
    if served.get("owned_by") == "sglang":
        with contextlib.suppress(NoAnswerError, ValueError):
            page = endpoint.page("/get_model_info")
            status, body = get(
                endpoint, page, headers, limit_s=_INFO_S, most_bytes=_MOST_ANSWER_BYTES
            )
            info = parse_json(body) if status == 200 else None
            for name in ("tokenizer_path", "model_path"):
                if isinstance(info, dict) and isinstance(info.get(name), str):
                    yield info[name]
