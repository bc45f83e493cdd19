"""Results of a study so far: its trials as rows, the best or the front, and the importances.

The importance of each dimension for the objective is Optuna's PED-ANOVA or fANOVA. PED-ANOVA
(Watanabe, Bansal and Hutter, IJCAI 2023) compares the best tenth of the trials to the others, and
needs no regression trees. fANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014) splits the variance
over the whole space; Optuna's needs scikit-learn.

Few trials give importances that are mostly chance, so they are computed again for resampled trials,
and only those that stay above an even split are kept.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from ...workloads.errors import SloBenchError
from ...workloads.extras import need
from ..capacity.search_options import SearchOutcome
from .evaluate_configuration import PruningThreshold
from .settings import CAPACITY, Aim
from .space import Configuration, Space

KEY = "key"
OWNER = "owner"
BEGUN = "begun"
PACE = "leads"  # of a trial that won its race: the threshold that it sets
VALUES = "values"
CONFIGURATION = "configuration"
SAME_AS = "same_as"
PROOF = "proof"  # attribute of a trial that searches the capacity of one: the race's estimate
PROVED_KEY = "{}:proved"  # the key of that trial
LAST_RACE = "last_race"  # attribute of a trial that races close ones on: them, and its requests
LAST_RACE_KEY = "last race of {0[trials]} with {0[most_requests]} requests"
STANDINGS = "standings"  # of that trial: trial, estimated capacity and requests, the best first
_OWN = "slo_bench:"
_DONE = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


FINISHED, UNDECIDED = "finished", SearchOutcome.UNDECIDED.value
LOST = "lost"
_UNUSABLE = ("failed", "infeasible")
# Times by which the estimate of one that races on is at most below the best: rates differ.
_NEAR = 2.0


@dataclass(frozen=True)
class TrialRow:
    """One trial. `state`: best and front ones are `finished` like others; `lost` ones were raced
    out, overtaken or pruned, and their values are estimates; `failed` and `infeasible` have a
    `reason`.
    """

    number: int
    state: str
    configuration: Configuration
    values: tuple[float, ...] | None
    default: bool
    requests: int
    figures: Mapping[str, Any]
    reason: str | None = None


@dataclass(frozen=True)
class StudyResults:
    """All trials in order, the best ones (one, or a front), and what mattered by objective."""

    aim: Aim
    space: Space
    trials: tuple[TrialRow, ...]
    best: tuple[TrialRow, ...]
    importances: Mapping[str, Mapping[str, tuple[float, float, float]]]
    running: int = 0  # trials that other processes are at work on

    @property
    def default(self) -> TrialRow | None:
        """The trial of the default configuration, if it is a point of the space."""
        return next((row for row in self.trials if row.default), None)

    @property
    def requests(self) -> int:
        """Total requests of all trials."""
        return sum(row.requests for row in self.trials)


def note(trial: Trial, name: str, value: Any) -> None:
    """Write an internal attribute of a trial; results for users are user attributes."""
    trial.storage.set_trial_system_attr(trial._trial_id, _OWN + name, value)


def noted(trial: FrozenTrial, name: str) -> Any:
    """An internal attribute of a trial; None if it is not set."""
    return trial.system_attrs.get(_OWN + name)


def unlike(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that can be deployed and repeat no other."""
    return [t for t in trials if not {SAME_AS, "infeasible"} & t.user_attrs.keys()]


def proposed(trial: FrozenTrial) -> bool:
    """Whether a sampler proposed the trial; else it runs known configurations on."""
    return not {PROOF, LAST_RACE} & trial.user_attrs.keys()


def counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that count: each configuration that can be deployed once."""
    return [t for t in unlike(trials) if proposed(t)]


def evaluated(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that have ended, each configuration once."""
    return [t for t in counted(trials) if t.state in _DONE]


def known_in_a_row(trials: Sequence[FrozenTrial]) -> int:
    """Number of trials at the end of the study that are repeated or infeasible."""
    news = {t.number for t in counted(trials)}
    old = itertools.takewhile(lambda t: t.number not in news, reversed(trials))
    return sum(1 for _ in old)


def rivals_pace(trials: Sequence[FrozenTrial], gpus: int) -> PruningThreshold | None:
    """The threshold of the leader among configurations with at most `gpus` GPUs, of those that did
    not fail later.
    """
    unusable = {row.number for row in rows_of(trials).values() if row.state in _UNUSABLE}
    paces = [
        PruningThreshold.of_plain(plain)
        for t in trials
        if (plain := noted(t, PACE)) is not None and t.number not in unusable
    ]
    rivals = [pace for pace in paces if pace.gpus <= gpus]
    return max(rivals, key=lambda pace: pace.estimate_rps, default=None)


def rows_of(trials: Sequence[FrozenTrial]) -> dict[int, TrialRow]:
    """Rows of the configurations that were evaluated, by trial. Where one raced on, or the capacity
    of one that led was searched, the row has that result.
    """
    ended = [t for t in trials if t.state in _DONE and SAME_AS not in t.user_attrs]
    proofs = {noted(t, KEY): t for t in ended if PROOF in t.user_attrs}
    rows = {
        t.number: _row(t, proofs.get(PROVED_KEY.format(noted(t, KEY)), t))
        for t in ended
        if proposed(t)
    }
    for number, estimate_rps, requests in (s for t in ended for s in noted(t, STANDINGS) or ()):
        if number in rows:
            row = rows[number]
            values = (estimate_rps,) if row.state == LOST else row.values
            rows[number] = replace(row, values=values, requests=max(row.requests, requests))
    return rows


def last_raced(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The trial of the last race; None where there is none, or others were tried since."""
    last = max((t.number for t in counted(trials)), default=0)
    races = [t for t in trials if t.number > last and LAST_RACE in t.user_attrs]
    return races[-1] if races else None


def study_results(study: Study, aim: Aim, space: Space) -> StudyResults:
    """Collect the results of a study so far."""
    trials = study.get_trials(deepcopy=False)
    best = best_of(trials, aim)
    rows = {number: _capped(row, best, aim) for number, row in rows_of(trials).items()}
    return StudyResults(
        aim,
        space,
        tuple(rows.values()),
        best,
        _importances(evaluated(trials), rows, aim),
        sum(trial.state is TrialState.RUNNING for trial in trials),
    )


def _capped(row: TrialRow, best: Sequence[TrialRow], aim: Aim) -> TrialRow:
    """The row with an estimate of its capacity no higher than the best that was searched."""
    if row.state != LOST or row.values is None or CAPACITY not in aim.names:
        return row
    place = aim.names.index(CAPACITY)
    searched = [o.values[place] for o in best if o.values is not None and o.state == FINISHED]
    most_rps = max(searched, default=math.inf)  # a bound of an undecided search limits nothing
    value = min(row.values[place], most_rps)
    return replace(row, values=(*row.values[:place], value, *row.values[place + 1 :]))


def best_of(
    trials: Sequence[FrozenTrial], aim: Aim, *, estimated: bool = False
) -> tuple[TrialRow, ...]:
    """The best so far: one, or the Pareto front; of equal trials the first, of those in a last race
    its winner. None before any was searched to the end, unless what races have `estimated` counts.
    """
    rows = rows_of(trials)
    counting = (FINISHED, UNDECIDED, *([LOST] if estimated and CAPACITY in aim.names else []))
    finished = [
        row
        for trial in evaluated(trials)
        if (row := rows[trial.number]).state in counting
        and all(value <= 0 for value in trial.constraints.values())
    ]
    if aim.single is None:
        front = [row for row in finished if not any(_dominates(o, row, aim) for o in finished)]
        distinct = {row.values: row for row in reversed(front)}
        return tuple(sorted(distinct.values(), key=lambda row: row.values or ()))
    sign = -1.0 if aim.single.maximise else 1.0
    race = last_raced(trials)
    standings = [] if race is None else noted(race, STANDINGS) or []
    ranks = {number: rank for rank, (number, *_) in enumerate(standings)}

    def order(row: TrialRow) -> tuple[float, float, float, int]:
        assert row.values is not None
        # Of equal cost, the one that serves more of the requests in time.
        attained = float(row.figures.get("attainment", 0.0)) if aim.must_attain else 0.0
        return ranks.get(row.number, math.inf), sign * row.values[0], -attained, row.number

    return tuple(sorted(finished, key=order)[:1])


def to_prove(trials: Sequence[FrozenTrial], aim: Aim, *, default: bool) -> list[TrialRow]:
    """The best configurations by their races, and then the `default`, whose capacity is still to be
    searched. Those of which the search failed are left out, so that the next best ones follow.
    """
    if CAPACITY not in aim.names:
        return []
    rows = rows_of(trials)
    usable = [t for t in evaluated(trials) if rows[t.number].state not in _UNUSABLE]
    races = [t for t in trials if LAST_RACE in t.user_attrs]
    leaders = best_of((*usable, *races), aim, estimated=True)
    defaults = (row for row in rows.values() if default and row.default)
    return [row for row in (*leaders, *defaults) if rows[row.number].state == LOST]


def close_ones(trials: Sequence[FrozenTrial], aim: Aim) -> list[TrialRow]:
    """The leader of a study for the capacity, and whoever may be as good by the races: near former
    leaders and those that lost within the error of a race; the best first.
    """
    rows, led = rows_of(trials), {t.number for t in trials if noted(t, PACE) is not None}
    leaders = best_of(trials, aim, estimated=True)

    def raced_rps(row: TrialRow) -> float:
        return float(row.figures.get("raced_rps", (row.values or (0.0,))[0]))

    near_rps = max(map(raced_rps, leaders), default=0.0) / _NEAR
    close = [
        row
        for row in rows.values()
        if row.values is not None
        and row.state not in _UNUSABLE
        and (row in leaders or row.number in led or row.figures.get("close"))
        and raced_rps(row) >= near_rps
    ]

    return sorted(close, key=lambda row: (row not in leaders, -raced_rps(row), row.number))


def _row(trial: FrozenTrial, result: FrozenTrial) -> TrialRow:
    """The row of a trial with what it, or the search of its capacity, found."""
    attrs = dict(result.user_attrs)
    values = noted(result, VALUES)
    if "infeasible" in attrs:
        state = "infeasible"
    elif "failed" in attrs:
        state = "failed"
    elif attrs.get("lost") or noted(result, PACE) is not None:
        state = LOST
    elif attrs.get("outcome") == UNDECIDED:
        state = UNDECIDED
    else:
        state = FINISHED
    own_columns = ("default", "requests", "failed", "infeasible", "lost", PROOF)
    return TrialRow(
        trial.number,
        state,
        noted(trial, CONFIGURATION) or trial.params,
        None if values is None else tuple(values),
        bool(trial.user_attrs.get("default")),
        int(attrs.get("requests", 0)),
        {name: v for name, v in attrs.items() if name not in own_columns},
        attrs.get("infeasible") or attrs.get("failed"),
    )


def _dominates(row: TrialRow, other: TrialRow, aim: Aim) -> bool:
    assert row.values is not None
    assert other.values is not None
    pairs = list(zip(aim.objectives, row.values, other.values, strict=True))
    worse = any(aim.better(objective, b, a) for objective, a, b in pairs)
    return not worse and any(aim.better(objective, a, b) for objective, a, b in pairs)


def _importances(
    ended: Sequence[FrozenTrial], rows: Mapping[int, TrialRow], aim: Aim
) -> dict[str, dict[str, tuple[float, float, float]]]:
    shares_of = {}
    for place, objective in enumerate(aim.objectives):
        values = [
            math.nan if (row := rows[trial.number]).values is None else row.values[place]
            for trial in ended
        ]
        if objective.name == CAPACITY:  # a lower bound says nothing of what matters
            undecided = [rows[trial.number].state == UNDECIDED for trial in ended]
            values = np.where(undecided, math.nan, values).tolist()
        shares_of[objective.name] = stable_importances(ended, values, maximise=objective.maximise)
    return shares_of


RESAMPLES = 60
_RANGE = (5, 95)  # percentiles of the resampled shares


def stable_importances(
    trials: Sequence[FrozenTrial], values: Sequence[float], *, maximise: bool
) -> dict[str, tuple[float, float, float]]:
    """Importances that resampling confirms: share, and its 90 % range over resampled trials.

    Kept are parameters whose range lies above the share that each would have by an even split. The
    share is the median.
    """
    rng = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {name: [] for trial in trials for name in trial.params}
    if len(drawn) < 2 or not importances(trials, values, maximise=maximise):
        return {}
    for _ in range(RESAMPLES):
        chosen = rng.integers(len(trials), size=len(trials))
        shares = importances(
            [trials[k] for k in chosen], [values[k] for k in chosen], maximise=maximise
        )
        for name, shares_drawn in drawn.items():
            shares_drawn.append(shares.get(name, 0.0))
    kept = {}
    for name, shares_drawn in drawn.items():
        low, high = np.percentile(shares_drawn, _RANGE)
        if low > 1 / len(drawn):
            kept[name] = (float(np.median(shares_drawn)), float(low), float(high))
    return dict(sorted(kept.items(), key=lambda item: -item[1][0]))


LEAST_TRIALS = 8
EVALUATORS = ("ped-anova", "fanova")


def importances(
    trials: Sequence[FrozenTrial],
    values: Sequence[float],
    *,
    maximise: bool,
    evaluator: str = "ped-anova",
) -> dict[str, float]:
    """Share of the importance by name, the largest first; empty if there are too few trials.

    Args:
        trials: evaluated and pruned trials.
        values: each trial's value of the objective; NaN where there is none.
        maximise: whether larger values are better.
        evaluator: one of `EVALUATORS`.

    Raises:
        SloBenchError: the evaluator is unknown or not installed.
    """
    if evaluator not in EVALUATORS:
        raise SloBenchError(f"importances are by {' or '.join(EVALUATORS)}, not {evaluator!r}")
    if evaluator == "fanova":
        need("regressors", "importances by fanova")
    usable = [
        create_trial(
            params=trial.params,
            distributions=trial.distributions,
            value=value,
            state=TrialState.COMPLETE,
        )
        for trial, value in zip(trials, values, strict=True)
        if math.isfinite(value) and trial.params
    ]
    if len(usable) < LEAST_TRIALS or len({trial.value for trial in usable}) < 2:
        return {}
    study = optuna.create_study(direction="maximize" if maximise else "minimize")
    study.add_trials(usable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are marked experimental
        chosen: optuna.importance.BaseImportanceEvaluator = (
            optuna.importance.FanovaImportanceEvaluator(seed=0)
            if evaluator == "fanova"
            else optuna.importance.PedAnovaImportanceEvaluator()
        )
        share_of = optuna.importance.get_param_importances(study, evaluator=chosen)
    return {name: float(share) for name, share in share_of.items()}
