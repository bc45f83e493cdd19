"""Searches whose levels others simulate find what one process finds, to the byte."""

import json

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.workers import LocalPool
from slo_bench.harness.results.run_folder import CAPACITY_FILE
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.workloads.errors import SloBenchError

ASKED = CapacityOptions(tolerance=0.3, targets=(0.9,), max_requests=3000)
EXPERIMENT = Experiment(
    systems=["vllm", "sarathi"], requests=200, seeds=3, output_tokens="20", tp=[1, 2]
)


def files(folder):
    """What a search left, but for where and when it ran and how long that took."""
    kept = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("environment.json", ".lock", CAPACITY_FILE)
    }
    return kept, timeless(json.loads((folder / CAPACITY_FILE).read_text()))


def timeless(plain):
    if isinstance(plain, dict):
        return {
            name: timeless(value)
            for name, value in plain.items()
            if name not in ("wall_s", "crc32")
        }
    return list(map(timeless, plain)) if isinstance(plain, list) else plain


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here") / "run"
    search_capacity(EXPERIMENT, folder, options=ASKED)
    return files(folder)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 4])
def test_capacity_search_in_a_pool_equals_one_process(tmp_path, here, pool_of, at_once):
    with pool_of(at_once) as pool:
        search_capacity(EXPERIMENT, tmp_path / "run", options=ASKED, pool=pool)
    assert files(tmp_path / "run") == here


@pytest.mark.slow
def test_capacity_search_in_local_processes_equals_one_process(tmp_path, here):
    with LocalPool(2) as pool:
        search_capacity(EXPERIMENT, tmp_path / "run", options=ASKED, pool=pool)
    assert files(tmp_path / "run") == here


@pytest.mark.slow
def test_interrupted_capacity_search_is_resumed_in_a_pool(tmp_path, here, pool_of):
    runs = 0

    def interrupt(progress):
        nonlocal runs
        runs += 1
        if runs == 12:
            raise KeyboardInterrupt

    with pool_of(4) as pool, pytest.raises(KeyboardInterrupt):
        search_capacity(EXPERIMENT, tmp_path / "run", options=ASKED, pool=pool, progress=interrupt)
    before = json.loads((tmp_path / "run" / CAPACITY_FILE).read_text())["searches"]
    finished_runs = {
        (s["search"], r["rate_rps"], r["seed"], r["requests"]) for s in before for r in s["runs"]
    }
    assert finished_runs
    with pool_of(4) as pool:
        search_capacity(EXPERIMENT, tmp_path / "run", options=ASKED, pool=pool, resume=True)
        again = {(stem, *run) for _, stem, _, *run in pool.begun}
    assert files(tmp_path / "run") == here
    assert not again & finished_runs


ONE = EXPERIMENT.model_copy(update={"systems": ("vllm",), "tp": (1,)})
HERE_S = "slo_bench.tuner.capacity.capacity_cells._HERE_S"


@pytest.mark.parametrize("here_s", [1e9, 1e-9])
def test_single_capacity_search_begins_in_this_process(tmp_path, pool_of, monkeypatch, here_s):
    search_capacity(ONE, tmp_path / "alone", options=ASKED)
    monkeypatch.setattr(HERE_S, here_s)
    with pool_of(4) as pool:
        search_capacity(ONE, tmp_path / "run", options=ASKED, pool=pool)
    assert files(tmp_path / "run") == files(tmp_path / "alone")
    assert bool(pool.begun) == (here_s < 1)


def test_runs_of_a_level_are_begun_together(tmp_path, pool_of, monkeypatch):
    monkeypatch.setattr(HERE_S, 1e-9)
    with pool_of(4) as pool:
        result = search_capacity(ONE, tmp_path / "run", options=ASKED, pool=pool)
    begun = [run[3:] for run in pool.begun]
    (row,) = result.rows()
    # More was begun than was needed only where a run turned out longer than foreseen.
    assert sum(level["runs"] for level in row["levels"]) - 1 <= len(begun)  # the first one is here
    refining = [(rate, requests) for rate, _, requests in begun]
    together = [k for k in range(2, len(refining)) if len(set(refining[k - 2 : k + 1])) == 1]
    assert together
    seeds = [begun[k][1] for k in range(together[0] - 2, together[0] + 1)]
    assert seeds == list(range(seeds[0], seeds[0] + 3))


def test_error_in_a_pool_process_is_raised_here(tmp_path, pool_of, monkeypatch):
    def failing(*arguments):
        raise SloBenchError("this machine lacks the trace")

    monkeypatch.setattr("slo_bench.tuner.capacity.capacity_cells.CellRunner.run", failing)
    with pool_of(2) as pool, pytest.raises(SloBenchError, match="lacks the trace"):
        search_capacity(EXPERIMENT, tmp_path / "run", options=ASKED, pool=pool)
    assert not (tmp_path / "run").exists()


def test_capacity_of_real_servers_is_measured_in_this_process(tmp_path, pool_of):
    experiment = Experiment(backend="openai", client={"base_urls": ("http://127.0.0.1:1",)})
    with pool_of(1) as pool, pytest.raises(SloBenchError, match="simulated"):
        search_capacity(experiment, tmp_path / "run", pool=pool)
