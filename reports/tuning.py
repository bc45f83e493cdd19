"""A tuning run: what `slo-bench tune` prints, and its page.

The page has the history of the search, the Pareto front, what mattered, all trials in parallel
coordinates, and the default against the winners on fresh seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..tuner.tuning.objectives import OBJECTIVES, Objective
from ..tuner.tuning.outcome import FILE, read_tuning
from ..workloads.errors import FileFormatError, SloBenchError
from . import sections
from .document import page, table, write_page
from .figure import ONLY, Axis, Figure, Format, View, as_json
from .numbers import percent_text, rate_text, seconds_text
from .parallel import parallel_coordinates

Plain = Mapping[str, Any]  # of tune.json

FINISHED, LOST, DEFAULT, TUNED, FRONT = (
    "finished",
    "raced out (estimate)",
    "default",
    "tuned",
    "front",
)
_MARKS = (FINISHED, LOST, DEFAULT, TUNED, FRONT)


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
        Text(f"trial {row['number']} failed: {_first_line(row['reason'])}", style="yellow")
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
        f"{found['system']}, {' and '.join(_label(found, o) for o in _objectives(found))}: "
        f"{len(states)} configurations ({', '.join(told)}), {found['requests']:,} requests "
        f"({origin(found)})"
    )


def origin(found: Plain) -> str:
    """Where the trials' numbers come from."""
    return "simulated" if found["backend"] == "simulated" else "measured"


def _objectives(found: Plain) -> list[Objective]:
    return [OBJECTIVES[name] for name in found["objectives"]]


def _label(found: Plain, objective: Objective) -> str:
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


def _knob_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _best_table(found: Plain) -> Table:
    table = Table(title=Text("Best"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("trial", justify="right", no_wrap=True)
    for objective in _objectives(found):
        table.add_column(objective.label, justify="right")
    table.add_column("configuration", overflow="fold")
    best = [row for row in found["trials"] if row["number"] in found["best"]]
    default = [row for row in found["trials"] if row["default"] and row not in best]
    for row in (*best, *default):
        name = f"{row['number']}{' (default)' if row['default'] else ''}"
        values = row["values"] or [None] * len(found["objectives"])
        figures = [value_text(o, v) for o, v in zip(found["objectives"], values, strict=True)]
        settings = ", ".join(f"{k} {_knob_text(v)}" for k, v in row["configuration"].items())
        table.add_row(name, *figures, Text(settings))
    return table


def _importance_table(found: Plain) -> Table:
    table = Table(title=Text("What mattered"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("knob or setting", overflow="fold")
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
    for head in _CONFIRMED_HEADS:
        right = head not in ("workload", "configuration", "objective", "")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    for row in found["confirmed"]:
        table.add_row(*map(Text, _confirmed_cells(found, row)))
    return table


def _both(found: Plain) -> bool:
    return len({row["backend"] == "simulated" for row in found["confirmed"]}) > 1


_CONFIRMED_HEADS = ("workload", "configuration", "objective", "value", "95 % interval", "")


def _confirmed_cells(found: Plain, row: Plain) -> list[str]:
    name = row["objective"]
    where = (
        row["workload"]
        if row["backend"] == found["backend"]
        else (f"{row['workload']} on {row['backend']}")
    )
    interval = "–"
    if row["low"] is not None or row["high"] is not None:
        interval = f"{value_text(name, row['low'])} to {value_text(name, row['high'])}"
    told = row["verdict"] or ("" if row["problem"] is None else _first_line(row["problem"]))
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


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


# The page.


def rewrite_tuning(folder: Path, out: Path) -> Plain:
    """Write the page of a tuning run that has ended, and return what it found.

    Raises:
        SloBenchError: its file is missing or none of ours, or the page cannot be written.
    """
    found = read_tuning(folder)
    if found is None:
        raise SloBenchError(f"{folder} is no tuning run that has ended: it has no {FILE}")
    try:
        write_tuning(found, out)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"is not what a tuning run writes: {error!r}"
        raise FileFormatError(folder / FILE, None, what) from error
    return found


def write_tuning(found: Plain, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    names = [*_MARKS, *found["space"]]
    figures = [_history(found, names), *_front(found, names), *_importance_figures(found, names)]
    compared = _compared(found, names)
    title = f"{found['system']}: tuned for {' and '.join(found['objectives'])}"
    cells = _badge_of(found)
    drawn = "".join(sections.figure(figure, cells) for figure in figures)
    body = f"""
<header class="top">
<p class="eyebrow">Tuning by slo-bench</p>
<h1>{escape(title)}</h1>
<ul class="facts"><li>{escape(found["model"])} on {escape(found["gpu"])}</li>
<li>{escape(found["workload"])}</li><li>sampler {escape(found["sampler"])}</li></ul>
</header>
<main>
<p class="answer">{escape(headline(found))}</p>
{_proof(found)}
<noscript><div class="notice">The figures need JavaScript; the tables do not.</div></noscript>
<section id="compared"><h2>Default against tuned</h2>
{"".join(sections.figure(figure, cells) for figure in compared)}
{_fresh_seeds(found)}
</section>
<section id="search"><h2>The search</h2><div class="grid">{drawn}</div>
{parallel_coordinates(found)}</section>
<section id="use"><h2>To use it</h2>{_commands(found)}</section>
<section id="trials"><h2>All trials</h2>{_trials(found)}</section>
</main>
<footer>{escape(_footer(found))}</footer>"""
    data = {
        "series": names,
        "origin": origin(found),
        **as_json([*figures, *compared]),
    }
    return write_page(page(f"{title} – tuning", body, data), out)


def _badge_of(found: Plain) -> pd.DataFrame:
    return pd.DataFrame({"backend": [found["backend"]], "step_time": [""]})


def _proof(found: Plain) -> str:
    sentence = confirmed_sentence(found)
    return f'<p class="lead">{escape(sentence)}.</p>' if sentence else ""


def _axis(objective: Objective) -> Axis:
    forms: dict[bool, Format] = {True: "rate", False: "seconds"}
    form: Format = forms[objective.maximise]
    if objective.name == "attainment":
        form = "percent"
    if objective.name == "cost":
        form = "number"
    return Axis(objective.label, form)


def _known(found: Plain, place: int) -> list[tuple[Plain, float]]:
    """Trials with their value of one objective."""
    return [
        (row, row["values"][place])
        for row in found["trials"]
        if row["values"] is not None and row["values"][place] is not None
    ]


def _history(found: Plain, names: Sequence[str]) -> Figure:
    objective = _objectives(found)[0]
    known = _known(found, 0)

    def points(state: str, series: str) -> View:
        of = [(row, value) for row, value in known if row["state"] == state]
        return {
            "s": names.index(series),
            "x": [float(row["number"]) for row, _ in of],
            "y": [value for _, value in of],
            "labels": [f"trial {row['number']}" for row, _ in of],
        }

    finished = [(row["number"], value) for row, value in known if row["state"] == FINISHED]
    best = list(
        itertools.accumulate((value for _, value in finished), max if objective.maximise else min)
    )
    line = {"s": names.index(TUNED), "x": [float(n) for n, _ in finished], "y": best}
    every = [points(FINISHED, FINISHED), points("lost", LOST)]
    return Figure(
        id="history",
        kind="lines",
        title="History",
        note="Trials in their order. Raced out: given up at the best one's rate; the value is an "
        "estimate from how many met their SLO there.",
        x=Axis("trial", "number"),
        y=_axis(objective),
        views={
            "all": {"series": [p for p in every if p["x"]], "lines": [], "scatter": True},
            "best": {"series": [line] if best else [], "lines": []},
        },
        picker="local",
        options=[["all", "all trials"], ["best", "best so far"]],
        hover="point",
    )


def _front(found: Plain, names: Sequence[str]) -> list[Figure]:
    if len(found["objectives"]) < 2:
        return []
    first, second = _objectives(found)[:2]
    rows = [row for row in found["trials"] if row["values"] is not None]

    def points(of: Sequence[Plain], series: str) -> View:
        return {
            "s": names.index(series),
            "x": [row["values"][1] for row in of],
            "y": [row["values"][0] for row in of],
            "labels": [f"trial {row['number']}" for row in of],
        }

    front = [row for row in rows if row["number"] in found["best"]]
    others = [row for row in rows if row["number"] not in found["best"]]
    series = [points(of, name) for of, name in ((front, FRONT), (others, FINISHED)) if of]
    return [
        Figure(
            id="front",
            kind="lines",
            title="Pareto front",
            note="On the front none is better in one objective without being worse in another.",
            x=_axis(second),
            y=_axis(first),
            views={ONLY: {"series": series, "lines": [], "scatter": True}},
            hover="point",
        )
    ]


def _importance_figures(found: Plain, names: Sequence[str]) -> list[Figure]:
    views = {}
    for name, shares in found["importances"].items():
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        bars = [
            {"s": names.index(one), "parts": [share], "lo": share, "hi": share}
            for one, share in ordered
        ]
        if bars:
            views[name] = {"series": bars, "lines": []}
    if not views:
        return []
    return [
        Figure(
            id="importances",
            kind="bars",
            title="What mattered",
            note="Share of what tells the best trials from the others (PED-ANOVA).",
            x=Axis("importance", "percent"),
            y=Axis("", "number"),
            views=views,
            picker="local",
            options=[[name, OBJECTIVES[name].label] for name in views],
        )
    ]


def _compared(found: Plain, names: Sequence[str]) -> list[Figure]:
    """Default and the first winner, a bar each, by workload."""
    figures = []
    for objective in _objectives(found):
        if objective.name == "cost":
            continue
        views, options = {}, []
        for key, of in itertools.groupby(
            (row for row in found["confirmed"] if row["objective"] == objective.name),
            key=lambda row: (row["backend"], row["workload"]),
        ):
            bars = []
            for series, row in zip((DEFAULT, TUNED), of, strict=False):
                if row["value"] is None:
                    continue
                low = row["value"] if row["low"] is None else row["low"]
                high = row["value"] if row["high"] is None else row["high"]
                bars.append(
                    {"s": names.index(series), "parts": [row["value"]], "lo": low, "hi": high}
                )
            if bars:
                name = " on ".join((key[1], key[0]))
                views[name] = {"series": bars, "lines": []}
                options.append([name, name])
        if views:
            figures.append(
                Figure(
                    id=f"compared-{objective.name}",
                    kind="bars",
                    title=f"Default against tuned: {objective.label}",
                    note="On seeds that nobody was tuned on. Line: 95 % interval.",
                    x=_axis(objective),
                    y=Axis("", "number"),
                    views=views,
                    picker="local",
                    options=options,
                )
            )
    return figures


def _fresh_seeds(found: Plain) -> str:
    rows = [_confirmed_cells(found, row) for row in found["confirmed"]]
    return table("Fresh seeds", _CONFIRMED_HEADS, rows, "long")


def _commands(found: Plain) -> str:
    parts = []
    for winner in found["winners"]:
        text = "\n".join(winner["commands"])
        parts.append(f"<p>Trial {winner['trial']}: {escape(winner['file'])}</p>")
        parts.append(f"<pre>{escape(text)}</pre>")
    return "".join(parts)


def _trials(found: Plain) -> str:
    heads = ("Trial", "State", *found["objectives"], "Requests", *found["space"])
    rows = []
    for row in found["trials"]:
        values = row["values"] or [None] * len(found["objectives"])
        figures = [value_text(o, v) for o, v in zip(found["objectives"], values, strict=True)]
        settings = [_knob_text(row["configuration"].get(name, "")) for name in found["space"]]
        state = "raced out" if row["state"] == "lost" else row["state"]
        if row["reason"]:
            state += f": {_first_line(row['reason'])}"
        rows.append([str(row["number"]), state, *figures, f"{row['requests']:,}", *settings])
    return table("All trials", heads, rows, "long")


def _footer(found: Plain) -> str:
    space = "; ".join(f"{name} {text}" for name, text in found["space"].items())
    return f"Searched: {space}. Trials: {origin(found)}."
