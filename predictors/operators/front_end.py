"""The front end of a server: what a request passes before the engine sees it, and its answer after.

HTTP, chat template, tokenizer, hand-over to the engine's process, detokenizer and first streamed
chunk. One thread takes requests in, one after the other, so that bursts queue.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ...workloads.arrays import Floats, Ints
from .server_version import ServerVersion, version_numbers


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A row of `catalogues/front_ends.toml`, where each field is explained."""

    server: str  # for people
    request_s: float
    latency_s: float
    token_s: float

    def plain(self) -> dict[str, Any]:
        """Fields, as TOML has them."""
        return asdict(self)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> FrontEnd:
        """From the section of a profile.

        Raises:
            TypeError: a field is unknown or missing.
            ValueError: a time is not a number from 0 on.
        """
        times = {name: float(value) for name, value in entry.items() if name != "server"}
        if not all(0 <= seconds < math.inf for seconds in times.values()):
            raise ValueError("times of the front end must be seconds from 0 on")
        return cls(str(entry.get("server", "")), **times)

    def passing_s(self, prompt_tokens: Ints) -> Floats:
        """Seconds that requests and first chunks take to pass, where they wait for no others."""
        return np.asarray(self.latency_s + self.token_s * prompt_tokens, dtype=np.float64)

    def __str__(self) -> str:
        return (
            f"front end of {self.server}: {1e3 * self.latency_s:g} ms and "
            f"{1e6 * self.token_s:g} µs a prompt token, {1e3 * self.request_s:g} ms queued"
        )


class FrontEndQueue:
    """The thread of one server that takes requests in."""

    __slots__ = ("_free_s", "_request_s")

    def __init__(self, front_end: FrontEnd) -> None:
        self._request_s = front_end.request_s
        self._free_s = 0.0

    def leaves_s(self, arrival_s: float) -> float:
        """When the engine sees a request that arrives behind all others."""
        begin_s = arrival_s if arrival_s > self._free_s else self._free_s
        self._free_s = free_s = begin_s + self._request_s
        return free_s


def front_end(server: ServerVersion) -> FrontEnd:
    """The front end of a server: the row of its newest version that is not newer.

    A server that was not measured has that of vLLM.
    """
    versions = _rows().get(server.engine) or _rows()["vllm"]
    numbers = version_numbers(server.version)
    newest = max((v for v in versions if version_numbers(v) <= numbers), key=version_numbers)
    row = versions[newest]
    return FrontEnd(str(server), row["request_s"], row["latency_s"], row["token_s"])


@cache
def _rows() -> dict[str, dict[str, dict[str, Any]]]:
    file = files(__package__.rpartition(".")[0]) / "catalogues" / "front_ends.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
