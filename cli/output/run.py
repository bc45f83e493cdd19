"""Output of `slo-bench run`: progress while it runs, then the summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from ...harness.experiments.execution.workers import Executor
from ...harness.experiments.experiment import Experiment, Progress, RunResult, new_folder

Watch = Callable[[Progress], None]


def run_shown(
    experiment: Experiment,
    out: Path | None,
    *,
    jobs: int | None,
    executor: Executor | None,
    resume: bool,
) -> RunResult:
    """Run with progress on stderr; Ctrl-C says how to go on, and ends with exit code 130."""
    folder = new_folder(experiment.name) if out is None else out
    if experiment.backend == "torch" and "tiny-llama" in experiment.model:
        typer.echo("tiny-llama: a tiny Llama with random weights, made here", err=True)
    last = Progress(0, 0, {})

    try:
        with _display(folder) as show:

            def watch(progress: Progress) -> None:
                nonlocal last
                last = progress
                show(progress)

            begin_s = time.monotonic()
            result = experiment.run(
                folder,
                jobs=jobs,
                executor=executor,
                resume=resume,
                progress=watch,
                command=sys.argv[1:],
            )
        if experiment.backend != "simulated":
            typer.echo(f"took {time.monotonic() - begin_s:.0f} s", err=True)
        return result
    except KeyboardInterrupt:
        if last.finished:
            typer.echo(
                f"interrupted: {last.finished} of {last.cells} cells are finished; "
                f"go on with: slo-bench run --resume --out {folder}",
                err=True,
            )
        else:
            typer.echo("interrupted before the first cell was finished", err=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _display(folder: Path) -> Iterator[Watch]:
    """Show a progress bar on an interactive terminal, otherwise two lines."""
    if not sys.stderr.isatty():
        yield _line(folder)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    from .console import terminal

    with Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=terminal(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            running = (f"{cell} {ended:,}" for cell, ended in progress.running.items())
            bar.update(
                task,
                total=progress.cells,
                completed=progress.finished,
                description=" · ".join(running),
            )

        yield show


def _line(folder: Path) -> Watch:
    said = False

    def show(progress: Progress) -> None:
        nonlocal said
        if not said:
            said = True
            typer.echo(f"running {progress.cells} cells into {folder}", err=True)

    return show


def write_page(result: RunResult) -> Path:
    """Write `report.html` to the run folder."""
    from ...reports.pages.run_page import write_report

    return write_report([result.folder], result.folder / "report.html")


def summarise(result: RunResult, page: Path | None) -> None:
    """The tables, and where everything is."""
    from ...harness.results.read import read_runs
    from ...reports.figures.levels import combine
    from ...reports.pages.summary import summary_table
    from .console import terminal

    console = terminal()
    console.print(summary_table(combine(read_runs([result.folder]))))
    where = f"report: {page}" if page is not None else f"results: {result.folder}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)
