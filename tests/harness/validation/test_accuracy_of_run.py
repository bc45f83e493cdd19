"""The accuracy that is published is that of `run`: the same step times, of the same server."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slo_bench.cli.options.experiment_options import DEFAULT_SUITE
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.experiments.execution.cells import simulated
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.policies.systems import system
from slo_bench.harness.validation.accuracy.measurement import Case, OpenLoop, Skipped
from slo_bench.harness.validation.accuracy.predict import (
    ENGINES,
    _server,
    max_num_seqs,
    predict,
    step_times,
    token_budget,
)
from slo_bench.harness.validation.accuracy.readers import read_folder
from slo_bench.harness.validation.accuracy.shipped import SHIPPED
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

STEPS = (1, 1000, ()), (32, 32_000, ()), (32, 32_000, ((0, 512),)), (0, 0, ((0, 2048),))


def deployments():
    """A measurement of each engine, version, model and GPU."""
    measurements = {}
    for measurement in read_folder(SHIPPED):
        if isinstance(measurement, Skipped):
            continue
        case = measurement.case
        if case.engine in ENGINES and not _server(case).experts_kernel:
            key = case.engine, case.version, case.model, case.gpu
            measurements.setdefault(key, case)
    return measurements


DEPLOYMENTS = deployments()


@pytest.mark.parametrize("key", DEPLOYMENTS, ids="-".join)
def test_run_takes_the_step_times_whose_accuracy_is_published(key):
    case = DEPLOYMENTS[key]
    if case.async_scheduling is not None and case.engine == "vllm":
        version = "0.14" if case.async_scheduling else "0.13"
    else:
        version = case.version
    spec = PlacementSpec(
        case.model,
        case.gpu,
        case.tp,
        **{name: getattr(case, name) for name in ("pp", "ep", "dp", "weight_dtype", "kv_dtype")},
        server_version=f"{case.engine}-{version}" if version else case.engine,
    )
    try:
        run = placed(spec)
    except SloBenchError:
        pytest.skip("the model fits with the memory share of the measurement alone")
    published = step_times(case, run.placement)
    assert (
        run.step_time.provenance.partition(", host")[0]
        == published.provenance.partition(", host")[0]
    )
    for step in STEPS:
        assert run.step_time.model.step_s(*step) == published.model.step_s(*step)


def simulated_by_run(case, load):
    """The records of an open loop that `run` simulates on the server of a measurement."""
    spec = PlacementSpec(
        case.model,
        case.gpu,
        case.tp,
        **{name: getattr(case, name) for name in ("weight_dtype", "kv_dtype", "memory_share")},
        server_version=f"{case.engine}-{case.version}",
    )
    [cell] = Experiment(systems=case.engine, rates=1, seeds=1).plan().cells
    names = {"max_num_batched_tokens": token_budget(case), "max_num_seqs": max_num_seqs(case)}
    names["async_scheduling"] = spec.server.schedules_ahead
    parameters = system(case.engine).known(names)
    cell = dataclasses.replace(
        cell, system=case.engine, placement=spec, parameters=parameters, overlong_requests="error"
    )
    workload = Workload(load.arrival_s, load.prompt_tokens, load.output_tokens)
    return simulated(cell, workload, None).records


@pytest.mark.parametrize(
    ("engine", "version", "gpu", "rate_rps", "preempts"),
    [
        ("vllm", "0.15.1", "h100-80g", 20, False),
        ("vllm", "0.12.0", "h100-80g", 20, False),
        ("vllm", "0.19.0", "b200", 20, False),
        ("vllm", "0.15.1", "l4", 4, True),
        ("vllm", "0.19.0", "a10", 8, True),
    ],
)
def test_run_takes_the_whole_simulation_whose_accuracy_is_published(
    engine, version, gpu, rate_rps, preempts
):
    """Step times, host, batch limits, memory and front end, from arrival to the last token, also
    where KV binds.
    """
    draw = np.random.default_rng(1)
    n = 200
    load = OpenLoop(
        np.cumsum(draw.exponential(1 / rate_rps, n)),
        draw.integers(100, 3000, n),
        draw.integers(2, 400, n),
        np.ones(n, dtype=np.bool_),
    )
    case = Case(engine, version, gpu, "llama-3.1-8b", load, harness="someone")
    published = predict(case).figures
    records = simulated_by_run(case, load)
    assert bool(records.preemptions_recompute.sum()) == preempts
    run = {"ttft_mean": records.ttft_s.mean(), "e2e_mean": records.e2e_s.mean()}
    assert run == pytest.approx({name: published[name] for name in run}, rel=1e-9)


def test_the_first_command_takes_the_default_step_times():
    assert Experiment.suite(DEFAULT_SUITE).profile == (None,)
