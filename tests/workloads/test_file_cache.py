import json
import os
import re
from pathlib import Path

import pytest

import slo_bench
from slo_bench import Experiment
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.predictors.device_map import shipped_device_maps
from slo_bench.workloads.file_cache import depends_on, file_cache


@pytest.fixture
def read():
    """A cached reader, and how often it really read."""

    @file_cache(maxsize=2)
    def read(path):
        read.times += 1
        depends_on(path)
        return path.read_text()

    read.times = 0
    return read


def test_unchanged_file_is_read_once(read, tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    os.utime(path, (0, 0))
    assert [read(path), read(path), read(path)] == ["one"] * 3
    assert read.times == 1


def test_new_content_of_equal_size_and_times_is_read(read, tmp_path):
    path = tmp_path / "a"
    for text in ("one", "two", "six"):
        path.write_text(text)
        os.utime(path, ns=(1, 1))  # as a copy that keeps the time
        assert read(path) == text


def test_two_contents_within_one_clock_tick_are_both_read(read, tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("one")
    status = path.stat()
    monkeypatch.setattr(type(path), "stat", lambda self, **_: status)
    assert read(path) == "one"
    path.write_text("two")
    assert read(path) == "two"


def test_cached_outer_result_follows_files_of_inner_ones(read, tmp_path):
    path = tmp_path / "a"

    @file_cache(maxsize=2)
    def twice(path):
        return 2 * read(path)

    path.write_text("one")
    read(path)  # known before `twice` asks for it
    assert twice(path) == "oneone"
    path.write_text("two")
    assert twice(path) == "twotwo"


def test_file_cache_keeps_only_the_last_results(read, tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    assert [read(path) for path in (*paths, paths[2], paths[0])] == ["a", "b", "c", "c", "a"]
    assert read.times == 4


@pytest.mark.slow
def test_experiment_reads_a_rewritten_trace(tmp_path):
    path = tmp_path / "trace.csv"

    def output_tokens(first):
        path.write_text(f"arrival_s,prompt_tokens,output_tokens\n0,10,{first}\n1,10,10\n")
        result = Experiment(systems=("fifo",), workload=str(path)).run(tmp_path / str(first))
        return list(result.requests(result.rows()[0]["cell"])["output_tokens"])

    # Of equal size, within the same second.
    assert output_tokens(400) == [400, 10]
    assert output_tokens(100) == [100, 10]


def test_placement_follows_a_changed_user_catalogue(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    monkeypatch.setenv("SLO_BENCH_CATALOGUE", str(file))

    def num_gpu_blocks(memory_gib):
        file.write_text(f"[gpus.a100-80g]\nmemory_gib = {memory_gib}\n")
        return placed(PlacementSpec("llama-3.1-8b", "a100-80g", tp=1)).placement.num_gpu_blocks

    assert num_gpu_blocks(79) > num_gpu_blocks(39)


def test_placement_follows_a_changed_device_map(tmp_path):
    shipped = shipped_device_maps()["uellm-helr"].read_text()
    file = tmp_path / "map.json"

    def ready_s(seconds):
        file.write_text(json.dumps(json.loads(shipped) | {"ready_s": seconds}))
        model = json.loads(shipped)["model"]
        return placed(PlacementSpec(model, "rtx-3090", 1, device_map=str(file))).ready_s

    assert [ready_s(1.0), ready_s(2.0)] == [1.0, 2.0]


def test_functools_caches_hold_no_user_file():
    """`functools` caches by name alone; a file under such a name may change."""
    root = Path(slo_bench.__file__).parent
    folders = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
    cached_files = {
        str(path.relative_to(root))
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if re.search(r"@(functools\.)?(lru_)?cache\b", path.read_text())
    }
    assert cached_files == {
        "harness/experiments/config/setting.py",  # the schema
        "harness/load_generator/http/answers.py",  # events without text, by their bytes
        "harness/load_generator/server_metrics.py",  # names of metrics
        "harness/servers/server_kinds.py",  # installed packages
        "harness/load_generator/http/event_shapes.py",  # the heads of chunks by their length
        "harness/validation/accuracy/aiconfigurator.py",  # in the package, as all below
        "harness/validation/accuracy/highest_rate.py",  # the levels of one search
        "predictors/bands.py",
        "predictors/lengths/distribution.py",
        "predictors/operators/front_end.py",
        "predictors/operators/kernels.py",
        "predictors/power.py",
        "predictors/server_memory.py",
        "predictors/profiles/step_time_table.py",  # look-ups by a grid's values
        "predictors/step_time.py",
        "reports/pages/document.py",
        "reports/terminal/run_answer.py",  # within one answer
        "workloads/extras.py",  # what pip knows of the package
        "workloads/fetch.py",
        "workloads/source.py",
    }
