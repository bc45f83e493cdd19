"""Tables of an experiment file: `[client]`, the load generator for real servers; `[server]`,
servers that are started; `[tuning]`, how a suite chose its systems' parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ...servers.launch.backend_names import ATTACHED
from ...servers.server_kinds import LAUNCHED
from .setting import (
    CLIENT,
    REAL,
    SERVERS,
    Count,
    CountFrom0,
    Positive,
    Several,
    number_list,
    setting,
)

if TYPE_CHECKING:
    from ...load_generator.http.endpoint import Endpoint
    from ...load_generator.http.http_options import HttpOptions

VLLM_JSON: Final = "vllm"  # the format of `vllm bench serve`, which is no name of a server here


class TuningRecord(BaseModel):
    """How the parameters of one system were chosen: by trials of `slo-bench tune`, or as `note`
    says. Frozen.

    Args:
        note: the reason for values that were not tuned, or more about the tuning.
        command: the command that tuned them.
        trials: configurations that were tried.
        whole_space: there were no others in the search space.
        seeds: seeds of the requests that they were tried on.
        objective: what was maximised or minimised, with the rate and the target.
        default_value: the objective with default parameters.
        best_value: the objective with the parameters chosen.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    note: str = ""
    command: str = ""
    trials: Count | None = None
    whole_space: bool = False
    seeds: tuple[CountFrom0, ...] = ()
    objective: str = ""
    default_value: float | None = None
    best_value: float | None = None

    @model_validator(mode="after")
    def _complete(self) -> TuningRecord:
        tuned = (self.command, self.trials, self.seeds, self.objective, self.best_value)
        present = [value not in ("", None, ()) for value in tuned]
        if any(present) and not all(present):
            raise ValueError("needs command, trials, seeds, objective and best_value together")
        if not (any(present) or self.note):
            raise ValueError("needs a note, or trials with their command")
        return self

    @property
    def text(self) -> str:
        """The record as a sentence for tables."""
        if self.trials is None:
            return self.note
        seeds = ", ".join(map(str, self.seeds))
        before = "" if self.default_value is None else f"{self.default_value:g} → "
        tried = f"all {self.trials} configurations" if self.whole_space else f"{self.trials} trials"
        sentence = f"{tried} on seeds {seeds}: {self.objective} {before}{self.best_value:g}"
        return f"{sentence}. {self.note}".rstrip(". ")


class ClientSchema(BaseModel):
    """Settings of the load generator; `HttpOptions` is their form for one cell. Frozen.

    `base_urls` are the servers that `backend = "openai"` attaches to; several are placed behind
    the router. Secrets are kept in environment variables: `api_key_env` names one, and `$NAME` in a
    header's value another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    base_urls: Several[str] = setting(
        CLIENT,
        "Address of a running server, with any path and query, or unix:SOCKET:/PATH. Without a "
        "version in its path, /v1 is added. Repeated: several servers, behind the router.",
        (),
        option="--base-url",
        metavar="URL",
        repeated=True,
        backends=("openai",),
    )
    api: Literal["completions", "chat", "responses", "messages", "embeddings"] = setting(
        CLIENT,
        "API that generation requests use: OpenAI's, or Anthropic's messages. A server without "
        "completions is asked for chat.",
        "completions",
        condition=True,
    )
    ca_file: str | None = setting(
        CLIENT,
        "File (PEM) with the certificates of the authorities that sign the server's.",
        metavar="FILE",
        file="yes",
        backends=("openai",),
    )
    insecure: bool = setting(
        CLIENT, "Accept any certificate of the server.", False, backends=("openai",)
    )
    headers: dict[str, str] = setting(
        CLIENT,
        "HTTP header sent with every request, in place of ours; $NAME in the value is replaced by "
        "that environment variable. May be repeated.",
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
        CLIENT,
        "Field of every request body; replaces the default value. Without a value (max_tokens=) "
        "the field is left out. May be repeated.",
        {},
        condition=True,
    )
    rename_fields: dict[str, str] = setting(
        CLIENT,
        "Send a field of the body under another name: max_tokens=max_completion_tokens. May be "
        "repeated.",
        {},
        option="--rename-field",
        condition=True,
    )
    exact_output: bool = setting(
        CLIENT,
        "Make servers generate exactly the number of output tokens in the workload.",
        True,
        condition=True,
    )
    prompt_format: Literal["auto", "token-ids", "text"] = setting(
        CLIENT,
        "Form of generated prompts, where the workload has no text. Default: token ids; for "
        "chat: text.",
        "auto",
        condition=True,
    )
    tokenizer: str | None = setting(
        CLIENT,
        "Folder of the served model's tokenizer; generated prompts use its vocabulary.",
        metavar="DIR",
        file="yes",
        condition=True,
    )
    token_ids: tuple[int, int] = setting(
        CLIENT,
        "Range of the token ids in generated prompts.",
        (1000, 30000),
        metavar="LOW,HIGH",
        read=number_list,
        condition=True,
    )
    prompt_salt: str | None = setting(
        CLIENT,
        "Salt of generated prompts: the same command with the same salt sends the same prompts. "
        "Default: drawn for each run, so that no prompt is in a server's prefix cache.",
        metavar="TEXT",
        backends=(ATTACHED, *LAUNCHED),
    )
    time_limit_s: Positive | None = setting(
        CLIENT,
        "Time limit of a cell; requests not finished by then are missed. Default: ten minutes "
        "after the last arrival.",
        unit="s",
        condition=True,
    )
    stall_limit_s: Positive | None = setting(
        CLIENT,
        "A request that receives no token for this time fails. Default: 120 s after its first "
        "token, and 600 s before it.",
        unit="s",
        condition=True,
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
    export: Several[Literal["vllm"]] = setting(  # VLLM_JSON
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
        from ...load_generator.http.http_options import check_header

        for name, value in headers.items():
            check_header(name, value)
        return headers

    @field_validator("body")
    @classmethod
    def _has_no_null(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Leave fields that are null out. Reject other null values, which TOML cannot hold, and
        secrets.
        """
        from ...servers.launch.server_args import SECRET

        for name, value in body.items():
            if SECRET.fullmatch(f"--{name}") and value:
                raise ValueError(
                    f"{name} looks like a secret, and run folders keep bodies as written; "
                    "--api-key-env and --header send what is kept nowhere"
                )
        body = {name: "" if value is None else value for name, value in body.items()}
        if _has_none(body):
            raise ValueError("cannot hold null within a field; leave it out there")
        return body

    def endpoints(self) -> list[Endpoint]:
        """Return the servers of `base_urls`, with the certificates that are trusted."""
        from ...load_generator.http.endpoint import Endpoint

        return [
            replace(Endpoint.parse(url), ca_file=self.ca_file or "", insecure=self.insecure)
            for url in self.base_urls
        ]

    def options(self, *, model: str, cell: str, values_field: str | None = None) -> HttpOptions:
        """Return the options of the load generator for one cell, whose prompts are its own."""
        from ...load_generator.http.http_options import Api, HttpOptions, PromptFormat

        alike = {option.name for option in fields(HttpOptions)} & set(type(self).model_fields)
        exported = VLLM_JSON in self.export
        converted = {
            "api": Api(self.api),
            "prompt_format": PromptFormat(self.prompt_format),
            "tokenizer": None if self.tokenizer is None else Path(self.tokenizer),
            "save_token_times": self.save_token_times or exported,
        }
        return HttpOptions(
            **{name: getattr(self, name) for name in alike} | converted,
            model=model,
            values_field=values_field,
            salt=f"{self.prompt_salt or ''} {cell}",
            keep_texts=exported,
        )


def _has_none(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    if isinstance(value, list):
        return any(map(_has_none, value))
    return value is None


class ServerSchema(BaseModel):
    """Settings of servers that are started, the torch engine among them. Frozen.

    With `validated` every level is simulated afterwards, with step times fitted to the step log.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    args: Several[str] = setting(
        SERVERS,
        "Argument passed unchanged to the started servers (--server-arg=--dtype=float32); "
        "--option=$NAME is filled in from the environment variable NAME. May be repeated.",
        (),
        option="--server-arg",
        metavar="ARG",
        repeated=True,
    )
    max_model_tokens: Count | None = setting(
        SERVERS, "Maximum number of prompt and output tokens of a request.", unit="tokens"
    )
    startup_timeout_s: Positive = setting(
        SERVERS,
        "Maximum time for a server to start.",
        300.0,
        option="--startup-timeout",
        unit="s",
        role="run",
    )
    step_log: bool = setting(
        SERVERS, "Write one line per iteration (batch, duration).", False, role="run"
    )
    kv_transfer: Literal["files", "nixl"] = setting(
        SERVERS,
        "KV transfer from prefill to decode instances: files (in a temporary folder) or nixl.",
        "files",
    )
    validated: bool = False  # on the command line --validate
    repetitions: Count = setting(
        SERVERS,
        "Measure every level N times. Tables show the first measurement; --validate reports "
        "the spread.",
        1,
        role="run",
        backends=REAL,
    )
    kvcached: bool = setting(
        SERVERS,
        "On GPUs: use the library kvcached, which maps KV pages on demand, so that servers on "
        "one GPU share its memory.",
        False,
    )
    workers: Annotated[int, Field(ge=0, le=64)] = setting(
        SERVERS,
        "With torch: worker processes to which layers and KV heads can migrate.",
        0,
        backends=("torch",),
    )
    moving: Mapping[str, float] = setting(
        SERVERS,
        "With torch: a threshold of module migration. May be repeated.",
        {},
        backends=("torch",),
    )
    clock: Literal["real", "cpu"] = setting(
        SERVERS,
        "With torch: `cpu` measures the CPU time of the engine's thread and skips waits, "
        "which reduces noise on a busy machine.",
        "real",
        condition=True,
        backends=("torch",),
    )
    dtype: Literal["float32", "bfloat16"] | None = setting(
        SERVERS,
        "With torch: data type of weights and KV. Default: float32 on a CPU, the checkpoint's on "
        "a GPU.",
        backends=("torch",),
    )
    threads: Count | None = setting(
        SERVERS,
        "With torch: CPU threads that compute, pinned to a core each. Default: all cores but one "
        "for the client and one for each worker, at most OMP_NUM_THREADS.",
        backends=("torch",),
    )
    cpu_wait_limit: Annotated[float, Field(gt=0, le=1)] = setting(
        SERVERS,
        "With torch: a cell is invalid if its threads waited for a core for more than this share "
        "of the time in which they were ready to compute.",
        0.1,
        role="run",
        backends=("torch",),
    )
    kv_store: Several[str] = setting(
        SERVERS,
        "With torch: also store prefix KV in this folder, with this capacity (/dev/shm/kv=2: "
        "2 GiB of host memory). Repeated: tiers, the fastest first. Servers of one model that "
        "use the same folder share it.",
        (),
        metavar="FOLDER=GIB",
        repeated=True,
        backends=("torch",),
    )

    @field_validator("args")
    @classmethod
    def _hold_no_secret(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        from ...servers.launch.server_args import check_no_secrets

        check_no_secrets(args)
        return args
