"""Steps with their measured times, and the features of each for regressors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from ..profiles.formulas import FORMULAS
from ..profiles.observations import Observations, observations, placement_of
from ..profiles.profile import Profile

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEATURES = (
    "layers",
    "hidden size per GPU",
    "tokens",
    "tokens before them",
    "batch size",
    "KV tokens each",
)
LEAST_ROWS = 30
_WHOLE_DRAWS = 4
_WHOLE_SHARE = 0.1


@dataclass(frozen=True)
class Samples:
    """Steps of one or several profiles.

    `features` has a column for each of `FEATURES`: the paper's four (layers, hidden size, tokens
    of a request, batch size), and the two lengths that its own samples hold constant. Tensor
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
    found = Samples(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.operators for part in parts]),
        Observations.joined([part.steps for part in parts]),
    )
    if len(found) < LEAST_ROWS:
        raise SloBenchError(
            f"the profile of {profiles[0].label} makes {len(found)} steps, too few to learn from "
            f"({LEAST_ROWS} are needed)"
        )
    return found


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
