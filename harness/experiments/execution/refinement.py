"""Further rates of an experiment, between those where attainment falls below 99 % and 90 %."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ...results.run_folder import Row, Value
from .cell_specs import CellSpec
from .experiment_plan import ExperimentPlan, plan

TARGETS = (0.9, 0.99)
"""Attainments whose highest rates are looked for, and named by every summary."""

_MOST_NAMED = 6  # series in the first answer
_CLOSE = 1.08  # of two rates: between closer ones there is none
_BEYOND = 1.3  # times the highest rate, where a target is met at all
_LOAD = ("cell", "rate_rps", "replay_speed", "load_factor", "seed")

Attainments = Mapping[float, float]  # means over seeds, by rate in req/s
Columns = tuple[tuple[str, Value], ...]


def further_rates(attainment_by_rate: Attainments) -> Iterator[float]:
    """For each target the rate in the middle between the last that meets it and the next; half the
    lowest where none does, and one above the highest where all do.
    """
    rates = sorted(attainment_by_rate)
    for target in TARGETS:
        failing = (rate for rate in rates if attainment_by_rate[rate] < target - 1e-12)
        failed = next(failing, None)
        if failed is None:
            yield _sayable(rates[-1] * _BEYOND, rates)
        elif failed == rates[0]:
            yield _sayable(failed / 2, rates)
        else:
            last = rates[rates.index(failed) - 1]
            if failed / last > _CLOSE:
                yield _sayable((last + failed) / 2, rates)


def _sayable(rate_rps: float, rates: Sequence[float]) -> float:
    """The rate with two significant digits, or with three where that is one of the others."""
    rounded = (float(f"{rate_rps:.{digits}g}") for digits in (2, 3))
    return next((rate for rate in rounded if rate not in rates), rate_rps)


def refined_cells(
    planned: ExperimentPlan, cells: Sequence[CellSpec], rows: Mapping[str, Row]
) -> Sequence[CellSpec]:
    """The cells and those at further rates, which all systems under the same conditions have.

    Args:
        planned: the experiment.
        cells: those that were run.
        rows: their results, by name.
    """
    rates: dict[Columns, set[float]] = {}
    for spec in cells:
        rates.setdefault(_conditions(spec), set()).add(spec.rate_rps or 0.0)
    for (conditions, _), attainments in _attainments(cells, rows).items():
        rates[conditions].update(further_rates(attainments))
    every = tuple(sorted(set(itertools.chain(*rates.values()))))
    again = plan(planned.resolved.model_copy(update={"rates": every}))
    chosen = [spec for spec in again.cells if spec.rate_rps in rates[_conditions(spec)]]
    names = {spec.cell: spec for spec in chosen}
    # Names that were cut may be numbered differently: then there is no telling what they stand for.
    return chosen if all(names.get(spec.cell) == spec for spec in cells) else cells


def _conditions(spec: CellSpec) -> Columns:
    """What systems share that are compared: the columns of no system, and of no level."""
    return tuple(
        (name, value)
        for name, value in spec.columns.items()
        if name not in (*_LOAD, "system", "gpus") and "." not in name
    )


def _attainments(
    cells: Sequence[CellSpec], rows: Mapping[str, Row]
) -> dict[tuple[Columns, Columns], dict[float, float]]:
    """Mean attainment by rate, for each series: by its conditions and its columns."""
    by_series: dict[tuple[Columns, Columns], dict[float, list[float]]] = {}
    for spec in cells:
        row = rows.get(spec.cell)
        if row is not None and row["valid"] and spec.rate_rps is not None:
            columns = tuple(item for item in spec.columns.items() if item[0] not in _LOAD)
            by_rate = by_series.setdefault((_conditions(spec), columns), {})
            by_rate.setdefault(spec.rate_rps, []).append(float(row["attainment"] or 0))
    return {
        series: {rate: sum(shares) / len(shares) for rate, shares in by_rate.items()}
        for series, by_rate in by_series.items()
    }


def first_answer(cells: Sequence[CellSpec], rows: Mapping[str, Row]) -> str:
    """A line on what was run so far: its rates, and the highest at 90 % of each system."""
    tried = ", ".join(f"{rate:g}" for rate in sorted({spec.rate_rps or 0.0 for spec in cells}))
    texts = []
    for (_, columns), attainments in _attainments(cells, rows).items():
        highest, (lowest, *_) = "", sorted(attainments)
        for rate in sorted(attainments):
            if attainments[rate] < TARGETS[0] - 1e-12:
                break
            highest = f"{rate:g}"
        system = next(value for name, value in columns if name == "system")
        texts.append(f"{system} {highest or f'< {lowest:g}'}")
    named = texts if len(texts) <= _MOST_NAMED else [*texts[:_MOST_NAMED], "…"]
    return (
        f"first answer, of {tried} req/s: {', '.join(named)} with 90 % in SLO; "
        "closer rates follow, around 99 and 90 %"
    )
