"""How servers are started for an experiment, as people write it: the table `[server]` of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .setting import SERVERS, Count, Positive, Setting, Several


class ServerSchema(BaseModel):
    """Settings of the backends `vllm`, `sglang` and `paged`. Frozen.

    With `validated` every level is simulated afterwards, with step times fitted to the step log.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[
        str | None,
        Setting(
            "Version of the server, where several are installed.",
            SERVERS,
            "--server-version",
            metavar="V",
        ),
    ] = None
    args: Annotated[
        Several[str],
        Setting(
            "Passed on, as it is, to servers that we start (--server-arg=--dtype=float32). May be "
            "repeated.",
            SERVERS,
            option="--server-arg",
            metavar="ARG",
        ),
    ] = ()
    max_model_tokens: Annotated[
        Count | None,
        Setting("Most tokens of a prompt and its answer together.", SERVERS, unit="tokens"),
    ] = None
    ready_s: Annotated[
        Positive, Setting("How long the start may take.", SERVERS, option="--ready", unit="s")
    ] = 300.0
    step_log: Annotated[bool, Setting("Keep a line for each step (batch, duration).", SERVERS)] = (
        False
    )
    kv_transfer: Annotated[
        Literal["files", "nixl"],
        Setting(
            "How KV goes from prefill to decode instances: files (a temporary folder) or nixl.",
            SERVERS,
        ),
    ] = "files"
    validated: bool = False  # on the command line --validate
    repetitions: Annotated[
        Count,
        Setting(
            "Measure every level N times. Tables show the first; a validation says how far they "
            "lie apart.",
            SERVERS,
        ),
    ] = 1
    kvcached: Annotated[
        bool,
        Setting(
            "On GPUs: KV pages are mapped on demand by the library kvcached, so that servers on "
            "one GPU share its memory.",
            SERVERS,
        ),
    ] = False
    workers: Annotated[
        int,
        Field(ge=0, le=64),
        Setting(
            "With paged: processes beside the engine, between which layers and heads move.",
            SERVERS,
        ),
    ] = 0
    moving: Annotated[
        Mapping[str, float],
        Setting("With paged: a threshold of those moves. May be repeated.", SERVERS),
    ] = {}
    clock: Annotated[
        Literal["real", "cpu"],
        Setting(
            "With paged: `cpu` counts the CPU time of its thread and skips waits, so that a busy "
            "machine disturbs its figures less.",
            SERVERS,
        ),
    ] = "real"
    kv_store: Annotated[
        Several[str],
        Setting(
            "With paged: keep prefixes in this folder too, /dev/shm/kv=2 for host memory; "
            "repeated, the fastest first. Servers of one model that name the same share them.",
            SERVERS,
            metavar="FOLDER=GIB",
        ),
    ] = ()
