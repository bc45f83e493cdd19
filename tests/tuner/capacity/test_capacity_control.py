"""The control variate takes away the luck of a run, and nothing else."""

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.tuner.capacity.capacity_cells import CellRunner, Simulator
from slo_bench.tuner.capacity.control import control_sums, corrected, dispersion_within
from slo_bench.tuner.capacity.level_samples import LevelSample

CLOSED = "sessions(closed=true)"


def runner(**settings) -> CellRunner:
    [spec] = plan(Experiment(**settings, rates=(1.0,), seeds=1)).cells
    return CellRunner(spec, "a", Simulator(), lambda cell, row: None)


def runs_at(rate_rps: float, number: int) -> list[LevelSample]:
    makes = runner(systems="sarathi")
    return [makes.run(rate_rps, seed, 2000) for seed in range(number)]


@pytest.mark.slow
def test_corrected_runs_scatter_less_around_the_same_mean():
    runs = runs_at(1.6, 12)
    cross, squares = control_sums(runs)
    better = corrected(runs, cross / squares)
    raw = np.array([run.attainment for run in runs])
    now = np.array([run.attainment for run in better])
    assert now.var() < raw.var() / 2
    assert now.mean() == pytest.approx(raw.mean(), abs=3 * raw.std() / np.sqrt(len(raw)))
    assert dispersion_within(better) < dispersion_within(runs) / 2
    assert [run.backlog for run in better] == [run.backlog for run in runs]


@pytest.mark.slow
def test_control_variate_has_mean_zero():
    of_runs = [sum(run.control) for run in runs_at(1.6, 12)]
    assert abs(np.mean(of_runs)) < 3 * np.std(of_runs, ddof=1) / np.sqrt(len(of_runs))


def test_uncorrected_runs_have_dispersion_of_at_least_one():
    runs = runs_at(0.5, 3)
    same = corrected(runs, 0.0)
    assert [run.batch_met for run in same] == [run.batch_met for run in runs]
    assert dispersion_within(same) >= 1


@pytest.mark.parametrize(
    "settings",
    [
        {"slo": "e2e=60"},
        {
            "workload": "synthetic",
            "prompt_tokens": "100",
            "output_tokens": "10",
            "sessions": CLOSED,
        },
        {"systems": "muxserve", "models": "fleet(llama-3.1-8b*2)", "gpus": 2},
    ],
    ids=["no-ttft", "sessions", "several-models"],
)
def test_settings_without_a_prompt_queue_have_no_control_variate(settings):
    sample = runner(**{"systems": "vllm", **settings}).run(1.0, 0, 200)
    assert sample.control == ()
