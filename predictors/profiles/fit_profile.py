"""Fits to a profile's measurements, and how far off each is: formulas of step time, and links.

A link is a line through copies that were timed: seconds = latency + bytes / bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...workloads.arrays import Floats, Mask
from ...workloads.errors import SloBenchError
from . import whole_steps
from .build_model import table_step_time
from .formulas import FORMULAS, TABLE
from .least_squares import non_negative
from .observations import Observations, from_layers, observations
from .profile_format import Fitted, MeasuredLink, Profile, ProfileTable
from .step_time_table import Host, TableStepTime

LEAST_COPIES = 5
DIRECTIONS = ("to-host", "to-gpu")
_PARTS = 5


@dataclass(frozen=True)
class LinkFit:
    """The line through all copies, and each one's relative error under a line without it."""

    latency_s: float
    s_per_byte: float
    errors: Floats

    @property
    def link(self) -> MeasuredLink:
        """The link in the form of a profile."""
        bandwidth = 1 / max(self.s_per_byte, 1e-15)
        return MeasuredLink(bandwidth, self.latency_s, float(100 * self.errors.mean()))


def fit_link(moved_bytes: Floats, seconds: Floats, rng: np.random.Generator) -> LinkFit:
    """Least relative squared error. Each fifth of the copies, drawn at random, judges a line
    through the others.

    Raises:
        SloBenchError: there are too few copies.
    """
    if len(moved_bytes) < LEAST_COPIES:
        raise SloBenchError(
            f"{len(moved_bytes)} copies are too few to learn from ({LEAST_COPIES} are needed)"
        )
    order = rng.permutation(len(moved_bytes))
    errors = []
    for held in np.array_split(order, _PARTS):
        kept = np.setdiff1d(order, held)
        latency_s, s_per_byte = _line(moved_bytes[kept], seconds[kept])
        errors.append(np.abs((latency_s + s_per_byte * moved_bytes[held]) / seconds[held] - 1))
    latency_s, s_per_byte = _line(moved_bytes, seconds)
    return LinkFit(latency_s, s_per_byte, np.concatenate(errors))


def fit_direction(transfers: ProfileTable, direction: str, rng: np.random.Generator) -> LinkFit:
    """Copies of a table `transfers` in one of `DIRECTIONS`.

    Raises:
        SloBenchError: there are too few of them.
    """
    chosen = transfers.words["direction"] == direction
    moved, seconds = transfers["bytes"][chosen], transfers["time_us"][chosen] * 1e-6
    if len(moved) < LEAST_COPIES:
        raise SloBenchError(
            f"the table transfers has {len(moved)} copies {direction}, too few to learn from "
            f"({LEAST_COPIES} are needed; directions are {' and '.join(DIRECTIONS)})"
        )
    return fit_link(moved, seconds, rng)


def fit_links(tables: Mapping[str, ProfileTable], seed: int = 0) -> dict[str, MeasuredLink]:
    """`host` from the table `transfers`, `peer` from `moves`, where those are there."""
    links = {}
    for name, kind in (("host", "transfers"), ("peer", "moves")):
        if kind in tables and len(tables[kind]) >= LEAST_COPIES:
            table, rng = tables[kind], np.random.default_rng(seed)
            links[name] = fit_link(table["bytes"], table["time_us"] * 1e-6, rng).link
    return links


def fit_directions(tables: Mapping[str, ProfileTable], seed: int = 0) -> dict[str, MeasuredLink]:
    """The table `transfers` by direction, where there are enough copies."""
    table = tables.get("transfers")
    if table is None:
        return {}
    directions = table.words["direction"]
    measured = [name for name in DIRECTIONS if np.count_nonzero(directions == name) >= LEAST_COPIES]
    return {name: fit_direction(table, name, np.random.default_rng(seed)).link for name in measured}


def _line(moved: Floats, seconds: Floats) -> tuple[float, float]:
    terms = np.column_stack([np.ones(len(moved)), moved]) / seconds[:, None]
    latency_s, s_per_byte = non_negative(terms, np.ones(len(moved))).tolist()
    return latency_s, s_per_byte


FITTED = ("nine", "ascendra")
HELD_OUT = 0.2
_LEAST_ROWS = 30


@dataclass(frozen=True)
class ProfileFitQuality:
    """Errors in percent of the measured time; NaN where they could not be had.

    `held_out_*`: on a fifth of the rows, drawn at random and kept out. `extrapolated_percent`: on
    the outer half of the range (chunk, context, batch or KV), fitted on the inner.
    """

    formula: str
    rows: int
    held_out_percent: float
    held_out_p95_percent: float
    extrapolated_percent: float


@dataclass(frozen=True)
class FitResult:
    """The profile with its fits and the best formula named, and the quality of each."""

    profile: Profile
    qualities: tuple[ProfileFitQuality, ...]


def fit(profile: Profile, seed: int = 0) -> FitResult:
    """Fit every formula; the best, by error on held-out rows, becomes the profile's.

    Raises:
        SloBenchError: the tables make too few steps.
    """
    steps = observations(profile)
    if len(steps) < _LEAST_ROWS:
        raise SloBenchError(
            f"the profile of {profile.label} makes {len(steps)} steps, too few to fit "
            f"({_LEAST_ROWS} are needed)"
        )
    rng = np.random.default_rng(seed)
    kept = rng.random(len(steps)) >= HELD_OUT
    inner = ~steps.outermost
    fits, qualities = dict(profile.fits), []
    whole = whole_steps.NAME in profile.fits
    for name in (*FITTED, whole_steps.NAME) if whole else FITTED:
        held = _errors(profile, name, steps, kept)
        beyond = _errors(profile, name, steps, inner)
        qualities.append(_quality(name, len(steps), held, beyond))
        fits[name] = Fitted(
            coefficients(profile, name, steps),
            held_out_percent=qualities[-1].held_out_percent,
            extrapolated_percent=qualities[-1].extrapolated_percent,
        )
    if {"linear", "attention"} <= set(profile.tables):
        qualities.append(
            _quality(TABLE, len(steps), _table_errors(profile, rng), _table_errors(profile, None))
        )
    best = min(qualities, key=lambda q: q.held_out_percent)
    if whole:  # to all others the host's share, which was measured, would be added once more
        best = next(q for q in qualities if q.formula == whole_steps.NAME)
    links = {**profile.links, **fit_links(profile.tables, seed)}
    fitted = dataclasses.replace(profile, fits=fits, best=best.formula, links=links)
    return FitResult(fitted, tuple(qualities))


def coefficients(profile: Profile, formula: str, steps: Observations) -> dict[str, float]:
    """The non-negative coefficients with the least relative squared error."""
    if formula == whole_steps.NAME:
        return whole_steps.coefficients(steps)
    terms = FORMULAS[formula].terms(profile, steps)
    weight = 1 / steps.seconds
    values = non_negative(terms * weight[:, None], np.ones(len(steps)))
    return dict(zip(FORMULAS[formula].coefficients, values.tolist(), strict=True))


def _errors(profile: Profile, formula: str, steps: Observations, kept: Mask) -> Floats:
    """Relative errors on the rows that were not kept."""
    if kept.all() or not kept.any():
        return np.empty(0)
    fitted = coefficients(profile, formula, steps[kept])
    others = steps[~kept]
    predicted = FORMULAS[formula].terms(profile, others) @ np.array(list(fitted.values()))
    return np.asarray(np.abs(predicted / others.seconds - 1))


def _table_errors(profile: Profile, rng: np.random.Generator | None) -> Floats:
    """The same for tables: a part of attention and of the linear layers' sizes is kept out.

    Drawn at random, or without a generator the outer half of attention.
    """
    steps = observations(profile)
    attention, linear = profile.tables["attention"], profile.tables["linear"]
    whole = from_layers(profile)
    if rng is None:
        kept = ~whole.outermost
        kept_linear = linear["tokens"] <= whole.tokens[kept].max() if kept.any() else kept
    else:
        kept = rng.random(len(attention)) >= HELD_OUT
        sizes = np.unique(linear["tokens"])
        gone = sizes[rng.random(len(sizes)) < HELD_OUT]
        kept_linear = ~np.isin(linear["tokens"], gone)
    if kept.all() or not kept.any() or not kept_linear.any():
        return np.empty(0)
    thinned: dict[str, ProfileTable] = {
        **profile.tables,
        "attention": attention.rows(kept),
        "linear": linear.rows(kept_linear),
    }
    try:
        step_time = table_step_time(dataclasses.replace(profile, tables=thinned), Host())
    except SloBenchError:
        return np.empty(0)  # what is left is no grid any more
    fits_memory = (
        whole.kv_tokens + whole.prefill_kv_tokens
        <= (steps.kv_tokens + steps.prefill_kv_tokens).max()
    )
    others = whole[~kept & fits_memory]
    return np.abs(predictions(step_time, others) / others.seconds - 1)


def predictions(step_time: TableStepTime, steps: Observations) -> Floats:
    """Seconds of each step; sequences of equal length."""
    rows = zip(
        *(
            column.tolist()
            for column in (
                steps.chunks,
                steps.chunk_tokens,
                steps.context_tokens,
                steps.sequences,
                steps.kv_tokens,
            )
        ),
        strict=True,
    )
    return np.array(
        [
            step_time.step_s(round(n), round(kv), [(round(before), round(chunk))] * round(chunks))
            for chunks, chunk, before, n, kv in rows
        ]
    )


def _quality(formula: str, rows: int, held: Floats, beyond: Floats) -> ProfileFitQuality:
    def percent(errors: Floats, quantile: float | None = None) -> float:
        if not len(errors):
            return math.nan
        value = errors.mean() if quantile is None else np.quantile(errors, quantile)
        return float(100 * value)

    return ProfileFitQuality(formula, rows, percent(held), percent(held, 0.95), percent(beyond))
