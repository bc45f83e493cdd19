"""Calibrates a profile on a closed-loop table: two factors, of small and of large steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ....predictors.operators.assembly import OPERATORS
from ....predictors.operators.front_end import front_end
from ....predictors.profiles.build_model import GRAPH_TOKENS
from ....predictors.profiles.calibration import Calibration
from ....predictors.profiles.formulas import profiled_step_time
from ....predictors.profiles.profile_format import Profile
from ....predictors.profiles.scope import Range, Scope
from ....predictors.profiles.step_time_table import Host
from ....predictors.step_time import DEFAULT_HOST_S
from ....workloads.arrays import Floats
from ....workloads.errors import SloBenchError
from ..accuracy.measurement import CLOSED_LOOP, ClosedLoop, Measurement
from ..accuracy.predict import measured_server, placed_as_measured, predict
from ..accuracy.readers import read_folder
from .calibrate import Calibrated, Progress, server_text, uncalibrated, with_factors
from .equations import FACTOR_BOUNDS, at_bounds

# Steps that are replayed from a CUDA graph, and larger ones.
KNOTS = (float(GRAPH_TOKENS), GRAPH_TOKENS + 1.0)
_METRICS = {"ttft": "ttft_mean", "tpot": "tpot_mean"}
_PRIOR = 0.3  # standard deviation of a factor that no row shows
_ERROR = 0.05  # of a row's figures
_ROUNDS = 6


def calibrate_table(
    file: Path, profile: Profile, *, day: str = "", progress: Progress = lambda line: None
) -> Calibrated:
    """Learn two factors of `profile` from the rows of `file` that are of its model and GPU.

    `file` is a closed-loop table as `slo-bench accuracy` reads it. The front end is that of the
    catalogue: means do not tell it from prompts' steps.

    Raises:
        SloBenchError: no row is of the profile, or the profile has no step times.
        FileFormatError: the file is damaged.
    """
    bare = uncalibrated(profile)
    all_rows = [entry for entry in read_folder(file) if isinstance(entry, Measurement)]
    rows = [row for row in all_rows if _of(row, bare)]
    if not rows:
        others = sorted({f"{r.case.model} on {r.case.gpu} × tp {r.case.tp}" for r in all_rows})
        raise SloBenchError(
            f"{file} has no closed loop of {bare.label} with {bare.weight_dtype} weights; it has "
            f"{', '.join(others[:5]) or 'none'}"
        )
    progress(f"{len(rows)} rows")
    loads = [row.case.load for row in rows if isinstance(row.case.load, ClosedLoop)]
    server = measured_server(rows[0].case)
    scope = Scope(
        server_text(server),
        day,
        prompt_tokens=_range(loads, lambda load: load.prompt_tokens),
        output_tokens=_range(loads, lambda load: load.output_tokens),
        concurrency=_range(loads, lambda load: load.concurrency),
    )
    bare = dataclasses.replace(bare, scope=scope, front_end=front_end(server))
    calibration = Calibration(
        origin=(file.name,),
        tokens=KNOTS,
        factors=_solved(rows, bare, progress),
        requests=sum(load.concurrency for load in loads),
        digests=tuple(row.key for row in rows),
        before_percent=_errors(rows, bare),
        held_out_percent=_held_out(rows, bare, progress),
    )
    result = dataclasses.replace(bare, calibration=calibration)
    calibration = dataclasses.replace(calibration, after_percent=_errors(rows, result))
    left_out = len(all_rows) - len(rows)
    notes = at_bounds(calibration)
    if left_out:
        notes.append(f"{left_out} rows of other models, GPUs or formats are left out")
    return Calibrated(
        dataclasses.replace(result, calibration=calibration), calibration, tuple(notes)
    )


def _range(loads: Sequence[ClosedLoop], count: Callable[[ClosedLoop], int]) -> Range:
    counts = [float(count(load)) for load in loads]
    return min(counts), max(counts)


def _of(row: Measurement, profile: Profile) -> bool:
    case = row.case
    ours = profile.model, profile.gpu, profile.tp, 1, profile.weight_dtype, profile.kv_dtype
    theirs = case.model, case.gpu, case.tp, case.pp, case.weight_dtype, case.kv_dtype
    return row.mode == CLOSED_LOOP and ours == theirs


def _solved(rows: Sequence[Measurement], bare: Profile, progress: Progress) -> tuple[float, ...]:
    from scipy.optimize import least_squares

    def residuals(factors: Floats) -> Floats:
        progress(f"factors {', '.join(f'{f:.3f}' for f in factors)}")
        off = _ratios(rows, with_factors(bare, KNOTS, factors.tolist()))
        ratios = np.concatenate(list(off.values()))
        return np.concatenate([np.log(ratios) / _ERROR, (factors - 1) / _PRIOR])

    solution = least_squares(
        residuals,
        np.ones(len(KNOTS)),
        bounds=FACTOR_BOUNDS,
        loss="soft_l1",
        diff_step=0.02,
        max_nfev=_ROUNDS,
    )
    return tuple(round(float(f), 4) for f in solution.x)


def _ratios(rows: Sequence[Measurement], profile: Profile) -> dict[str, Floats]:
    """Predicted / measured by metric, of all rows that have it."""
    ratios_by_metric: dict[str, list[float]] = {metric: [] for metric in _METRICS}
    for row in rows:
        host_s = 0.0 if measured_server(row.case).schedules_ahead else DEFAULT_HOST_S
        host = Host(step_s=host_s, graph_tokens=GRAPH_TOKENS)
        step_time = profiled_step_time(
            profile,
            None if profile.best == OPERATORS else host,  # operators have host times of their own
            placement=placed_as_measured(row.case),
        )
        predicted = predict(row.case, step_time_model=step_time).figures
        for metric, name in _METRICS.items():
            ratio = predicted.get(name, math.nan) / row.measured.get(name, math.nan)
            if math.isfinite(ratio) and ratio > 0:
                ratios_by_metric[metric].append(ratio)
    return {metric: np.array(ratios) for metric, ratios in ratios_by_metric.items()}


def _errors(rows: Sequence[Measurement], profile: Profile) -> dict[str, float]:
    """Mean of the signed errors of the rows by metric, in percent."""
    return {
        metric: round(100 * float(ratios.mean() - 1), 2)
        for metric, ratios in _ratios(rows, profile).items()
        if len(ratios)
    }


def _held_out(rows: Sequence[Measurement], bare: Profile, progress: Progress) -> dict[str, float]:
    """Mean absolute error, by metric, of every second row with the factors of the others, in
    percent; the larger of both halves; empty with fewer than four rows.
    """
    worst: dict[str, float] = {}
    if len(rows) < 4:
        return worst
    for fitted, held_out in ((rows[::2], rows[1::2]), (rows[1::2], rows[::2])):
        half = with_factors(bare, KNOTS, _solved(fitted, bare, progress))
        for metric, ratios in _ratios(held_out, half).items():
            if len(ratios):
                off = round(100 * float(np.abs(ratios - 1).mean()), 2)
                worst[metric] = max(worst.get(metric, 0.0), off)
    return worst
