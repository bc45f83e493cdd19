"""Matching of the cells of A and B that differ in their seed or in the compared setting only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..figures.figure import rate_key
from .results import Cell, NotComparableError, Results

_ALWAYS_THE_SAME = ("workload", "model", "backend")
"""Columns that must be the same if one set of results is to replace the other."""

_DEFINES_WORKLOAD = (
    "arrivals",
    "redraw_arrivals",
    "prompt_tokens",
    "output_tokens",
    "sessions",
    "requests",
    "duration_s",
    "warmup_s",
    "max_output_tokens",
)
"""Settings of an experiment that change the workload, beside its name."""


@dataclass(frozen=True)
class MatchedRuns:
    """The seeds of A and those of B under one load. `label` names the pair where there are many."""

    label: str
    rate_rps: float | None
    a: Sequence[Cell]
    b: Sequence[Cell]


@dataclass(frozen=True)
class Matched:
    """Levels that both have. `differs` tells by column what A and B are where they are not alike;
    `obstacles` says why one can hardly be judged by the other.
    """

    levels: Sequence[MatchedRuns]
    differs: Mapping[str, tuple[str, str]]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...] = ()


def match(
    a: Results,
    b: Results,
    *,
    systems: tuple[str, str] | None = None,
    rates: Iterable[float] | None = None,
) -> Matched:
    """Put cells that differ in their seed only beside each other.

    A column in which A has one value and B another, as `system` with two files of one system each,
    is what is compared; otherwise values must be the same on both sides.

    Args:
        a: the one.
        b: the other; may be the same as `a` where `systems` tells them apart.
        systems: take this system of A and that of B.
        rates: only these rates.

    Raises:
        NotComparableError: they have no cell in common.
    """
    cells_a, cells_b = list(a.cells), list(b.cells)
    differs: dict[str, tuple[str, str]] = {}
    if systems is not None:
        cells_a = _only_system(a, cells_a, systems[0])
        cells_b = _only_system(b, cells_b, systems[1])
        if systems[0] != systems[1]:
            differs["system"] = systems
    if rates is not None:
        wanted = {rate_key(rate) for rate in rates}
        cells_a = [cell for cell in cells_a if _rate(cell) in wanted]
        cells_b = [cell for cell in cells_b if _rate(cell) in wanted]
        if not cells_a or not cells_b:
            raise NotComparableError(
                f"{(a if not cells_a else b).name} has no cell at {', '.join(sorted(wanted))} req/s"
            )
    shared, found = _align(a, b, cells_a, cells_b, set(differs))
    differs |= found
    groups_a, groups_b = _grouped(cells_a, shared), _grouped(cells_b, shared)
    common = [key for key in groups_a if key in groups_b]
    if not common:
        raise NotComparableError(
            f"{a.name} and {b.name} have no cell in common: no combination of "
            f"{', '.join(shared)} is in both"
        )
    many = [
        column
        for place, column in enumerate(shared)
        if column != "rate" and len({key[place] for key in common}) > 1
    ]
    levels = []
    for key in common:
        values = dict(zip(shared, key, strict=True))
        named = [_worded(column, values[column]) for column in many]
        first = groups_a[key][0]
        levels.append(MatchedRuns(" · ".join(named), first.rate_rps, groups_a[key], groups_b[key]))
    alone = len(groups_a) + len(groups_b) - 2 * len(common)
    notes = [f"{alone} levels have no counterpart on the other side and are left out."]
    return Matched(
        levels=levels,
        differs=differs,
        obstacles=tuple(_obstacles(a, b, differs)),
        notes=tuple(notes) if alone else (),
    )


def _only_system(of: Results, cells: Sequence[Cell], system: str) -> list[Cell]:
    found = [cell for cell in cells if cell.identity.get("system") == system]
    if not found:
        known = sorted({cell.identity.get("system", "") for cell in cells})
        raise NotComparableError(f"{of.name} has no system {system!r}; it has {', '.join(known)}")
    return found


def _rate(cell: Cell) -> str:
    return "" if cell.rate_rps is None else rate_key(cell.rate_rps)


def _value(cell: Cell, column: str) -> str:
    return _rate(cell) if column == "rate" else cell.identity.get(column, "")


def _worded(column: str, value: str) -> str:
    bare = column in ("system", "workload", "model", "gpu", "backend")
    return value if bare else f"{column} {value}"


def _align(
    a: Results, b: Results, cells_a: Sequence[Cell], cells_b: Sequence[Cell], settled: set[str]
) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Columns whose values tell levels apart, and those in which A and B differ as a whole."""
    columns = dict.fromkeys(c for cell in (*cells_a, *cells_b) for c in cell.identity)
    shared = []
    differs = {}
    for column in (*columns, "rate"):
        if column in settled:
            continue
        has_a = {_value(cell, column) for cell in cells_a}
        has_b = {_value(cell, column) for cell in cells_b}
        if {""} in (has_a, has_b) and has_a != has_b:
            if len(has_a | has_b) > 2:
                raise NotComparableError(
                    f"{a.name if has_a == {''} else b.name} does not say its {column}, and the "
                    f"other has several: {', '.join(sorted(has_a | has_b - {''}))}"
                )
            continue  # unknown on one side: nothing to hold against the other
        if has_a & has_b:
            shared.append(column)
        elif len(has_a) == len(has_b) == 1:
            differs[column] = (has_a.pop(), has_b.pop())
        else:
            raise NotComparableError(
                f"{a.name} and {b.name} have no {column} in common: "
                f"{', '.join(sorted(has_a))} against {', '.join(sorted(has_b))}"
                + ("; choose with --systems A,B" if column == "system" else "")
            )
    return shared, differs


def _grouped(cells: Sequence[Cell], columns: Sequence[str]) -> dict[tuple[str, ...], list[Cell]]:
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(_value(cell, column) for column in columns), []).append(cell)
    return {key: sorted(group, key=lambda cell: cell.seed) for key, group in groups.items()}


def _obstacles(a: Results, b: Results, differs: Mapping[str, tuple[str, str]]) -> Iterable[str]:
    yield from filter(None, (a.unfinished, b.unfinished))
    for column in (*_ALWAYS_THE_SAME, "rate"):
        if column in differs:
            what = "rates (req/s)" if column == "rate" else f"{column}s"
            yield f"the {what} differ: {differs[column][0]} and {differs[column][1]}"
    for setting in _DEFINES_WORKLOAD:
        if setting not in a.settings or setting not in b.settings:
            continue
        if a.settings[setting] != b.settings[setting]:
            yield (
                f"the workloads differ: {setting} is {a.settings[setting]!r} and "
                f"{b.settings[setting]!r}"
            )
