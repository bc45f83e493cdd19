"""The figures of a tuning run's page: its history, the Pareto front, what mattered, the proof."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...tuner.capacity.search_options import SearchOutcome
from ...tuner.search.settings import TuningObjective, tuning_objectives
from .figure import AXES, ONLY, Axis, Figure, View, curve
from .figures import bar_figure

Plain = Mapping[str, Any]  # of tune.json

MARKS = ("finished", "stopped early (estimate)", "default", "tuned", "front")
FINISHED, LOST, DEFAULT, TUNED, FRONT = MARKS
UNDECIDED = SearchOutcome.UNDECIDED.value  # the value is a rate that was carried


def objectives_of(tuning: Plain) -> list[TuningObjective]:
    """Objectives of a tuning run, the first one first."""
    return [tuning_objectives()[name] for name in tuning["objectives"]]


def _axis(objective: TuningObjective) -> Axis:
    return Axis(objective.label, AXES[objective.form])


def _points(
    names: Sequence[str], series: str, rows: Sequence[Plain], x: Sequence[float], y: Sequence[float]
) -> View:
    return curve(names.index(series), x, y, labels=[f"trial {row['number']}" for row in rows])


def _with_value(tuning: Plain) -> list[Plain]:
    """The trials that have a value of the first objective."""
    return [row for row in tuning["trials"] if row["values"] and row["values"][0] is not None]


def history(tuning: Plain, names: Sequence[str]) -> Figure:
    """Values of the first objective, trial after trial, and the best so far."""
    objective = objectives_of(tuning)[0]
    with_value = _with_value(tuning)

    def points(series: str, *states: str) -> View:
        rows = [row for row in with_value if row["state"] in states]
        values = [row["values"][0] for row in rows]
        return _points(names, series, rows, [float(row["number"]) for row in rows], values)

    finished = points(FINISHED, FINISHED, UNDECIDED)
    best = [*itertools.accumulate(finished["y"], max if objective.maximise else min)]
    line = curve(names.index(TUNED), finished["x"], best)
    every = [finished, points(LOST, "lost")]
    return Figure(
        id="history",
        title="History",
        note="Trials in their order. Stopped early: given up at the best one's rate; the value is "
        "an estimate from how many met their SLO there.",
        x=Axis("trial", "number"),
        y=_axis(objective),
        views={
            "all": {"series": [p for p in every if p["x"]], "scatter": True},
            "best": {"series": [line] if best else []},
        },
        picker="local",
        options=[["all", "all trials"], ["best", "best so far"]],
        hover="point",
    )


def front(tuning: Plain, names: Sequence[str]) -> list[Figure]:
    """Trials by two objectives, the Pareto front apart; none where there is one objective."""
    if len(tuning["objectives"]) < 2:
        return []
    first, second = objectives_of(tuning)[:2]
    rows = [row for row in tuning["trials"] if row["values"] is not None]

    def points(trials: Sequence[Plain], series: str) -> View:
        x, y = [row["values"][1] for row in trials], [row["values"][0] for row in trials]
        return _points(names, series, trials, x, y)

    front = [row for row in rows if row["number"] in tuning["best"]]
    others = [row for row in rows if row["number"] not in tuning["best"]]
    series = [
        points(trials, name) for trials, name in ((front, FRONT), (others, FINISHED)) if trials
    ]
    return [
        Figure(
            id="front",
            title="Pareto front",
            note="On the front none is better in one objective without being worse in another.",
            x=_axis(second),
            y=_axis(first),
            views={ONLY: {"series": series, "scatter": True}},
            hover="point",
        )
    ]


def importances(tuning: Plain, names: Sequence[str]) -> list[Figure]:
    """A bar for each parameter or setting; none where nothing could be told."""
    views = {}
    for name, shares in tuning["importances"].items():
        bars = [
            {"s": names.index(parameter), "parts": [share], "lo": low, "hi": high}
            for parameter, (share, low, high) in shares.items()
        ]
        if bars:
            views[name] = {"series": bars}
    if not views:
        return []
    return [
        bar_figure(
            id="importances",
            title="Parameter importance",
            note="Share of what tells the best trials from the others (PED-ANOVA), with the 90 % "
            "range over resampled trials; only parameters that stay above an even split.",
            x=Axis("importance", "percent"),
            views=views,
            picker="local",
            options=[[name, tuning_objectives()[name].label] for name in views],
        )
    ]


def compared(tuning: Plain, names: Sequence[str]) -> list[Figure]:
    """Default and the first winner, a bar each, by workload."""
    figures = []
    for objective in objectives_of(tuning):
        if objective.name == "cost":
            continue
        views = {}
        for key, group in itertools.groupby(
            (row for row in tuning["confirmed"] if row["objective"] == objective.name),
            key=lambda row: (row["backend"], row["workload"]),
        ):
            bars = []
            for series, row in zip((DEFAULT, TUNED), group, strict=False):
                if row["value"] is None:
                    continue
                value = row["value"]
                low, high = (value if row[end] is None else row[end] for end in ("low", "high"))
                bars.append({"s": names.index(series), "parts": [value], "lo": low, "hi": high})
            if bars:
                views[" on ".join((key[1], key[0]))] = {"series": bars}
        if views:
            figures.append(
                bar_figure(
                    id=f"compared-{objective.name}",
                    title=f"Default against tuned: {objective.label}",
                    note="On seeds that no trial used. Line: 95 % interval.",
                    x=_axis(objective),
                    views=views,
                    picker="local",
                    options=[[name, name] for name in views],
                )
            )
    return figures


_MOST_LINES = 400
_SHADES = 5
_MOST_NAME = 18  # characters under an axis


def parallel_coordinates(tuning: Plain, names: Sequence[str]) -> list[Figure]:
    """An axis a dimension and one for the first objective, a line a trial; none with fewer than two
    trials that have a value.
    """
    rows = _with_value(tuning)
    dimensions = [*tuning["space"]]
    if len(rows) < 2 or not dimensions:
        return []
    objective = objectives_of(tuning)[0]
    rows.sort(key=lambda row: row["values"][0], reverse=not objective.maximise)
    rows = rows[-_MOST_LINES:]  # the best are drawn last, on top
    columns: list[list[Any]] = [[row["configuration"].get(n) for row in rows] for n in dimensions]
    columns.append([row["values"][0] for row in rows])
    logs = [text.endswith(":log") for text in tuning["space"].values()] + [False]
    places = [_places(values, log) for values, log in zip(columns, logs, strict=True)]
    labels = [*dimensions, objective.label]
    best = FRONT if len(tuning["objectives"]) > 1 else TUNED
    ends = tuple((_short(n), *_ends(values)) for n, values in zip(labels, columns, strict=True))

    def draw(number: int, row: Plain) -> View:
        series = LOST if row["state"] == "lost" else DEFAULT if row["default"] else FINISHED
        points = [
            f"trial {row['number']}: {label} {_value_text(values[number])}"
            for label, values in zip(labels, columns, strict=True)
        ]
        is_best = row["number"] in tuning["best"]
        shade = math.ceil(_SHADES * (number + 1) / len(rows)) / 10
        positions = [of_trials[number] for of_trials in places]
        place = names.index(best if is_best else series)
        more = {"labels": points} | ({} if is_best else {"opacity": shade})
        return curve(place, range(len(labels)), positions, **more)

    return [
        Figure(
            id="parallel",
            title="Parallel coordinates",
            note="A line a trial, the darker the better. Trials stopped early have estimates.",
            x=Axis("", "number", names=ends),
            y=Axis("place in the range of the trials", "percent", top=1.0),
            views={ONLY: {"series": [*itertools.starmap(draw, enumerate(rows))]}},
            hover="point",
        )
    ]


def _places(values: Sequence[Any], log: bool) -> list[float]:
    """From 0 at the bottom of an axis to 1 at its top."""
    if not all(_is_number(value) for value in values):
        words = sorted({str(value) for value in values})
        return [(words.index(str(v)) + 0.5) / len(words) for v in values]
    numbers = [math.log(v) if log and v > 0 else float(v) for v in values]
    low, high = min(numbers), max(numbers)
    return [(n - low) / (high - low) if high > low else 0.5 for n in numbers]


def _ends(values: Sequence[Any]) -> tuple[str, ...]:
    if not all(_is_number(value) for value in values):
        words = sorted({str(value) for value in values})
        ends = [_short(words[0]), _short(words[-1])]
    else:
        ends = [_number(min(values)), _number(max(values))]
    if ends[0] == ends[1]:
        return (ends[0],)
    both = " – ".join(ends)
    return (both,) if len(both) <= _MOST_NAME else (f"{ends[0]} –", ends[1])


def _value_text(value: Any) -> str:
    return _number(value) if _is_number(value) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_NAME else text[: _MOST_NAME - 1] + "…"
