"""What two nodes find equals what one process finds, also when one is lost half-way."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import sys
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench import __version__
from slo_bench.cli.main import app
from slo_bench.harness.experiments.execution.ray_pool import OnRay, _cell, _done
from slo_bench.harness.experiments.execution.workers import LocalExecutor
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.load_generator.load_workers import _check_versions
from slo_bench.harness.results.run_folder import CAPACITY_FILE
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import tune
from slo_bench.workloads.errors import SloBenchError

ASKED = Experiment(
    systems=["vllm", "sarathi"], rates=[2, 4], requests=100, seeds=3, records="csv", name="on ray"
)


def needs_ray(test):
    absent = importlib.util.find_spec("ray") is None
    skip = pytest.mark.skipif(absent, reason="needs the extra ray: pip install -e '.[ray]'")
    return pytest.mark.ray(skip(test))


@contextmanager
def two_nodes():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        other = cluster.add_node(**small)
        cluster.wait_for_nodes()
        yield cluster, other
    finally:
        cluster.shutdown()


def files(folder: Path) -> dict[str, bytes]:
    """What a run left, but for where and when it ran and how long that took."""
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("environment.json", ".lock")
    }
    if CAPACITY_FILE in contents:
        plain = json.loads(contents[CAPACITY_FILE], object_hook=without_wall_s)
        contents[CAPACITY_FILE] = json.dumps(plain).encode()
    return contents


def without_wall_s(plain: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in plain.items() if name not in ("wall_s", "crc32")}


@needs_ray
@pytest.mark.parametrize("lose", [pytest.param(False, marks=pytest.mark.weekly), True])
def test_run_on_two_nodes_equals_one_process(tmp_path, lose):
    with two_nodes() as (cluster, other):

        def watch(progress):
            if lose and progress.finished == 3:
                cluster.remove_node(other, allow_graceful=False)

        ASKED.run(tmp_path / "ray", executor=OnRay(cluster.address), progress=watch)
    ASKED.run(tmp_path / "here", jobs=1)
    assert files(tmp_path / "ray") == files(tmp_path / "here")


@needs_ray
@pytest.mark.weekly
@pytest.mark.parametrize("lose", [False, True])
def test_capacity_search_on_two_nodes_equals_one_process(tmp_path, lose):
    searched = Experiment(systems=["vllm", "sarathi", "orca"], requests=200, seeds=3)
    options = CapacityOptions(targets=(0.9,), tolerance=0.2, max_requests=10_000)
    runs = 0
    with two_nodes() as (cluster, other):

        def watch(progress):
            nonlocal runs
            runs += 1
            if lose and runs == 15:
                cluster.remove_node(other, allow_graceful=False)

        with OnRay(cluster.address).pool() as pool:
            search_capacity(searched, tmp_path / "ray", options=options, pool=pool, progress=watch)
    search_capacity(searched, tmp_path / "here", options=options)
    assert runs > 20
    assert files(tmp_path / "ray") == files(tmp_path / "here")


@needs_ray
@pytest.mark.weekly
@pytest.mark.parametrize("lose", [False, True])
def test_tune_on_two_nodes_equals_one_process(tmp_path, lose):
    grid = {"chunk_tokens": "256,512,2048", "max_num_seqs": "4,256"}
    settings = TuneSettings(search=grid, trials=6, tolerance=0.3, sampler="grid")
    tuned = Experiment(systems="sarathi", requests=200)
    ended = 0
    with two_nodes() as (cluster, other):

        def watch(progress):
            nonlocal ended
            ended += 1
            if lose and ended == 2:
                cluster.remove_node(other, allow_graceful=False)

        with OnRay(cluster.address).pool() as pool:
            tuning = tune(tuned, settings, tmp_path / "ray", pool=pool, progress=watch)
    here = tune(tuned, settings, tmp_path / "here")
    assert len(tuning.study.trials) == 6
    assert {row.state for row in tuning.study.trials} <= {"finished", "lost"}
    assert tuning.study.best[0].configuration == here.study.best[0].configuration
    assert tuning.confirmed[0] == here.confirmed[0]
    there, alone = runs_in(tmp_path / "ray"), runs_in(tmp_path / "here")
    both = there.keys() & alone.keys()
    assert len(both) > 10
    assert {run: there[run] for run in both} == {run: alone[run] for run in both}


def runs_in(folder: Path) -> dict[tuple[object, ...], object]:
    """What became of each run of each configuration, none of which was made twice."""
    runs: dict[tuple[object, ...], object] = {}
    for path in folder.rglob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text, object_hook=without_wall_s)
            run = (path.stem, line["rate_rps"], line["seed"], line["requests"])
            assert run not in runs
            runs[run] = line
    return runs


def loaded(folder: Path, url: str, watch=None, address: str | None = None):
    """A level at 10 req/s for 6 s and one of 2 s from all machines, and its rows."""
    client = {"base_urls": (url,), "send_delay_limit_s": 60.0}
    settings = {"prompt_tokens": "fixed(8)", "output_tokens": "fixed(5)", "requests": 60}
    experiment = Experiment(backend="openai", client=client, rates=[10, 30], seeds=1, **settings)
    return experiment.run(folder, executor=OnRay(address), progress=watch).rows()


@needs_ray
def test_two_nodes_share_the_load_of_a_level(tmp_path):
    with two_nodes() as (cluster, _), serving(MockConfig(ttft_s=0.01, itl_s=0.001)) as server:
        rows = loaded(tmp_path / "run", server.url, address=cluster.address)
        ids = [truth.request_id for truth in server.truths()]
    assert [row["finished"] for row in rows] == [60, 60]
    sent = [f"slo-bench-{row}" for _ in rows for row in range(60)]
    assert sorted(ids) == sorted(["slo-bench-0", *sent])  # a first request finds faults of all
    for row in rows:
        assert (row["client_processes"], row["client_machines"], row["valid"]) == (2, 1, True)
        lines = (tmp_path / "run" / "clients" / f"{row['cell']}.csv").read_text().splitlines()
        clients = list(csv.DictReader(lines))
        assert [client["requests"] for client in clients] == ["30", "30"]
        for client in clients:  # both nodes are this machine, and have its clock
            assert abs(float(client["offset_s"])) <= float(client["clock_error_s"]) + 1e-6


@needs_ray
def test_lost_node_makes_its_level_invalid_and_the_next_runs(tmp_path):
    killed = False
    with two_nodes() as (cluster, other), serving(MockConfig()) as server:

        def kill(progress):
            nonlocal killed
            if not killed and any(progress.running.values()):
                killed = True
                cluster.remove_node(other, allow_graceful=False)

        first, second = loaded(tmp_path / "run", server.url, kill, cluster.address)
    assert (first["valid"], second["valid"]) == (False, True)
    assert "died" in first["invalid_because"]
    assert (second["client_processes"], second["finished"]) == (1, 60)


@needs_ray
def test_missing_ray_cluster_is_an_error():
    words = ["run", "--requests", "10", "--executor", "ray", "--address", "127.0.0.1:1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SloBenchError)
    assert "no Ray cluster at 127.0.0.1:1" in str(done.exception)


def test_worker_with_another_version_refuses_cells():
    with pytest.raises(SloBenchError, match="install the same everywhere"):
        _done("0.0.0", _cell.__module__, _cell.__name__, ({}, "none"))


@pytest.mark.parametrize(("there", "refused"), [(__version__, False), ("0.0.0", True)])
def test_sender_with_another_version_is_refused(there, refused):
    class Told:
        machine = "10.0.0.2"

        def call(self, method, *arguments):
            assert method == "version"
            answer = Future()
            answer.set_result(there)
            return answer

    expected = pytest.raises(SloBenchError, match=r"10\.0\.0\.2 has slo-bench 0\.0\.0")
    with expected if refused else nullcontext():
        _check_versions([Told()])


def test_request_details_come_back_from_a_node():
    spec = ASKED.plan().cells[0]
    arguments = (spec.plain(), "csv")
    row, details = _done(__version__, _cell.__module__, _cell.__name__, arguments)
    assert row["cell"] == spec.cell
    assert set(details) == {f"{kind}/{spec.cell}.csv.gz" for kind in ("requests", "timelines")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--executor", "rya"], "ray"),
        (["--address", "auto"], "--executor ray"),
    ],
)
def test_executor_options_that_contradict_are_refused(words, message):
    done = CliRunner().invoke(app, ["run", "--requests", "10", *words])
    assert isinstance(done.exception, SloBenchError)
    assert message in str(done.exception)


def test_missing_ray_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SloBenchError, match=r"slo-bench\[ray\]"):
        ASKED.run(tmp_path / "run", executor=OnRay())


def test_launched_servers_are_measured_from_this_machine(tmp_path, monkeypatch):
    torch_engine = "slo_bench.harness.experiments.backends.torch_engine"
    monkeypatch.setattr(f"{torch_engine}.need", lambda extra, purpose: None)

    class Elsewhere(LocalExecutor):
        pass

    experiment = Experiment(backend="torch", model="tiny-llama", rates=[1])
    with pytest.raises(SloBenchError, match="running servers"):
        experiment.run(tmp_path / "run", executor=Elsewhere(1))
