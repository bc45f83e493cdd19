"""A tuning run in words and tables: what `slo-bench tune` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...tuner.search.objectives import OBJECTIVES, TuningObjective
from ..figures.numbers import percent_text, rate_text, seconds_text

Plain = Mapping[str, Any]  # of tune.json

FINISHED, LOST, DEFAULT, TUNED, FRONT = (
    "finished",
    "raced out (estimate)",
    "default",
    "tuned",
    "front",
)
MARKS = (FINISHED, LOST, DEFAULT, TUNED, FRONT)


def tuning_text(found: Plain) -> RenderableType:
    """The best configurations beside the default, what mattered, and the proof on fresh seeds."""
    parts: list[RenderableType] = [Text(headline(found), style="bold"), _best_table(found)]
    if any(found["importances"].values()):
        parts.append(_importance_table(found))
    if found["confirmed"]:
        parts.append(_confirmed_table(found))
    parts.append(Text(confirmed_sentence(found), style="bold"))
    failed = [row for row in found["trials"] if row["state"] == "failed"]
    parts += [
        Text(f"trial {row['number']} failed: {first_line(row['reason'])}", style="yellow")
        for row in failed[:5]
    ]
    if len(failed) > 5:
        parts.append(Text(f"… and {len(failed) - 5} others", style="yellow"))
    return Group(*parts)


def headline(found: Plain) -> str:
    """How much was tried, for what, and how many of it were cut short."""
    states = [row["state"] for row in found["trials"]]
    told = [f"{states.count(FINISHED)} searched to the end"]
    for state, words in (("lost", "raced out"), ("failed", "failed"), ("infeasible", "infeasible")):
        if count := states.count(state):
            told.append(f"{count} {words}")
    return (
        f"{found['system']}, {' and '.join(_label(found, o) for o in objectives_of(found))}: "
        f"{len(states)} configurations ({', '.join(told)}), {found['requests']:,} requests "
        f"({origin(found)})"
    )


def origin(found: Plain) -> str:
    """Where the trials' numbers come from."""
    return "simulated" if found["backend"] == "simulated" else "measured"


def objectives_of(found: Plain) -> list[TuningObjective]:
    """The objectives, in their order."""
    return [OBJECTIVES[name] for name in found["objectives"]]


def _label(found: Plain, objective: TuningObjective) -> str:
    if objective.name == "capacity":
        return f"{objective.label} with {found['target']:.6g} in SLO"
    if objective.name == "cost":
        return objective.label
    return f"{objective.label} at {rate_text(found['rate_rps'])} req/s"


def value_text(name: str, value: float | None) -> str:
    """A figure of an objective."""
    if value is None:
        return "–"
    if name == "attainment":
        return percent_text(value)
    if name == "cost":
        return f"{value:g}"
    return rate_text(value) if OBJECTIVES[name].maximise else seconds_text(value)


def parameter_text(value: object) -> str:
    """A parameter or setting as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _best_table(found: Plain) -> Table:
    table = Table(title=Text("Best"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("trial", justify="right", no_wrap=True)
    for objective in objectives_of(found):
        table.add_column(objective.label, justify="right")
    table.add_column("configuration", overflow="fold")
    best = [row for row in found["trials"] if row["number"] in found["best"]]
    default = [row for row in found["trials"] if row["default"] and row not in best]
    for row in (*best, *default):
        name = f"{row['number']}{' (default)' if row['default'] else ''}"
        values = row["values"] or [None] * len(found["objectives"])
        figures = [value_text(o, v) for o, v in zip(found["objectives"], values, strict=True)]
        settings = ", ".join(f"{k} {parameter_text(v)}" for k, v in row["configuration"].items())
        table.add_row(name, *figures, Text(settings))
    return table


def _importance_table(found: Plain) -> Table:
    table = Table(title=Text("What mattered"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("parameter or setting", overflow="fold")
    names = [name for name, shares in found["importances"].items() if shares]
    for name in names:
        table.add_column(OBJECTIVES[name].label, justify="right")
    shares = found["importances"]
    ordered = sorted(found["space"], key=lambda one: -max(shares[n].get(one, 0.0) for n in names))
    for one in ordered:
        table.add_row(Text(one), *(percent_text(shares[name].get(one, 0.0)) for name in names))
    return table


def _confirmed_table(found: Plain) -> Table:
    where = "simulated and measured" if _both(found) else origin(found)
    table = Table(
        title=Text(f"Default and tuned on fresh seeds ({where})"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for head in CONFIRMED_HEADS:
        right = head not in ("workload", "configuration", "objective", "")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    for row in found["confirmed"]:
        table.add_row(*map(Text, confirmed_cells(found, row)))
    return table


def _both(found: Plain) -> bool:
    return len({row["backend"] == "simulated" for row in found["confirmed"]}) > 1


CONFIRMED_HEADS = ("workload", "configuration", "objective", "value", "95 % interval", "")


def confirmed_cells(found: Plain, row: Plain) -> list[str]:
    """A row of the proof on fresh seeds, under `CONFIRMED_HEADS`."""
    name = row["objective"]
    where = (
        row["workload"]
        if row["backend"] == found["backend"]
        else (f"{row['workload']} on {row['backend']}")
    )
    interval = "–"
    if row["low"] is not None or row["high"] is not None:
        interval = f"{value_text(name, row['low'])} to {value_text(name, row['high'])}"
    told = row["verdict"] or ("" if row["problem"] is None else first_line(row["problem"]))
    configuration = row["configuration"]
    return [
        where,
        configuration,
        OBJECTIVES[name].label,
        value_text(name, row["value"]),
        interval if name != "cost" else "",
        told if name != "cost" else "",
    ]


def confirmed_sentence(found: Plain) -> str:
    """Where the winner holds, and where it does not."""
    parts = []
    if any(row["default"] for row in found["trials"] if row["number"] in found["best"]):
        parts.append("nothing that was tried is better than the default")
    for row in found["confirmed"]:
        if not row["verdict"] or row["objective"] == "cost":
            continue
        base = next(
            one
            for one in found["confirmed"]
            if one["configuration"] == "default"
            and all(one[key] == row[key] for key in ("backend", "workload", "objective"))
        )
        change = ""
        if base["value"] and row["value"] is not None:
            change = f", {100 * (row['value'] / base['value'] - 1):+.1f} %"
        where = (
            row["workload"]
            if row["backend"] == "simulated"
            else (f"{row['workload']} on {row['backend']}")
        )
        verdict = row["verdict"] + (" than the default" if row["verdict"] in _APART else "")
        parts.append(f"{row['configuration']} on {where}: {verdict}{change}")
    return "; ".join(parts)


_APART = ("better", "worse")


def first_line(text: str | None) -> str:
    """Of an error, what fits into a table."""
    return (text or "").partition("\n")[0]
