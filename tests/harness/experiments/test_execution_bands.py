"""Bands of simulated cells: factors of figures, recomputed attainment, none where unknown."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution import cell_bands
from slo_bench.harness.experiments.execution.cell_bands import (
    attainments,
    band_columns,
    sampled,
    setting_of,
    share_that_keeps,
)
from slo_bench.harness.experiments.execution.cells import (
    simulated,
    simulated_figures,
    workload_of,
)
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.results.request_fold import RequestSample
from slo_bench.predictors.bands import KERNELS, LEVEL, Spread, residuals, residuals_id
from slo_bench.reports.compare.model_error import error_draws, mean_draws
from slo_bench.tuner.capacity.folder import prediction_band


@pytest.fixture(scope="module")
def cell():
    experiment = Experiment(systems=["vllm"], rates=[4], requests=200, seeds=1, gpu="h200-141g")
    [spec] = plan(experiment).cells
    workload = workload_of(spec)
    result = simulated(spec, workload, None)
    return spec, workload, result, dict(simulated_figures(spec, workload, result))


def test_latency_bands_are_quantiles_of_their_residuals(cell):
    spec, workload, result, row = cell
    sample = sampled(workload, result)
    setting = setting_of(spec, sample, row)
    assert (setting.engine, setting.gpu, setting.step_time) == ("vllm", "h200-141g", KERNELS)
    low, high = residuals().spread(setting, ("ttft_p99",)).factors()
    columns = band_columns(spec, sample, row)
    assert columns["band_low_ttft_p99_s"] == pytest.approx(low * row["ttft_p99_s"], abs=1e-8)
    assert columns["band_high_ttft_p99_s"] == pytest.approx(high * row["ttft_p99_s"], abs=1e-8)
    assert columns["band_low_attainment"] <= columns["band_high_attainment"]
    assert columns["band_basis"].startswith("vllm, kernel tables, h200-141g, tp 1, ")
    assert columns["band_basis"].endswith(f", residuals {residuals_id()}")
    assert "band_low_throughput_rps" not in columns  # the offered rate sets it
    draws = [float(text) for text in columns["band_draws"].split()]
    assert len(draws) == 40
    assert columns["band_low_attainment"] <= np.median(draws) <= columns["band_high_attainment"]


def test_cells_of_other_residuals_share_no_errors(cell, monkeypatch):
    spec, workload, result, row = cell

    def of_residuals(name):
        monkeypatch.setattr(cell_bands, "residuals_id", lambda: name)
        banded = row | band_columns(spec, sampled(workload, result), row)
        return error_draws(banded | {"model": "m"}, "attainment")

    before, same, now = map(of_residuals, ("1", "1", "2"))
    assert mean_draws([before, same]) is not None
    assert mean_draws([before, now]) is None


def test_attainment_band_is_recomputed_with_each_measurements_factors(cell):
    _, workload, result, _ = cell
    as_it_is, hopeless = np.zeros(3), np.full(3, 20.0)
    spread = Spread(np.array([as_it_is, hopeless]), np.ones(2), LEVEL, same_system=True)
    shares = attainments(spread, sampled(workload, result))
    assert shares[0] == pytest.approx(cell[3]["attainment"])
    assert shares[1] == 0


def test_probability_of_meeting_falls_with_the_target(cell):
    spec, workload, result, row = cell
    sample = sampled(workload, result)

    def share(target):
        return share_that_keeps(spec, sample, row, target, lambda _: sample)

    shares = [share(target) for target in (0.0, 0.5, 0.9, 1.0)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)


@dataclasses.dataclass
class Loaded:
    """Runs under a higher load, which all have the same requests; their factors."""

    sample: RequestSample
    factors: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, factor):
        self.factors.append(factor)
        return self.sample


def test_probability_of_meeting_is_by_the_queue_of_a_slower_server(cell):
    spec, workload, result, row = cell
    late = dataclasses.replace(
        result.records,
        first_token_s=result.records.first_token_s + 100,
        finish_s=result.records.finish_s + 100,
    )
    sample = sampled(workload, result)
    at_load = Loaded(sampled(workload, dataclasses.replace(result, records=late)))
    keeps = share_that_keeps(spec, sample, row, 0.9, at_load)
    as_fast = share_that_keeps(spec, sample, row, 0.9, Loaded(sample))
    factors = at_load.factors
    assert len(set(factors)) == len(factors) <= 6
    assert all(factor > 1 for factor in factors)
    assert keeps < min(as_fast, 1 - len(factors) / 6 + 0.05)  # the slower parts fail


def test_probability_of_meeting_needs_no_run_for_what_another_load_decides(cell):
    spec, workload, result, row = cell
    at_load = Loaded(sampled(workload, result))  # as at the load itself: the queue does not grow
    share_that_keeps(spec, at_load.sample, row, 0.0, at_load)  # kept by all, so by the slowest
    all_kept = len(at_load.factors)
    share_that_keeps(spec, at_load.sample, row, 1.1, at_load)  # missed by all without a queue
    assert 1 <= all_kept < 3
    assert len(at_load.factors) == all_kept


@pytest.mark.parametrize(("factor", "runs"), [(50.0, False), (1.0 + 1e-9, True)])
def test_probability_of_meeting_needs_no_run_where_earlier_runs_decide(cell, factor, runs):
    spec, workload, result, row = cell
    at_load = Loaded(sampled(workload, result))
    loaded = [(0.5, at_load.sample), (factor, at_load.sample)]
    # Kept under fifty times the load, so by all errors.
    assert share_that_keeps(spec, at_load.sample, row, 0.0, at_load, loaded) == 1.0
    assert bool(at_load.factors) == runs


def test_cell_with_a_profile_has_no_bands(cell, monkeypatch):
    spec, workload, result, row = cell
    from slo_bench.harness.experiments.execution import cell_specs

    deployment = spec.deployment
    fitted_step_time = dataclasses.replace(
        deployment.step_time, provenance="profile mine.json", fitted=True
    )
    monkeypatch.setattr(
        cell_specs, "placed", lambda _: dataclasses.replace(deployment, step_time=fitted_step_time)
    )
    assert band_columns(spec, sampled(workload, result), row) == {}


def test_capacity_band_ends_where_attainment_bands_cross_the_target():
    rows = [
        {"rate_rps": rate, "band_low_attainment": low, "band_high_attainment": high}
        for rate, low, high in ((1.0, 1.0, 1.0), (2.0, 0.8, 1.0), (3.0, 0.4, 0.95))
    ]
    assert prediction_band(rows, 0.9) == (1.5, None)
    assert prediction_band([{"rate_rps": 1.0}], 0.9) == (None, None)


def test_a_file_named_after_an_engine_has_the_bands_of_its_declared_engine(cell, tmp_path):
    spec, workload, result, row = cell
    sample = sampled(workload, result)
    policy = "from slo_bench.policy import Policy\n\nclass Ideas(Policy):\n    pass\n"
    for name in ("sglang_ideas.py", "ideas.py"):
        (tmp_path / name).write_text(policy)
        renamed = dataclasses.replace(spec, system=str(tmp_path / name))
        assert setting_of(renamed, sample, row).engine == "vllm"
    assert setting_of(dataclasses.replace(spec, system="sglang"), sample, row).engine == "sglang"
    (tmp_path / "mine.py").write_text(
        policy + "\nfrom slo_bench.harness.policies.systems import System\n"
        'MINE = System("mine", Ideas(), residuals_engine="sglang")\n'
    )
    declared = dataclasses.replace(spec, system=f"{tmp_path / 'mine.py'}:MINE")
    assert setting_of(declared, sample, row).engine == "sglang"
