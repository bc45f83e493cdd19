"""`slo-bench explain`: where a request's time went, and a trace of its whole cell."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ...workloads.errors import SloBenchError
from ..options.parameters import CELL, argument, flag, option

EXAMPLES = (
    "slo-bench explain runs/quickstart slowest --cell vllm_rate-6_seed-0",
    "slo-bench explain runs/quickstart 17 --cell vllm_rate-6_seed-0 --trace trace.json.gz",
    "slo-bench explain runs/quickstart 17 --cell vllm_rate-6_seed-0 --json",
    "slo-bench explain runs/quickstart",
)


def explain(
    run: Path = argument("RUN", "Run folder."),
    request: str | None = argument(
        "[REQUEST]",
        "Request number (`id` in the records), or slowest. Without: why the best system won.",
        default=None,
    ),
    cell: str | None = option(
        "C", "Cell name (`cell` in cells.csv). Required if the run has several.", *CELL
    ),
    trace: Path | None = option(
        "FILE.json[.gz]",
        "Also write a trace of the whole cell for ui.perfetto.dev or chrome://tracing.",
    ),
    as_json: bool = flag("Print only JSON.", "--json"),
) -> None:
    """Show where a request's time went: instances, queue, prefill, preempted, decode and others.

    A simulated cell is simulated again, with a log of events. For a cell of a real server only
    the client's times are known: queue and prefill cannot be separated. Decisions of a policy
    inside the server are shown beside those of a simulation of the same requests.

    Without REQUEST: the best system of the run against the next, request by request, from the
    records: waiting, prefill, transfer and decode.
    """
    if request is None:
        if cell is not None or trace is not None:
            raise SloBenchError("--cell and --trace go with a REQUEST, such as slowest")
        _explain_run(run, as_json=as_json)
        return
    from ...harness.experiments.explain.trace import (
        MeasuredCell,
        cell_names,
        measured_on,
        replay,
        write_events,
    )
    from ...harness.results.compared_decisions import decisions_on
    from ...reports.pages import explain_page as explaining
    from ..output.console import print_result
    from ..output.progress import counted

    names = cell_names(run)
    if cell is None:
        if len(names) > 1:
            raise SloBenchError(
                f"{run} has {len(names)} cells; choose one with --cell, such as {names[0]}"
            )
        cell = names[0]
    doubt = None
    if measured_on(run, cell) is not None:
        measured = MeasuredCell.read(run, cell)
        number = explaining.chosen_request(measured, request)
        decided = decisions_on(run, cell, number)
        explanation = explaining.explain_measured(measured, number, decided)
        events = measured.events
    else:
        with counted("requests") as progress:
            watched = replay(run, cell, progress=lambda ended, clock_s: progress(ended, None))
        doubt = explaining.differs_from_record(run, watched)
        explanation = explaining.explain(watched, explaining.chosen_request(watched, request))
        events = watched.events
    if trace is not None:
        write_events(events(), trace)
    if as_json:
        document = explaining.explanation_json(explanation) | {"doubt": doubt}
        typer.echo(json.dumps(document, allow_nan=False, ensure_ascii=False))
        return
    if doubt is not None:
        typer.echo(f"careful: {doubt}", err=True)
    where = None if trace is None else f"trace: {trace} (open it in https://ui.perfetto.dev)"
    print_result(explaining.explanation_text(explanation), where)


def _explain_run(run: Path, *, as_json: bool) -> None:
    from ...harness.results.read_run import read_runs
    from ...reports.figures.levels import combine
    from ...reports.pages import decisions_page, why
    from ..output.console import print_lines

    runs = read_runs([run])
    cells = combine(runs)
    reasons = why.reasons(runs, cells)
    beside = decisions_page.simulated_in(runs)
    decided = [*decisions_page.sentences(cells), *decisions_page.beside_sentences(beside)]
    if not (reasons or decided):
        raise SloBenchError(
            f"{run} has nothing to compare: it takes two systems with different attainment of an "
            "SLO at a common rate, and records of their requests"
        )
    if as_json:
        document = {"reasons": [why.reason_json(reason) for reason in reasons], "decisions": beside}
        typer.echo(json.dumps(document, allow_nan=False, ensure_ascii=False))
        return
    print_lines(*(f"{facet}: {text}" if facet else text for facet, text in why.shown(reasons)))
    print_lines(*decided)
