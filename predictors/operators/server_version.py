"""Which server a simulation stands for: step times and scheduling depend on engine and version."""

from __future__ import annotations

import sys
from typing import NamedTuple

from ...workloads.errors import SloBenchError, UnknownNameError

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
# The newest version that was checked, by engine; "" where none was.
NEWEST = {"vllm": "0.32", "sglang": "0.5.23", "trtllm": ""}
DEFAULT_ENGINE = "vllm"
ASYNCHRONOUS_FROM = (0, 14)  # the vLLM version from which it schedules ahead by default


class ServerVersion(NamedTuple):
    """An engine, a key of `NEWEST`, and its version (unknown: that of the newest); `ahead`: whether
    vLLM schedules the next step during the present one, where that does not follow from it.
    """

    engine: str = DEFAULT_ENGINE
    version: str = NEWEST[DEFAULT_ENGINE]
    ahead: bool | None = None

    @classmethod
    def parse(cls, text: str) -> ServerVersion:
        """`0.11` (of vLLM), `sglang-0.5.14`, or `sglang` (the newest).

        Raises:
            UnknownNameError: there are no host times of the engine.
            SloBenchError: the version is none.
        """
        if text[:1].isdigit():
            text = f"{DEFAULT_ENGINE}-{text}"
        engine, hyphen, version = text.partition("-")
        if engine not in NEWEST:
            raise UnknownNameError("engine", engine, NEWEST)
        if hyphen and version_numbers(version) == UNKNOWN:
            raise SloBenchError(
                f"server_version is {text!r}, but {version!r} is no version; write 0.11 or "
                "sglang-0.5.14"
            )
        return cls(engine, version or NEWEST[engine])

    @property
    def schedules_ahead(self) -> bool:
        """Whether vLLM schedules the next step during the present one."""
        if self.engine != "vllm" or self.ahead is not None:
            return self.engine == "vllm" and bool(self.ahead)
        return version_numbers(self.version) >= ASYNCHRONOUS_FROM

    def __str__(self) -> str:
        return f"{TITLES[self.engine]} {self.version}".rstrip()


UNKNOWN = (sys.maxsize,)


def version_numbers(text: str | None) -> tuple[int, ...]:
    """Major and minor version; an unknown version counts as the newest."""
    parts = (text or "").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return UNKNOWN
    return int(parts[0]), int(parts[1])
