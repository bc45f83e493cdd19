"""Options of a server's command line, and what they mean as settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....workloads.errors import SloBenchError

_SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PARAMETER = "parameters."  # before the name of a parameter of the server's own system


def count(text: str) -> int:
    """A whole number, also as vLLM reads them: 32k is 32,000 and 32K is 32,768."""
    factor = _SUFFIXES.get(text[-1:])
    return int(text) if factor is None else round(float(text[:-1]) * factor)


@dataclass(frozen=True)
class Flag:
    """An option of a server. `names`: as it is written, and other spellings.

    `setting`: of an experiment by its path, `parameters.NAME` of the server's system, or a name
    that `ServerKind.settle` makes settings of; empty: a simulation has nothing for it. `read` gives
    its value, or None for one without a meaning there. `write` gives the words for a value, and all
    settings; None: the kind's own functions write it.
    """

    names: tuple[str, ...]
    setting: str = ""
    read: Callable[[str], Any] = str
    write: Callable[[Any, Mapping[str, Any]], Sequence[str]] | None = None
    switch: bool = False


def named(name: str) -> Callable[[Any, Mapping[str, Any]], Sequence[str]]:
    """A `Flag.write` of the option's name and the value."""
    return lambda value, settings: (name, str(value))


@dataclass(frozen=True)
class ServerCommand:
    """A command line as settings by path, with parameters of the server's system as
    `parameters.NAME`; and the options that are no settings.
    """

    model: str | None
    settings: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def refuse_half(role: str | None) -> None:
    """Raise SloBenchError for a server that does only prefill or decode."""
    if role is not None:
        raise SloBenchError(
            f"{role}: the server does prefill or decode alone, which --like does not read: give "
            "--system distserve with prefill_instances and decode_instances"
        )
