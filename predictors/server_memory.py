"""What a server takes of each GPU beside weights and KV, by server and version."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from ..workloads.errors import SloBenchError, UnknownNameError
from .model_spec import ModelSpec
from .operators.server_version import UNKNOWN, ServerVersion, version_numbers

ANY = "any"  # of what is only simulated
_GIB = 2**30
_ACTIVATION_BYTES = 2
_LARGE_GPU_BYTES = 70 * _GIB  # from which on vLLM has larger defaults, but for A100


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on each GPU beside weights and KV."""

    activations: int  # of a step of the most tokens, or of sampling for the most sequences
    outside: int  # CUDA, workspaces and NCCL's buffers

    @property
    def total(self) -> int:
        """All of them."""
        return self.activations + self.outside


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """A row of `catalogues/server_memory.toml`, where each field is explained."""

    server: str
    version: str
    outside_gib: float
    group_outside_gib: float
    sampler_bytes: float
    sequences: int
    sequences_large: int
    tokens: int
    tokens_large: int
    origin: str
    with_activations: bool = False
    activations: bool = True

    def is_large(self, gpu_name: str, gpu_memory_bytes: int) -> bool:
        """Whether steps on this GPU have `sequences_large` and `tokens_large` by default."""
        return gpu_memory_bytes >= _LARGE_GPU_BYTES and not gpu_name.startswith("a100")

    def parts(self, model: ModelSpec, gpus: int, tokens: int, sequences: int) -> MemoryParts:
        """What a step of so many tokens and sequences takes on each of `gpus` that share layers.

        Activations do not shrink with their number: vLLM 0.19 measures the same at tp 1, 2 and 4.
        """
        outside = round((self.outside_gib if gpus == 1 else self.group_outside_gib) * _GIB)
        if not self.activations:
            return MemoryParts(0, outside)
        sampler = round(sequences * model.vocab * self.sampler_bytes)
        if self.with_activations:
            # The residual stream, its normed copy, attention output and queries live together with
            # the MLP's widened activations (gate, up and their product) of one layer.
            experts = model.experts
            at_once = experts.per_token * experts.intermediate if experts else 0
            inner = max(model.intermediate, at_once)
            return MemoryParts(_step_bytes(model, tokens, inner) + sampler, outside)
        step = _step_bytes(model, tokens, model.intermediate / gpus)
        held = 2 * tokens * model.hidden * _ACTIVATION_BYTES  # while it samples
        return MemoryParts(max(step, sampler + held) + _routed_bytes(model, gpus, tokens), outside)


def _step_bytes(model: ModelSpec, tokens: int, inner: float) -> int:
    width = 4 * model.hidden + model.traits.mlp_matrices * inner
    return round(tokens * width * _ACTIVATION_BYTES)


def _routed_bytes(model: ModelSpec, gpus: int, tokens: int) -> int:
    """Workspaces of the fused experts, which stay: what enters or leaves the experts, and the
    product of gate and up, for each of a token's experts.
    """
    experts = model.experts
    if experts is None:
        return 0
    inner = experts.intermediate / gpus
    each = max(2 * inner, experts.width or model.hidden) + inner
    return round(tokens * experts.per_token * each * _ACTIVATION_BYTES)


def server_memory(server: str = ANY, version: str = "") -> ServerMemory:
    """The row of a server and its version; the newest without one.

    Raises:
        UnknownNameError: there is no such server.
        SloBenchError: the version is older than all rows, or none.
    """
    rows = _rows()
    if server not in rows:
        raise UnknownNameError("server", server, rows)
    ordered = sorted(rows[server], key=lambda row: _number(row.version))
    if not version:
        return ordered[-1]
    older = [row for row in ordered if _number(row.version) <= _number(version)]
    if not older:
        raise SloBenchError(
            f"memory of {server} {version} is not known; the oldest is {ordered[0].version}"
        )
    return older[-1]


def has_memory(server: str, version: str) -> bool:
    """Whether a row holds for this version of a server."""
    return server in _rows() and any(
        _number(row.version) <= _number(version) for row in _rows()[server]
    )


def placed_memory(server: ServerVersion) -> dict[str, str]:
    """The fields of a `Placement` that name the memory of a server; none where it is not known."""
    version = "" if version_numbers(server.version) == UNKNOWN else server.version
    if server.engine not in _rows() or (version and not has_memory(server.engine, version)):
        return {}
    return {"server": server.engine, "server_version": version}


def servers() -> tuple[str, ...]:
    """Servers that have rows, without the one for what is only simulated."""
    return tuple(name for name in _rows() if name != ANY)


def _number(version: str) -> tuple[int, ...]:
    words = re.fullmatch(r"v?(\d+(?:\.\d+)*)\S*", version)
    if words is None:
        raise SloBenchError(f"{version!r} is no version; write it as 0.19 or 0.19.1")
    return tuple(map(int, words[1].split(".")))


@cache
def _rows() -> dict[str, list[ServerMemory]]:
    file = files(__package__) / "catalogues" / "server_memory.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    names = {definition.name for definition in fields(ServerMemory)}
    return {
        server: [
            ServerMemory(server, version, **{n: v for n, v in row.items() if n in names})
            for version, row in versions.items()
        ]
        for server, versions in tables.items()
    }
