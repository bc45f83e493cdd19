"""The last race: the configurations that are close to the leader run on, until one is left or the
requests are spent.

Races of configurations are short, so a leader may lead by luck. Here all runs are at one rate, the
leader's capacity as far as it is known, and all have the same requests, of seeds that chose nobody
before. After each stage the better half runs on, so that most is spent on those that are hard to
tell apart (sequential halving; Z. Karnin, T. Koren & O. Somekh, Almost optimal exploration in
multi-armed bandits, ICML 2013); who is clearly behind drops out at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..capacity.capacity_search import three_digits
from ..capacity.level_samples import LevelRunner, LevelSample
from .evaluate_configuration import (
    PruningThreshold,
    from_target,
    gained_by_batch,
    logit,
    moved,
)

LAST_RACE_RUNS = 40  # in all, where the study has no budget of requests
LAST_RACE_SEEDS = 600_000  # away from those of searches and races
LEAST_ROUNDS = 2  # of all, for which the requests must suffice
_OUT_SIGMAS = 3.0  # standard errors of a difference; batches in a row are alike
_APPROACHES, _OFF_LOGITS, _WIDEST_MOVE = 3, 0.3, 0.1  # of the rate to the leader's capacity
_LEAST_SLOPE = 10.0  # that an approach trusts, so that it goes not too far


def last_race(
    runners: Mapping[int, LevelRunner],
    pace: PruningThreshold,
    *,
    target: float,
    first_seed: int,
    most_requests: int,
) -> dict[int, float]:
    """The estimated capacity of each by trial, best first, as soon as one is left or the requests
    are spent.

    Args:
        runners: of the configurations by trial, the leader first.
        pace: the leader's, with its estimated capacity and the slope there.
        target: share of the requests that must meet their SLO.
        first_seed: of runs that chose none of them.
        most_requests: that all runs may take, with those by which the rate is found.
    """
    requests, leader = pace.requests[-1], next(iter(runners))
    rate_rps, spent, seed = three_digits(pace.estimate_rps), 0, first_seed
    for _ in range(_APPROACHES):
        away = from_target([runners[leader].run(rate_rps, seed, requests)], target)
        if abs(away) <= _OFF_LOGITS:
            break
        move = min(max(away / max(pace.slope, _LEAST_SLOPE), -_WIDEST_MOVE), _WIDEST_MOVE)
        rate_rps, spent = three_digits(moved(rate_rps, move)), spent + requests
    runs: dict[int, list[LevelSample]] = {trial: [] for trial in runners}
    racing = list(runners)
    while len(racing) > 1:
        half = math.ceil(len(racing) / 2)
        affordable = (most_requests - spent) // (len(racing) * requests)
        stage_requests = affordable // math.ceil(math.log2(len(racing))) * len(racing) * requests
        ends_at = spent + max(stage_requests, len(racing) * requests)
        if not affordable:
            break
        while len(racing) > 1 and spent + len(racing) * requests <= ends_at:
            for trial in racing:
                runs[trial].append(runners[trial].run(rate_rps, seed, requests))
            spent, seed = spent + len(racing) * requests, seed + 1
            racing.sort(key=lambda trial: -sum(run.met for run in runs[trial]))
            leader, *others = racing
            racing = [leader, *(t for t in others if not _out(runs[t], runs[leader]))]
        racing = racing[:half]
    best_rps = moved(rate_rps, from_target(runs[leader], target) / pace.slope)

    def estimate_rps(trial: int) -> float:
        behind = _logit_of(runs[leader][: len(runs[trial])]) - _logit_of(runs[trial])
        return moved(best_rps, -max(behind, 0.0) / pace.slope)

    order = sorted(
        runs, key=lambda trial: (trial != leader, -len(runs[trial]), -estimate_rps(trial))
    )
    return {trial: estimate_rps(trial) for trial in order}


def _out(runs: list[LevelSample], leaders: list[LevelSample]) -> bool:
    """Whether a configuration is clearly behind the leader, or has done the very same twice."""
    gained, error = gained_by_batch([r.batch_met for r in runs], [r.batch_met for r in leaders])
    the_same = len(runs) > 1 and not gained.any()
    return the_same or bool(gained.sum() + _OUT_SIGMAS * error < 0)


def _logit_of(runs: list[LevelSample]) -> float:
    return logit(sum(run.met for run in runs), sum(run.counted for run in runs))
