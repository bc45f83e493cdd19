"""How a real server is asked, as people write it: the table `[client]` of an experiment file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from .setting import CLIENT, Count, Positive, Setting, Several, number_list

if TYPE_CHECKING:
    from ...load_generator.http.options import HttpOptions


class ClientSchema(BaseModel):
    """Settings of the load generator; see `HttpOptions`. Frozen.

    `base_urls` are the servers that `backend = "http"` attaches to; several stand behind the
    router. Secrets stand in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_urls: Annotated[
        Several[str],
        Setting(
            "An OpenAI-compatible server that runs already. Repeated: all of them, behind the "
            "router.",
            CLIENT,
            option="--base-url",
            metavar="URL",
            role="client",
        ),
    ] = ()
    api: Annotated[
        Literal["completions", "chat", "embeddings"],
        Setting("Where requests go.", CLIENT, role="client"),
    ] = "completions"
    headers: Annotated[
        dict[str, str],
        Setting(
            "Sent with every request; $NAME in the value is an environment variable. May be "
            "repeated.",
            CLIENT,
            option="--header",
            role="client",
        ),
    ] = {}
    api_key_env: Annotated[
        str | None,
        Setting(
            "The environment variable that holds the API key; the key is written nowhere.",
            CLIENT,
            metavar="NAME",
            role="client",
        ),
    ] = None
    body: Annotated[
        dict[str, Any],
        Setting(
            "A field of every request's body, in place of ours. May be repeated.",
            CLIENT,
            role="client",
        ),
    ] = {}
    exact_output: Annotated[
        bool, Setting("Make servers generate as many tokens as asked.", CLIENT, role="client")
    ] = True
    prompts: Annotated[
        Literal["auto", "ids", "words"],
        Setting(
            "What prompts without text are made of.",
            CLIENT,
            default="token ids, for chat words",
            role="client",
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None,
        Setting(
            "Folder of the served model's tokenizer: prompts use its vocabulary.",
            CLIENT,
            metavar="DIR",
            file="yes",
            role="client",
        ),
    ] = None
    token_ids: Annotated[
        tuple[int, int],
        Setting(
            "Range of the token ids that prompts are drawn from.",
            CLIENT,
            metavar="LOW,HIGH",
            read=number_list,
            role="client",
        ),
    ] = (1000, 30000)
    time_limit_s: Annotated[
        Positive | None,
        Setting(
            "A cell ends after so long; what is under way is then missed.",
            CLIENT,
            default="ten minutes after the last arrival",
            unit="s",
            role="client",
        ),
    ] = None
    stall_limit_s: Annotated[
        Positive,
        Setting(
            "A request without a new token for so long has failed.", CLIENT, unit="s", role="client"
        ),
    ] = 120.0
    late_limit_s: Annotated[
        Positive,
        Setting(
            "A cell whose requests were sent later than this (99th percentile) is invalid.",
            CLIENT,
            unit="s",
            role="client",
        ),
    ] = 0.01
    processes: Annotated[
        Count | None,
        Setting(
            "Processes that send.",
            CLIENT,
            default="as many as the load needs; with --executor ray one on each machine at least",
            role="client",
        ),
    ] = None
    token_times: Annotated[
        bool, Setting("Keep the time of every token.", CLIENT, role="client")
    ] = False
    export: Annotated[
        Several[Literal["vllm"]],
        Setting(
            "Also write each cell as `vllm bench serve --save-result --save-detailed` does.",
            CLIENT,
            role="client",
        ),
    ] = ()

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
