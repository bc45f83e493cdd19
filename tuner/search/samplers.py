"""Optuna's samplers by their common names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna import samplers
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.extras import need
from .dimension import Dimension, Value

_STARTUP = 10  # configurations at random before a model of them is trusted
_POPULATION = 20
GRID_POINTS = 5  # of a range that has no steps
MOST_GRID_POINTS = 20_000

MakeSampler = Callable[[int, Sequence[Dimension]], BaseSampler]


@dataclass(frozen=True)
class SamplerKind:
    """A sampler: `make` takes a seed; `several`: it handles several objectives; `numbers`: only
    numeric ranges.

    `learns_from_pruned`: it uses pruned trials; for the others such a trial counts as finished,
    with its estimated value. `extra` is the one that it needs.
    """

    make: MakeSampler
    several: bool = True
    numbers: bool = False
    learns_from_pruned: bool = True
    extra: str | None = None


class ByNumber(BaseSampler):
    """A sampler whose draws depend on the number of the trial, not on earlier draws.

    An interrupted study therefore continues with the same draws, and processes that share a study
    draw different values.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed

    def exhausted(self, study: Study) -> bool:
        """Whether every point of a grid was tried; nothing else is ever exhausted."""
        sampler = self._make(self._seed)
        return isinstance(sampler, Grid) and sampler.is_exhausted(study)

    def _of(self, trial: FrozenTrial, *words: str) -> BaseSampler:
        text = repr((self._seed, trial.number, *words))
        return self._make(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Seed the sampler with the trial's number."""
        self._of(trial).before_trial(study, trial)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The search space of the wrapped sampler."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw parameters together, by the wrapped sampler."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter; others of the trial may have been drawn before an interruption."""
        sampler = self._of(trial, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Report the trial's values to the wrapped sampler."""
        self._of(trial).after_trial(study, trial, state, values)


class Grid(samplers.GridSampler):
    """Optuna's grid for studies with an ask-and-tell loop, which ends without an exception.

    Grid points are the same in every process; the seed determines the order.
    """

    def __init__(self, dimensions: Sequence[Dimension], seed: int) -> None:
        super().__init__(grid_of(dimensions), seed=0)
        self._rng.rng.seed(seed)

    def after_trial(self, *args: Any, **kwargs: Any) -> None:
        """Optuna's own would stop `Study.optimize`, which is not what runs here."""


def _optuna(kind: Callable[..., BaseSampler], **settings: Any) -> MakeSampler:
    """Makes one of Optuna's samplers, which need not know the dimensions."""
    return lambda seed, dimensions: kind(seed=seed, **settings)


SAMPLERS: Mapping[str, SamplerKind] = {
    "tpe": SamplerKind(
        _optuna(
            samplers.TPESampler, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True
        )
    ),
    "gp": SamplerKind(
        _optuna(samplers.GPSampler, n_startup_trials=_STARTUP),
        learns_from_pruned=False,
        extra="torch",
    ),
    "cmaes": SamplerKind(
        _optuna(
            samplers.CmaEsSampler,
            n_startup_trials=1,
            consider_pruned_trials=True,
            warn_independent_sampling=False,
        ),
        several=False,
        numbers=True,
    ),
    "nsga2": SamplerKind(
        _optuna(samplers.NSGAIISampler, population_size=_POPULATION), learns_from_pruned=False
    ),
    "random": SamplerKind(_optuna(samplers.RandomSampler)),
    "grid": SamplerKind(lambda seed, dimensions: Grid(dimensions, seed)),
}


def checked(name: str, dimensions: Sequence[Dimension], objectives: int) -> SamplerKind:
    """The sampler of that name, if it can search this.

    Raises:
        SloBenchError: it is unknown, not installed, or made for something else.
    """
    if name not in SAMPLERS:
        raise UnknownNameError("sampler", name, SAMPLERS)
    kind = SAMPLERS[name]
    if kind.extra is not None:
        need(kind.extra, f"the sampler {name}")
    if objectives > 1 and not kind.several:
        raise SloBenchError(
            f"the sampler {name} takes one objective, but there are {objectives}; use nsga2 or tpe"
        )
    words = [d.name for d in dimensions if d.choices is not None and len(d.choices) > 1]
    if kind.numbers and words:
        raise SloBenchError(
            f"the sampler {name} searches numbers, but {words[0]} is one of several words; fix it "
            f"(--set {words[0]}=…), or use tpe"
        )
    if name == "grid":
        grid_of(dimensions)
    return kind


def grid_of(dimensions: Sequence[Dimension]) -> dict[str, list[Value]]:
    """The values of each dimension, of a range without steps a few.

    Raises:
        SloBenchError: there are too many combinations.
    """
    grid = {dimension.name: list(dimension.points(GRID_POINTS)) for dimension in dimensions}
    count = math.prod(len(values) for values in grid.values())
    if count > MOST_GRID_POINTS:
        raise SloBenchError(
            f"the grid has {count:,} points, more than {MOST_GRID_POINTS:,}; search fewer "
            "dimensions or values (--search), or use another sampler"
        )
    return grid
