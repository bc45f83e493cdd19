"""Options shared by the `slo-bench tune` commands, and the tuning run that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...tuner.capacity.capacity_options import REAL_REQUESTS, SEEDS, SIMULATED_REQUESTS
from ...tuner.search.settings import SEARCHED
from ...workloads.errors import SloBenchError
from .declared import STORAGE
from .from_schema import Given
from .parameters import OUT, flag, option, option_group

if TYPE_CHECKING:
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.settings import TuneSettings


STATIC_SLO = "e2e=uniform(1,350)"


@option_group
class StudyOptions:
    """Options of the folder, Optuna storage and name of a study, and of the output."""

    storage: str | None = option(
        "URL",
        "Optuna storage (sqlite:///tune.db, postgresql://…, redis://…, a journal file). Default: "
        "a journal file in --out.",
        panel=STORAGE,
    )
    study: str | None = option(
        "NAME",
        "Name of the study in the storage; processes that use the same name share it. Default: "
        "the name of --out.",
        panel=STORAGE,
    )
    out: Path | None = option(
        "DIR", "Folder, empty or new. Default: a new one under runs.", *OUT, panel=STORAGE
    )
    as_json: bool = flag("Print only the results, as JSON.", "--json")


NOT_TUNED = (
    *("file", "suite", "sweep", "systems", "rates", "replay_speeds", "load_factors"),
    *("duration_s", "name", "variant"),
)
CHANGED = {
    "requests": {
        "panel": SEARCHED,
        "help": "Minimum number of requests in each cell of a search. Default: "
        f"{SIMULATED_REQUESTS}, on a real server {REAL_REQUESTS}.",
    },
    "seeds": {
        "panel": SEARCHED,
        "help": f"Number of seeds at each rate, the same for all configurations. Default: {SEEDS}.",
    },
}


def experiment_and_tuning(
    experiment_options: Given, tuning: Given, system: str | None, resumed: Path | None = None
) -> tuple[Experiment, TuneSettings]:
    """Return the experiment and the tuning settings from the options.

    Args:
        experiment_options: the options of the experiment.
        tuning: those of the tuning run.
        system: what is tuned, or None where a file or the folder says it.
        resumed: the folder to go on with.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.outcome import ASKED_FILE
    from ...tuner.search.settings import TuneSettings, load
    from .experiment_options import changed_experiment

    if resumed is not None:
        if not (resumed / ASKED_FILE).is_file():
            raise SloBenchError(f"there is nothing to resume in {resumed}: no {ASKED_FILE}")
        base, settings = load(resumed / ASKED_FILE)
    elif experiment_options.file is not None:
        base, settings = load(experiment_options.file)
    elif system is None:
        raise SloBenchError("say what is tuned: a system (slo-odbs), FILE.toml, or server")
    else:
        base, settings = Experiment(systems=(system,), **_slo_of(system)), TuneSettings()
    changes = dict(tuning.settings)
    if "objectives" in changes:
        changes.setdefault("sampler", "")
    settings = settings.changed(**changes) if changes else settings
    experiment = changed_experiment(base, experiment_options)
    chosen = (
        base.slo == experiment.slo == (STATIC_SLO,) and "slo" not in experiment_options.settings
    )
    if chosen and experiment_options.file is None and resumed is None:
        typer.echo(
            f"SLO: {STATIC_SLO} (UELLM, §3.6), because {system} returns a batch as a whole; choose "
            "another with --slo",
            err=True,
        )
    return experiment, settings


def _slo_of(system: str) -> dict[str, Any]:
    """The default SLO of a system, where it is not that of all: no static batch, which is returned
    when its longest answer is out, has its first tokens within a second.
    """
    from ...harness.core.policy import StaticPolicy
    from ...harness.policies.systems import system as named

    return {"slo": STATIC_SLO} if isinstance(named(system).policy, StaticPolicy) else {}
