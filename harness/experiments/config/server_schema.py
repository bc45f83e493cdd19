"""Settings of started servers: the table `[server]` of an experiment file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .setting import SERVERS, Count, Positive, Several, setting


class ServerSchema(BaseModel):
    """Settings of the backends `vllm`, `sglang` and `torch`. Frozen.

    With `validated` every level is simulated afterwards, with step times fitted to the step log.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str | None = setting(
        SERVERS,
        "Server version, if several are installed.",
        option="--server-version",
        metavar="V",
    )
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
        SERVERS, "Maximum time for a server to start.", 300.0, option="--startup-timeout", unit="s"
    )
    step_log: bool = setting(SERVERS, "Write one line per iteration (batch, duration).", False)
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
        backends=("openai", "vllm", "sglang", "torch"),
    )
    kvcached: bool = setting(
        SERVERS,
        "On GPUs: use the library kvcached, which maps KV pages on demand, so that servers on "
        "one GPU share its memory.",
        False,
    )
    workers: Annotated[int, Field(ge=0, le=64)] = setting(
        SERVERS, "With torch: worker processes to which layers and KV heads can migrate.", 0
    )
    moving: Mapping[str, float] = setting(
        SERVERS, "With torch: a threshold of module migration. May be repeated.", {}
    )
    clock: Literal["real", "cpu"] = setting(
        SERVERS,
        "With torch: `cpu` measures the CPU time of the engine's thread and skips waits, "
        "which reduces noise on a busy machine.",
        "real",
    )
    threads: Count | None = setting(
        SERVERS,
        "With torch: CPU threads that compute, pinned to a core each. Default: all cores but one "
        "for the client and one for each worker, at most OMP_NUM_THREADS.",
    )
    cpu_wait_limit: Annotated[float, Field(gt=0, le=1)] = setting(
        SERVERS,
        "With torch: a cell is invalid if its threads waited for a core for more than this share "
        "of the time in which they were ready to compute.",
        0.1,
    )
    kv_store: Several[str] = setting(
        SERVERS,
        "With torch: also store prefix KV in this folder, with this capacity (/dev/shm/kv=2: "
        "2 GiB of host memory). Repeated: tiers, the fastest first. Servers of one model that "
        "use the same folder share it.",
        (),
        metavar="FOLDER=GIB",
        repeated=True,
    )

    @field_validator("args")
    @classmethod
    def _hold_no_secret(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        from ...servers.launch.server_args import check_no_secrets

        check_no_secrets(args)
        return args
