"""The options of `slo-bench tune` that are no settings, and what all of them ask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...tuner.capacity.asked import REAL_REQUESTS, SEEDS, SIMULATED_REQUESTS
from ...tuner.search.settings import SEARCHED
from ...workloads.errors import SloBenchError
from .declared import STORAGE
from .from_schema import Given

if TYPE_CHECKING:
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.settings import TuneSettings

Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Any Optuna storage (sqlite:///tune.db, postgresql://…, redis://…, a journal file). "
        "Default: a journal file in --out.",
        rich_help_panel=STORAGE,
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of the study in the storage; processes that name the same one share it. Default: "
        "the name of --out.",
        rich_help_panel=STORAGE,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder, empty or new. Default: a new one under runs.",
        rich_help_panel=STORAGE,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with what --out holds, or help another process that works there.",
        rich_help_panel=STORAGE,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.html.", rich_help_panel=STORAGE)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print all that was found as JSON, and nothing else."),
]
NOT_TUNED = (
    "file",
    "suite",
    "sweep",
    "systems",
    "rates",
    "replay_speeds",
    "load_factors",
    "duration_s",
    "name",
)
CHANGED = {
    "requests": {
        "panel": SEARCHED,
        "help": f"The least in a run of a search. Default: {SIMULATED_REQUESTS}, on a real server "
        f"{REAL_REQUESTS}.",
    },
    "seeds": {
        "panel": SEARCHED,
        "help": "Runs of a rate, each with a seed of its own, the same for all configurations. "
        f"Default: {SEEDS}.",
    },
}


def asked_of(
    given: Given, tuning: Given, system: str | None, resumed: Path | None = None
) -> tuple[Experiment, TuneSettings]:
    """The experiment and the settings that options ask for.

    Args:
        given: the options of the experiment.
        tuning: those of the tuning run.
        system: what is tuned, or None where a file or the folder says it.
        resumed: the folder to go on with.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.outcome import ASKED_FILE
    from ...tuner.search.settings import TuneSettings
    from ...tuner.search.tune_file import load
    from .experiment import changed_experiment

    if resumed is not None:
        if not (resumed / ASKED_FILE).is_file():
            raise SloBenchError(f"there is nothing to resume in {resumed}: no {ASKED_FILE}")
        base, settings = load(resumed / ASKED_FILE)
    elif given.file is not None:
        base, settings = load(given.file)
    elif system is None:
        raise SloBenchError("say what is tuned: a system (slo-odbs), FILE.toml, or server")
    else:
        base, settings = Experiment(systems=(system,)), TuneSettings()
    changes = dict(tuning.settings)
    if "objectives" in changes:
        changes.setdefault("sampler", "")
    settings = settings.changed(**changes) if changes else settings
    return changed_experiment(base, given), settings
