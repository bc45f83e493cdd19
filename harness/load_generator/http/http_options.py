"""Options of the load generator: API, request fields, limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ....workloads.errors import SloBenchError
from ....workloads.masking import environment_variable, register
from ....workloads.request import RequestType


class Api(StrEnum):
    """API that generation requests use: OpenAI's, or Anthropic's `messages`."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"

    @property
    def path(self) -> str:
        """Path of the API after the base of its server's (`/v1`)."""
        return "/chat/completions" if self is Api.CHAT else f"/{self.value}"

    @property
    def takes_messages(self) -> bool:
        """Return True if a prompt is a list of messages, so that it cannot be token ids."""
        return self in (Api.CHAT, Api.RESPONSES, Api.MESSAGES)

    @property
    def streams(self) -> bool:
        """Return True if answers arrive token by token."""
        return self is not Api.EMBEDDINGS

    def of(self, kind: RequestType) -> Api:
        """Return the API of a kind of request."""
        return Api.EMBEDDINGS if kind is RequestType.EMBED else self


class PromptFormat(StrEnum):
    """Form of generated prompts, for workloads without text."""

    AUTO = "auto"  # token ids where the API takes them, else text
    TOKEN_IDS = "token-ids"  # exact, and known prefixes are really shared
    TEXT = "text"  # exact with a tokenizer, about a token a word without


@dataclass(frozen=True)
class HttpOptions:
    """Options of the load generator for one cell: API, request fields and limits.

    Attributes:
        api: API of generation requests; embedding requests always go to `/v1/embeddings`.
        model: model of requests that name none.
        headers: sent with every request, in place of our own of that name; `$NAME` in a value is
            the environment variable NAME.
        api_key_env: name of the environment variable that holds the API key.
        body: fields that are added to the body or replace its own; LEFT_OUT: not sent.
        rename_fields: other names of fields of the body (`max_tokens`).
        values_field: body field for per-request values (see `core.wire`); None: not sent.
        length_predictor: predictor of the lengths of answers, which are sent with those values;
            empty: none. `length_seed` seeds its random numbers; `lengths_folder` is where an
            online predictor learns.
        exact_output: make the server give exactly the workload's output tokens
            (`ignore_eos`, `min_tokens`), which vLLM and SGLang understand.
        prompt_format: form of generated prompts.
        tokenizer: folder of the served model's tokenizer, for the vocabulary and exact words.
        token_ids: lowest and one above the highest id for made-up prompts, without a tokenizer.
        vocabulary: ids that made-up prompts consist of, in place of those.
        salt: prompts of other salts or other lengths share no prefix, so that no cell finds
            another's in the server's prefix cache.
        time_limit_s: time limit of a whole cell; by default the span of the arrivals and ten
            minutes, or one hour in a closed loop.
        connect_limit_s: time limit for a connection to be opened.
        stall_limit_s: longest time without a token; None: 120 s after the first data of a stream,
            600 s before it.
        processes: number of sending processes; None: as many as the offered load needs.
        send_delay_limit_s: dispatch later than this at the 99th percentile makes a level invalid.
        rate_limit_share: so does a sent rate further from the offered one than this share.
        failed_before: how the first request of the level before failed, if not one of that level
            was served (see `unserved`); empty else.
        keep_texts: keep the texts of answers.
        save_token_times: keep the time of every token.
    """

    api: Api = Api.COMPLETIONS
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    api_key_env: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    rename_fields: Mapping[str, str] = field(default_factory=dict)
    values_field: str | None = None
    length_predictor: str = ""
    length_seed: int = 0
    lengths_folder: Path | None = None
    exact_output: bool = True
    prompt_format: PromptFormat = PromptFormat.AUTO
    tokenizer: Path | None = None
    token_ids: tuple[int, int] = (1000, 30000)
    vocabulary: tuple[int, ...] = ()
    salt: str = ""
    time_limit_s: float | None = None
    connect_limit_s: float = 10.0
    stall_limit_s: float | None = None
    processes: int | None = None
    send_delay_limit_s: float = 0.01
    rate_limit_share: float = 0.02
    failed_before: str = ""
    keep_texts: bool = False
    save_token_times: bool = False

    def header_fields(self) -> dict[str, str]:
        """Return the extra headers and the API key as sent, by name in lower case; never store or
        show them.

        Raises:
            SloBenchError: a header is invalid, or an environment variable is not set.
        """
        fields: dict[str, str] = {}
        if self.api is Api.MESSAGES:
            fields["anthropic-version"] = ANTHROPIC_VERSION
        if self.api_key_env is not None:
            key = environment_variable(self.api_key_env)
            fields["authorization"] = f"Bearer {key}"
            if self.api is Api.MESSAGES:
                fields["x-api-key"] = key
        extra = {name.lower(): _expanded(name, value) for name, value in self.headers.items()}
        return fields | extra


def request_head(method: str, target: str, fields: Mapping[str, str]) -> bytes:
    """Return the head of a request without the empty line after it."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    try:
        return "".join(f"{line}\r\n" for line in lines).encode("latin-1")
    except UnicodeEncodeError:
        raise SloBenchError(
            "an address or a header has characters beyond Latin-1; encode them (%C3%A9)"
        ) from None


LEFT_OUT = ""  # in `body`: the field is not sent
ANTHROPIC_VERSION = "2023-06-01"  # of the API `messages`
_NOT_OURS = ("content-length", "transfer-encoding", "connection")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_SECRET = re.compile(r"auth|key|token|secret|cookie", re.IGNORECASE)


def check_header(name: str, value: str) -> None:
    """Reject an invalid header, or a secret written in plain text, since run folders keep the
    settings.

    Raises:
        SloBenchError: with what to write instead.
    """
    if not _NAME.fullmatch(name) or any(c in value for c in "\r\n\0"):
        raise SloBenchError(f"{name!r} is no header; write NAME=VALUE")
    if name.lower() in _NOT_OURS:
        raise SloBenchError(f"header {name} says how a request is sent, and cannot be chosen")
    if _SECRET.search(name) and not _VARIABLE.search(value):
        raise SloBenchError(
            f"header {name} looks like a secret, and run folders keep headers as written; put its "
            f"value into an environment variable and write {name}=$THAT_VARIABLE, "
            "or use --api-key-env"
        )


def _expanded(name: str, value: str) -> str:
    check_header(name, value)
    expanded = _VARIABLE.sub(lambda m: environment_variable(m[1] or m[2]), value)
    if _SECRET.search(name):
        register(expanded)
    return expanded
