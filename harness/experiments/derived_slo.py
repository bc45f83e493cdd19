"""SLOs derived from the latencies of each model on dedicated GPUs.

Source: Prism (see docs/papers.md), §7.1: every model's own requests on a dedicated GPU, the 95th
percentile of their TTFT and TPOT; a scale then multiplies them all (`slo_scale`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...workloads.errors import SloBenchError
from ...workloads.models import shape_of
from ...workloads.workload import Workload, take
from ..engine.simulator.simulate_models import OneModel, simulate_models
from ..policies.static_partition import StaticPartition

QUANTILE = 0.95


def dedicated_slos(
    workload: Workload, models: Mapping[str, OneModel], quantile: float = QUANTILE
) -> dict[str, dict[str, float]]:
    """TTFT and TPOT bounds by model, in the form that `parse_slo` reads; models without requests
    are left out.

    Raises:
        SloBenchError: a model is missing, or no request of one can be served.
    """
    bounds_by_model: dict[str, dict[str, float]] = {}
    for index, name in enumerate(workload.model_names):
        rows = np.flatnonzero(workload.model_index == index)
        if not len(rows):
            continue
        model_requests = dataclasses.replace(
            take(workload, rows, workload.arrival_s[rows]),
            model_index=np.zeros(1, dtype=np.int64),
            model_names=(name,),
        )
        if name not in models:
            raise SloBenchError(
                f"the workload has requests for model {name!r}, which is not among the models"
            )
        result = simulate_models(
            model_requests,
            StaticPartition(),
            {name: models[name]},
            gpus=models[name].placement.gpus,
            overlong_requests="reject",
        )
        ttft_s, tpot_s = result.records.ttft_s, result.records.tpot_s
        if np.isnan(ttft_s).all() or np.isnan(tpot_s).all():
            raise SloBenchError(f"{name} serves no request on GPUs of its own")
        bounds_by_model[name] = {
            "ttft": _three_digits(float(np.nanquantile(ttft_s, quantile))),
            "tpot": _three_digits(float(np.nanquantile(tpot_s, quantile))),
        }
    return bounds_by_model


def by_shape(slos: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Medians of the bounds over the copies of each model shape."""
    bounds_by_shape: dict[str, list[Mapping[str, float]]] = {}
    for name, bounds in slos.items():
        bounds_by_shape.setdefault(shape_of(name), []).append(bounds)
    return {
        shape: {
            bound: _three_digits(float(np.median([model_bounds[bound] for model_bounds in copies])))
            for bound in copies[0]
        }
        for shape, copies in bounds_by_shape.items()
    }


def slo_text(slos: Mapping[str, Mapping[str, float]]) -> str:
    """The bounds as text that `parse_slo` reads."""
    return "; ".join(
        f"{name}:" + ",".join(f"{bound}={seconds:g}" for bound, seconds in bounds.items())
        for name, bounds in slos.items()
    )


def _three_digits(seconds: float) -> float:
    return float(f"{seconds:.3g}")
