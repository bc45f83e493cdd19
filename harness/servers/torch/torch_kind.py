"""The torch engine: all that is asked about it as a server."""

from __future__ import annotations

from ...core.wire import VLLM_FIELD
from ..launch.backend_names import TORCH
from ..launch.server_kind import ServerKind

TORCH_ENGINE = ServerKind(
    name=TORCH,
    title="torch engine",
    policy_refusal=lambda policy: "",
    executes_controllers=True,
    values_field=VLLM_FIELD,
    placeholder_blocks=1,  # its logs count blocks as vLLM does
)
