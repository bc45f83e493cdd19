"""Statistics of a workload: lengths, burstiness, shared prefixes, classes, models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from .arrays import Floats, Ints
from .workload import Workload

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.99)
WINDOWS_S = (1.0, 10.0, 60.0)


@dataclass(frozen=True)
class ColumnFigures:
    """Mean, coefficient of variation, extremes and quantiles (by probability) of a column."""

    mean: float
    cv: float
    min: float
    max: float
    quantiles: dict[float, float]


@dataclass(frozen=True)
class ArrivalFigures:
    """Rate and burstiness.

    `gap_cv` is the coefficient of variation of the gaps between arrivals, 1 for Poisson;
    `dispersion` the variance over the mean of the counts in windows of that many seconds, 1 for
    Poisson at any window; windows that fit fewer than ten times into the span are left out.
    """

    span_s: float
    rate_rps: float
    gap_cv: float
    dispersion: dict[float, float]


@dataclass(frozen=True)
class PrefixFigures:
    """Shared prefixes, as a cache without end would see them.

    `token_hit_share` is the share of all prompt tokens that some earlier request has brought in
    whole blocks; `request_hit_share` the share of requests with any such block.
    """

    block_size: int
    distinct_blocks: int
    token_hit_share: float
    request_hit_share: float


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one class or model."""

    name: str
    requests: int
    share: float
    mean_prompt_tokens: float
    mean_output_tokens: float


@dataclass(frozen=True)
class WorkloadSummary:
    """All figures of a workload; None or empty where there is nothing to say."""

    name: str
    requests: int
    prompt_tokens: ColumnFigures
    output_tokens: ColumnFigures
    arrivals: ArrivalFigures | None
    sessions: int
    prefixes: PrefixFigures | None
    classes: tuple[GroupFigures, ...]
    models: tuple[GroupFigures, ...]


def summarise(workload: Workload, has_arrivals: bool = True) -> WorkloadSummary:
    """Compute the figures of a workload."""
    return WorkloadSummary(
        name=workload.name,
        requests=len(workload),
        prompt_tokens=column_figures(workload.prompt_tokens),
        output_tokens=column_figures(workload.output_tokens),
        arrivals=arrival_figures(workload.arrival_s) if has_arrivals else None,
        sessions=len(np.unique(workload.session[workload.session >= 0])),
        prefixes=prefix_figures(workload),
        classes=_groups(workload, workload.class_index, workload.class_names),
        models=_groups(workload, workload.model_index, workload.model_names),
    )


def column_figures(values: Ints | Floats) -> ColumnFigures:
    """The figures of one column, which must not be empty."""
    mean = float(values.mean())
    return ColumnFigures(
        mean=mean,
        cv=float(values.std()) / mean if mean else math.nan,
        min=float(values.min()),
        max=float(values.max()),
        quantiles=dict(zip(QUANTILES, np.quantile(values, QUANTILES).tolist(), strict=True)),
    )


def arrival_figures(arrival_s: Floats) -> ArrivalFigures | None:
    """Rate and burstiness; None if all arrive at once."""
    span_s = float(arrival_s[-1] - arrival_s[0])
    if span_s <= 0:
        return None
    gaps = np.diff(arrival_s)
    dispersion = {}
    for window_s in WINDOWS_S:
        windows = int(span_s / window_s)
        if windows >= 10:
            index = ((arrival_s - arrival_s[0]) / window_s).astype(np.int64)
            counts = np.unique(index[index < windows], return_counts=True)[1].astype(np.float64)
            mean = counts.sum() / windows
            # Most windows of a long, sparse trace are empty: they are not listed.
            squares = ((counts - mean) ** 2).sum() + (windows - len(counts)) * mean**2
            dispersion[window_s] = float(squares / windows / mean)
    return ArrivalFigures(
        span_s=span_s,
        rate_rps=len(gaps) / span_s,
        gap_cv=float(gaps.std() / gaps.mean()),
        dispersion=dispersion,
    )


def prefix_figures(workload: Workload) -> PrefixFigures | None:
    """Shared prefixes; None if the workload has none."""
    if workload.prefix_blocks is None:
        return None
    cached_blocks: set[int] = set()
    hit_blocks = 0
    hit_requests = 0
    size = workload.prefix_block_size
    for blocks, prompt in zip(workload.prefix_blocks, workload.prompt_tokens.tolist(), strict=True):
        hits = sum(1 for _ in takewhile(cached_blocks.__contains__, blocks[: prompt // size]))
        hit_blocks += hits
        hit_requests += hits > 0
        cached_blocks.update(blocks)
    return PrefixFigures(
        block_size=size,
        distinct_blocks=len(cached_blocks),
        token_hit_share=hit_blocks * size / int(workload.prompt_tokens.sum()),
        request_hit_share=hit_requests / len(workload),
    )


def _groups(workload: Workload, index: Ints, names: tuple[str, ...]) -> tuple[GroupFigures, ...]:
    if not any(names):
        return ()
    counts = np.bincount(index, minlength=len(names))
    prompts = np.bincount(index, workload.prompt_tokens, len(names))
    outputs = np.bincount(index, workload.output_tokens, len(names))
    return tuple(
        GroupFigures(
            name=name,
            requests=int(counts[k]),
            share=float(counts[k] / len(workload)),
            mean_prompt_tokens=float(prompts[k] / counts[k]),
            mean_output_tokens=float(outputs[k] / counts[k]),
        )
        for k, name in enumerate(names)
        if counts[k]
    )
