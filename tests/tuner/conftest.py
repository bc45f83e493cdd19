"""What tests of work done elsewhere share."""

import pickle
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from slo_bench.tuner.planning import plan_search as search


class Threads:
    """A `Pool` of threads: work travels as bytes, as it does between machines."""

    def __init__(self, at_once):
        self.at_once = at_once
        self.begun = []
        self._threads = ThreadPoolExecutor(at_once)
        self._futures = []
        self._stopped = False

    def begin(self, work, *given):
        if self._stopped:
            raise CancelledError
        self.begun.append(given)
        sent = pickle.dumps((work, given))
        self._futures.append(self._threads.submit(self._do, sent))
        return self._futures[-1]

    @staticmethod
    def _do(sent):
        work, given = pickle.loads(sent)
        return pickle.loads(pickle.dumps(work(*given)))

    def stop(self):
        self._stopped = True
        for future in self._futures:
            future.cancel()


@contextmanager
def _threads(at_once=3):
    pool = Threads(at_once)
    try:
        yield pool
    finally:
        pool.stop()
        pool._threads.shutdown()


@pytest.fixture
def pool_of():
    """A context manager: so many threads that take the place of other machines."""
    return _threads


@pytest.fixture
def short_runs(monkeypatch):
    """The lengths of runs by which plans are searched and confirmed, by name: a tenth of those in
    use. Capacities are searched with as little.
    """
    lengths = {name: getattr(search, name) for name in ("SEARCH", "CONFIRM")}
    short = {
        name: replace(length, requests=length.requests // 10) for name, length in lengths.items()
    }
    for name, value in {**short, "_TOLERANCE": 0.2, "_CAPACITY_REQUESTS": 4000}.items():
        monkeypatch.setattr(search, name, value)
    return short
