"""The page of a tuning run.

It has the history of the search, the Pareto front, what mattered, all trials in parallel
coordinates, and the default against the winners on fresh seeds.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import pandas as pd

from ...tuner.search.outcome import FILE, read_tuning
from ...workloads.errors import FileFormatError, SloBenchError
from ..figures import tuning_figures
from ..figures.figure import as_json
from ..figures.parallel import parallel_coordinates
from . import sections
from .document import page, table, write_page
from .tuning import (
    CONFIRMED_HEADS,
    MARKS,
    Plain,
    confirmed_cells,
    confirmed_sentence,
    first_line,
    headline,
    origin,
    parameter_text,
    value_text,
)


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
    names = [*MARKS, *found["space"]]
    figures = [
        tuning_figures.history(found, names),
        *tuning_figures.front(found, names),
        *tuning_figures.importances(found, names),
    ]
    compared = tuning_figures.compared(found, names)
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


def _fresh_seeds(found: Plain) -> str:
    rows = [confirmed_cells(found, row) for row in found["confirmed"]]
    return table("Fresh seeds", CONFIRMED_HEADS, rows, "long")


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
        settings = [parameter_text(row["configuration"].get(name, "")) for name in found["space"]]
        state = "raced out" if row["state"] == "lost" else row["state"]
        if row["reason"]:
            state += f": {first_line(row['reason'])}"
        rows.append([str(row["number"]), state, *figures, f"{row['requests']:,}", *settings])
    return table("All trials", heads, rows, "long")


def _footer(found: Plain) -> str:
    space = "; ".join(f"{name} {text}" for name, text in found["space"].items())
    return f"Searched: {space}. Trials: {origin(found)}."
