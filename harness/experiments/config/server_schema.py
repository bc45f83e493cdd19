"""How servers are started for an experiment, as people write it: the table `[server]` of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class ServerSchema(BaseModel):
    """Settings of `backend = "vllm"` and `"sglang"`. Frozen.

    `version` chooses among several that are installed; `args` go to the server as they are;
    `max_model_tokens` bounds prompt and answer together; a `step_log` is kept if asked for. With
    `validated` its levels are simulated afterwards, with step times fitted to that log. Every
    level is measured `repetitions` times, of which tables show the first, and a validation how far
    they lie apart.
    `kv_transfer` says how KV goes from prefill to decode instances, where a system splits them;
    `kvcached` switches that library on in servers on GPUs.
    `workers` are processes beside the engine `paged`, between which layers and heads move; `moving`
    sets thresholds of `policies.systems.module_policy`. By `clock` `cpu` it counts the CPU time of
    its thread and skips waits, so that a busy machine disturbs its figures less. `kv_store`:
    folders with sizes, `FOLDER=GIB`, fastest first, where it keeps prefixes beyond its device.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str | None = None
    args: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    max_model_tokens: Count | None = None
    ready_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0
    step_log: bool = False
    kv_transfer: Literal["files", "nixl"] = "files"
    validated: bool = False
    repetitions: Count = 1
    kvcached: bool = False
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    moving: Mapping[str, float] = {}
    clock: Literal["real", "cpu"] = "real"
    kv_store: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
