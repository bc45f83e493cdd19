"""A sweep on two nodes equals one process's, also when one of them is lost half-way."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.experiment import Experiment
from slo_bench.harness.on_ray import OnRay, _cell
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
    """What a run left, but for where and when it ran; rows in any order."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("environment.json", ".lock")
    }
    found["cells.csv"] = b"\n".join(sorted(found["cells.csv"].splitlines()))
    return found


@needs_ray
@pytest.mark.parametrize("lose", [False, True])
def test_two_nodes_give_what_one_process_gives(tmp_path, lose):
    with two_nodes() as (cluster, other):

        def watch(progress):
            if lose and progress.finished == 3:
                cluster.remove_node(other, allow_graceful=False)

        ASKED.run(tmp_path / "ray", executor=OnRay(cluster.address), progress=watch)
    ASKED.run(tmp_path / "here", jobs=1)
    assert files(tmp_path / "ray") == files(tmp_path / "here")


@needs_ray
def test_where_no_cluster_is_that_is_said():
    words = ["run", "--requests", "10", "--executor", "ray", "--address", "127.0.0.1:1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SloBenchError)
    assert "no Ray cluster at 127.0.0.1:1" in str(done.exception)


def test_a_machine_with_another_version_refuses():
    with pytest.raises(SloBenchError, match="install the same everywhere"):
        _cell({}, "none", "0.0.0")


def test_details_come_back_with_the_row():
    import dataclasses

    from slo_bench import __version__

    spec = ASKED.plan().cells[0]
    row, details = _cell(dataclasses.asdict(spec), "csv", __version__)
    assert row["cell"] == spec.cell
    assert set(details) == {f"{kind}/{spec.cell}.csv.gz" for kind in ("requests", "timelines")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--executor", "rya"], "ray"),
        (["--address", "auto"], "--executor ray"),
    ],
)
def test_options_that_make_no_sense(words, message):
    done = CliRunner().invoke(app, ["run", "--requests", "10", *words])
    assert isinstance(done.exception, SloBenchError)
    assert message in str(done.exception)


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("slo_bench.harness.on_ray.find_spec", lambda name: None)
    with pytest.raises(SloBenchError, match=r"slo-bench\[ray\]"):
        ASKED.run(tmp_path / "run", executor=OnRay())


def test_real_servers_are_measured_here(tmp_path):
    asked = Experiment(backend="http", client={"base_urls": ("http://127.0.0.1:1",)}, rates=[1])
    with pytest.raises(SloBenchError, match="simulated cells"):
        asked.run(tmp_path / "run", executor=OnRay())
