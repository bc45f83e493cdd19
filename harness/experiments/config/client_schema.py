"""How a real server is asked, as people write it: the table `[client]` of an experiment file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from .setting import CLIENT, Count, Positive, Several, number_list, setting

if TYPE_CHECKING:
    from ...load_generator.http.options import HttpOptions


class ClientSchema(BaseModel):
    """Settings of the load generator; see `HttpOptions`. Frozen.

    `base_urls` are the servers that `backend = "http"` attaches to; several stand behind the
    router. Secrets stand in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_urls: Several[str] = setting(
        (),
        CLIENT,
        "An OpenAI-compatible server that runs already. Repeated: all of them, behind the router.",
        option="--base-url",
        metavar="URL",
        repeated=True,
    )
    api: Literal["completions", "chat", "embeddings"] = setting(
        "completions", CLIENT, "Where requests go."
    )
    headers: dict[str, str] = setting(
        {},
        CLIENT,
        "Sent with every request; $NAME in the value is an environment variable. May be repeated.",
        option="--header",
    )
    api_key_env: str | None = setting(
        None,
        CLIENT,
        "The environment variable that holds the API key; the key is written nowhere.",
        metavar="NAME",
    )
    body: dict[str, Any] = setting(
        {}, CLIENT, "A field of every request's body, in place of ours. May be repeated."
    )
    exact_output: bool = setting(True, CLIENT, "Make servers generate as many tokens as asked.")
    prompts: Literal["auto", "ids", "words"] = setting(
        "auto", CLIENT, "What prompts without text are made of. Default: token ids, for chat words."
    )
    tokenizer: str | None = setting(
        None,
        CLIENT,
        "Folder of the served model's tokenizer: prompts use its vocabulary.",
        metavar="DIR",
        file="yes",
    )
    token_ids: tuple[int, int] = setting(
        (1000, 30000),
        CLIENT,
        "Range of the token ids that prompts are drawn from.",
        metavar="LOW,HIGH",
        read=number_list,
    )
    time_limit_s: Positive | None = setting(
        None,
        CLIENT,
        "A cell ends after so long; what is under way is then missed. Default: ten minutes after "
        "the last arrival.",
        unit="s",
    )
    stall_limit_s: Positive = setting(
        120.0, CLIENT, "A request without a new token for so long has failed.", unit="s"
    )
    late_limit_s: Positive = setting(
        0.01,
        CLIENT,
        "A cell whose requests were sent later than this (99th percentile) is invalid.",
        unit="s",
    )
    processes: Count | None = setting(
        None,
        CLIENT,
        "Processes that send. Default: as many as the load needs; with --executor ray one on "
        "each machine at least.",
    )
    token_times: bool = setting(False, CLIENT, "Keep the time of every token.")
    export: Several[Literal["vllm"]] = setting(
        (),
        CLIENT,
        "Also write each cell as `vllm bench serve --save-result --save-detailed` does.",
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
        from ...load_generator.http.options import Api, HttpOptions, Prompts

        return HttpOptions(
            api=Api(self.api),
            model=model,
            headers=self.headers,
            api_key_env=self.api_key_env,
            body=self.body,
            values_field=values_field,
            exact_output=self.exact_output,
            prompts=Prompts(self.prompts),
            tokenizer=None if self.tokenizer is None else Path(self.tokenizer),
            token_ids=self.token_ids,
            salt=salt,
            time_limit_s=self.time_limit_s,
            stall_limit_s=self.stall_limit_s,
            processes=self.processes,
            late_limit_s=self.late_limit_s,
            keep_texts="vllm" in self.export,
            keep_token_times=self.token_times or "vllm" in self.export,
        )


def _has_none(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    if isinstance(value, list):
        return any(map(_has_none, value))
    return value is None
