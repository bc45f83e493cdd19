"""A tuning run: a study in a folder, trial after trial, until the budget is spent.

tune.toml      what was asked; running it again asks the same
study.journal  the study, as Optuna keeps it (unless another storage was named)
study.json     where the study is kept
runs/          every run of every configuration, so that none is made twice
tune.json      what was found; winner*.toml, the configurations to use
confirm/       the runs on fresh seeds and other workloads
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ...harness.cells import WorkloadSpec, source
from ...harness.experiment import Experiment, new_folder
from ...harness.schema import SIMULATED
from ...harness.store import write_whole
from ...harness.systems import system
from ...harness.workers import NotDoneError, Pool, together
from ...workloads.errors import FileFormatError, SloBenchError
from .claims import alive, claim, cut_trials, new_name, one_at_a_time, wait_again
from .confirm import Confirming
from .evaluate import Evaluation, InfeasibleError, Worth, cell_of, gpus_of
from .found import (
    CONFIGURATION,
    KEY,
    OWNER,
    PACE,
    SAME_AS,
    VALUES,
    TrialRow,
    best_of,
    counted,
    evaluated,
    found_in,
    known_in_a_row,
    note,
    noted,
    rivals_pace,
)
from .objectives import CAPACITY, COST, Aim
from .outcome import Outcome, concluded, on_backend
from .place import FILE as PLACE_FILE
from .place import Place, place_of, within_reach
from .race import Pace
from .runs import Ended
from .samplers import SAMPLERS, ByNumber, checked
from .serving import Servers
from .settings import TuneSettings, text_of
from .space import Space, counts_gpus, key_of, space_of
from .storage import JOURNAL, opened, quiet

ASKED_FILE = "tune.toml"
_ASKED = "asked"
_SETTING_UP_S = 10.0  # whoever made a study and has not set it up after that is gone
_STUCK = 10  # proposals in a row that were known already: then one that nobody tried
_MEDIAN_STARTUP = 5
_MOST_INFEASIBLE = 20  # and repeated ones, for each trial that was asked for


@dataclass(frozen=True)
class TuneProgress:
    """How far a study is, after every trial."""

    trials: int
    of_trials: int
    requests: int
    best: tuple[TrialRow, ...]


Watch = Callable[[TuneProgress], None]


@dataclass(frozen=True)
class Tuning:
    """What is tuned, checked before anything runs.

    Raises:
        SloBenchError: the experiment, the space and the settings do not fit each other.
    """

    experiment: Experiment
    settings: TuneSettings
    aim: Aim
    space: Space


def prepared(experiment: Experiment, settings: TuneSettings) -> Tuning:
    """Check everything that can be checked without a trial.

    Raises:
        SloBenchError: see `Tuning`.
    """
    if len(experiment.systems) != 1:
        raise SloBenchError(f"tuning is about one system, not {len(experiment.systems)}")
    if experiment.backend == "http":
        raise SloBenchError(
            "a server that runs already cannot be given other settings: let `tune server` start it"
        )
    if any("concurrency" in arrivals for arrivals in experiment.arrivals):
        raise SloBenchError("concurrency(…) has no rate to tune for; choose other arrivals")
    aim = settings.aim
    gpus = _gpus(experiment)
    space = space_of(experiment, settings.search, gpus)
    counting = counts_gpus(space)
    if counting and experiment.gpus == (None,) and COST not in aim.names:
        named = [name for name in counting if name in settings.search]
        if named and "instances" in named:
            raise SloBenchError(
                "more instances always carry more: say how many GPUs there are (--gpus), or add "
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
        source(WorkloadSpec(workload, trace_format=experiment.trace_format))
    if settings.confirm_backend is not None:
        _check_backend(experiment, settings.confirm_backend)
    return Tuning(experiment, settings, aim, space)


def _gpus(experiment: Experiment) -> int:
    """How many there are, or how many the default takes.

    Roles that do not fit so many GPUs are no obstacle: others are searched.

    Raises:
        SloBenchError: anything else does not fit.
    """
    if experiment.gpus == (None,) or system(experiment.systems[0]).cluster is None:
        return gpus_of(cell_of(experiment, "default"))
    table = experiment.model_dump(exclude_unset=True) | {"systems": ("vllm",), "knobs": {}}
    return gpus_of(cell_of(Experiment(**table), "default"))


def _check_backend(experiment: Experiment, backend: str) -> None:
    from ...harness.backends.choose import backend_of

    if experiment.backend != SIMULATED:
        raise SloBenchError(f"this is tuned on {experiment.backend} already: leave --confirm out")
    real = on_backend(experiment, backend)
    backend_of(real).check(cell_of(real, "confirm"))


def _with_gpus(experiment: Experiment, gpus: int) -> Experiment:
    """The same on a fixed number of GPUs, so that configurations compare."""
    table = experiment.model_dump(exclude_unset=True) | {"gpus": (gpus,)}
    if table.get("instances", (None,)) != (None,):
        table["instances"] = (None,)
    return Experiment(**table)


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
        pool: where runs are simulated instead, as in `OnRay().pool()`.
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
                    _Worker(study, made, evaluation, name, place.storage is None, watch).work()

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
            "jobs are trials at once on a cluster: add --executor ray, or go on with the same "
            "study in another shell (slo-bench tune --resume --out DIR)"
        )
    if pool is not None and experiment.backend != SIMULATED:
        raise SloBenchError(
            f"trials on {experiment.backend} belong to the machine that has the server: leave "
            "--executor out"
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


class _Worker:
    """One process's work on a study."""

    def __init__(
        self,
        study: Study,
        made: Tuning,
        evaluation: Evaluation,
        name: str,
        alone: bool,
        progress: Watch | None,
    ) -> None:
        self._study = study
        self._made = made
        self._evaluation = evaluation
        self._name = name
        self._alone = alone  # all processes of the study share the folder
        self._progress = progress
        self._began_s = time.monotonic()

    def work(self) -> None:
        """Trial after trial until nothing is left to do."""
        while (trial := self._next()) is not None:
            self._evaluate(trial)
            if self._progress is not None:
                trials = self._study.get_trials(deepcopy=False)
                self._progress(
                    TuneProgress(
                        len(counted(trials)),
                        self._made.settings.trials,
                        sum(t.user_attrs.get("requests", 0) for t in trials),
                        best_of(trials, self._made.aim),
                    )
                )

    def _next(self) -> Trial | None:
        """A trial that was cut, or a new one; None: enough."""
        with one_at_a_time(self._evaluation.folder):
            for cut in cut_trials(self._study, unsigned=self._alone):
                wait_again(self._study, cut)
            trials = self._study.get_trials(deepcopy=False)
            waiting = any(trial.state is TrialState.WAITING for trial in trials)
            begun = [trial for trial in trials if trial.state is not TrialState.WAITING]
            goes_on = waiting and any(
                trial.state is TrialState.WAITING and noted(trial, OWNER) for trial in trials
            )
            if not goes_on and (self._spent(begun) or self._exhausted()):
                return None
            stuck = not waiting and known_in_a_row(begun) >= _STUCK
            if stuck and not self._queue_untried(trials):
                return None
            trial = self._study.ask()
            note(trial, OWNER, self._name)
            return trial

    def _spent(self, begun: Sequence[FrozenTrial]) -> bool:
        settings = self._made.settings
        tried = counted(begun)
        infeasible = len(begun) - len(tried)
        if len(tried) >= settings.trials or infeasible >= _MOST_INFEASIBLE * settings.trials:
            return True
        requests = sum(trial.user_attrs.get("requests", 0) for trial in begun)
        if settings.max_requests is not None and requests >= settings.max_requests:
            return True
        spent_s = time.monotonic() - self._began_s
        return settings.max_time_s is not None and spent_s >= settings.max_time_s

    def _exhausted(self) -> bool:
        sampler = self._study.sampler
        assert isinstance(sampler, ByNumber)
        return sampler.exhausted(self._study)

    def _queue_untried(self, trials: Sequence[FrozenTrial]) -> bool:
        tried = [key for trial in trials if (key := noted(trial, KEY)) is not None]
        rng = np.random.default_rng((self._made.settings.sampler_seed, len(trials)))
        untried = self._made.space.untried(tried, rng)
        if untried is None:
            return False
        self._study.enqueue_trial(dict(untried))
        return True

    def _evaluate(self, trial: Trial) -> None:
        configuration = self._made.space.suggest(trial)
        note(trial, CONFIGURATION, dict(configuration))
        same = claim(self._study, trial, key_of(configuration))
        if same is not None:
            trial.set_user_attr(SAME_AS, same.number)
            self._tell_again(trial, same)
            return
        try:
            runs = self._evaluation.runs_of(configuration)
        except InfeasibleError as error:
            trial.set_user_attr("infeasible", str(error))
            self._study.tell(trial, state=TrialState.PRUNED)
            return
        # Without itself: it may have been cut between its pace and its end.
        trials = [t for t in self._study.get_trials(deepcopy=False) if t.number != trial.number]
        try:
            worth = self._evaluation.worth(
                runs,
                trial=trial.number,
                pace=self._pace(trials, gpus_of(runs.spec)),
                fewest_gpus=self._fewest_gpus(trials),
                report=self._reporter(trial),
            )
        except NotDoneError:
            raise  # the trial is cut, and nothing is known of it
        except SloBenchError as error:
            self._evaluation.servers.stop()
            trial.set_user_attr("failed", str(error))
            trial.set_user_attr("requests", runs.requests)
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_user_attr("requests", runs.requests)
        trial.set_user_attr("wall_s", round(runs.wall_s, 3))
        self._tell(trial, worth)

    def _reporter(self, trial: Trial) -> Callable[[int, float], bool]:
        """Tells Optuna of a value on the way; it says whether to prune."""
        if self._made.aim.single is None:
            return lambda step, value: False

        known = trial.storage.get_trial(trial._trial_id).intermediate_values
        last = max(known, default=-1)  # it was cut after that

        def report(step: int, value: float) -> bool:
            if step not in known:
                trial.report(value, step)
            return self._made.aim.names != (CAPACITY,) and step >= last and trial.should_prune()

        return report

    def _tell(self, trial: Trial, worth: Worth) -> None:
        for name, value in worth.figures.items():
            trial.set_user_attr(name, value)
        if worth.pace is not None:
            note(trial, PACE, worth.pace.plain())
        if self._made.aim.must_attain and not worth.lost:
            trial.set_constraint("attainment", worth.missed)
        if worth.lost:
            trial.set_user_attr("lost", True)
        if any(map(math.isnan, worth.values)):
            trial.set_user_attr("failed", "an objective has no value: nothing was served")
            self._study.tell(trial, state=TrialState.FAIL)
            return
        note(trial, VALUES, list(worth.values))
        kind = SAMPLERS[self._made.settings.sampler]
        single = self._made.aim.single is not None
        if worth.lost and single and kind.learns_from_pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, list(worth.values))

    def _tell_again(self, trial: Trial, same: FrozenTrial) -> None:
        for step, value in same.intermediate_values.items():
            trial.report(value, step)
        for name, value in same.constraints.items():
            trial.set_constraint(name, value)
        if same.state is TrialState.COMPLETE:
            assert same.values is not None
            self._study.tell(trial, same.values)
        else:  # of one that is under way nothing is known yet
            ended = same.state.is_finished()
            self._study.tell(trial, state=same.state if ended else TrialState.PRUNED)

    def _pace(self, trials: Sequence[FrozenTrial], gpus: int) -> Pace | None:
        """What a configuration on so many GPUs must beat in capacity to be of any use."""
        if set(self._made.aim.names) - {CAPACITY, COST}:
            return None  # a lower capacity may be worth it
        return rivals_pace(trials, gpus)

    def _fewest_gpus(self, trials: Sequence[FrozenTrial]) -> int | None:
        if self._made.aim.names != (COST,):
            return None
        met = [
            trial.user_attrs["gpus"]
            for trial in evaluated(trials)
            if trial.state is TrialState.COMPLETE and max(trial.constraints.values()) <= 0
        ]
        return min(met, default=None)
