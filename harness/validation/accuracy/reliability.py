"""How often plans hold that were told a probability, on loads that were measured.

What was measured of one server under rising load (clients of a closed loop, or rates) is a ladder.
For an SLO its plan is the highest load up to which predictions keep the bounds, where the next one
misses them. P(SLO) is told as `plan` tells it (`cell_bands.share_that_keeps`), by residuals without
those of the same model (or GPU): the plan holds if the measured figures keep the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from ....predictors.bands import METRICS, Residuals, Setting, residual_id
from ....workloads.arrays import Floats
from .measurement import ClosedLoop, Measurement, OpenLoop

TTFT_BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
TPOT_BOUNDS_S = (0.015, 0.025, 0.04, 0.06, 0.1)
EDGES = (0.0, 0.5, 0.8, 0.95, 1.0)  # of the buckets of what is told
_JOINT = ("ttft_mean", "tpot_mean", "e2e_mean")


@dataclass(frozen=True)
class LadderStep:
    """One load of a ladder: measured and predicted TTFT and TPOT (s), and what bands go by."""

    load: float  # clients, or requests per second
    measured_s: Floats
    predicted_s: Floats
    setting: Setting
    is_open: bool


@dataclass(frozen=True)
class ToldPlan:
    """A plan, what it was told, and whether it held."""

    ladder: str
    setting: Setting
    probability: float
    held: bool


def ladders(
    measurements: Iterable[Measurement], residuals: Residuals, step_time: str
) -> dict[str, list[LadderStep]]:
    """Ladders of measurements that have residuals with these step times, by rising load.

    Closed loops go by means, open loops by 90th percentiles.
    """
    rows = {
        identity: row
        for row in np.flatnonzero(residuals.having("step_time", step_time))
        for identity in [str(residuals.names["id"][row])]
    }
    steps: dict[str, list[LadderStep]] = {}
    for measurement in measurements:
        row = rows.get(residual_id(measurement.set, measurement.row))
        load = measurement.case.load
        if row is None or not isinstance(load, ClosedLoop | OpenLoop):
            continue
        metrics = _JOINT[:2] if isinstance(load, ClosedLoop) else ("ttft_p90", "tpot_p90")
        logs = residuals.logs[row, [METRICS.index(metric) for metric in metrics]]
        if not np.isfinite(logs).all():
            continue
        measured = np.array([measurement.measured[metric] for metric in metrics])
        names = (str(residuals.names[name][row]) for name in Setting.__dataclass_fields__)
        predicted, is_open = measured * np.exp(-logs), isinstance(load, OpenLoop)
        step = LadderStep(_height(load), measured, predicted, Setting(*names), is_open)
        steps.setdefault(_ladder(measurement), []).append(step)
    return {name: sorted(ladder, key=lambda step: step.load) for name, ladder in steps.items()}


def told_plans(
    measured: Mapping[str, Sequence[LadderStep]], residuals: Residuals, left_out: str
) -> list[ToldPlan]:
    """The plans of ladders for each SLO; `left_out` is a column of residuals (model, gpu)."""
    plans: list[ToldPlan] = []
    values = {getattr(steps[0].setting, left_out) for steps in measured.values()}
    for value in sorted(values):
        others = residuals.kept(~residuals.having(left_out, value))
        for name, steps in measured.items():
            if getattr(steps[0].setting, left_out) == value:
                plans += _plans_of(name, steps, others)
    return plans


def _plans_of(name: str, steps: Sequence[LadderStep], residuals: Residuals) -> Iterator[ToldPlan]:
    for bounds_s in map(np.array, product(TTFT_BOUNDS_S, TPOT_BOUNDS_S)):
        for step, following in pairwise(steps):
            if (following.predicted_s <= bounds_s).all():
                continue
            spread = residuals.spread(step.setting, _JOINT)
            if (step.predicted_s <= bounds_s).all() and spread is not None:
                likely_s = np.exp(spread.logs[:, :2]) * _under_load(steps, step, spread.logs[:, 2])
                probability = spread.share(np.all(likely_s <= bounds_s, axis=1))
                held = bool((step.measured_s <= bounds_s).all())
                yield ToldPlan(name, step.setting, probability, held)
            break


def _under_load(steps: Sequence[LadderStep], step: LadderStep, slower: Floats) -> Floats:
    """Predictions [errors, 2] of a step; of an open loop, whose requests do not wait for a slower
    server, those of the load times its factor, between the steps.
    """
    if not step.is_open:
        return np.broadcast_to(step.predicted_s, (len(slower), 2))
    loads = step.load * np.exp(np.maximum(slower, 0))
    measured_loads, figures = [n.load for n in steps], np.array([n.predicted_s for n in steps])
    return np.stack([np.interp(loads, measured_loads, column) for column in figures.T], axis=1)


def reliability(plans: Sequence[ToldPlan]) -> list[tuple[float, float, int, int, float]]:
    """For each bucket of `EDGES`: its ends, plans, ladders, and the share of plans that held."""
    table = []
    for low, high in pairwise(EDGES):
        inside = [
            plan
            for plan in plans
            if low <= plan.probability and (plan.probability < high or high == 1)
        ]
        held = float(np.mean([plan.held for plan in inside])) if inside else float("nan")
        table.append((low, high, len(inside), len({plan.ladder for plan in inside}), held))
    return table


def _height(load: ClosedLoop | OpenLoop) -> float:
    """Clients, or requests per second."""
    if isinstance(load, ClosedLoop):
        return load.concurrency
    return float(load.answered.sum()) / max(load.span_s, 1e-9)


def _ladder(measurement: Measurement) -> str:
    """The same for measurements that differ in their load alone."""
    case, load = measurement.case, measurement.case.load
    if isinstance(load, ClosedLoop):
        return replace(case, load=replace(load, concurrency=0)).identity
    return f"{measurement.set} {case.instances}"
