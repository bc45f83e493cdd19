"""AdaptiveLLM's eight regressors, each on polynomials of the features (§3.2, Tables 5 and 6).

They learn from steps with their measured times (`Samples`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...workloads.arrays import Floats, Mask
from ...workloads.errors import SloBenchError
from ..profiles.formulas import FORMULAS
from ..profiles.least_squares import non_negative
from ..profiles.observations import Observations, observations, placement_of
from ..profiles.profile_format import Profile

LEAST_ROWS = 30
_WHOLE_DRAWS = 4
_WHOLE_SHARE = 0.1


@dataclass(frozen=True)
class Samples:
    """Steps of one or several profiles.

    `features` has a column each for layers, hidden size per GPU, tokens, tokens before them, batch
    size and KV tokens each: the paper's four (layers, hidden size, tokens of a request, batch
    size), and the two lengths that its own samples hold constant. Tensor
    parallelism divides the hidden size; pipeline parallelism changes nothing (AdaptiveLLM, §6).
    `operators`: what each operator would take at the hardware's peak, from the same analysis as
    §3.2 (linear layers by tokens, attention by pairs, ...), seconds.
    """

    features: Floats
    operators: Floats
    steps: Observations

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, rows: Mask) -> Samples:
        return Samples(self.features[rows], self.operators[rows], self.steps[rows])

    @property
    def seconds(self) -> Floats:
        """Measured seconds of each step."""
        return self.steps.seconds


def samples(profiles: Sequence[Profile]) -> Samples:
    """All steps that the tables of these profiles tell the time of.

    Raises:
        SloBenchError: a profile makes no whole steps, or all together make too few.
    """
    parts = [described(profile, observations(profile)) for profile in profiles]
    sample_rows = Samples(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.operators for part in parts]),
        Observations.joined([part.steps for part in parts]),
    )
    if len(sample_rows) < LEAST_ROWS:
        raise SloBenchError(
            f"the profile of {profiles[0].label} makes {len(sample_rows)} steps, too few to learn "
            f"from ({LEAST_ROWS} are needed)"
        )
    return sample_rows


def described(profile: Profile, steps: Observations, tp: int | None = None) -> Samples:
    """Steps of the profile's model, on `tp` GPUs if that is not the profile's own degree."""
    if tp is not None:
        profile = dataclasses.replace(profile, tp=tp)
    spec = placement_of(profile).model
    each = steps.kv_tokens / np.maximum(1, steps.sequences)
    features = np.column_stack(
        [
            np.full(len(steps), spec.layers),
            np.full(len(steps), spec.hidden / profile.tp),
            steps.chunk_tokens,
            steps.context_tokens,
            steps.sequences + steps.chunks,
            each,
        ]
    )
    return Samples(features, FORMULAS["nine"].terms(profile, steps), steps)


def random_rows(count: int, share: float, rng: np.random.Generator) -> Mask:
    """A share of the rows, at random."""
    return rng.random(count) < share


def whole_sizes(steps: Observations, rng: np.random.Generator) -> Iterator[Mask]:
    """Every row of some batch sizes and some lengths, a few times drawn anew.

    A tenth of the inner values of each, at least one: the least and the most stay, what lies
    beyond them is another question.
    """
    each = np.round(steps.kv_tokens / np.maximum(1, steps.sequences))
    columns = (steps.chunk_tokens, steps.context_tokens, steps.sequences, each)
    for _ in range(_WHOLE_DRAWS):
        gone = np.zeros(len(steps), dtype=np.bool_)
        for column in columns:
            inner = np.unique(column)[1:-1]
            if len(inner):
                chosen = rng.choice(inner, max(1, round(_WHOLE_SHARE * len(inner))), replace=False)
                gone |= np.isin(column, chosen)
        if gone.any() and not gone.all():
            yield gone


Target = Literal["ratio", "seconds"]
Scale = Literal["log", "raw"]

DEGREES = (1, 2)
REGRESSORS = ("linear", "tree", "forest", "ridge", "lasso", "elastic", "boosting", "knn")


@dataclass(frozen=True)
class Setting:
    """A regressor, the degree of its polynomials, its target and the scale of its features.

    `target`: `seconds` of a step, as published; `ratio` of the seconds to those of the operators
    (non-negative coefficients, fitted on the same rows), whose logarithm is learned. `scale`:
    features as they are, as published, or their logarithms; both are standardised.
    """

    regressor: str
    degree: int
    target: Target
    scale: Scale = "log"

    def scaled(self, features: Floats) -> Floats:
        """The features on this scale."""
        return np.log1p(features) if self.scale == "log" else features


def settings(degrees: Sequence[int] = DEGREES) -> list[Setting]:
    """Every regressor with these degrees: both targets of logarithms, and seconds of raw features.

    Raises:
        SloBenchError: a degree that is not from 1 to 10.
    """
    if not degrees or min(degrees) < 1 or max(degrees) > 10:
        raise SloBenchError(f"degrees must be from 1 to 10 but are {list(degrees)}")
    kinds: tuple[tuple[Target, Scale], ...] = (
        *(("ratio", "log"), ("seconds", "log")),
        ("seconds", "raw"),
    )
    return [Setting(r, d, *kind) for kind in kinds for r in REGRESSORS for d in degrees]


@dataclass(frozen=True)
class TrainedRegressor:
    """A regressor after its training."""

    setting: Setting
    _model: Any
    _coefficients: Floats  # of the operators
    _scale: tuple[float, float]  # of what it learned

    def predict(self, samples: Samples) -> Floats:
        """Predicted seconds of each step."""
        mean, deviation = self._scale
        raw = self._model.predict(self.setting.scaled(samples.features)) * deviation + mean
        if self.setting.target == "seconds":
            return np.asarray(raw)
        return np.asarray(np.exp(raw) * (samples.operators @ self._coefficients))


def learn(setting: Setting, sample_rows: Samples, seed: int = 0) -> TrainedRegressor:
    """Train on all rows of `sample_rows`."""
    coefficients = np.zeros(sample_rows.operators.shape[1])
    if setting.target == "seconds":
        target = sample_rows.seconds
    else:
        weighed = sample_rows.operators / sample_rows.seconds[:, None]
        coefficients = non_negative(weighed, np.ones(len(sample_rows)))
        target = np.log(sample_rows.seconds / (sample_rows.operators @ coefficients))
    mean, deviation = float(target.mean()), float(target.std()) or 1.0
    model = _pipeline(setting, seed)
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):  # threads wait more than they work here
        warnings.simplefilter("ignore")  # lasso that has not converged says so by its error
        model.fit(setting.scaled(sample_rows.features), (target - mean) / deviation)
    return TrainedRegressor(setting, model, coefficients, (mean, deviation))


def _pipeline(setting: Setting, seed: int) -> Any:
    from sklearn.feature_selection import VarianceThreshold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    return make_pipeline(
        VarianceThreshold(),  # layers and hidden size, where there is one model only
        StandardScaler(),
        PolynomialFeatures(setting.degree, include_bias=False),
        StandardScaler(),
        _makers()[setting.regressor](seed),
    )


def _makers() -> dict[str, Callable[[int], Any]]:
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.tree import DecisionTreeRegressor

    return {
        "linear": lambda seed: LinearRegression(),
        "tree": lambda seed: DecisionTreeRegressor(random_state=seed),
        "forest": lambda seed: RandomForestRegressor(50, random_state=seed),
        "ridge": lambda seed: Ridge(1e-3),
        "lasso": lambda seed: Lasso(1e-3, random_state=seed),
        "elastic": lambda seed: ElasticNet(1e-3, random_state=seed),
        "boosting": lambda seed: HistGradientBoostingRegressor(
            max_iter=300, min_samples_leaf=5, early_stopping=False, random_state=seed
        ),
        "knn": lambda seed: KNeighborsRegressor(5, weights="distance"),
    }
