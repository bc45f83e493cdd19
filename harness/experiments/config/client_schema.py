"""How a real server is asked, as people write it: the table `[client]` of an experiment file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ...load_generator.http.endpoint import Endpoint
from ...load_generator.http.options import Api, HttpOptions, PromptFormat, check_header

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class ClientSchema(BaseModel):
    """Settings of the load generator; see `HttpOptions`. Frozen.

    `base_urls` are the servers that `backend = "openai"` attaches to; several stand behind the
    router. Secrets stand in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_urls: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    api: Literal["completions", "chat", "embeddings"] = "completions"
    headers: dict[str, str] = {}
    api_key_env: str | None = None
    body: dict[str, Any] = {}
    exact_output: bool = True
    prompt_format: Literal["auto", "token-ids", "text"] = "auto"
    tokenizer: str | None = None
    token_ids: tuple[int, int] = (1000, 30000)
    time_limit_s: Positive | None = None
    stall_limit_s: Positive = 120.0
    send_delay_limit_s: Positive = 0.01
    processes: Annotated[int, Field(ge=1)] | None = None
    save_token_times: bool = False
    export: Annotated[tuple[Literal["vllm"], ...], BeforeValidator(_listed)] = ()

    @field_validator("base_urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            Endpoint.parse(url)
        return urls

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, str]) -> dict[str, str]:
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

    def anchored(self, folder: Path) -> ClientSchema:
        """The same with a relative path made absolute, starting at `folder`."""
        if self.tokenizer is None:
            return self
        return self.model_copy(update={"tokenizer": str(folder / self.tokenizer)})

    def options(self, *, model: str, salt: str, values_field: str | None = None) -> HttpOptions:
        """As the load generator takes it, for one cell."""
        return HttpOptions(
            api=Api(self.api),
            model=model,
            headers=self.headers,
            api_key_env=self.api_key_env,
            body=self.body,
            values_field=values_field,
            exact_output=self.exact_output,
            prompt_format=PromptFormat(self.prompt_format),
            tokenizer=None if self.tokenizer is None else Path(self.tokenizer),
            token_ids=self.token_ids,
            salt=salt,
            time_limit_s=self.time_limit_s,
            stall_limit_s=self.stall_limit_s,
            processes=self.processes,
            send_delay_limit_s=self.send_delay_limit_s,
            keep_texts="vllm" in self.export,
            save_token_times=self.save_token_times or "vllm" in self.export,
        )


def _has_none(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    if isinstance(value, list):
        return any(map(_has_none, value))
    return value is None
