"""Several servers on one machine: each gets GPUs of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ....workloads.errors import SloBenchError

# What says over how many GPUs a server spreads its model: vLLM's options, then SGLang's.
_DEGREES = (
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "-dp",
    "--tp-size",
    "--pp-size",
    "--dp-size",
)


def gpus_each(server_args: Sequence[str]) -> int:
    """GPUs of a server with these arguments.

    Raises:
        SloBenchError: a degree is no number.
    """
    found = 1
    words = [part for word in server_args for part in word.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name in _DEGREES:
            if not value.isdecimal() or int(value) < 1:
                raise SloBenchError(f"{name} must be a whole number from 1 on but is {value!r}")
            found *= int(value)
    return found


def shares(servers: int, each: int, visible: Sequence[str]) -> list[tuple[str, ...]]:
    """The GPUs of each server, by the names that are `visible`.

    Raises:
        SloBenchError: there are not enough.
    """
    if servers * each > len(visible):
        raise SloBenchError(
            f"{servers} servers with {each} GPU{'s' if each > 1 else ''} each need "
            f"{servers * each}; {len(visible)} can be used here"
        )
    return [tuple(visible[k * each : (k + 1) * each]) for k in range(servers)]
