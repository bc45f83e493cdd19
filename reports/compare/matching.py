"""Matching of the cells of A and B that differ in their seed or in the compared setting only."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..figures.facets import IDENTITY
from ..figures.figure import rate_key, rate_text
from .conditions import RATES, Pair, condition_names, differences
from .results import Cell, NotComparableError, Results, reasons_text


@dataclass(frozen=True)
class MatchedRuns:
    """The seeds of A and those of B under one load. `label` names the pair where there are many."""

    label: str
    rate_rps: float | None
    a: Sequence[Cell]
    b: Sequence[Cell]


@dataclass(frozen=True)
class Matched:
    """Levels that both have. `differs` tells by column or setting what A and B are where they are
    compared in it, `unlike` the same of conditions that should be alike; `obstacles` says what else
    stands in the way of judging one by the other.
    """

    levels: Sequence[MatchedRuns]
    differs: Mapping[str, Pair]
    unlike: Mapping[str, Pair]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...] = ()


def match(
    a: Results,
    b: Results,
    *,
    systems: tuple[str, str] | None = None,
    rates: Iterable[float] | None = None,
    allowed: Collection[str] = (),
) -> Matched:
    """Put cells that differ in their seed only beside each other.

    A column or setting in which A has one value and B another, as `system` with two files of one
    system each, is what is compared, unless it is a condition; otherwise values must be the same on
    both sides.

    Args:
        a: the one.
        b: the other; may be the same as `a` where `systems` tells them apart.
        systems: take this system of A and that of B.
        rates: only these rates.
        allowed: conditions that are compared as well.

    Raises:
        NotComparableError: they have no cell in common.
    """
    cells_a, cells_b = _completed(a, b), _completed(b, a)
    differs: dict[str, Pair] = {}
    if systems is not None:
        cells_a = _only_system(a, cells_a, systems[0])
        cells_b = _only_system(b, cells_b, systems[1])
        if systems[0] != systems[1]:
            differs["system"] = systems
    if rates is not None:
        keys = {rate_key(rate) for rate in rates}
        cells_a = [cell for cell in cells_a if _rate(cell) in keys]
        cells_b = [cell for cell in cells_b if _rate(cell) in keys]
        if not cells_a or not cells_b:
            raise NotComparableError(
                f"{(a if not cells_a else b).name} has no cell at {', '.join(sorted(keys))} req/s"
            )
    shared, columns = _align(a, b, cells_a, cells_b, set(differs))
    settings, notes = _settings(a, b, {**differs, **columns})
    differs |= columns | settings
    valid_a, valid_b = _valid(cells_a), _valid(cells_b)
    groups_a, groups_b = _grouped(a, valid_a, shared), _grouped(b, valid_b, shared)
    common = [key for key in groups_a if key in groups_b]
    if not common:
        invalid = [cell for cell in (*cells_a, *cells_b) if cell.invalid_because]
        why = f"; invalid: {reasons_text(invalid)}" if invalid else ""
        raise NotComparableError(
            f"{a.name} and {b.name} have no cell in common: no combination of "
            f"{', '.join(shared)} is in both{why}"
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
    if alone := len(groups_a) + len(groups_b) - 2 * len(common):
        notes.append(f"{alone} levels have no counterpart on the other side and are left out.")
    conditions = {name: RATES if name == "rate" else name for name in differs}
    settled = {*condition_names()} - {*allowed}
    unlike = {
        conditions[name]: pair for name, pair in differs.items() if conditions[name] in settled
    }
    lost = _grouped(b, [cell for cell in cells_b if cell.invalid_because], shared)
    missing = [cell for key in groups_a if key not in groups_b for cell in lost.get(key, ())]
    return Matched(
        levels=levels,
        differs={name: pair for name, pair in differs.items() if conditions[name] not in unlike},
        unlike=unlike,
        obstacles=tuple(_obstacles(a, b, missing)),
        notes=tuple(notes),
    )


def _settings(
    a: Results, b: Results, columns: Mapping[str, Pair]
) -> tuple[dict[str, Pair], list[str]]:
    """Settings in which A and B differ, but for those that `columns` has already; and notes.

    Parameters are told where the system is the same.
    """
    if a.settings is None or b.settings is None:
        without = " and ".join(results.name for results in (a, b) if results.settings is None)
        return {}, [f"no settings in {without}: whether conditions were alike is not known."]
    setting_differences = differences(a.settings, b.settings, (a.name, b.name))
    unequal = {
        **setting_differences.settings,
        **({} if "system" in columns else setting_differences.parameters),
    }
    axes = {column for cell in (*a.cells, *b.cells) for column in cell.identity} - {*IDENTITY}
    matched = {*columns, *axes}
    return {n: pair for n, pair in unequal.items() if n not in matched}, list(
        setting_differences.notes
    )


def _completed(results: Results, other: Results) -> list[Cell]:
    """All cells, invalid ones too, with the settings of which only the other has a column."""
    cells = [*results.cells, *results.left_out]
    if results.settings is None:
        return cells
    columns = dict.fromkeys(column for cell in other.cells for column in cell.identity)
    return [
        replace(
            cell, identity={**results.settings.columns(columns, cell.identity), **cell.identity}
        )
        for cell in cells
    ]


def _valid(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if not cell.invalid_because]


def _only_system(results: Results, cells: Sequence[Cell], system: str) -> list[Cell]:
    chosen = [cell for cell in cells if cell.identity.get("system") == system]
    if not chosen:
        system_names = sorted({cell.identity.get("system", "") for cell in cells})
        raise NotComparableError(
            f"{results.name} has no system {system!r}; it has {', '.join(system_names)}"
        )
    return chosen


def _rate(cell: Cell) -> str:
    return "" if cell.rate_rps is None else rate_key(cell.rate_rps)


def _value(cell: Cell, column: str) -> str:
    return _rate(cell) if column == "rate" else cell.identity.get(column, "")


def _worded(column: str, value: str) -> str:
    bare = column in ("system", "workload", "model", "gpu", "backend")
    return value if bare else f"{column} {value}"


def _align(
    a: Results, b: Results, cells_a: Sequence[Cell], cells_b: Sequence[Cell], settled: set[str]
) -> tuple[list[str], dict[str, Pair]]:
    """Columns whose values tell levels apart, and those in which A and B differ as a whole."""
    columns = dict.fromkeys(c for cell in (*cells_a, *cells_b) for c in cell.identity)
    shared = []
    differs: dict[str, Pair] = {}
    for column in (*columns, "rate"):
        if column in settled:
            continue
        has_a = {_value(cell, column) for cell in cells_a}
        has_b = {_value(cell, column) for cell in cells_b}
        if {""} in (has_a, has_b) and has_a != has_b:
            if len(has_a | has_b) > 2:
                raise NotComparableError(
                    f"{a.name if has_a == {''} else b.name} does not say its {column}, and the "
                    f"other has several: {', '.join(sorted((has_a | has_b) - {''}))}"
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


def _grouped(
    results: Results, cells: Sequence[Cell], columns: Sequence[str]
) -> dict[tuple[str, ...], list[Cell]]:
    """Cells by their values of the columns, in order of their seeds.

    Raises:
        NotComparableError: two cells of a group have the same seed.
    """
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(_value(cell, column) for column in columns), []).append(cell)
    for group in groups.values():
        group.sort(key=lambda cell: cell.seed)
        for first, second in itertools.pairwise(group):
            if first.seed == second.seed:
                raise NotComparableError(
                    f"{results.name}: cells {first.name} and {second.name} have the same seed and "
                    f"the same {', '.join(columns)}, so that one cannot be told from the other"
                )
    return groups


def _obstacles(a: Results, b: Results, missing: Sequence[Cell]) -> Iterable[str]:
    yield from filter(None, (a.unfinished, b.unfinished))
    if missing:
        rates = ", ".join(dict.fromkeys(rate_text(cell.rate_rps or 0.0) for cell in missing))
        yield (
            f"{b.name} has only invalid cells at levels of {a.name} ({rates} req/s): "
            f"{reasons_text(missing)}; --rates chooses others"
        )
