"""A tuning run: an Optuna study in a folder, until the budget is spent.

tune.toml      experiment and settings; running it again gives the same study
study.journal  the study in Optuna's format (unless another storage was given)
study.json     the study's storage
runs/          all runs of all configurations
tune.json      results; winner*.toml: configurations to use
confirm/       runs with new seeds and on other workloads
ablation/      runs of the winners with one parameter at its default
alone/         a run of the default almost without load

What can be checked without a trial is checked before the first one (`prepared`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.study import Study

from ...harness.experiments.execution.cell_specs import WorkloadSpec, source
from ...harness.experiments.execution.workers import WorkerPool, check_jobs, together
from ...harness.experiments.experiment import Experiment, backend_of, new_folder
from ...harness.policies.systems import DEFAULT_SYSTEM, system
from ...harness.results.run_checkpoint import check_settings
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ...workloads.whole_file import write_whole
from ..capacity.capacity_cells import Ended
from ..capacity.capacity_options import CapacityOptions
from ..capacity.search_options import SearchOptions
from .confirm import Confirming
from .evaluate_configuration import ConfigurationEvaluator, cell_of, gpus_of, unmet_alone
from .outcome import ASKED_FILE, TuningOutcome, concluded, on_backend
from .runs import Servers
from .samplers import SAMPLERS, ByNumber, checked
from .settings import CAPACITY, COST, TuneSettings, text_of
from .space import Tuning, counts_gpus, space_of
from .storage import JOURNAL, STUDY_FILE, StudyLocation, opened, quiet, study_location, within_reach
from .study_results import study_results
from .study_worker import PROOF_SHARE, StudyWorker, TuneProgress, Watch
from .trial_leases import new_name, one_at_a_time

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
    confirming: Confirming = lambda done, total: None,
    ended: Ended | None = None,
    warn: Callable[[str], None] = lambda line: None,
    say: Callable[[str], None] = lambda line: None,
    pool: WorkerPool | None = None,
    jobs: int | None = None,
) -> TuningOutcome:
    """Search for the best configuration and write the results to the folder.

    Several processes may work on one study: those of one folder with `resume`, those of several
    machines with the same `storage` and `study_name`.

    Args:
        experiment: one system under one load.
        settings: objectives, search space, sampler and budget.
        out: the folder, empty or new; by default a new one under `runs/`.
        storage: an Optuna storage by URL; by default a journal file in the folder. The folder
            records it and the name, for `resume`.
        study_name: the name in the storage; by default that of the folder.
        resume: continue the study in `out`, or join other processes in it.
        progress: called after every trial.
        confirming: called with (configurations done, total) as winners are confirmed.
        ended: called within a run with (requests ended, clock in seconds).
        warn: called before the first trial with what is wrong with the question: an SLO that the
            default misses almost without load.
        say: called with what goes on with a real server: it starts, it is probed, it stops.
        pool: processes that simulate: a `LocalPool`, or `OnRay().pool()`.
        jobs: trials at once with a pool; by default the pool's size.

    Raises:
        SloBenchError: settings are invalid, the folder or the storage cannot be used, or no
            configuration could be evaluated.
    """
    tune_settings = settings or TuneSettings()
    tuning = prepared(experiment, tune_settings)
    _check_pool(experiment, pool, jobs)
    folder = Path(out) if out is not None else new_folder(f"tune-{tuning.space.system}")
    if resume and not (folder / ASKED_FILE).is_file():
        raise SloBenchError(f"there is nothing to resume in {folder}: no {ASKED_FILE}")
    if not resume and not _is_new(folder):
        raise SloBenchError(
            f"{folder} is not empty; continue it with --resume, or choose another folder with --out"
        )
    place = study_location(folder, storage, study_name, resume=resume)
    with quiet(), within_reach(place, folder), opened(place.storage, folder) as kept:
        _write_asked(folder, experiment, tune_settings, place)
        with one_at_a_time(folder):
            for unfinished in folder.glob(".*.[0-9]*.part"):
                unfinished.unlink()  # of a process that was killed; the lock excludes other writers
            study = _study(kept, place.study, tuning, alone=place.storage is None)
        with Servers(folder / "servers", say=say) as servers:
            evaluation = ConfigurationEvaluator(
                tuning.experiment,
                tuning.space,
                tuning.aim,
                tune_settings.tolerance,
                folder,
                servers,
                ended,
                pool,
                max_search_s=tune_settings.max_time_s and tune_settings.max_time_s * PROOF_SHARE,
            )
            watch = None if progress is None else _one_by_one(progress)
            alone = dataclasses.replace(evaluation, folder=folder / "alone", ended=None, pool=None)
            if (unmet := unmet_alone(alone)) is not None:
                warn(unmet)

            at_once = 1 if pool is None else min(jobs or pool.at_once, tune_settings.trials)
            workers = [
                StudyWorker(study, tuning, evaluation, new_name(), place.storage is None, watch)
                for _ in range(at_once)
            ]
            left = True
            while left:
                if pool is None:
                    workers[0].work()
                else:
                    together([worker.work for worker in workers], pool)
                left = workers[0].leaves_a_proof()
                results = study_results(study, tuning.aim, tuning.space)
                left = left and not results.running
        if results.running:  # the last process concludes
            return TuningOutcome(folder, tuning.experiment, tune_settings, results, (), ())
        return concluded(evaluation, tune_settings, results, confirming)


def _check_pool(experiment: Experiment, pool: WorkerPool | None, jobs: int | None) -> None:
    check_jobs(jobs)
    if pool is None and jobs is not None:
        raise SloBenchError(
            "jobs are trials at once in a pool: give one, or continue the same study in another "
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
    """Whether the folder has no settings yet; a process that was killed may have left a journal."""
    begun = (JOURNAL, STUDY_FILE)
    return not folder.is_dir() or all(
        path.name in begun or path.name.startswith(".") for path in folder.iterdir()
    )


def _write_asked(
    folder: Path, experiment: Experiment, settings: TuneSettings, place: StudyLocation
) -> None:
    """Write the settings last: their file marks a folder that can be resumed."""
    path = folder / ASKED_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        place.write(folder)
        write_whole(path, [text_of(experiment, settings).encode()])


def _study(storage: optuna.storages.BaseStorage, name: str, tuning: Tuning, alone: bool) -> Study:
    """The study, created or loaded. `alone`: no other process is setting it up."""
    settings, aim = tuning.settings, tuning.aim
    kind = SAMPLERS[settings.sampler]
    sampler = ByNumber(lambda seed: kind.make(seed, tuning.space.dimensions), settings.sampler_seed)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_STARTUP)
    settings_text = text_of(tuning.experiment, settings, budget=False)
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
        _set_up(study, tuning, settings_text)
    else:
        remedy = "choose another folder (--out) or another name (--study)"
        check_settings(Path(ASKED_FILE), before, settings_text, f"the study {name}", remedy)
    return study


def _asked_before(study: Study, patience_s: float) -> str | None:
    until_s = time.monotonic() + patience_s
    while (before := study.user_attrs.get(_ASKED)) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return before


def _set_up(study: Study, tuning: Tuning, settings_text: str) -> None:
    """Set the settings attribute last: it marks a study that is complete."""
    trials = study.get_trials(deepcopy=False)
    if any("default" not in trial.user_attrs for trial in trials):
        raise SloBenchError(
            f"the study {study.study_name} was not made by slo-bench: choose another name (--study)"
        )
    study.set_metric_names(list(tuning.aim.names))
    default = tuning.space.default
    if default is not None and not trials:
        study.enqueue_trial(dict(default), user_attrs={"default": True})
    study.set_user_attr(_ASKED, settings_text)


def prepared(experiment: Experiment, settings: TuneSettings) -> Tuning:
    """Check everything that can be checked without a trial.

    Raises:
        SloBenchError: see `Tuning`.
    """
    experiment.refuse_variants("tune")
    if len(experiment.systems) != 1:
        raise SloBenchError(f"tuning needs one system, not {len(experiment.systems)}")
    if experiment.backend == "openai":
        raise SloBenchError(
            "settings of a running server cannot be changed: let `tune server` start it"
        )
    aim = settings.aim(experiment)
    if CAPACITY in aim.names:  # what a search would refuse is refused before the first server
        options = CapacityOptions(targets=(aim.target,), tolerance=settings.tolerance)
        SearchOptions.of(experiment, options)
    gpus = _gpus(experiment)
    space = space_of(experiment, settings.search, gpus)
    counting = counts_gpus(space)
    if counting and experiment.gpus == (None,) and COST not in aim.names:
        named = [name for name in counting if name in settings.search]
        if named and "instances" in named:
            raise SloBenchError(
                "more instances always carry more: give the number of GPUs (--gpus), or add "
                "the objective cost"
            )
        if experiment.backend == SIMULATED:
            experiment = _with_gpus(experiment, gpus)
    if COST in aim.names:
        if not counting:
            raise SloBenchError(
                "cost is the number of GPUs, but nothing that is searched changes it: search "
                "instances or tp (--search instances=1..8)"
            )
        if experiment.gpus != (None,):
            raise SloBenchError(
                "cost is the number of GPUs, and gpus is set: leave --gpus out, or cost"
            )
    checked(settings.sampler, space.dimensions, len(aim.objectives))
    for workload in settings.confirm_workloads:
        reading = {n: getattr(experiment, n) for n in ("trace_format", "trace_columns")}
        source(WorkloadSpec(workload, **reading))
    if settings.confirm_backend is not None:
        _check_backend(experiment, settings.confirm_backend)
    return Tuning(experiment, settings, aim, space)


def _gpus(experiment: Experiment) -> int:
    """Number of GPUs: the experiment's, or that of the default configuration.

    Raises:
        SloBenchError: the default does not fit, for another reason than its number of instances.
    """
    if experiment.gpus == (None,) or system(experiment.systems[0]).cluster is None:
        return gpus_of(cell_of(experiment, "default"))
    one_server = {"systems": (DEFAULT_SYSTEM,), "parameters": {}}
    table = experiment.model_dump(exclude_unset=True) | one_server
    return gpus_of(cell_of(Experiment(**table), "default"))


def _check_backend(experiment: Experiment, backend: str) -> None:
    if experiment.backend != SIMULATED:
        raise SloBenchError(f"this is tuned on {experiment.backend} already: leave --confirm out")
    real = on_backend(experiment, backend)
    backend_of(real).check(cell_of(real, "confirm"))


def _with_gpus(experiment: Experiment, gpus: int) -> Experiment:
    """The experiment on a fixed number of GPUs, so that configurations can be compared."""
    table = experiment.model_dump(exclude_unset=True) | {"gpus": (gpus,)}
    if table.get("instances", (None,)) != (None,):
        table["instances"] = (None,)
    return Experiment(**table)
