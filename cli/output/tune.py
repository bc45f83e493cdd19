"""Output of `slo-bench tune`: a progress bar during the trials, then the table of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.outcome import TuningOutcome
    from ...tuner.search.settings import TuneSettings
    from ...tuner.search.worker import TuneProgress


@dataclass(frozen=True)
class Kept:
    """Location of a study: folder, Optuna storage and name; `resume` continues it."""

    out: Path | None
    storage: str | None
    study: str | None
    resume: bool = False


def tuned(
    experiment: Experiment,
    settings: TuneSettings,
    kept: Kept,
    where: OnRay | None = None,
    jobs: int | None = None,
    *,
    no_report: bool,
    as_json: bool,
) -> None:
    """Tune with progress on stderr, write the report and print what was found."""
    from ...harness.experiments.experiment import new_folder
    from ...reports.pages.tuning import tuning_text, write_tuning
    from ...tuner.search.tune import tune
    from ..options.executor import pool_of

    folder = kept.out or new_folder(f"tune-{Path(experiment.systems[0]).stem}")
    stop_on_terminate()
    try:
        with (
            _display(folder, settings) as (watch, confirming, ended),
            pool_of(where, 1 if jobs is None else jobs) as pool,
        ):
            outcome = tune(
                experiment,
                settings,
                folder,
                storage=kept.storage,
                study_name=kept.study,
                resume=kept.resume,
                progress=watch,
                confirming=confirming,
                ended=ended,
                pool=pool,
                jobs=None if pool is None else jobs,
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: slo-bench tune --resume --out {folder}", err=True)
        raise typer.Exit(130) from None
    if outcome.found.running:
        typer.echo(
            f"{outcome.found.running} trials are in the hands of other processes; the last of "
            f"them writes what was found into {folder}",
            err=True,
        )
    page = None
    if not no_report and not outcome.found.running:
        page = write_tuning(outcome.plain(), folder / "report.html")
    if as_json:
        typer.echo((folder / "tune.json").read_text("utf-8") if page or _kept(outcome) else "{}")
        return
    from .console import terminal

    console = terminal()
    console.print(tuning_text(outcome.plain()))
    for winner in outcome.winners:
        for command in winner.commands:
            console.print(command, markup=False, highlight=False, soft_wrap=True)
    at = f"results: {folder}" if page is None else f"report: {page}"
    console.print(at, markup=False, highlight=False, soft_wrap=True)


def _kept(outcome: TuningOutcome) -> bool:
    return (outcome.folder / "tune.json").is_file()


def stop_on_terminate() -> None:
    """Handle SIGTERM like Ctrl-C: servers are stopped on exit."""
    import signal

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)


Watch = Callable[["TuneProgress"], None]
Confirming = Callable[[int, int], None]
Ended = Callable[[int, float], None]


@contextlib.contextmanager
def _display(
    folder: Path, settings: TuneSettings
) -> Iterator[tuple[Watch, Confirming, Ended | None]]:
    """Show a progress bar on an interactive terminal, otherwise one line."""
    if not sys.stderr.isatty():
        typer.echo(f"tuning into {folder}", err=True)
        yield (lambda progress: None), (lambda done, of: None), None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from .console import terminal

    with Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=terminal(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("trials", total=settings.trials)
        said = "trials"

        def watch(progress: TuneProgress) -> None:
            nonlocal said
            said = f"trials · {progress.requests:,} requests"
            if progress.best:
                best = progress.best[0]
                values = ", ".join(f"{value:.4g}" for value in best.values or ())
                said += f" · best {values} (trial {best.number})"
            bar.update(task, completed=progress.trials, total=progress.of_trials, description=said)

        def confirming(done: int, of: int) -> None:
            nonlocal said
            said = "confirming"
            bar.update(task, completed=done, total=of, description=said)

        def ended(requests: int, clock_s: float) -> None:
            bar.update(task, description=f"{said} · running, {requests:,} ended")

        yield watch, confirming, ended
