"""Bands of a simulated cell: what its figures would be, were it as far off as earlier predictions.

Every measurement that is known (`predictors.bands`) gives factors for TTFT, TPOT and E2E. Latencies
take the band of their own metric; attainment and goodput are computed again for each measurement's
factors together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ....predictors.bands import (
    OVERLOADED,
    Setting,
    Spread,
    kind_of,
    model_kind,
    regime_of,
    residuals,
    residuals_id,
)
from ....predictors.operators.server_version import DEFAULT_ENGINE
from ....workloads.request import SLO_COLUMNS
from ....workloads.workload import Workload
from ...core.records.judging import judge_times
from ...core.records.request_records import Outcome, Result
from ...policies.systems import System
from ...results.rate_windows import counted_requests
from ...results.request_fold import MOST_SAMPLED, RequestSample
from ...results.run_folder import BAND_BASIS, BAND_DRAWS, BAND_LEVEL, Row
from ...servers.server_kinds import SERVERS, server_kind
from .cell_specs import CellSpec, configured

Floats = NDArray[np.float64]

LOW, HIGH = "band_low_", "band_high_"
_LATENCIES = tuple(
    f"{latency}_{statistic}"
    for latency in ("ttft", "tpot", "e2e")
    for statistic in ("p50", "p90", "p99", "mean")
)
_JOINT = ("ttft_mean", "tpot_mean", "e2e_mean")
_MOST_ROWS = 100  # that attainment is computed again for
_DRAWS = 40  # of attainment, kept for the leads of systems
_SPEEDS = 6  # parts of the errors, each with a run of its own


def band_columns(spec: CellSpec, sample: RequestSample, row: Row) -> Row:
    """`band_low_COLUMN` and `band_high_COLUMN` of the figures in `row`, what they are based on, and
    attainment by evenly spaced errors: the n-th of two cells of one basis is by the same error.

    Nothing where no residuals fit: several models on shared GPUs, device maps, embedding, profiles.
    """
    setting = setting_of(spec, sample, row)
    if setting is None:
        return {}
    all_residuals, columns = residuals(), Row()
    for metric in _LATENCIES:
        value, spread = row.get(f"{metric}_s"), all_residuals.spread(setting, (metric,))
        if spread is not None and isinstance(value, float):
            low, high = spread.factors()
            columns |= _both(f"{metric}_s", value * low, value * high)
    spread = all_residuals.spread(setting, ("throughput",))
    full = setting.regime == OVERLOADED or sample.workload.concurrency is not None
    if spread is not None and full:  # otherwise the offered rate is what a server completes
        low, high = spread.factors()
        for name in ("throughput_rps", "output_tokens_per_s"):
            columns |= _both(name, low * float(row[name] or 0), high * float(row[name] or 0))
    joint = all_residuals.spread(setting, _JOINT)
    if joint is not None:
        joint = joint.thinned(_MOST_ROWS)
        shares = attainments(joint, sample)
        low, high = joint.band(shares)
        columns |= _both("attainment", low, high)
        if row["attainment"]:
            goodput = float(row["goodput_rps"] or 0) / float(row["attainment"])
            columns |= _both("goodput_rps", low * goodput, high * goodput)
        seen_text = "seen" if joint.same_system else "not seen"
        seen_text += ", errors of kernel tables" * joint.borrowed
        basis = setting.engine, setting.step_time, setting.gpu, f"tp {spec.placement.tp}", seen_text
        columns[BAND_BASIS] = f"{', '.join(basis)}, residuals {residuals_id()}"
        columns[BAND_LEVEL] = joint.level
        columns[BAND_DRAWS] = " ".join(f"{share:.4g}" for share in shares[joint.evenly(_DRAWS)])
    return {n: round(v, 9) if isinstance(v, float) else v for n, v in columns.items()}


def _both(name: str, low: float, high: float) -> Row:
    return {f"{LOW}{name}": low, f"{HIGH}{name}": high}


def sampled(workload: Workload, result: Result, warmup_s: float = 0.0) -> RequestSample:
    """A sample of the requests of a cell."""
    records = result.records
    counted = np.flatnonzero(counted_requests(records.arrival_s, warmup_s))
    return RequestSample(
        workload,
        records,
        counted[:: 1 + len(counted) // MOST_SAMPLED],
        finished=int((records.outcome == Outcome.FINISHED).sum()),
        last_arrival_s=float(np.nanmax(records.arrival_s)),
        prompt_tokens=float(workload.prompt_tokens.mean()),
        output_tokens=float(workload.output_tokens.mean()),
    )


def setting_of(spec: CellSpec, sample: RequestSample, row: Row) -> Setting | None:
    """What the residual of a simulated cell may depend on; None: no residuals are known."""
    place = spec.placement
    if place.device_map is not None or place.embedder is not None:
        return None
    served_by = configured(spec.system, spec.parameters)
    if served_by.sharing is not None:
        return None
    put = spec.deployment
    if put.placement.model.linear is not None:
        return None
    kind = kind_of(put.step_time)
    times = [row.get(f"{metric}_s") for metric in _JOINT]
    if kind is None or not all(isinstance(value, float) and value > 0 for value in times):
        return None
    ttft_s, tpot_s, e2e_s = (float(value or 0) for value in times)
    span_s = max(sample.last_arrival_s, e2e_s)
    clients = sample.workload.concurrency
    running = sample.finished * (e2e_s - ttft_s) / span_s if clients is None else clients
    regime = regime_of(
        put.placement,
        put.step_time.model,
        clients=None if clients is None else -(-clients // spec.instances),
        running=running / spec.instances,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=sample.output_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
    )
    named = place.server_version is not None or ":" in (place.profile or "")
    engine = place.server.engine if named else _residuals_engine(served_by)
    served = put.placement.model
    return Setting(engine, put.placement.gpu.name, served.name, kind, regime, model_kind(served))


def _residuals_engine(served_by: System) -> str:
    """Engine of `predictors.bands` whose prediction errors give the bands of a system."""
    of_server = served_by.name in SERVERS and server_kind(served_by.name).residuals_engine
    return served_by.residuals_engine or of_server or DEFAULT_ENGINE


def attainments(joint: Spread, sample: RequestSample) -> Floats:
    """Attainment if TTFT, TPOT and E2E were off as each row of `joint` was; shape (rows,)."""
    workload, records, some = sample.workload, sample.records, sample.rows
    finished = (records.outcome == Outcome.FINISHED)[some]
    bounds_s = {name: getattr(workload, column)[some] for name, column in SLO_COLUMNS.items()}
    ttft, tpot, e2e = np.exp(joint.logs).T[:, :, None]
    factors = {"ttft": ttft, "tpot": tpot, "e2e": e2e, "deadline": e2e}
    times_s = {"ttft": records.ttft_s, "tpot": records.tpot_s, "e2e": records.e2e_s}
    times_s["deadline"] = records.e2e_s
    # Nothing is later than a bound that is infinite for all.
    bounded = [name for name, bounds in bounds_s.items() if np.isfinite(bounds).any()] or ["ttft"]
    seconds = {name: factors[name] * times_s[name][some] for name in bounded}
    if "deadline" in seconds:
        seconds["deadline"] += records.arrival_s[some]
    shares: Floats = judge_times(finished, seconds, bounds_s).met.mean(axis=1)
    return shares


def share_that_keeps(
    spec: CellSpec,
    sample: RequestSample,
    row: Row,
    target: float,
    at_load: Callable[[float], RequestSample],
    loaded: Iterable[tuple[float, RequestSample]] = (),
) -> float | None:
    """The probability that attainment is at least `target`, by the residuals; None: none known.

    Of an error that makes a server slower its queue grows, too: errors are applied to a run under
    load that is higher by their factor of E2E, `at_load`; of errors that make it faster, to
    `sample`, whose figures are in `row`. They are divided into `_SPEEDS` parts, each with the run
    of its median, but what misses the target under a lower load, or keeps it under a higher one,
    needs no run.
    `loaded`: runs under other loads, by their factor over that of `sample`.
    """
    setting = setting_of(spec, sample, row)
    joint = None if setting is None else residuals().spread(setting, _JOINT)
    if joint is None:
        return None
    joint = joint.thinned(_MOST_ROWS)
    slower = np.exp(joint.logs[:, _JOINT.index("e2e_mean")])
    parts = [rows for rows in np.array_split(np.argsort(slower), _SPEEDS) if len(rows)]
    part_factors = np.empty(len(slower))
    for rows in parts:
        part_factors[rows] = max(1.0, np.median(slower[rows]))
    kept = attainments(joint, sample) >= target
    undecided = kept & (part_factors > 1)
    runs = [run for run in loaded if run[0] > 1]
    while undecided.any():
        if runs:
            factor, sample = runs.pop()
        else:
            factors = np.unique(part_factors[undecided])
            factor = float(factors[len(factors) // 2])
            sample = at_load(factor)
        keeps = attainments(joint, sample) >= target
        decided = undecided & np.where(keeps, part_factors <= factor, part_factors >= factor)
        kept[decided] = keeps[decided]
        undecided &= ~decided
    return joint.share(kept)
