"""Output of `slo-bench run`: progress while it runs, then the summary; and of `--validate`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...harness.experiments.execution.cell_specs import deployment_notes, file_notes
from ...harness.experiments.execution.offered_load import estimate
from ...harness.experiments.experiment import Experiment, Progress, RunResult, new_folder
from ...harness.load_generator.machine import cores
from ...harness.results.run_columns import REASON_COLUMN
from ...harness.results.run_folder import has_no_result
from ...harness.servers.launch.backend_names import SIMULATED, TORCH
from ...harness.servers.server_kinds import LAUNCHED
from ...workloads.errors import SloBenchError
from ...workloads.machine_memory import gib
from ..interrupts import interruptible
from ..options.declared import Execution
from .progress import DESCRIPTION, display, phase

if TYPE_CHECKING:
    from ...harness.load_generator.load_progress import LoadProgress
    from ...harness.results.read_run import RunResults

_LONG_S = 120.0  # CPU time from which on the estimate is printed


def run_shown(experiment: Experiment, execution: Execution) -> RunResult:
    """Run with progress on stderr; Ctrl-C says how to go on, and ends with exit code 130."""
    from .console import tell

    out, cluster = execution.out, execution.cluster
    folder = new_folder(experiment.name) if out is None else out
    if experiment.backend == TORCH:
        from ...harness.experiments.backends.torch_engine import TorchBackend

        threads = TorchBackend(server=experiment.server).threads
        if "tiny-llama" in experiment.model:
            typer.echo("tiny-llama: a tiny Llama with random weights, made here", err=True)
        typer.echo(f"CPU threads of torch: {threads}, pinned, of {cores()} cores", err=True)
    last = Progress(0, 0, {})
    size = estimate(experiment)
    size.check()
    simulated = experiment.backend == SIMULATED
    for note in file_notes(experiment) + (deployment_notes(experiment) if simulated else []):
        tell(note)
    if simulated and size.cpu_s >= _LONG_S:
        tell(f"about {size.text} {gib(size.memory_bytes)} of memory")

    def way_on() -> str:
        if not last.finished:
            return "interrupted before the first cell was finished"
        return (
            f"interrupted: {last.finished} of {last.cells} cells are finished; "
            f"go on with: slo-bench run --resume --out {shlex.quote(str(folder))}"
        )

    with interruptible(way_on):
        with (
            execution.watched(folder) as status,
            _display(folder, real=experiment.backend != SIMULATED) as show,
        ):

            def watch(progress: Progress) -> None:
                nonlocal last
                last = progress
                show(progress)
                if status is not None:
                    status.running = _running(progress)
                    if progress.note or progress.running:
                        status.begin(progress.note or "the cells run")
                if progress.note:
                    passed_s = time.monotonic() - begin_s
                    tell(f"{passed_s:.0f} s: {progress.note}")

            begin_s = time.monotonic()
            result = experiment.run(
                folder,
                jobs=execution.jobs,
                executor=cluster,
                resume=execution.resume,
                progress=watch,
                command=sys.argv[1:],
            )
        if experiment.backend != SIMULATED:
            typer.echo(f"took {time.monotonic() - begin_s:.0f} s", err=True)
        return result


@contextlib.contextmanager
def _display(folder: Path, *, real: bool) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on an interactive terminal, otherwise lines.

    The cells of `real` servers run one after the other: what the requests show replaces the bar.
    """
    announced = sys.stderr.isatty()
    columns = ["Bar", "MofNComplete", "cells", "TimeElapsed", "TimeRemaining", DESCRIPTION]
    if real:
        columns = ["MofNComplete", "cells", "TimeElapsed", DESCRIPTION]
    with display(*columns) as change:

        def show(progress: Progress) -> None:
            nonlocal announced
            if not announced:
                announced = True
                cells = f"{progress.cells:,} cell{'s' if progress.cells != 1 else ''}"
                typer.echo(f"running {cells} into {folder}", err=True)
            change(
                total=progress.cells,
                completed=progress.finished,
                description=" · ".join(_running(progress)),
            )

        yield show


def _running(progress: Progress) -> list[str]:
    """A line for each cell that runs."""
    return [
        _so_far(cell, ended, progress.loads.get(cell)) for cell, ended in progress.running.items()
    ]


def _so_far(cell: str, ended: int, load: LoadProgress | None) -> str:
    """A running cell with its ended requests; of a real server, what they show."""
    if load is None or load.attainment is None:
        return f"{cell} {ended:,}"
    from ...reports.figures.figure import percent_text, seconds_text

    parts = [f"{ended:,} ended", f"{load.in_flight:,} in flight"]
    parts.append(f"{percent_text(load.attainment)} in SLO")
    parts.append(f"late {seconds_text(load.send_delay_s)}")
    for name, seconds in (("TTFT", load.mean_ttft_s), ("TPOT", load.mean_tpot_s)):
        if seconds is not None:
            parts.append(f"{name} {seconds_text(seconds)}")
    return ", ".join([*parts, cell])


def write_page(folder: Path) -> Path:
    """Write `report.html` to a run folder."""
    from ...reports.pages.run_page import write_report

    return write_report([folder], folder / "report.html")


def summarise(result: RunResult, page: Path | None, *, verbose: bool) -> None:
    """Print the answer of a run, and where its report or folder is; `verbose`: details before."""
    from ...harness.results.read_run import read_runs
    from .console import print_lines, result_line

    print_runs(read_runs([result.folder]), verbose=verbose)
    print_lines(result_line(result.folder, page))


def print_runs(runs: Sequence[RunResults], *, verbose: bool) -> None:
    """Print the answer of runs that were not searches; `verbose`: every system at every rate and
    all notes before it.
    """
    from ...reports.figures.levels import combine
    from ...reports.pages import decisions_page
    from ...reports.terminal.run_answer import run_screen
    from ...reports.terminal.run_details import run_details
    from .console import print_lines, print_result

    with phase("making the tables"):
        cells = combine(runs)
        answer = run_screen(runs, cells)
        details = run_details(cells) if verbose else []
        beside = decisions_page.simulated_in(runs) if verbose else []
    for screen in details:
        print_result(screen)
    if verbose:
        print_lines(*decisions_page.beside_sentences(beside), "")
    print_result(answer)


def print_searches(
    rows: Sequence[Mapping[str, Any]], runs: Sequence[RunResults], *, verbose: bool
) -> None:
    """Print the answer of capacity searches; `verbose`: the levels that were tried before it."""
    from ...reports.figures.levels import combine
    from ...reports.terminal.capacity_answer import capacity_details, capacity_screen
    from .console import print_result

    for screen in capacity_details(rows) if verbose else ():
        print_result(screen, "")
    print_result(capacity_screen(rows, runs, combine(runs)))


_REPETITIONS = 3  # of every level, by default: separates simulation error from noise


def validated(experiment: Experiment, profile: Path | None) -> Experiment:
    """Return the experiment with the measurements that are needed to simulate its levels.

    Raises:
        SloBenchError: the backend is simulated, or no step times are known.
    """
    if experiment.backend == SIMULATED:
        raise SloBenchError(
            "--validate compares a real server with its simulation; choose one with --backend "
            f"{' or '.join(LAUNCHED)}"
        )
    if experiment.records == "none":
        raise SloBenchError("--validate needs per-request records; leave --records none out")
    if experiment.backend == "openai":
        if profile is None:
            raise SloBenchError(
                "--validate needs step times, and a server given by --base-url has no step "
                "log. Give step times with --profile FILE, or let slo-bench start the server "
                f"(--backend {' or '.join(LAUNCHED)})"
            )
        more: dict[str, object] = {}
    else:
        more = {"validated": True} if profile is None else {"step_log": True}
    if "repetitions" not in experiment.server.model_fields_set:
        more["repetitions"] = _REPETITIONS
    return experiment.model_copy(update={"server": experiment.server.model_copy(update=more)})


def check_results(result: RunResult) -> None:
    """Say which cells have no result: of none of their requests.

    Raises:
        SloBenchError: no cell has one.
    """
    rows = result.rows()
    without = [row for row in rows if has_no_result(row) and row.get(REASON_COLUMN)]
    if not without:
        return
    again = f"slo-bench run --resume --out {shlex.quote(str(result.folder))}"
    because = without[0][REASON_COLUMN]
    if len(without) < len(rows):
        many = f"{len(without):,} of {len(rows):,} cells have no result, the first because"
        typer.echo(f"{many} {because}; {again} measures them again", err=True)
        return
    raise SloBenchError(f"no result: {because}; {again} measures it again")
