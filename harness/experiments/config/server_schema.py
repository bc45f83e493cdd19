"""How servers are started for an experiment, as people write it: the table `[server]` of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .setting import SERVERS, Count, Positive, Several, setting


class ServerSchema(BaseModel):
    """Settings of the backends `vllm`, `sglang` and `torch`. Frozen.

    With `validated` every level is simulated afterwards, with step times fitted to the step log.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str | None = setting(
        SERVERS,
        "Version of the server, where several are installed.",
        option="--server-version",
        metavar="V",
    )
    args: Several[str] = setting(
        SERVERS,
        "Passed on, as it is, to servers that we start (--server-arg=--dtype=float32). May be "
        "repeated.",
        (),
        option="--server-arg",
        metavar="ARG",
        repeated=True,
    )
    max_model_tokens: Count | None = setting(
        SERVERS, "Most tokens of a prompt and its answer together.", unit="tokens"
    )
    startup_timeout_s: Positive = setting(
        SERVERS, "How long the start may take.", 300.0, option="--startup-timeout", unit="s"
    )
    step_log: bool = setting(SERVERS, "Keep a line for each step (batch, duration).", False)
    kv_transfer: Literal["files", "nixl"] = setting(
        SERVERS,
        "How KV goes from prefill to decode instances: files (a temporary folder) or nixl.",
        "files",
    )
    validated: bool = False  # on the command line --validate
    repetitions: Count = setting(
        SERVERS,
        "Measure every level N times. Tables show the first; a validation says how far they lie "
        "apart.",
        1,
    )
    kvcached: bool = setting(
        SERVERS,
        "On GPUs: KV pages are mapped on demand by the library kvcached, so that servers on one "
        "GPU share its memory.",
        False,
    )
    workers: Annotated[int, Field(ge=0, le=64)] = setting(
        SERVERS, "With torch: processes beside the engine, between which layers and heads move.", 0
    )
    moving: Mapping[str, float] = setting(
        SERVERS, "With torch: a threshold of those moves. May be repeated.", {}
    )
    clock: Literal["real", "cpu"] = setting(
        SERVERS,
        "With torch: `cpu` counts the CPU time of its thread and skips waits, so that a busy "
        "machine disturbs its figures less.",
        "real",
    )
    kv_store: Several[str] = setting(
        SERVERS,
        "With torch: keep prefixes in this folder too, /dev/shm/kv=2 for host memory; repeated, "
        "the fastest first. Servers of one model that name the same share them.",
        (),
        metavar="FOLDER=GIB",
        repeated=True,
    )
