"""A worker: gets trials from a study, claims their configurations, evaluates them and reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from ...harness.experiments.execution.workers import NotDoneError
from ...workloads.errors import SloBenchError
from ..capacity.capacity_options import SIMULATED_BUDGET
from .evaluate_configuration import (
    LEAST_RUNS,
    ConfigurationEvaluator,
    ConfigurationResult,
    PruningThreshold,
    gpus_of,
)
from .last_race import LAST_RACE_RUNS, LAST_RACE_SEEDS, LEAST_ROUNDS, last_race
from .runs import FAULTS, InfeasibleError, Runs
from .samplers import GRID_POINTS, MOST_GRID_POINTS, SAMPLERS, ByNumber
from .settings import CAPACITY, COST
from .space import Tuning, key_of
from .study_results import (
    CONFIGURATION,
    KEY,
    LAST_RACE,
    LAST_RACE_KEY,
    OWNER,
    PACE,
    PROOF,
    PROVED_KEY,
    SAME_AS,
    STANDINGS,
    VALUES,
    TrialRow,
    best_of,
    close_ones,
    counted,
    known_in_a_row,
    last_raced,
    note,
    noted,
    proposed,
    rivals_pace,
    rows_of,
    to_prove,
)
from .trial_leases import alive, claim, cut_trials, one_at_a_time, wait_again

PROOF_SHARE = 1 / 6  # of a budget, for the search of the leader's capacity
LAST_RACE_SHARE = 1 / 6  # of a budget of requests, for the last race
_STUCK = 10  # repeated proposals in a row, after which an untried one is drawn
_MOST_INFEASIBLE = 20  # and repeated ones, per trial


@dataclass(frozen=True)
class TuneProgress:
    """Progress of a study after a trial."""

    trials: int
    of_trials: int
    requests: int
    best: tuple[TrialRow, ...]


Watch = Callable[[TuneProgress], None]


@dataclass
class StudyWorker:
    """One process's work on a study. `alone`: all processes of the study share the folder."""

    study: Study
    tuning: Tuning
    evaluation: ConfigurationEvaluator
    name: str
    alone: bool
    progress: Watch | None

    def __post_init__(self) -> None:
        self._began_s = time.monotonic()

    def work(self) -> None:
        """Run trials until the budget is spent or no untried configuration is left."""
        with alive(self.study, self.name):
            self._work()

    def _work(self) -> None:
        while (trial := self._next()) is not None:
            self._evaluate(trial)
            if self.progress is not None:
                trials = self.study.get_trials(deepcopy=False)
                self.progress(
                    TuneProgress(
                        len(counted(trials)),
                        self.tuning.settings.trials,
                        _requests(trials),
                        best_of(trials, self.tuning.aim, estimated=True),
                    )
                )

    def _next(self) -> Trial | None:
        """An interrupted trial or a new one; None when the study is finished."""
        with one_at_a_time(self.evaluation.folder):
            for cut in cut_trials(self.study, unsigned=self.alone):
                wait_again(self.study, cut)
            trials = self.study.get_trials(deepcopy=False)
            waiting = [t for t in trials if t.state is TrialState.WAITING]
            begun = [t for t in trials if t.state is not TrialState.WAITING and proposed(t)]
            ended = self._spent(begun, trials) or self._exhausted()
            if not ended and not waiting:
                ended = not self._queue_untried(trials, stuck=known_in_a_row(begun) >= _STUCK)
            cut_before = any(noted(t, OWNER) or not proposed(t) for t in waiting)
            if ended and not cut_before:
                return self._begin_last_race(trials) or self._begin_proof(trials)
            trial = self.study.ask()
            note(trial, OWNER, self.name)
            return trial

    def _spent(self, begun: Sequence[FrozenTrial], trials: Sequence[FrozenTrial]) -> bool:
        trial_limit, tried = self.tuning.settings.trials, len(counted(begun))
        ended = tried >= trial_limit or len(begun) - tried >= _MOST_INFEASIBLE * trial_limit
        return ended or self._over_budget(trials)

    def _over_budget(self, trials: Sequence[FrozenTrial]) -> bool:
        """Whether only what is kept for the last race and the search of the leader's capacity is
        left of a budget.
        """
        most_requests = self.tuning.settings.max_requests
        if most_requests is not None:
            races_on = self.evaluation.races_on and len(close_ones(trials, self.tuning.aim)) > 1
            race_share = LAST_RACE_SHARE * races_on
            if _requests(trials) >= (1 - race_share) * most_requests - self._kept_requests:
                return True
        return self._over_time()

    def _over_time(self) -> bool:
        most_s = self.tuning.settings.max_time_s
        share = 1.0 - (PROOF_SHARE if CAPACITY in self.tuning.aim.names else 0.0)
        return most_s is not None and time.monotonic() - self._began_s >= share * most_s

    @property
    def _kept_requests(self) -> float:
        """Requests of the maximum that are kept for the search of the leader's capacity: a share,
        or what it needs at least, if that is not more than half.
        """
        most_requests = self.tuning.settings.max_requests
        if most_requests is None or CAPACITY not in self.tuning.aim.names:
            return 0.0
        least = LEAST_RUNS * self.evaluation.requests
        return max(PROOF_SHARE * most_requests, min(least, most_requests / 2))

    def _begin_proof(self, trials: Sequence[FrozenTrial]) -> Trial | None:
        """Begin the search of a leader's capacity; None if there is none to search, or others are
        still at work: the last of them does it.

        The default is searched, too, unless a budget has ended the study.
        """
        rows = self._unproved(trials)
        if not rows or any(t.state is TrialState.RUNNING for t in trials):
            return None
        values = rows[0].values
        assert values is not None
        return self._begun(rows[0], {PROOF: values[self.tuning.aim.names.index(CAPACITY)]})

    def _begun(self, row: TrialRow, attrs: dict[str, Any]) -> Trial:
        """A trial of a known configuration with those attributes. It never waits in the queue,
        where another process could take it.
        """
        template = create_trial(
            state=TrialState.RUNNING,
            system_attrs={"fixed_params": dict(row.configuration)},  # as enqueue_trial has it
            user_attrs=attrs,
        )
        trial_id = self.study._storage.create_new_trial(self.study._study_id, template)
        trial = Trial(self.study, trial_id)
        note(trial, OWNER, self.name)
        return trial

    def _begin_last_race(self, trials: Sequence[FrozenTrial]) -> Trial | None:
        """Begin the race of the configurations that are close to the leader; None where there are
        none, they have raced, or what is left of a budget does not suffice.
        """
        if not self.evaluation.races_on or any(t.state is TrialState.RUNNING for t in trials):
            return None
        close = close_ones(trials, self.tuning.aim)
        if not close or last_raced(trials) is not None:
            return None
        pace = self._pace(trials, close[0].figures["gpus"])
        if pace is None or self._over_time():
            return None
        run_requests = pace.requests[-1]
        most_requests = LAST_RACE_RUNS * run_requests
        if self.tuning.settings.max_requests is not None:
            left = self.tuning.settings.max_requests - _requests(trials) - self._kept_requests
            most_requests = int(min(left, SIMULATED_BUDGET))
        unlike = {self.evaluation.runs_of(row.configuration).results: row for row in close[::-1]}
        racers = max(most_requests, 0) // (LEAST_ROUNDS * run_requests)
        racing = [row for row in close if row in unlike.values()][:racers]
        if len(racing) < 2:
            return None
        attrs = {"trials": [row.number for row in racing], "most_requests": most_requests}
        return self._begun(racing[0], {LAST_RACE: attrs})

    def _race_on(self, trial: Trial) -> None:
        """Race the close ones, and note how they stand."""
        trials = [t for t in self.study.get_trials(deepcopy=False) if t.number != trial.number]
        rows, race = rows_of(trials), trial.user_attrs[LAST_RACE]
        runs = {k: self.evaluation.runs_of(rows[k].configuration) for k in race["trials"]}
        pace = self._pace(trials, rows[race["trials"][0]].figures["gpus"])
        assert pace is not None
        try:
            estimates_rps = last_race(
                runs,
                pace,
                target=self.tuning.aim.target,
                first_seed=self.evaluation.options.first_seed + LAST_RACE_SEEDS,
                most_requests=race["most_requests"],
            )
        except NotDoneError:
            raise  # as in other trials
        except SloBenchError as error:  # the races decide, as without it
            self._tell_unusable(trial, error)
            return
        note(trial, STANDINGS, [(k, rps, runs[k].requests) for k, rps in estimates_rps.items()])
        self.study.tell(trial, estimates_rps[race["trials"][0]])

    def leaves_a_proof(self) -> bool:
        """Whether the capacity of a leader is still to be searched: it was left to another process,
        which has ended its last trial since.
        """
        return bool(self._unproved(self.study.get_trials(deepcopy=False)))

    def _unproved(self, trials: Sequence[FrozenTrial]) -> list[TrialRow]:
        default = not self._over_budget(trials)
        return to_prove(trials, self.tuning.aim, default=default)

    def _exhausted(self) -> bool:
        sampler = self.study.sampler
        assert isinstance(sampler, ByNumber)
        return sampler.exhausted(self.study)

    def _queue_untried(self, trials: Sequence[FrozenTrial], *, stuck: bool) -> bool:
        """Queue an untried neighbour of the leader, if the sampler has a model of its own, or of
        any trial where the study is stuck; False if it is and no untried one is left.
        """
        tried = {noted(trial, KEY) for trial in trials}
        moves = self.tuning.settings.sampler == "tpe"
        leaders = best_of(trials, self.tuning.aim, estimated=True) if moves else ()
        untried = [
            neighbour
            for row in (rows_of(trials).values() if stuck else leaders)
            for neighbour in self.tuning.space.neighbours(
                row.configuration, MOST_GRID_POINTS if stuck else GRID_POINTS
            )
            if key_of(neighbour) not in tried
        ]
        if untried:
            rng = np.random.default_rng((self.tuning.settings.sampler_seed, len(trials)))
            self.study.enqueue_trial(dict(untried[rng.integers(len(untried))]))
        return bool(untried) or not stuck

    def _evaluate(self, trial: Trial) -> None:
        configuration = self.tuning.space.suggest(trial)
        note(trial, CONFIGURATION, dict(configuration))
        key, near_rps = key_of(configuration), trial.user_attrs.get(PROOF)
        if near_rps is not None:
            key = PROVED_KEY.format(key)
        elif LAST_RACE in trial.user_attrs:
            key = LAST_RACE_KEY.format(trial.user_attrs[LAST_RACE])
        same = claim(self.study, trial, key)
        if same is not None:
            trial.set_user_attr(SAME_AS, same.number)
            self._tell_again(trial, same)
            return
        if LAST_RACE in trial.user_attrs:
            self._race_on(trial)
            return
        try:
            runs = self.evaluation.runs_of(configuration)
        except InfeasibleError as error:
            self._tell_unusable(trial, error)
            return
        # Without itself: it may have been cut between its pace and its end.
        trials = [t for t in self.study.get_trials(deepcopy=False) if t.number != trial.number]
        gpus = gpus_of(runs.spec)
        try:
            worth = self.evaluation.worth(
                runs,
                pace=self._pace(trials, gpus),
                prove=near_rps is not None or not self._races,
                near_rps=near_rps,
                most_requests=self._left(trials) if self._races else None,
                fewest_gpus=self._fewest_gpus(trials),
                report=self._reporter(trial),
            )
        except NotDoneError:
            raise  # the trial is interrupted without a result
        except SloBenchError as error:
            self.evaluation.servers.stop()
            self._note_requests(trial, runs)
            self._tell_unusable(trial, error)
            return
        self._note_requests(trial, runs)
        trial.set_user_attr("wall_s", round(runs.wall_s, 3))
        self._tell(trial, worth)

    @staticmethod
    def _note_requests(trial: Trial, runs: Runs) -> None:
        trial.set_user_attr("requests", runs.requests)
        if faults := runs.faults:
            trial.set_user_attr(FAULTS, faults)

    def _tell_unusable(self, trial: Trial, reason: SloBenchError | str) -> None:
        """A pruned trial without a value is the worst to a sampler; of a failed one it would learn
        nothing.
        """
        infeasible = isinstance(reason, InfeasibleError)
        trial.set_user_attr("infeasible" if infeasible else "failed", str(reason))
        self.study.tell(trial, state=TrialState.PRUNED)

    def _reporter(self, trial: Trial) -> Callable[[int, float], bool]:
        """A function that reports intermediate values to Optuna; it returns whether to prune."""
        if self.tuning.aim.single is None:
            return lambda step, value: False

        reported = trial.storage.get_trial(trial._trial_id).intermediate_values
        last = max(reported, default=-1)  # it was cut after that

        def report(step: int, value: float) -> bool:
            if step not in reported:
                trial.report(value, step)
            return self.tuning.aim.names != (CAPACITY,) and step >= last and trial.should_prune()

        return report

    def _tell(self, trial: Trial, worth: ConfigurationResult) -> None:
        for name, value in worth.figures.items():
            trial.set_user_attr(name, value)
        if worth.pace is not None:
            note(trial, PACE, vars(worth.pace))
        if self.tuning.aim.must_attain and not worth.lost:
            trial.set_constraint("attainment", worth.missed)
        if worth.lost:
            trial.set_user_attr("lost", True)
        if any(map(math.isnan, worth.values)):
            self._tell_unusable(trial, "an objective has no value: nothing was served")
            return
        note(trial, VALUES, list(worth.values))
        kind = SAMPLERS[self.tuning.settings.sampler]
        single = self.tuning.aim.single is not None
        if worth.lost and single and kind.learns_from_pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, list(worth.values))

    def _tell_again(self, trial: Trial, same: FrozenTrial) -> None:
        for step, value in same.intermediate_values.items():
            trial.report(value, step)
        for name, value in same.constraints.items():
            trial.set_constraint(name, value)
        if same.state is TrialState.COMPLETE:
            assert same.values is not None
            self.study.tell(trial, same.values)
        else:  # it is still running
            ended = same.state.is_finished()
            self.study.tell(trial, state=same.state if ended else TrialState.PRUNED)

    @property
    def _races(self) -> bool:
        """Whether configurations are compared by races; else a lower capacity may be worth it."""
        return not set(self.tuning.aim.names) - {CAPACITY, COST}

    def _pace(self, trials: Sequence[FrozenTrial], gpus: int) -> PruningThreshold | None:
        """The leader that a configuration with that number of GPUs must beat."""
        return rivals_pace(trials, gpus) if self._races else None

    def _left(self, trials: Sequence[FrozenTrial]) -> int | None:
        """Requests that are left for a search; it gets those that were kept for it at least."""
        most_requests = self.tuning.settings.max_requests
        if most_requests is None:
            return None
        return round(max(most_requests - _requests(trials), self._kept_requests))

    def _fewest_gpus(self, trials: Sequence[FrozenTrial]) -> int | None:
        best = best_of(trials, self.tuning.aim) if self.tuning.aim.names == (COST,) else ()
        return best[0].figures["gpus"] if best else None


def _requests(trials: Sequence[FrozenTrial]) -> int:
    """Requests of all trials."""
    return sum(row.requests for row in rows_of(trials).values())
