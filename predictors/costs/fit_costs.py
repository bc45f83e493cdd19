"""Which regressor predicts a step best, and the grid of costs that it makes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.arrays import Floats, Mask
from ...workloads.extras import need
from ..placement import Placement
from ..profiles.fit_profile import DIRECTIONS, fit_direction
from ..profiles.observations import Observations, placement_of
from ..profiles.profile_format import Profile
from .grid import CostGrid, Swap
from .regressors import (
    Samples,
    Setting,
    TrainedRegressor,
    described,
    learn,
    random_rows,
    samples,
    settings,
    whole_sizes,
)

_HELD_OUT = 0.2
_CALLS = 20  # single predictions that are timed


@dataclass(frozen=True)
class CostFitQuality:
    """Mean errors in percent of the measured time (NaN where they could not be had), and costs.

    `random_percent`: on a fifth of the rows, kept out. `whole_percent`: on whole batch sizes and
    lengths kept out. `beyond_percent`: on the outer half of the range, trained on the inner.
    """

    setting: Setting
    random_percent: float
    whole_percent: float
    beyond_percent: float
    train_s: float
    call_s: float

    @property
    def held_out_percent(self) -> float:
        """Mean of the two inside the range; what the best has least of."""
        return float(np.nanmean([self.random_percent, self.whole_percent]))


@dataclass(frozen=True)
class GridQuality:
    """The same for the lookup grid of the best, where nothing stands before a prefill in KV."""

    random_percent: float
    whole_percent: float
    call_s: float


@dataclass(frozen=True)
class CostFit:
    """What was tried, the best of it, the grid that it makes and how good that is."""

    rows: int
    qualities: tuple[CostFitQuality, ...]
    best: CostFitQuality
    grid: CostGrid
    grid_quality: GridQuality
    swap: SwapFit


def fit_costs(
    profile: Profile,
    beside: Sequence[Profile] = (),
    *,
    tp: int | None = None,
    tried: Sequence[Setting] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostFit:
    """The best of the settings in `tried` (else all `settings()`), by error on held-out rows, and
    its grid. It learns from the steps of `profile` and of the profiles `beside` it; the grid is for
    the model of `profile` on `tp` GPUs. `progress` gets the regressors done and their number.

    Raises:
        SloBenchError: scikit-learn is missing, or the tables have too few steps.
    """
    need("regressors", "--like adaptivellm")
    sample_rows = samples([profile, *beside])
    rng = np.random.default_rng(seed)
    at_random = random_rows(len(sample_rows), _HELD_OUT, rng)
    whole = list(whole_sizes(sample_rows.steps, rng))
    all_tried = tried or settings()
    qualities = []
    for place, setting in enumerate(all_tried):
        progress(place, len(all_tried))
        qualities.append(_quality(setting, sample_rows, at_random, whole, seed))
    progress(len(all_tried), len(all_tried))
    best = min(qualities, key=lambda q: q.held_out_percent)
    placement = dataclasses.replace(placement_of(profile), tp=tp or profile.tp)
    swap = swap_costs(profile, placement, rng)
    learned = learn(best.setting, sample_rows, seed)
    grid = _grid(profile, placement.tp, sample_rows, learned, swap)
    about = {
        "model": profile.model,
        "gpu": profile.gpu,
        "tp": placement.tp,
        "rows": len(sample_rows),
        **dataclasses.asdict(best.setting),
        "random_percent": best.random_percent,
        "whole_percent": best.whole_percent,
        "swap": swap.source,
        "sources": [source.project for p in (profile, *beside) for source in p.sources],
    }
    grid = dataclasses.replace(grid, about=about)
    grid_quality = _grid_quality(profile, sample_rows, best.setting, at_random, whole, swap, seed)
    return CostFit(len(sample_rows), tuple(qualities), best, grid, grid_quality, swap)


def _quality(
    setting: Setting, sample_rows: Samples, at_random: Mask, whole: Sequence[Mask], seed: int
) -> CostFitQuality:
    began_s = time.perf_counter()
    learned = learn(setting, sample_rows[~at_random], seed)
    train_s = time.perf_counter() - began_s
    random_errors = _errors(learned, sample_rows[at_random])
    whole_errors = [
        _errors(learn(setting, sample_rows[~held], seed), sample_rows[held]) for held in whole
    ]
    outer = sample_rows.steps.outermost
    beyond = np.empty(0)
    if outer.any() and not outer.all():
        beyond = _errors(learn(setting, sample_rows[~outer], seed), sample_rows[outer])
    first_row = sample_rows[np.arange(len(sample_rows)) == 0]
    began_s = time.perf_counter()
    for _ in range(_CALLS):
        learned.predict(first_row)
    call_s = (time.perf_counter() - began_s) / _CALLS
    return CostFitQuality(
        setting,
        _percent(random_errors),
        _percent(np.concatenate([np.empty(0), *whole_errors])),
        _percent(beyond),
        train_s,
        call_s,
    )


def _errors(learned: TrainedRegressor, held: Samples) -> Floats:
    return np.asarray(np.abs(learned.predict(held) / held.seconds - 1))


def _percent(errors: Floats) -> float:
    return float(100 * errors.mean()) if len(errors) else math.nan


def _grid(
    profile: Profile, tp: int, sample_rows: Samples, learned: TrainedRegressor, swap: SwapFit
) -> CostGrid:
    """The learned step time at the measured sizes and halfway between them."""
    steps = sample_rows.steps
    each = np.round(steps.kv_tokens / np.maximum(1, steps.sequences))
    axes = [_axis(column) for column in (steps.chunk_tokens, steps.sequences, each)]
    tokens, sequences, kv_tokens = (column.ravel() for column in np.meshgrid(*axes, indexing="ij"))
    # A step without decodes and prefill takes the time of the least prefill, so that it is flat.
    nothing = (tokens == 0) & (sequences == 0)
    tokens = np.where(nothing, axes[0][1], tokens)
    points = Observations(
        chunks=(tokens > 0).astype(np.float64),
        chunk_tokens=tokens,
        context_tokens=np.zeros(len(tokens)),
        sequences=sequences,
        kv_tokens=sequences * kv_tokens,
        seconds=np.ones(len(tokens)),
    )
    seconds = np.maximum(0.0, learned.predict(described(profile, points, tp)))
    shape = tuple(len(axis) for axis in axes)
    return CostGrid(axes[0], axes[1], axes[2], seconds.reshape(shape), swap.out, swap.into)


def _axis(measured: Floats) -> Floats:
    """0, the sizes measured, and between two of them their geometric mean."""
    sizes = np.unique(measured[measured > 0])
    if not len(sizes):
        return np.array([0.0, 1.0])
    between = np.round(np.sqrt(sizes[1:] * sizes[:-1]))
    return np.unique(np.concatenate([[0.0], sizes, between]))


def _grid_quality(
    profile: Profile,
    sample_rows: Samples,
    setting: Setting,
    at_random: Mask,
    whole: Sequence[Mask],
    swap: SwapFit,
    seed: int,
) -> GridQuality:
    """Error of lookups in grids whose regressors have not seen the looked-up rows."""
    same_profile = (
        sample_rows.features[:, :2] == described(profile, sample_rows.steps).features[:, :2]
    )
    own_rows = same_profile.all(axis=1) & (sample_rows.steps.context_tokens == 0)
    call_s = math.nan

    def errors(held: Mask) -> Floats:
        nonlocal call_s
        grid = _grid(
            profile, profile.tp, sample_rows[~held], learn(setting, sample_rows[~held], seed), swap
        )
        steps = sample_rows.steps[held & own_rows]
        columns = (steps.chunk_tokens, steps.sequences, steps.kv_tokens)
        rows = list(zip(*(np.rint(column).astype(int).tolist() for column in columns), strict=True))
        began_s = time.perf_counter()
        predicted_s = np.array([grid.step_seconds(*row) for row in rows])
        call_s = (time.perf_counter() - began_s) / max(1, len(rows))
        return np.asarray(np.abs(predicted_s / steps.seconds - 1))

    of_whole = [errors(held) for held in whole]
    at_whole = _percent(np.concatenate([np.empty(0), *of_whole]))
    return GridQuality(_percent(errors(at_random)), at_whole, call_s)


@dataclass(frozen=True)
class SwapFit:
    """Both directions, what they rest on, and the error on copies kept out (NaN: none measured)."""

    out: Swap
    into: Swap
    measured: bool
    held_out_percent: float
    source: str


def swap_costs(profile: Profile, placement: Placement, rng: np.random.Generator) -> SwapFit:
    """From the profile's measured copies (table `transfers`), else the catalogue's host link.

    Under tensor parallelism every GPU moves its own heads at once; pipeline parallelism is priced
    as a single node (AdaptiveLLM, §6): the bytes of all layers over one link.

    Raises:
        SloBenchError: a direction has too few copies.
    """
    token_bytes = placement.kv_bytes_per_token / placement.tp
    table = profile.tables.get("transfers")
    if table is None:
        link = placement.host_link
        swap = Swap(link.latency_s, token_bytes / link.bandwidth_bytes_per_s)
        source = f"not measured: the catalogue's {link.name}, {link.origin}"
        return SwapFit(swap, swap, False, math.nan, source)
    lines = [fit_direction(table, direction, rng) for direction in DIRECTIONS]
    out, into = (Swap(line.latency_s, line.s_per_byte * token_bytes) for line in lines)
    percent = float(100 * np.concatenate([line.errors for line in lines]).mean())
    return SwapFit(out, into, True, percent, "copies in the profile's table transfers")
