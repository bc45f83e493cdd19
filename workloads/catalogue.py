"""The shipped workloads: figures of public data sets, each with its origin (`catalogue.toml`)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .errors import UnknownNameError
from .lengths import LengthDistribution, MixtureComponent, PairLengths, Quantiles, parse_lengths
from .prefixes import Continuations


@dataclass(frozen=True)
class Entry:
    """One shipped workload.

    `mean_prompt_tokens` and `mean_output_tokens` are the origin's true means, where there is one
    to compare with; `natural_rate_rps` is the rate at which the origin's requests came.
    """

    name: str
    title: str
    origin: str
    licence: str
    note: str
    lengths: PairLengths
    requests_seen: int | None = None
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    natural_rate_rps: float | None = None
    prefix: Continuations | None = None


@functools.cache
def catalogue() -> Mapping[str, Entry]:
    """Entries of all shipped workloads, by name."""
    text = resources.files(__package__).joinpath("catalogue.toml").read_text("utf-8")
    return {name: _entry(name, table) for name, table in tomllib.loads(text).items()}


def find(name: str) -> Entry:
    """A shipped workload.

    Raises:
        UnknownNameError: there is none of this name.
    """
    if name not in catalogue():
        raise UnknownNameError("workload", name, catalogue())
    return catalogue()[name]


def _entry(name: str, table: dict[str, Any]) -> Entry:
    values = dict(table)
    parts = tuple(_part(part) for part in values.pop("part"))
    lengths = PairLengths(parts, values.pop("max_total_tokens", None))
    prefix = values.pop("prefix", None)
    return Entry(
        name=name,
        lengths=lengths,
        prefix=None if prefix is None else Continuations(**prefix),
        **values,
    )


def _part(table: dict[str, Any]) -> MixtureComponent:
    values = dict(table)
    values.pop("title", None)
    return MixtureComponent(
        _lengths(values.pop("prompt")), _lengths(values.pop("output")), **values
    )


def _lengths(value: str | dict[str, Any]) -> LengthDistribution:
    if isinstance(value, str):
        return parse_lengths(value)
    return Quantiles(tuple(value["p"]), tuple(value["tokens"]))
