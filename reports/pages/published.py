"""Published results beside ours, row by row: our figure with its interval, and the verdict.

A value is taken for each seed, comparisons within a seed. Rows never average over anything but
seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ...harness.results.read_run import RunResults
from ...harness.results.run_columns import NUMBER_COLUMNS
from ...predictors.fitted_to_papers import FittedConstant, fitted_to
from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_toml
from ...workloads.slo import parse_slo
from ..figures.facets import IDENTITY, axes_of
from ..figures.levels import drifting, knee_rps, level_rates, reaches
from .published_table import Pins, PublishedRow, PublishedTable, figure_text, load_published
from .verdicts import (
    HOLDS,
    VERDICTS,
    Judgement,
    Verdict,
    crossing,
    interval_over_seeds,
    judgement,
    order_verdict,
    verdict,
)

MANY_ROWS = 20
"""A longer table scrolls in a window of its own, so that what follows stays near."""


@dataclass(frozen=True)
class JudgedTable:
    """A published table and what a run says about each of its rows."""

    table: PublishedTable
    findings: tuple[Finding, ...]
    knee_rps: float | None

    @property
    def rows(self) -> list[tuple[PublishedRow, Finding]]:
        """Each row with its finding."""
        return list(zip(self.table.rows, self.findings, strict=True))

    @property
    def title(self) -> str:
        """The title of the table, with the knee where rows are taken there."""
        knee = "" if self.knee_rps is None else f"; the knee is at {self.knee_rps:.3g} req/s"
        return self.table.title + knee

    @property
    def headline(self) -> str:
        """How many rows have which verdict: `6 rows: 2 reproduced, 4 not run`."""
        counts = Counter(row_finding.verdict for row_finding in self.findings)
        parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        n = len(self.findings)
        return f"{n} row{'' if n == 1 else 's'}: {', '.join(parts)}"

    @property
    def fitted(self) -> tuple[FittedConstant, ...]:
        """What was fitted to the paper."""
        return fitted_to(self.table.paper)

    @property
    def long(self) -> bool:
        """Whether the table scrolls in a window of its own."""
        return len(self.findings) > MANY_ROWS


def judged(
    table: PublishedTable, cells: pd.DataFrame, settings: Mapping[str, Any], levels: pd.DataFrame
) -> JudgedTable:
    """The rows of a table beside a run.

    Args:
        table: what was published.
        cells: the run's cells, as `levels.combine` returns them.
        settings: the run's experiment.toml.
        levels: the levels of those cells, which say where the knee is.
    """
    knee = knee_rps(levels)
    at_knee = any(
        "knee" in (pins or {}).values()
        for row in table.rows
        for pins in (row.where, row.than, *row.order)
    )
    findings = tuple(finding(row, cells, settings, knee) for row in table.rows)
    return JudgedTable(table, findings, knee if at_knee else None)


def tables_of(
    runs: Sequence[RunResults], cells: pd.DataFrame, levels: pd.DataFrame
) -> list[JudgedTable | str]:
    """The tables that the runs' experiments name, or why one cannot be shown.

    Args:
        runs: the run folders; `cells["folder"]` is a run's place among them.
        cells: all their cells.
        levels: the levels of those cells.
    """
    tables: list[JudgedTable | str] = []
    for place, run in enumerate(runs):
        try:
            settings = parse_toml(run.experiment_toml)
            name = settings.get("published")
            if name is not None:
                table = load_published(str(name))
                tables.append(judged(table, cells[cells["folder"] == place], settings, levels))
        except tomllib.TOMLDecodeError:
            continue  # the report shows the file as it is
        except SloBenchError as error:
            tables.append(str(error))
    return tables


@dataclass(frozen=True)
class Finding:
    """What a run says about a row.

    `text` is our figure; `remarks`: settings that differ, values that were chosen, cells that are
    not stationary. `values`: one for each seed, where the row is one figure.
    """

    verdict: Verdict
    text: str = "–"
    remarks: tuple[str, ...] = ()
    values: tuple[float, ...] = dataclasses.field(default=(), compare=False)


@dataclass(frozen=True)
class _Chosen:
    """Cells that pins choose. `differing`: pins that the run has otherwise, wanted and found."""

    cells: pd.DataFrame
    differing: tuple[str, ...] = ()


class _CannotTellError(Exception):
    """No figure can be given; the verdict and the reason."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


def finding(
    row: PublishedRow, cells: pd.DataFrame, settings: Mapping[str, Any], knee: float
) -> Finding:
    """What `cells` say about a row.

    Args:
        row: what was published.
        cells: rows of cells.csv of one run.
        settings: the run's experiment.toml; a pin that is no column is looked up there.
        knee: the rate that the pin `rate_rps = "knee"` stands for.
    """
    if row.column is None:
        return Finding("not run")
    sides = row.sides
    as_pinned = _finding_at(row, sides, cells, settings, knee)
    others = {
        axis: {
            value: _finding_at(row, varied, cells, settings, knee)
            for value, varied in _other_values(axis, sides, cells)
        }
        for axis in row.vary
    }
    equals = itertools.chain(
        *(
            _equals_published(row, axis, _pinned(axis, sides), as_pinned, of_axis)
            for axis, of_axis in others.items()
        )
    )
    as_pinned = dataclasses.replace(as_pinned, remarks=(*equals, *as_pinned.remarks))
    if as_pinned.verdict not in HOLDS:
        return as_pinned
    weakest, remarks, depends = as_pinned.verdict, as_pinned.remarks, []
    for axis in row.vary:
        differing: dict[str, str] = {}  # other values of the axis, with the figure there
        for value, other in others[axis].items():
            if HOLDS.get(other.verdict) is (not HOLDS[as_pinned.verdict]):
                differing[_text(_as_number(value))] = f"{other.verdict}, {other.text}"
            elif other.verdict == "same order":
                weakest = other.verdict
        if differing:
            pinned = _text(_pinned(axis, sides) or "default")
            first = next(iter(differing.values()))
            depends.append(
                f"depends on {axis}: {pinned} {as_pinned.verdict}; {', '.join(differing)} {first}"
            )
    return Finding(
        "depends on what is assumed" if depends else weakest, as_pinned.text, (*depends, *remarks)
    )


def _equals_published(
    row: PublishedRow, axis: str, pinned: object, at_pinned: Finding, others: Mapping[str, Finding]
) -> tuple[str, ...]:
    """The value of a varied axis at which a comparison is the published figure, as a remark."""
    by_value = {str(pinned): at_pinned, **others}
    intervals = {
        number: interval_over_seeds(other.values)
        for value, other in by_value.items()
        if isinstance(number := _as_number(value), float) and other.values
    }
    figure = row.figure
    if row.than is None or figure is None or figure.low != figure.high:
        return ()
    mean, *ends = (
        crossing({value: getattr(i, part) for value, i in intervals.items()}, figure.low)
        for part in ("mean", "high", "low")
    )
    if mean is None:
        return ()
    texts = [f"{end:.4g}" for end in sorted(end for end in ends if end is not None)]
    between = f" ({texts[0]} to {texts[1]})" if len(texts) == 2 else ""
    return (f"equals {row.published_text} at {axis} {mean:.4g}{between}",)


def _stands(pins: Pins, axis: str) -> bool:
    """Whether a side has the axis: `""` is the default of its own system, of others nothing."""
    of_its_system = axis.rpartition(".")[0] == pins.get("system")
    return axis in pins and (of_its_system or pins[axis] != "")


def _pinned(axis: str, sides: Sequence[Pins]) -> str | float | bool:
    """The value of an axis at which the sides stand."""
    (value,) = {pins[axis] for pins in sides if _stands(pins, axis)}
    return value


def _other_values(
    axis: str, sides: Sequence[Pins], cells: pd.DataFrame
) -> Iterator[tuple[str, list[Pins]]]:
    """The values of an axis at which the sides do not stand, each with the sides' pins there."""
    pinned = _text(_pinned(axis, sides))
    for value in dict.fromkeys(cells[axis].astype(str)) if axis in cells.columns else ():
        if _text(_as_number(value)) not in {"none", "nan", pinned}:
            varied = {axis: _as_number(value)}
            yield value, [{**pins, **varied} if _stands(pins, axis) else pins for pins in sides]


def _as_number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _finding_at(
    row: PublishedRow,
    sides: Sequence[Pins],
    cells: pd.DataFrame,
    settings: Mapping[str, Any],
    knee: float,
) -> Finding:
    """What `cells` say about a row whose sides stand at these pins."""
    differing: tuple[str, ...] = ()
    try:
        chosen = [_choose(pins, cells, settings, knee) for pins in sides]
        differing = tuple(dict.fromkeys(itertools.chain(*(choice.differing for choice in chosen))))
        chosen, best = _best(row, chosen)
        by_seed = [_by_seed(row, choice.cells) for choice in chosen]
        text, values, judged_values = _judge(row, by_seed)
    except _CannotTellError as error:
        if differing:
            return Finding("another set-up", remarks=differing)
        return Finding(error.verdict, remarks=(str(error),))
    left_out = _seeds_left_out(by_seed, cells)
    remarks = (*differing, *best, *left_out, *_overloaded(row, chosen))
    if differing:
        return Finding("another set-up", text, remarks)
    if len(sides) > 1 and _equal_in_every_cell(sides, cells, settings):
        return Finding("same policy here", text, remarks, values)
    if _tells_nothing(row, by_seed):
        return Finding("tells nothing", text, ("the same share in every seed", *remarks), values)
    undecided = (judged_values.remark,) if judged_values.remark else ()
    return Finding(judged_values.verdict, text, (*undecided, *remarks), values)


def _tells_nothing(row: PublishedRow, by_seed: Sequence[Mapping[int, float]]) -> bool:
    """Whether all sides have the same share in time, where a difference is claimed.

    So it is where all is in time, or of no class anything that a policy could save.
    """
    alike = row.figure is not None and row.figure.low <= (row.null or 0.0) <= row.figure.high
    compared = len(by_seed) > 1 and str(row.column).startswith("attainment")
    return compared and not alike and all(values == by_seed[0] for values in by_seed)


_LEVELS = ("rate_rps", "load_factor", "replay_speed")


def _equal_in_every_cell(
    sides: Sequence[Pins], cells: pd.DataFrame, settings: Mapping[str, Any]
) -> bool:
    """Whether all sides measure the same at every level that was run, seed by seed."""
    keys = [key for key in (*_LEVELS, "seed") if key in cells.columns]
    measured = [c for c in {*NUMBER_COLUMNS, "iterations"} if c in cells.columns and c not in keys]
    frames = []
    for pins in sides:
        settled = {key: value for key, value in pins.items() if key not in _LEVELS}
        frame = _choose(settled, cells, settings, math.nan).cells
        frames.append(frame[[*keys, *measured]].sort_values(keys, ignore_index=True))
    return bool(measured) and all(frame.equals(frames[0]) for frame in frames[1:])


def chosen_cells(pins: Pins, cells: pd.DataFrame, settings: Mapping[str, Any]) -> pd.DataFrame:
    """The valid cells that pins choose.

    Raises:
        SloBenchError: the run has none of them, or other settings.
    """
    try:
        chosen = _choose(pins, cells, settings, math.nan)
    except _CannotTellError as error:
        raise SloBenchError(str(error)) from error
    if chosen.differing:
        raise SloBenchError("; ".join(chosen.differing))
    return chosen.cells


def _choose(pins: Pins, cells: pd.DataFrame, settings: Mapping[str, Any], knee: float) -> _Chosen:
    chosen = cells["valid"].to_numpy(dtype=bool)
    if "system" in pins:
        chosen = chosen & _equal(cells["system"], pins["system"]).to_numpy(dtype=bool)
        if not chosen.any():
            raise _CannotTellError("not run", f"no valid cell of {pins['system']}")
    differing = []
    for key, pinned in pins.items():
        value = knee if (key, pinned) == ("rate_rps", "knee") else pinned
        if key in cells.columns:
            column = _level_rates(cells, chosen) if key == "rate_rps" else cells[key]
            same = _same_slo(column, str(value)) if key == "slo" else _equal(column, value)
            matching = chosen & same.to_numpy(dtype=bool)
            if matching.any():
                chosen = matching
                continue
            present = [_text(entry) for entry in dict.fromkeys(column[chosen])]
        else:
            present = [_text(entry) for entry in _listed(_setting(settings, key))]
            if present == [_text(value)]:
                continue
        differing.append(f"{key}: {_text(value)} is needed, the run has {_few(present)}")
    return _Chosen(cells[chosen], tuple(differing))


def _level_rates(cells: pd.DataFrame, chosen: npt.NDArray[np.bool_]) -> pd.Series[float]:
    """The level of each chosen cell in requests/s; NaN for others where it is not known before."""
    if "level_rps" in cells.columns:
        return cells["level_rps"]
    return level_rates(cells[chosen]).reindex(cells.index)


def _setting(settings: Mapping[str, Any], key: str) -> object:
    """Value of a setting (such as `client.api`) or parameter (`vllm.max_num_seqs`), or ""."""
    for value in (settings, settings.get("parameters", {})):
        for part in key.split("."):
            value = value.get(part, "") if isinstance(value, Mapping) else ""
        if value != "":
            return value
    return ""


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) and value else [value]


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _text(value: object) -> str:
    if value == "" or value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}"
    return str(value)


def _equal(column: pd.Series, value: str | float | bool) -> pd.Series:
    """Sweep axes are words in a run folder: numbers there are compared as numbers."""
    if value == "":
        return column.isna() | (column.astype(str) == "")
    if isinstance(value, bool | str):
        return column.astype(str).str.lower() == str(value).lower()
    return (pd.to_numeric(column, errors="coerce") - value).abs() <= 1e-3 * abs(value)


def _same_slo(column: pd.Series, slo: str) -> pd.Series:
    """SLOs are compared by what they say: `tpot=0.15,ttft=1` is `ttft=1, tpot=0.15`."""
    same = {text: text == slo for text in set(column.astype(str))}
    for text in same:
        with contextlib.suppress(SloBenchError):  # as `unknown`, of a damaged experiment.toml
            same[text] = parse_slo(text) == parse_slo(slo)
    return column.astype(str).map(same)


def _best(row: PublishedRow, chosen: list[_Chosen]) -> tuple[list[_Chosen], tuple[str, ...]]:
    """The cells with the best mean of the column among the values of `best_of`, and which it is."""
    axes = [axis for axis in row.best_of if any(axis in choice.cells for choice in chosen)]
    if not axes or row.column not in chosen[0].cells:
        return chosen, ()
    best, remarks = [], []
    for choice in chosen:
        groups = choice.cells.groupby(axes, dropna=False, sort=False)
        means = {key: float(group[row.column].mean()) for key, group in groups}
        pick = max if row.pick == "highest" else min
        key = pick(means, key=means.__getitem__)
        best.append(dataclasses.replace(choice, cells=groups.get_group(key)))
        if len(means) > 1:
            values = [f"{axis} {_text(value)}" for axis, value in zip(axes, key, strict=True)
                      if _text(value) != "none"]  # fmt: skip
            remarks.append(f"best of {len(means)}: {', '.join(values)}")
    return best, tuple(remarks)


def _by_seed(row: PublishedRow, cells: pd.DataFrame) -> dict[int, float]:
    """The row's column for each seed, from one cell, or with `reaches` from those of a sweep."""
    column = str(row.column)
    for name in (column, row.per or column):
        if name not in cells.columns:
            raise _CannotTellError("not run", f"the run has no column {name}")
    swept = column if row.reaches is not None else None
    _refuse_several(cells, swept)
    values: dict[int, float] = {}
    for seed, of_seed in cells.groupby("seed"):
        if row.reaches is not None:
            by_value = of_seed.set_index(pd.to_numeric(of_seed[column]))["attainment"].sort_index()
            reaching = reaches(by_value, row.reaches)
            if row.pick == "highest":  # a load counts as carried if every lower one is
                reaching = reaching.cummin()
            if not reaching.any():
                share = f"{100 * row.reaches:g} %"
                raise _CannotTellError("undecided", f"no {column} that was run reaches {share}")
            values_reaching = by_value.index[reaching]
            value = values_reaching.max() if row.pick == "highest" else values_reaching.min()
        else:
            value = of_seed[column].iloc[0]
            if row.per is not None:
                divisor = of_seed[row.per].iloc[0]
                value = value / divisor if divisor else math.nan
        if math.isfinite(value):
            values[int(float(str(seed)))] = float(value)
    if not values:
        raise _CannotTellError("not run", f"{column} has no value")
    return values


def _seeds_left_out(by_seed: Sequence[Mapping[int, float]], cells: pd.DataFrame) -> tuple[str, ...]:
    """A remark where seeds of the run have no value, or no valid cell."""
    seeds = cells["seed"].nunique()
    compared = len(set.intersection(*(set(values) for values in by_seed)))
    return (f"{compared} of {seeds} seeds have a value",) if compared < seeds else ()


def _refuse_several(cells: pd.DataFrame, swept: str | None) -> None:
    """Each seed must have one cell, or one for each value of `swept`."""
    keys = ["seed"] if swept is None else ["seed", swept]
    if not cells.duplicated(keys).any():
        return
    axes = [c for c in (*IDENTITY, *axes_of(cells), "rate_rps") if c in cells and c != swept]
    several = [f"{c} {_few([_text(v) for v in dict.fromkeys(cells[c])])}" for c in axes
               if cells[c].nunique(dropna=False) > 1]  # fmt: skip
    raise _CannotTellError("not unique", "the run has several: " + "; ".join(several))


def _judge(
    row: PublishedRow, by_seed: Sequence[Mapping[int, float]]
) -> tuple[str, tuple[float, ...], Judgement]:
    """Our figure as text, its values by seed (none of an order), and what they say."""
    seeds = sorted(set.intersection(*(set(values) for values in by_seed)))
    if not seeds:
        raise _CannotTellError("not run", "no seed has all that is compared")
    if row.order:
        means = [np.mean([values[seed] for seed in seeds]) * row.scale for values in by_seed]
        sign = " > " if sorted(means, reverse=True) == means else ", "
        steps = [
            [higher[seed] - lower[seed] for seed in seeds]
            for higher, lower in itertools.pairwise(by_seed)
        ]
        shown = sign.join(figure_text(float(mean), "") for mean in means)
        return f"{shown} {row.unit}".rstrip(), (), judgement(steps, order_verdict)
    if row.than is None:
        values = [by_seed[0][seed] * row.scale for seed in seeds]
    else:
        values = [_compared(row, by_seed[0][seed], by_seed[1][seed]) for seed in seeds]
    interval = interval_over_seeds(values)
    signed = row.than is not None and row.by == "difference"
    unit, half = row.unit, ""
    if math.isfinite(interval.half):
        unit, half = "", f" ± {figure_text(interval.half, row.unit)}"
    text = figure_text(interval.mean, unit, signed=signed) + half
    judged_values = judgement([values], lambda parts: verdict(parts[0], row.figure, row.null))
    return text, tuple(values), judged_values


def _compared(row: PublishedRow, ours: float, other: float) -> float:
    if row.by == "difference":
        return (ours - other) * row.scale
    if not other:
        raise _CannotTellError("undecided", "what it is compared with is 0")
    return (ours / other if row.by == "ratio" else 1 - ours / other) * row.scale


def _overloaded(row: PublishedRow, chosen: Sequence[_Chosen]) -> tuple[str, ...]:
    """A remark where cells of a row are not stationary; with `reaches`, those that reach it."""
    cells = pd.concat([choice.cells for choice in chosen])
    if row.reaches is not None:
        cells = cells[reaches(cells["attainment"], row.reaches)]
    drifts = bool(drifting(cells).any())
    return ("overloaded: the figure depends on the run's length",) * drifts
