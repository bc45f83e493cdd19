"""Processes of this machine that do pieces of work: answers, errors, deaths, and no orphans."""

import importlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from slo_bench.harness.experiments.execution.workers import LocalPool, NotDoneError
from slo_bench.predictors.specs import gpu
from slo_bench.workloads.errors import SloBenchError

PATIENCE_S = 60


@pytest.mark.slow
def test_pool_results_come_from_other_processes():
    with LocalPool(2) as pool:
        begun = [pool.begin(math.factorial, number) for number in range(20)]
        assert [pending.result(PATIENCE_S) for pending in begun] == [
            math.factorial(n) for n in range(20)
        ]
        assert pool.begin(os.getpid).result(PATIENCE_S) != os.getpid()
        assert pool.at_once == 2


def test_pool_reuses_one_process_for_work_in_turn():
    with LocalPool(3) as pool:
        assert len({pool.begin(os.getpid).result(PATIENCE_S) for _ in range(6)}) == 1


@pytest.mark.slow
def test_pool_result_raises_the_error_of_the_work():
    with LocalPool(1) as pool:
        with pytest.raises(SloBenchError, match="did you mean"):
            pool.begin(gpu, "a100-80gg").result(PATIENCE_S)
        assert pool.begin(abs, -1).result(PATIENCE_S) == 1  # the same process goes on


def test_a_package_that_work_cannot_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "cmaes.py").write_text("raise ImportError('libcmaes.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = r"cmaes is installed but cannot be imported \(libcmaes.so: not found\)"
    with LocalPool(1) as pool, pytest.raises(SloBenchError, match=broken):
        pool.begin(importlib.import_module, "cmaes").result(PATIENCE_S)


@pytest.mark.slow
def test_pool_reports_and_replaces_a_process_that_dies():
    with LocalPool(1) as pool:
        with pytest.raises(NotDoneError, match="failed with code 3"):
            pool.begin(eval, "__import__('os')._exit(3)").result(PATIENCE_S)
        with pytest.raises(NotDoneError, match=r"killed \(signal 9\); if memory ran out"):
            pool.begin(signal.raise_signal, signal.SIGKILL).result(PATIENCE_S)
        assert pool.begin(abs, -1).result(PATIENCE_S) == 1


def test_stopped_pool_ends_all_pending_results():
    pool = LocalPool(1)
    begun = [pool.begin(time.sleep, 600), pool.begin(time.sleep, 600)]
    pool.stop()
    for pending in begun:
        with pytest.raises((CancelledError, NotDoneError)):
            pending.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        pool.begin(abs, -1)
    pool.stop()


def queued(pool):
    pool.begin(time.sleep, 600)
    pool.begin(time.sleep, 600)._condition.acquire()


def running(pool):
    future = pool.begin(time.sleep, 600)
    while not pool._processes:
        time.sleep(0.01)
    future._condition.acquire()


def answered(pool):
    future = pool.begin(time.sleep, 1)
    while not pool._processes:
        time.sleep(0.01)
    future._condition.acquire()
    while not pool._idle:
        time.sleep(0.01)


@pytest.mark.parametrize("locked", [queued, running, answered])
def test_pool_stops_while_the_lock_of_a_future_is_held(locked):
    """Ctrl-C within a method of a future can leave it so."""

    def interrupted():
        pool = LocalPool(1)
        locked(pool)
        pool.stop()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_pool_calls_ended_with_the_finished_future():
    ended = queue.SimpleQueue()
    with LocalPool(1) as pool:
        begun = pool.begin(abs, -1, ended=ended.put)
        assert ended.get(timeout=PATIENCE_S) is begun
        assert begun.result(0) == 1


def test_pool_of_no_processes_is_refused():
    with pytest.raises(SloBenchError, match="from 1 to 1,024 but is 0"):
        LocalPool(0)


ORPHANS = """
import os, sys, time
from slo_bench.harness.experiments.execution.workers import LocalPool
pool = LocalPool(2)
begun = [pool.begin(os.getpid) for _ in range(8)]
print(*{one.result() for one in begun}, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who is alive")
def test_pool_processes_end_with_their_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        workers = [int(word) for word in parent.stdout.readline().split()]
    assert workers
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + PATIENCE_S
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
