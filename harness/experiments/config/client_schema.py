"""How a real server is asked, as people write it: the table `[client]` of an experiment file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from .setting import CLIENT, Count, Positive, Several, number_list, setting

if TYPE_CHECKING:
    from ...load_generator.http.options import HttpOptions


class ClientSchema(BaseModel):
    """Settings of the load generator; see `HttpOptions`. Frozen.

    `base_urls` are the servers that `backend = "openai"` attaches to; several stand behind the
    router. Secrets stand in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_urls: Several[str] = setting(
        CLIENT,
        "An OpenAI-compatible server that runs already. Repeated: all of them, behind the router.",
        (),
        option="--base-url",
        metavar="URL",
        repeated=True,
    )
    api: Literal["completions", "chat", "embeddings"] = setting(
        CLIENT, "Where requests go.", "completions"
    )
    headers: dict[str, str] = setting(
        CLIENT,
        "Sent with every request; $NAME in the value is an environment variable. May be repeated.",
        {},
        option="--header",
    )
    api_key_env: str | None = setting(
        CLIENT,
        "The environment variable that holds the API key; the key is written nowhere.",
        metavar="NAME",
    )
    body: dict[str, Any] = setting(
        CLIENT, "A field of every request's body, in place of ours. May be repeated.", {}
    )
    exact_output: bool = setting(CLIENT, "Make servers generate as many tokens as asked.", True)
    prompt_format: Literal["auto", "token-ids", "text"] = setting(
        CLIENT, "What prompts without text are made of. Default: token ids; for chat: text.", "auto"
    )
    tokenizer: str | None = setting(
        CLIENT,
        "Folder of the served model's tokenizer: prompts use its vocabulary.",
        metavar="DIR",
        file="yes",
    )
    token_ids: tuple[int, int] = setting(
        CLIENT,
        "Range of the token ids that prompts are drawn from.",
        (1000, 30000),
        metavar="LOW,HIGH",
        read=number_list,
    )
    time_limit_s: Positive | None = setting(
        CLIENT,
        "A cell ends after so long; what is under way is then missed. Default: ten minutes after "
        "the last arrival.",
        unit="s",
    )
    stall_limit_s: Positive = setting(
        CLIENT, "A request without a new token for so long has failed.", 120.0, unit="s"
    )
    send_delay_limit_s: Positive = setting(
        CLIENT,
        "A cell whose requests were sent later than this (99th percentile) is invalid.",
        0.01,
        unit="s",
    )
    processes: Count | None = setting(
        CLIENT,
        "Processes that send. Default: as many as the load needs; with --executor ray one on "
        "each machine at least.",
    )
    save_token_times: bool = setting(CLIENT, "Keep the time of every token.", False)
    export: Several[Literal["vllm"]] = setting(
        CLIENT,
        "Also write each cell as `vllm bench serve --save-result --save-detailed` does.",
        (),
        repeated=True,
    )

    @field_validator("base_urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        from ...load_generator.http.endpoint import Endpoint

        for url in urls:
            Endpoint.parse(url)
        return urls

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        from ...load_generator.http.options import check_header

        for name, value in headers.items():
            check_header(name, value)
        return headers

    @field_validator("body")
    @classmethod
    def _has_no_null(cls, body: dict[str, Any]) -> dict[str, Any]:
        """An experiment file could not hold it."""
        if _has_none(body):
            raise ValueError("cannot hold null; leave the field out")
        return body

    def options(self, *, model: str, salt: str, values_field: str | None = None) -> HttpOptions:
        """As the load generator takes it, for one cell."""
        from ...load_generator.http.options import Api, HttpOptions, PromptFormat

        alike = {one.name for one in fields(HttpOptions)} & set(type(self).model_fields)
        exported = "vllm" in self.export
        own = {
            "api": Api(self.api),
            "prompt_format": PromptFormat(self.prompt_format),
            "tokenizer": None if self.tokenizer is None else Path(self.tokenizer),
            "save_token_times": self.save_token_times or exported,
        }
        return HttpOptions(
            **{name: getattr(self, name) for name in alike} | own,
            model=model,
            values_field=values_field,
            salt=salt,
            keep_texts=exported,
        )


def _has_none(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    if isinstance(value, list):
        return any(map(_has_none, value))
    return value is None
