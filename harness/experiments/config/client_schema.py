"""Settings of the load generator for real servers: the table `[client]` of an experiment file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from .setting import CLIENT, Count, Positive, Several, number_list, setting

if TYPE_CHECKING:
    from ...load_generator.http.options import HttpOptions


class ClientSchema(BaseModel):
    """Settings of the load generator; `HttpOptions` is their form for one cell. Frozen.

    `base_urls` are the servers that `backend = "openai"` attaches to; several are placed behind
    the router. Secrets are kept in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_urls: Several[str] = setting(
        CLIENT,
        "URL of a running OpenAI-compatible server. Repeated: several servers, behind the router.",
        (),
        option="--base-url",
        metavar="URL",
        repeated=True,
        backends=("openai",),
    )
    api: Literal["completions", "chat", "embeddings"] = setting(
        CLIENT, "API that generation requests use.", "completions"
    )
    headers: dict[str, str] = setting(
        CLIENT,
        "HTTP header sent with every request; $NAME in the value is replaced by that "
        "environment variable. May be repeated.",
        {},
        option="--header",
    )
    api_key_env: str | None = setting(
        CLIENT,
        "Name of the environment variable that holds the API key; the key is never written to "
        "a file.",
        metavar="NAME",
    )
    body: dict[str, Any] = setting(
        CLIENT, "Field of every request body; replaces the default value. May be repeated.", {}
    )
    exact_output: bool = setting(
        CLIENT, "Make servers generate exactly the number of output tokens in the workload.", True
    )
    prompt_format: Literal["auto", "token-ids", "text"] = setting(
        CLIENT,
        "Form of generated prompts, where the workload has no text. Default: token ids; for "
        "chat: text.",
        "auto",
    )
    tokenizer: str | None = setting(
        CLIENT,
        "Folder of the served model's tokenizer; generated prompts use its vocabulary.",
        metavar="DIR",
        file="yes",
    )
    token_ids: tuple[int, int] = setting(
        CLIENT,
        "Range of the token ids in generated prompts.",
        (1000, 30000),
        metavar="LOW,HIGH",
        read=number_list,
    )
    time_limit_s: Positive | None = setting(
        CLIENT,
        "Time limit of a cell; requests not finished by then are missed. Default: ten minutes "
        "after the last arrival.",
        unit="s",
    )
    stall_limit_s: Positive = setting(
        CLIENT, "A request that receives no token for this time fails.", 120.0, unit="s"
    )
    send_delay_limit_s: Positive = setting(
        CLIENT,
        "A cell is invalid if the 99th percentile of its send delays exceeds this.",
        0.01,
        unit="s",
    )
    processes: Count | None = setting(
        CLIENT,
        "Sending processes. Default: as many as the load needs; with --executor ray at least "
        "one on each machine.",
    )
    save_token_times: bool = setting(CLIENT, "Save the time of every token.", False)
    export: Several[Literal["vllm"]] = setting(
        CLIENT,
        "Also write each cell in the format of `vllm bench serve --save-result --save-detailed`.",
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
        """Reject null values, which a TOML file cannot hold."""
        if _has_none(body):
            raise ValueError("cannot hold null; leave the field out")
        return body

    def options(self, *, model: str, salt: str, values_field: str | None = None) -> HttpOptions:
        """Return the options of the load generator for one cell."""
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
