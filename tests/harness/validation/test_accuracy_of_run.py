"""The accuracy that is published is that of `run`: the same step times, of the same server."""

from __future__ import annotations

import pytest

from slo_bench.cli.options.experiment_options import DEFAULT_SUITE
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.validation.accuracy.measurement import Skipped
from slo_bench.harness.validation.accuracy.predict import ENGINES, _server, step_times
from slo_bench.harness.validation.accuracy.readers import read_folder
from slo_bench.harness.validation.accuracy.shipped import SHIPPED
from slo_bench.workloads.errors import SloBenchError

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


def test_the_first_command_takes_the_default_step_times():
    assert Experiment.suite(DEFAULT_SUITE).profile == (None,)
