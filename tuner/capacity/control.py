"""A control variate for the attainment of a simulated run: a queue of prompts that costs nothing.

Most of the scatter between short runs is what happened to arrive: a few long prompts together, and
those behind them are late. A single FIFO queue that only computes prompts, at the pace at which
the simulated system answers long ones when they need not wait, misses much the same TTFT bounds on
the same arrivals, for a hundredth of the CPU time. What it misses in the long run is known well
from many more arrivals. A run in which the queue misses more than that was unlucky, and its
attainment is corrected:

    met + beta * (misses of the queue - those expected)

with beta from the regression of batches' misses on those of the queue, over runs at similar rates.
Each batch is held against arrivals of its own, so the error of the expectation is one of the
batches too: beta shrinks with it, and batch means and the scatter of runs contain it. A queue that
has nothing in common with the system gets a beta near zero (S. S. Lavenberg & P. D. Welch, A
perspective on the use of control variables to increase the efficiency of Monte Carlo simulations,
Management Science 27, 1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...harness.core.records.request_records import Records
from ...harness.experiments.execution.cell_specs import CellSpec, source
from ...harness.results.stationarity import batch_edges, design_effect, horizon_s
from ...workloads.arrays import Floats, Mask
from ...workloads.base import DrawnSource
from ...workloads.slo import parse_slo
from ...workloads.workload import Workload
from .level_samples import LevelSample

_TIMES = 32  # as many requests as the run's give the expectation
_MOST_REQUESTS = 200_000  # unless the run itself has more
_SEEDS = 1 << 32  # of the expectation, away from those of runs
_LONG = 0.75  # quantile of prompts from which on TTFT is mostly prefill
_ALONE = 0.25  # quantile of their TTFT per token, which hardly contains waiting
_LEAST_DISPERSION = 0.1


def control_of(
    spec: CellSpec, workload: Workload, records: Records, *, warmup_s: float
) -> tuple[float, ...]:
    """Misses of the queue above those expected, for each batch of a run.

    Empty without TTFT bounds, and for arrivals that are not drawn or depend on answers.
    """
    drawn = source(spec.workload)
    if not isinstance(drawn, DrawnSource) or spec.workload.models is not None:
        return ()
    if workload.closed or not np.isfinite(workload.ttft_slo_s).any():
        return ()
    pace_s = _pace_s(workload, records)
    if pace_s is None:
        return ()
    requests = max(min(_TIMES * len(workload), _MOST_REQUESTS), len(workload))
    if drawn.continuations is None and drawn.sessions is None:  # prompts contain no outputs
        drawn = replace(drawn, lengths=drawn.lengths.prompts_alone())
    others = drawn.make(
        rate_rps=spec.rate_rps,
        requests=requests,
        seed=_SEEDS + spec.seed,
        slo=parse_slo(spec.slo, spec.slo_scale),
    )
    missed, counted = _missed(workload, pace_s, spec.instances, warmup_s)
    expected, others_counted = _missed(others, pace_s, spec.instances, warmup_s)
    return tuple((missed - expected / others_counted * counted).tolist())


def _pace_s(workload: Workload, records: Records) -> float | None:
    """Seconds per prompt token of long prompts that hardly wait; None where none was served."""
    long = workload.prompt_tokens >= np.quantile(workload.prompt_tokens, _LONG)
    paces_s = (records.ttft_s / workload.prompt_tokens)[long & np.isfinite(records.ttft_s)]
    return float(np.quantile(paces_s, _ALONE)) if len(paces_s) else None


def _missed(
    workload: Workload, pace_s: float, servers: int, warmup_s: float
) -> tuple[Floats, Floats]:
    """Requests of each batch whose TTFT bound the queue misses, and all of the batch.

    Several servers are one that is as much faster for those that wait.
    """
    service_s = pace_s * workload.prompt_tokens
    done_s = np.cumsum(service_s) / servers
    ahead_s = done_s - service_s / servers - workload.arrival_s
    wait_s = ahead_s - np.minimum.accumulate(ahead_s)  # Lindley's recursion
    late: Mask = wait_s + service_s > workload.ttft_slo_s
    edges = batch_edges(workload.arrival_s, horizon_s=horizon_s(workload), warmup_s=warmup_s)
    missed = np.add.reduceat(late[: edges[-1]], edges[:-1], dtype=np.float64)
    return missed, np.diff(edges).astype(np.float64)


def control_sums(runs: Sequence[LevelSample]) -> tuple[float, float]:
    """Sums over the batches of runs: control times misses, and control squared, each about its
    mean of the run.
    """
    cross = squares = 0.0
    for run in runs:
        if run.control:
            requests = np.array(run.batch_requests, dtype=float)
            missed = requests * run.attainment - run.batch_met
            control = np.array(run.control)
            control -= requests * (control.sum() / requests.sum())
            cross += float(control @ missed)
            squares += float(control @ control)
    return cross, squares


def corrected(runs: Sequence[LevelSample], beta: float) -> tuple[LevelSample, ...]:
    """Runs with the requests that met their SLO corrected by the control variate; runs that are
    not corrected, with a `beta` of 0, have none.
    """
    if beta == 0:
        return tuple(replace(run, control=()) if run.control else run for run in runs)
    return tuple(
        replace(run, batch_met=tuple(np.add(run.batch_met, beta * np.array(run.control)).tolist()))
        if run.control
        else run
        for run in runs
    )


def dispersion_within(runs: Sequence[LevelSample]) -> float:
    """The variance within runs over that of independent requests, which corrected runs may
    undercut.
    """
    least = _LEAST_DISPERSION if any(run.control for run in runs) else 1.0
    return design_effect(runs, least=least)
