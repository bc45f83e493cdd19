"""Output of `slo-bench tune`: a progress bar during the trials, then the table of results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..interrupts import interruptible
from .progress import DESCRIPTION, display

if TYPE_CHECKING:
    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.settings import TuneSettings
    from ...tuner.search.worker import TuneProgress
    from ..options.tune import StudyOptions


def tuned(
    experiment: Experiment,
    settings: TuneSettings,
    kept: StudyOptions,
    where: OnRay | None = None,
    jobs: int | None = None,
    *,
    no_report: bool,
    resume: bool = False,
) -> None:
    """Tune with progress on stderr, write the report and print what was found."""
    from ...harness.experiments.experiment import new_folder
    from ...reports.pages.tuning import tuning_text, write_tuning
    from ...tuner.search.tune import tune
    from ..options.declared import pool_of
    from .console import print_result, result_line

    folder = kept.out or new_folder(f"tune-{Path(experiment.systems[0]).stem}")
    with (
        interruptible(f"interrupted; go on with: slo-bench tune --resume --out {folder}"),
        _display(folder, settings) as (watch, confirming, ended),
        pool_of(where, 1 if jobs is None else jobs) as pool,
    ):
        outcome = tune(
            experiment,
            settings,
            folder,
            storage=kept.storage,
            study_name=kept.study,
            resume=resume,
            progress=watch,
            confirming=confirming,
            ended=ended,
            warn=lambda line: typer.echo(f"warning: {line}", err=True),
            pool=pool,
            jobs=None if pool is None else jobs,
        )
    if outcome.found.running:
        typer.echo(
            f"{outcome.found.running} trials are in the hands of other processes; the last of "
            f"them writes what was found into {folder}",
            err=True,
        )
    page = None
    if not no_report and not outcome.found.running:
        page = write_tuning(outcome.plain(), folder / "report.html")
    if kept.as_json:
        found = folder / "tune.json"
        typer.echo(found.read_text("utf-8") if page or found.is_file() else "{}")
        return
    commands = [command for winner in outcome.winners for command in winner.commands]
    print_result(tuning_text(outcome.plain()), *commands, result_line(folder, page))


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
    with display("Bar", "MofNComplete", "TimeElapsed", DESCRIPTION) as change:
        said = "trials"
        change(total=settings.trials, description=said)

        def watch(progress: TuneProgress) -> None:
            nonlocal said
            said = f"trials · {progress.requests:,} requests"
            if progress.best:
                best = progress.best[0]
                values = ", ".join(f"{value:.4g}" for value in best.values or ())
                said += f" · best {values} (trial {best.number})"
            change(completed=progress.trials, total=progress.of_trials, description=said)

        def confirming(done: int, of: int) -> None:
            nonlocal said
            said = "confirming"
            change(completed=done, total=of, description=said)

        def ended(requests: int, clock_s: float) -> None:
            change(description=f"{said} · running, {requests:,} ended")

        yield watch, confirming, ended
