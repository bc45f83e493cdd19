"""A tuning run: a study in a folder, trial after trial, until the budget is spent.

tune.toml      what was asked; running it again asks the same
study.journal  the study, as Optuna keeps it (unless another storage was named)
study.json     where the study is kept
runs/          every run of every configuration, so that none is made twice
tune.json      what was found; winner*.toml, the configurations to use
confirm/       the runs on fresh seeds and other workloads
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.study import Study

from ...harness.experiments.execution.workers import Pool, together
from ...harness.experiments.experiment import Experiment, new_folder
from ...harness.results.run_folder import write_whole
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import FileFormatError, SloBenchError
from .confirm import Confirming
from .evaluate import Evaluation
from .outcome import ASKED_FILE, Outcome, concluded
from .prepare import Tuning, prepared
from .runs import Ended
from .samplers import SAMPLERS, ByNumber
from .serving import Servers
from .settings import TuneSettings
from .storage import JOURNAL, opened, quiet
from .study_location import FILE as PLACE_FILE
from .study_location import Place, place_of, within_reach
from .study_results import found_in
from .trial_leases import alive, new_name, one_at_a_time
from .tune_file import text_of
from .worker import TuneProgress, Watch, Worker

_ASKED = "asked"
_SETTING_UP_S = 10.0  # whoever made a study and has not set it up after that is gone
_MEDIAN_STARTUP = 5


def tune(
    experiment: Experiment,
    settings: TuneSettings | None = None,
    out: str | Path | None = None,
    *,
    storage: str | None = None,
    study_name: str | None = None,
    resume: bool = False,
    progress: Watch | None = None,
    confirming: Confirming = lambda done, of: None,
    ended: Ended | None = None,
    pool: Pool | None = None,
    jobs: int | None = None,
) -> Outcome:
    """Search for the best configuration; what is found stands in the folder.

    Several processes may work on one study: those of one folder with `resume`, those of several
    machines by naming the same `storage` and `study_name`.

    Args:
        experiment: one system under one load.
        settings: what is asked.
        out: the folder, empty or new; by default a new one under `runs`.
        storage: an Optuna storage by URL; by default a journal file in the folder. Both this and
            the name are remembered in the folder, for `resume`.
        study_name: in the storage; by default the name of the folder.
        resume: go on with what is in `out`, or help whoever works there.
        progress: called after every trial.
        confirming: called as winners are confirmed with (configurations done, of how many).
        ended: called within a run with (requests ended, clock in seconds).
        pool: where runs are simulated instead: a `PoolHere`, or `OnRay().pool()`.
        jobs: trials at once with a pool; by default as many as it has room for.

    Raises:
        SloBenchError: something does not fit, the folder or the storage cannot be used, or no
            configuration could be evaluated.
    """
    asked = settings or TuneSettings()
    made = prepared(experiment, asked)
    _check_pool(experiment, pool, jobs)
    folder = Path(out) if out is not None else new_folder(f"tune-{made.space.system}")
    if resume and not (folder / ASKED_FILE).is_file():
        raise SloBenchError(f"there is nothing to go on with in {folder}: no {ASKED_FILE}")
    if not resume and not _is_new(folder):
        raise SloBenchError(
            f"{folder} is not empty; go on with what is there with --resume, "
            "or choose another folder with --out"
        )
    place = place_of(folder, storage, study_name, resume=resume)
    with quiet(), within_reach(place, folder), opened(place.storage, folder) as kept:
        _write_asked(folder, experiment, asked, place)
        with one_at_a_time(folder):
            for unfinished in folder.glob(".*.[0-9]*.part"):
                unfinished.unlink()  # of a process that was killed: nobody else writes here now
            study = _study(kept, place.study, made, alone=place.storage is None)
        with Servers(folder / "servers") as servers:
            evaluation = Evaluation(
                made.experiment, made.space, made.aim, asked.tolerance, folder, servers, ended, pool
            )
            watch = None if progress is None else _one_by_one(progress)

            def work() -> None:
                name = new_name()
                with alive(study, name):
                    Worker(study, made, evaluation, name, place.storage is None, watch).work()

            if pool is None:
                work()
            else:
                together([work] * min(jobs or pool.at_once, asked.trials), pool)
        found = found_in(study, made.aim, made.space)
        if found.running:  # whoever ends last concludes
            return Outcome(folder, made.experiment, asked, found, (), ())
        return concluded(
            made.experiment, asked, found, folder, ended=ended, progress=confirming, pool=pool
        )


def _check_pool(experiment: Experiment, pool: Pool | None, jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise SloBenchError(f"jobs must be at least 1 but is {jobs}")
    if pool is None and jobs is not None:
        raise SloBenchError(
            "jobs are trials at once in a pool: give one, or go on with the same study in another "
            "shell (slo-bench tune --resume --out DIR)"
        )
    if pool is not None and experiment.backend != SIMULATED:
        raise SloBenchError(
            f"trials on {experiment.backend} belong to the machine that has the server: leave "
            "--executor and --jobs out"
        )


def _one_by_one(watch: Watch) -> Watch:
    lock = threading.Lock()

    def told(progress: TuneProgress) -> None:
        with lock:
            watch(progress)

    return told


def _is_new(folder: Path) -> bool:
    """Whether nobody has said what is asked there; one that was killed before may have begun."""
    begun = (JOURNAL, PLACE_FILE)
    return not folder.is_dir() or all(
        path.name in begun or path.name.startswith(".") for path in folder.iterdir()
    )


def _write_asked(
    folder: Path, experiment: Experiment, settings: TuneSettings, place: Place
) -> None:
    """What is asked comes last, for whoever goes on looks for that."""
    path = folder / ASKED_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        place.write(folder)
        write_whole(path, [text_of(experiment, settings).encode()])


def _study(storage: optuna.storages.BaseStorage, name: str, made: Tuning, alone: bool) -> Study:
    """The study, made or found. `alone`: nobody is setting it up just now."""
    settings, aim = made.settings, made.aim
    kind = SAMPLERS[settings.sampler]
    sampler = ByNumber(lambda seed: kind.make(seed, made.space.dimensions), settings.sampler_seed)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_STARTUP)
    asked = text_of(made.experiment, settings, budget=False)
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=sampler,
            pruner=pruner,
            directions=["maximize" if o.maximise else "minimize" for o in aim.objectives],
        )
        before = None
    except DuplicatedStudyError:
        study = optuna.load_study(study_name=name, storage=storage, sampler=sampler, pruner=pruner)
        before = _asked_before(study, 0.0 if alone else _SETTING_UP_S)
    if before is None:
        _set_up(study, made, asked)
    elif before != asked:
        _tell_difference(name, before, asked)
    return study


def _asked_before(study: Study, patience_s: float) -> str | None:
    until_s = time.monotonic() + patience_s
    while (before := study.user_attrs.get(_ASKED)) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return before


def _set_up(study: Study, made: Tuning, asked: str) -> None:
    """What it asks comes last, so that it is all there once that is."""
    trials = study.get_trials(deepcopy=False)
    if any("default" not in trial.user_attrs for trial in trials):
        raise SloBenchError(
            f"the study {study.study_name} is none of slo-bench's: choose another name (--study)"
        )
    study.set_metric_names(list(made.aim.names))
    default = made.space.default
    if default is not None and not trials:
        study.enqueue_trial(dict(default), user_attrs={"default": True})
    study.set_user_attr(_ASKED, asked)


def _tell_difference(name: str, before: str, asked: str) -> None:
    old_lines, new_lines = before.splitlines(), asked.splitlines()
    for number in range(max(len(old_lines), len(new_lines))):
        old = old_lines[number] if number < len(old_lines) else "(nothing)"
        new = new_lines[number] if number < len(new_lines) else "(nothing)"
        if old != new:
            raise FileFormatError(
                ASKED_FILE,
                number + 1,
                f"the study {name} asks something else: it has {old!r} where this has {new!r}; "
                "choose another folder (--out) or another name (--study)",
            )
