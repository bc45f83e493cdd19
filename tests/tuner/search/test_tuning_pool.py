"""Studies whose runs others simulate: what one process finds, nothing lost, nothing repeated."""

import json
from concurrent.futures import Future

import optuna
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.workers import LocalPool, NotDoneError
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.storage import open_storage
from slo_bench.tuner.search.tuning_run import tune
from slo_bench.workloads.errors import SloBenchError

# Answers of few tokens are simulated in few steps.
EXPERIMENT = Experiment(systems="sarathi", requests=200, output_tokens="50")
GRID = {"chunk_tokens": "256,512,2048", "max_num_seqs": "4,256"}


def quick(**changes):
    defaults = {"search": GRID, "trials": 6, "tolerance": 0.3, "confirm": False, "sampler": "grid"}
    return TuneSettings(**{**defaults, **changes})


def lines(folder):
    """All runs, without the time they took and the checksum that hangs on it."""
    runs = []
    for path in sorted(folder.rglob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            del line["sample"]["wall_s"], line["crc32"]
            runs.append((path.relative_to(folder).as_posix(), line))
    return runs


def rows(outcome):
    return [
        (row.configuration, row.state, row.values, row.requests) for row in outcome.study.trials
    ]


def no_run_twice(folder):
    runs = [
        (name, line["rate_rps"], line["seed"], line["requests"]) for name, line in lines(folder)
    ]
    return len(set(runs)) == len(runs)


@pytest.mark.slow
def test_tune_in_a_pool_with_one_job_equals_one_process(tmp_path, pool_of):
    here = tune(EXPERIMENT, quick(confirm=True), tmp_path / "here")
    with pool_of(2) as pool:
        there = tune(EXPERIMENT, quick(confirm=True), tmp_path / "there", pool=pool, jobs=1)
    assert rows(there) == rows(here)
    assert there.confirmed == here.confirmed
    assert lines(tmp_path / "there") == lines(tmp_path / "here")


@pytest.mark.slow
def test_tune_in_a_pool_divides_the_trials(tmp_path, pool_of):
    reports = []
    with pool_of(3) as pool:
        outcome = tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool, progress=reports.append)
    configurations = {tuple(sorted(row.configuration.items())) for row in outcome.study.trials}
    assert len(outcome.study.trials) == len(configurations) == 6
    assert outcome.study.running == 0
    assert sorted(report.trials for report in reports)[-1] == 6
    (best,) = outcome.study.best
    assert best.configuration == {"chunk_tokens": 2048, "max_num_seqs": 256}
    assert no_run_twice(tmp_path / "o")
    begun_runs = {tuple(run[-3:]) for run in pool.begun}
    runs = lines(tmp_path / "o" / "runs")  # not the one almost without load
    kept = {(line["rate_rps"], line["seed"], line["requests"]) for _, line in runs}
    assert kept
    assert kept <= begun_runs


@pytest.mark.slow
def test_tune_runs_a_configuration_proposed_twice_once(tmp_path, pool_of):
    settings = quick(search={"max_num_seqs": "4,256"}, sampler="random", trials=2)
    with pool_of(4) as pool:
        outcome = tune(EXPERIMENT, settings, tmp_path / "o", pool=pool, jobs=4)
    assert len({row.configuration["max_num_seqs"] for row in outcome.study.trials}) == 2
    assert no_run_twice(tmp_path / "o")


@pytest.mark.slow
def test_interrupted_tune_in_a_pool_loses_and_repeats_no_trial(tmp_path, pool_of):
    def interrupt(progress):
        if progress.trials >= 2:
            raise KeyboardInterrupt

    with pool_of(3) as pool, pytest.raises(KeyboardInterrupt):
        tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool, progress=interrupt)
    before = lines(tmp_path / "o")
    with pool_of(3) as pool:
        outcome = tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool, resume=True)
    study = optuna.load_study(study_name="o", storage=open_storage(None, tmp_path / "o"))
    assert all(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    assert len({tuple(row.configuration.items()) for row in outcome.study.trials}) == 6
    assert {row.state for row in outcome.study.trials} <= {"finished", "lost"}
    assert no_run_twice(tmp_path / "o")
    after = lines(tmp_path / "o")
    assert [line for line in before if line not in after] == []


@pytest.mark.slow
def test_lost_pool_fails_no_trial(tmp_path, pool_of):
    with pool_of(2) as pool:
        begin, calls = pool.begin, 0

        def lose(work, *arguments):
            nonlocal calls
            calls += 1
            if calls != 12:
                return begin(work, *arguments)
            lost = Future()
            lost.set_exception(NotDoneError("work was lost 6 times"))
            return lost

        pool.begin = lose
        with pytest.raises(NotDoneError, match="6 times"):
            tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool, jobs=2)
    with pool_of(2) as pool:
        outcome = tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool, resume=True)
    assert {row.state for row in outcome.study.trials} <= {"finished", "lost"}
    assert len(outcome.study.trials) == 6
    assert no_run_twice(tmp_path / "o")


@pytest.mark.parametrize(
    ("backend", "jobs", "problem"),
    [("vllm", None, "belong to the machine"), ("simulated", 0, "from 1 to 1,024")],
)
def test_tune_in_a_pool_refuses_real_backends(tmp_path, pool_of, backend, jobs, problem):
    experiment = EXPERIMENT.model_copy(update={"backend": backend})
    with pool_of(1) as pool, pytest.raises(SloBenchError, match=problem):
        tune(experiment, quick(), tmp_path / "o", pool=pool, jobs=jobs)


def test_tune_jobs_without_a_pool_are_refused(tmp_path):
    with pytest.raises(SloBenchError, match="jobs are trials at once in a pool"):
        tune(EXPERIMENT, quick(), tmp_path / "o", jobs=2)


@pytest.mark.slow
def test_tune_in_local_processes_divides_the_trials(tmp_path):
    with LocalPool(2) as pool:
        outcome = tune(EXPERIMENT, quick(), tmp_path / "o", pool=pool)
    assert {row.state for row in outcome.study.trials} <= {"finished", "lost"}  # to a better one
    assert len({str(row.configuration) for row in outcome.study.trials}) == 6
    assert no_run_twice(tmp_path / "o")
