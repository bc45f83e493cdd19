"""A tuning run: what `slo-bench tune` prints, and its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...tuner.search.evaluate_configuration import ANSWERED, DRIFTING
from ...tuner.search.outcome import FILE, read_tuning
from ...tuner.search.runs import FAULTS
from ...tuner.search.settings import TuningObjective, tuning_objectives
from ...workloads.errors import FileFormatError, SloBenchError
from ..figures import tuning_figures
from ..figures.drawing import page_data
from ..figures.figure import form_text, percent_text, rate_text
from ..figures.levels import GOODPUT_DIVISOR, window_text
from ..figures.tuning_figures import FINISHED, MARKS, Plain, objectives_of
from ..terminal.screen import Screen
from .answers_page import surplus_text
from .document import PlotlyJs, page, write_page
from .summary_page import OVERLOADED_NOTE
from .table import Table, one_group


def tuning_text(tuning: Plain, tested: Sequence[str] = ()) -> RenderableType:
    """What mattered; then what was tested, the best configurations beside the default, the proof on
    fresh seeds, and the answer.
    """
    parts: list[RenderableType] = []
    if any(tuning["importances"].values()):
        parts.append(_importance_table(tuning))
    if tuning["ablations"]:
        parts += _noted(_ablation_table(tuning), "The winner with one parameter at its default")
    parts += [Screen(tested), _best_table(tuning)]
    if note := _trials_note(tuning):
        parts.append(Text(note, style="dim"))
    if tuning["confirmed"]:
        both = len({row["backend"] == "simulated" for row in tuning["confirmed"]}) > 1
        where = "simulated and measured" if both else origin(tuning)
        title = f"Default and tuned on fresh seeds ({where})"
        parts += _noted(_confirmed_table(tuning), title)
    failed = [row for row in tuning["trials"] if row["state"] == "failed"]
    parts += [
        Text(f"trial {row['number']} failed: {first_line(row['reason'])}", style="yellow")
        for row in failed[:5]
    ]
    if len(failed) > 5:
        parts.append(Text(f"… and {len(failed) - 5} others", style="yellow"))
    answer = (*faults_texts(tuning), headline(tuning), confirmed_sentence(tuning))
    parts += [Text(line, style="bold") for line in answer if line]
    return Group(*parts)


def faults_texts(tuning: Plain) -> list[str]:
    """How many requests of the trials failed other than by overload, and how many answers are
    longer than requested; no line where none is.
    """
    rows = [row for row in tuning["trials"] if FAULTS in row["figures"]]
    faults = [row["figures"][FAULTS] for row in rows]
    lines = []
    if failed := sum(fault["failed"] for fault in faults):
        worst = max(faults, key=lambda fault: int(fault["failed"]))
        numbers = [str(r["number"]) for r in rows if r["figures"][FAULTS]["failed"]]
        lines.append(
            f"{failed:,} of {tuning['requests']:,} requests failed ({worst['failed_because']}), in "
            f"trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}."
        )
    surplus = sum(fault["surplus_outputs"] for fault in faults)
    if text := surplus_text(surplus, tuning["requests"]):
        lines.append(f"{text}.")
    return lines


def _noted(table: Table, title: str) -> list[RenderableType]:
    """A table and its note for a terminal."""
    return [table.rich(title), *([Text(table.note, style="dim")] if table.note else [])]


def headline(tuning: Plain) -> str:
    """One sentence: number of trials, objectives, pruned trials."""
    states = [row["state"] for row in tuning["trials"]]
    counts = [f"{states.count(FINISHED)} searched to the end"]
    others = ("undecided", "failed", "infeasible")
    for state, words in (("lost", "stopped early"), *zip(others, others, strict=True)):
        if count := states.count(state):
            counts.append(f"{count} {words}")
    return (
        f"{tuning['system']}, {' and '.join(_label(tuning, o) for o in objectives_of(tuning))}: "
        f"{len(states)} configurations ({', '.join(counts)}), {tuning['requests']:,} requests "
        f"({origin(tuning)})"
    )


def origin(tuning: Plain) -> str:
    """Origin of the trials' numbers: simulated or measured."""
    return "simulated" if tuning["backend"] == "simulated" else "measured"


def _label(tuning: Plain, objective: TuningObjective) -> str:
    if objective.name == "capacity":
        return f"{objective.label} with {tuning['target']:.6g} in SLO"
    if objective.name == "cost":
        return objective.label
    return f"{objective.label} {_load_text(tuning, tuning['rate_rps'])}"


def _load_text(tuning: Plain, rate_rps: float | None) -> str:
    """The load of runs: at a rate, or what the arrivals without one are."""
    return tuning["load"] if rate_rps is None else f"at {rate_text(rate_rps)} req/s"


def value_text(name: str, value: float | None) -> str:
    """An objective's value as text."""
    if value is None:
        return "–"
    return f"{value:g}" if name == "cost" else form_text(tuning_objectives()[name].form, value)


def parameter_text(value: object) -> str:
    """A parameter or setting as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _divisor(tuning: Plain) -> str:
    return f"{GOODPUT_DIVISOR}." if "goodput" in tuning["objectives"] else ""


def _trials_note(tuning: Plain) -> str:
    """What goodput divides by, which of the best and the default are overloaded, and which did
    not answer all requests, where that alone makes an objective better.
    """
    shown = [row for row in tuning["trials"] if row["default"] or row["number"] in tuning["best"]]

    def by_trial(figure: str, text: Callable[[Any], str]) -> str:
        rows = [row for row in shown if figure in row["figures"]]
        return ", ".join(f"trial {row['number']} {text(row['figures'][figure])}" for row in rows)

    shares = by_trial(ANSWERED, percent_text)
    shortens = any(o.column is not None and not o.maximise for o in objectives_of(tuning))
    unanswered = (
        f"Answered: {shares} of the requests; latencies and makespan are of these alone."
        if shares and shortens
        else ""
    )
    drifting = by_trial(DRIFTING, window_text)
    notes = (
        _divisor(tuning),
        unanswered,
        drifting and f"Overloaded: {drifting}. {OVERLOADED_NOTE}",
    )
    return " ".join(filter(None, notes))


def _figures(tuning: Plain, row: Plain) -> list[str]:
    """Texts of a trial's objective values."""
    values = row["values"] or [None] * len(tuning["objectives"])
    return [value_text(o, v) for o, v in zip(tuning["objectives"], values, strict=True)]


def _trial_name(row: Plain) -> str:
    """Number of a trial; whether it is the default, and its values are estimates."""
    estimated = ", estimated" * (row["state"] == "lost")
    return f"{row['number']} (default{estimated})" if row["default"] else str(row["number"])


def _best_table(tuning: Plain) -> Screen:
    best = [row for row in tuning["trials"] if row["number"] in tuning["best"]]
    default = [row for row in tuning["trials"] if row["default"] and row not in best]
    rows = [
        (
            _trial_name(row),
            *_figures(tuning, row),
            ", ".join(f"{k} {parameter_text(v)}" for k, v in row["configuration"].items()),
        )
        for row in (*best, *default)
    ]
    labels = [objective.label for objective in objectives_of(tuning)]
    heads = ("trial", *labels, "configuration")
    return one_group("Best", heads, rows, texts=(len(heads) - 1,), names=labels).rich("Best")


def _importance_table(tuning: Plain) -> Screen:
    rows = [
        [
            parameter,
            *([tuning_objectives()[name].label] if len(tuning["objectives"]) > 1 else []),
            percent_text(share),
            f"{percent_text(low)} to {percent_text(high)}",
        ]
        for name, shares in tuning["importances"].items()
        for parameter, (share, low, high) in shares.items()
    ]
    labels = ["objective"] if len(tuning["objectives"]) > 1 else []
    heads = ("parameter or setting", *labels, "share", "90 % range")
    return one_group("Importance", heads, rows).rich("Parameter importance, where it is stable")


def _ablation_table(tuning: Plain) -> Table:
    """The winner with one parameter at its default, on fresh seeds."""
    heads = ("parameter", "winner", "default", "change", "95 % interval", "")
    rows = []
    for row in tuning["ablations"]:
        verdict = "matters" if row["matters"] else "not distinguishable"
        change, interval = "–", first_line(row["problem"])
        if row["change"] is not None:
            points = row["objective"] == "attainment"
            change, low, high = (
                f"{100 * row[end]:+.2f}" if points else f"{row[end]:+.3g}"
                for end in ("change", "low", "high")
            )
            change += " points" if points else ""
            interval = f"{low} to {high}"
            if not row["matters"] and row["low"] * row["high"] > 0:
                verdict = "the default is better"
        values = (parameter_text(row[name]) for name in ("value", "default"))
        rows.append([row["parameter"], *values, change, interval, verdict])
    note = ""
    if tuning["ablations"]:
        first = tuning["ablations"][0]
        label = tuning_objectives()[first["objective"]].label
        note = (
            f"Change of {label} with the default in place of the "
            f"winner's value, {_load_text(tuning, first['rate_rps'])} on the same requests. "
            "Parameters that do not matter have their default in the winner's file and commands, "
            "unless the winner needs them together."
        )
    return one_group("Ablation", heads, rows, texts=(0, 5), note=note)


def _confirmed_table(tuning: Plain) -> Table:
    heads = ("workload", "configuration", "objective", "value", "95 % interval", "")
    rows = [_confirmed_cells(tuning, row) for row in tuning["confirmed"]]
    drifts = any(row.get(DRIFTING) for row in tuning["confirmed"])
    note = " ".join(filter(None, (_divisor(tuning), f"Overloaded: {OVERLOADED_NOTE}" * drifts)))
    return one_group("Fresh seeds", heads, rows, texts=(0, 1, 2, 5), css="long", note=note)


def _confirmed_cells(tuning: Plain, row: Plain) -> list[str]:
    name = row["objective"]
    interval = "–"
    if row["low"] is not None or row["high"] is not None:
        interval = f"{value_text(name, row['low'])} to {value_text(name, row['high'])}"
    verdict = row["verdict"] or first_line(row["problem"])
    if after_s := row.get(DRIFTING):
        verdict = ", ".join(filter(None, (verdict, f"overloaded {window_text(after_s)}")))
    return [
        _where(row, tuning["backend"]),
        row["configuration"],
        tuning_objectives()[name].label,
        value_text(name, row["value"]),
        *(("", "") if name == "cost" else (interval, verdict)),
    ]


def _where(row: Plain, backend: str) -> str:
    on = "" if row["backend"] == backend else f" on {row['backend']}"
    return f"{row['workload']}{on}"


def confirmed_sentence(tuning: Plain) -> str:
    """Verdicts of the confirmation runs against the default, by backend, workload and objective."""
    parts = []
    if any(row["default"] for row in tuning["trials"] if row["number"] in tuning["best"]):
        parts.append("nothing that was tried is better than the default")
    for row in tuning["confirmed"]:
        if not row["verdict"] or row["objective"] == "cost":
            continue
        base = next(
            default_row
            for default_row in tuning["confirmed"]
            if default_row["configuration"] == "default"
            and all(default_row[key] == row[key] for key in ("backend", "workload", "objective"))
        )
        change = ""
        if base["value"] and row["value"] is not None:
            change = f", {100 * (row['value'] / base['value'] - 1):+.1f} %"
        verdict = row["verdict"] + " than the default" * (row["verdict"] in ("better", "worse"))
        parts.append(f"{row['configuration']} on {_where(row, 'simulated')}: {verdict}{change}")
    return "; ".join(parts)


def result_sentence(tuning: Plain) -> str:
    """What tuning gained: each objective on fresh seeds, else of the best trial and the default."""
    if sentence := confirmed_sentence(tuning):
        first = [row for row in tuning["confirmed"] if row["objective"] != "cost"][:2]
        values = "; ".join(
            f"{tuning_objectives()[row['objective']].label} on {row['workload']} "
            f"{value_text(row['objective'], row['value'])} with {row['configuration']}"
            for row in first
        )
        return f"{sentence[0].upper()}{sentence[1:]}. {values[:1].upper()}{values[1:]}."
    shown = [row for row in tuning["trials"] if row["number"] in tuning["best"] or row["default"]]
    labels = [objective.label for objective in objectives_of(tuning)]
    parts = [
        f"trial {_trial_name(row)}: "
        + ", ".join(f"{k} {v}" for k, v in zip(labels, _figures(tuning, row), strict=True))
        for row in shown
    ]
    return f"Not confirmed on fresh seeds. {'; '.join(parts)}." if parts else "No trial ended."


def first_line(text: str | None) -> str:
    """First line of an error message; empty without a message."""
    return (text or "").partition("\n")[0]


def rewrite_tuning(folder: Path, out: Path, *, plotly: PlotlyJs = "inline") -> Plain:
    """Write the page of a tuning run that has ended, and return what it found.

    Raises:
        SloBenchError: its file is missing or none of ours, or the page cannot be written.
    """
    tuning = read_tuning(folder)
    if tuning is None:
        raise SloBenchError(f"{folder} is no tuning run that has ended: it has no {FILE}")
    try:
        write_tuning(tuning, out, plotly=plotly)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"is not what a tuning run writes: {error!r}"
        raise FileFormatError(folder / FILE, None, problem) from error
    return tuning


def write_tuning(tuning: Plain, out: Path, *, plotly: PlotlyJs = "inline") -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    names = [*MARKS, *tuning["space"]]
    figures = [
        tuning_figures.history(tuning, names),
        *tuning_figures.front(tuning, names),
        *tuning_figures.importances(tuning, names),
    ]
    compared = tuning_figures.compared(tuning, names)
    parallel = tuning_figures.parallel_coordinates(tuning, names)
    space = "; ".join(f"{name} {text}" for name, text in tuning["space"].items())
    data = page_data(names, origin(tuning), [*figures, *parallel, *compared])
    text = page(
        "tuning.html",
        data,
        plotly=plotly,
        heading=f"{tuning['system']}: tuned for {' and '.join(tuning['objectives'])}",
        facts=[
            f"{tuning['model']} on {tuning['gpu']}",
            str(tuning["workload"]),
            f"sampler {tuning['sampler']}",
        ],
        badge=origin(tuning),
        answer=result_sentence(tuning),
        effort=" ".join([*faults_texts(tuning), f"{headline(tuning)}."]),
        compared=compared,
        confirmed=_confirmed_table(tuning),
        ablations=_ablation_table(tuning) if tuning["ablations"] else None,
        figures=figures,
        parallel=parallel,
        winners=[
            (winner["trial"], winner["file"], "\n".join(winner["commands"]))
            for winner in tuning["winners"]
        ],
        trials=_trials(tuning),
        footer=f"Searched: {space}. Trials: {origin(tuning)}.",
    )
    return write_page(text, out)


def _trials(tuning: Plain) -> Table:
    heads = ("Trial", "State", *tuning["objectives"], "Requests", *tuning["space"])
    rows = []
    for row in tuning["trials"]:
        settings = [parameter_text(row["configuration"].get(name, "")) for name in tuning["space"]]
        state = "stopped early" if row["state"] == "lost" else row["state"]
        state += f": {first_line(row['reason'])}" if row["reason"] else ""
        number, requests = str(row["number"]), f"{row['requests']:,}"
        rows.append([number, state, *_figures(tuning, row), requests, *settings])
    names, note = [*tuning["space"]], _trials_note(tuning)
    return one_group("All trials", heads, rows, css="long", names=names, note=note)
