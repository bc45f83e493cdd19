"""The engine's CPU threads: how many, where, and how long they waited for a core."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slo_bench.harness.engine.torch.threads import (
    CpuWait,
    ThreadLayout,
    available_cores,
    pin,
    thread_count,
    unpin,
)
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.workloads.errors import SloBenchError

ALL = available_cores()

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here"),
]


def cores_are(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 0, 1), (2, 0, 1), (8, 0, 7), (8, 2, 5), (2, 4, 1)],
)
def test_thread_count_leaves_a_core_for_client_and_each_worker(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int
) -> None:
    cores_are(monkeypatch, cores)
    assert thread_count(None, workers) == threads
    layout = ThreadLayout.choose(None, workers)
    assert len(layout.cores) == layout.threads == threads
    assert len(layout.worker_cores) == workers
    if cores > workers + 1:
        used = {*layout.cores, *layout.worker_cores}
        assert len(used) == threads + workers == cores - 1


def test_thread_count_follows_omp_num_threads_and_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores_are(monkeypatch, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_count(None) == 3
    assert thread_count(8) == 8
    with pytest.raises(SloBenchError, match="this process may use 8 cores; set it to 8 or less"):
        thread_count(9)


def test_threads_are_pinned_and_unpinned_again() -> None:
    torch = pytest.importorskip("torch")
    cores, threads = available_cores(), torch.get_num_threads()
    layout = ThreadLayout.choose(1)
    with layout.pinned():
        assert available_cores() == list(layout.cores)
        assert torch.get_num_threads() == 1
    assert (available_cores(), torch.get_num_threads()) == (cores, threads)


def test_copy_threads_are_not_pinned() -> None:
    pytest.importorskip("torch")
    with ThreadLayout.choose(1).pinned():
        inherits, copies = ThreadPoolExecutor(1), ThreadPoolExecutor(1, initializer=unpin)
        assert len(inherits.submit(available_cores).result()) == 1
        assert copies.submit(available_cores).result() == ALL


def spin(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def rival(core: int, ready: multiprocessing.synchronize.Event, seconds: float) -> None:
    pin([core])
    ready.set()
    spin(seconds)


def test_cpu_wait_share_measures_time_taken_by_another_program() -> None:
    pytest.importorskip("torch")
    layout = ThreadLayout.choose(1)
    fork = multiprocessing.get_context("spawn")
    ready = fork.Event()
    other = fork.Process(target=rival, args=(layout.cores[0], ready, 30.0))
    with layout.pinned():
        idle = CpuWait(layout)
        time.sleep(0.2)
        assert idle.seconds()[1] < 0.1  # a thread that sleeps waits for no core
        other.start()
        ready.wait()
        wait = CpuWait(layout)
        begin_s = time.perf_counter()
        spin(1.0)
        took_s = time.perf_counter() - begin_s
        (ran_s, waited_s), share = wait.seconds(), wait.share()
        other.terminate()
        other.join()
    assert ran_s + waited_s == pytest.approx(took_s, rel=0.1)
    assert share == pytest.approx(waited_s / (ran_s + waited_s), rel=0.05)
    assert waited_s / took_s > 0.25  # two programs with one core


def test_cell_whose_cores_were_taken_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(CpuWait, "share", lambda self: 0.2)
    settings = {"backend": "torch", "systems": "vllm", "workload": "alpaca", "rates": 40}
    settings |= {"requests": 5, "seeds": 1}
    for limit, valid in ((0.1, "False"), (0.2, "True")):
        out = tmp_path / valid
        Experiment(**settings, server={"cpu_wait_limit": limit, "threads": 1}).run(out)
        with (out / "cells.csv").open() as file:
            (row,) = csv.DictReader(file)
        assert row["valid"] == valid
        assert row["cpu_threads"] == "1"
        assert float(row["cpu_wait_share"]) == 0.2
        assert ("waited for one for 20% of their busy time" in row["invalid_because"]) == (
            valid == "False"
        )
        assert json.loads((out / "environment.json").read_text())["cpu_threads"] == 1
