"""Output of `slo-bench tune`: a progress bar during the trials, then the table of results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...harness.results.run_folder import TUNING
from ..interrupts import interruptible
from .progress import DESCRIPTION, display, phase

if TYPE_CHECKING:
    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.settings import TuneSettings
    from ...tuner.search.study_worker import TuneProgress
    from ..options.tune_options import StudyOptions


def tuned(
    experiment: Experiment,
    settings: TuneSettings,
    study_options: StudyOptions,
    where: OnRay | None = None,
    jobs: int | None = None,
    *,
    no_report: bool,
    resume: bool = False,
) -> None:
    """Tune with progress on stderr, write the report and print what was found."""
    from ...harness.experiments.experiment import new_folder
    from ...reports.pages.tuning import write_tuning
    from ...tuner.search.tuning_run import tune
    from ..options.declared import pool_of
    from .console import print_lines, result_line, tell

    folder = study_options.out or new_folder(f"tune-{Path(experiment.systems[0]).stem}")
    begin_s = time.monotonic()
    with (
        interruptible(f"interrupted; go on with: slo-bench tune --resume --out {folder}"),
        _display(folder, settings) as (watch, confirming, ended),
        pool_of(where, 1 if jobs is None else jobs) as pool,
    ):
        outcome = tune(
            experiment,
            settings,
            folder,
            storage=study_options.storage,
            study_name=study_options.study,
            resume=resume,
            progress=watch,
            confirming=confirming,
            ended=ended,
            warn=lambda line: tell(f"warning: {line}"),
            say=lambda line: tell(f"{time.monotonic() - begin_s:.0f} s: {line}"),
            pool=pool,
            jobs=None if pool is None else jobs,
        )
    if outcome.study.running:
        typer.echo(
            f"{outcome.study.running} trials are in the hands of other processes; the last of "
            f"them writes what was found into {folder}",
            err=True,
        )
    page = None
    if not no_report and not outcome.study.running:
        with phase("writing the report"):
            page = write_tuning(outcome.plain(), folder / "report.html")
    if study_options.as_json:
        results_file = folder / "tune.json"
        typer.echo(results_file.read_text("utf-8") if page or results_file.is_file() else "{}")
        return
    commands = [command for winner in outcome.winners for command in winner.commands]
    print_tuning(outcome.plain(), folder)
    print_lines(*commands, result_line(folder, page))


def print_tuning(tuning: Mapping[str, Any], folder: Path) -> None:
    """Print what a tuning run tested, and what it found."""
    from ...reports.pages.tuning import tuning_text
    from ...reports.terminal.experiment_lines import lines_of_settings
    from .console import print_result

    settings = folder / TUNING
    text = settings.read_text("utf-8", errors="replace") if settings.is_file() else ""
    print_result(tuning_text(tuning, lines_of_settings(text)))


Watch = Callable[["TuneProgress"], None]
Confirming = Callable[[int, int], None]
Ended = Callable[[int, float], None]


@contextlib.contextmanager
def _display(
    folder: Path, settings: TuneSettings
) -> Iterator[tuple[Watch, Confirming, Ended | None]]:
    """Show a progress bar on an interactive terminal, otherwise lines."""
    if not sys.stderr.isatty():
        typer.echo(f"tuning into {folder}", err=True)
    columns = ("Bar", "MofNComplete", "configurations", "TimeElapsed", DESCRIPTION)
    with display(*columns) as change:
        line = ""
        change(completed=0, total=settings.trials, description=line)

        def watch(progress: TuneProgress) -> None:
            nonlocal line
            line = f"{progress.requests:,} requests"
            if progress.best:
                best = progress.best[0]
                values = ", ".join(f"{value:.4g}" for value in best.values or ())
                about = "about " if best.state == "lost" else ""
                line += f" · best {about}{values} (trial {best.number})"
            change(completed=progress.trials, total=progress.of_trials, description=line)

        def confirming(done: int, total: int) -> None:
            nonlocal line
            line = "confirming"
            change(completed=done, total=total, description=line)

        def ended(requests: int, clock_s: float) -> None:
            change(description=f"{line} · running, {requests:,} ended".removeprefix(" · "))

        yield watch, confirming, ended
