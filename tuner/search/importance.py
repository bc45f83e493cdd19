"""Importance of each dimension for the objective, by Optuna's PED-ANOVA or fANOVA.

PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023) compares the best tenth of the trials to the
others, and needs no regression trees. fANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014) splits the
variance over the whole space; Optuna's needs scikit-learn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from ...workloads.errors import SloBenchError

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
    if evaluator == "fanova" and find_spec("sklearn") is None:
        raise SloBenchError(
            "importances by fanova need scikit-learn: pip install 'slo-bench[regressors]'"
        )
    known = [
        create_trial(
            params=trial.params,
            distributions=trial.distributions,
            value=value,
            state=TrialState.COMPLETE,
        )
        for trial, value in zip(trials, values, strict=True)
        if math.isfinite(value) and trial.params
    ]
    if len(known) < LEAST_TRIALS or len({trial.value for trial in known}) < 2:
        return {}
    study = optuna.create_study(direction="maximize" if maximise else "minimize")
    study.add_trials(known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are marked experimental
        chosen: optuna.importance.BaseImportanceEvaluator = (
            optuna.importance.FanovaImportanceEvaluator(seed=0)
            if evaluator == "fanova"
            else optuna.importance.PedAnovaImportanceEvaluator()
        )
        found = optuna.importance.get_param_importances(study, evaluator=chosen)
    return {name: float(share) for name, share in found.items()}
