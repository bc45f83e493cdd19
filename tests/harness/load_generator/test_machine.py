"""Cores of servers and of the load generator on one machine."""

from __future__ import annotations

import os
import sys

import pytest

from slo_bench.harness.load_generator.machine import (
    CoreShare,
    before_other_programs,
    core_share,
    started_on,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone pins processes")


@pytest.mark.parametrize(("cores", "left"), [(2, 1), (4, 1), (8, 1), (16, 2), (64, 8)])
def test_core_share_leaves_cores_to_the_client(monkeypatch, cores, left):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    share = core_share()
    assert share.server == tuple(range(cores - left))
    assert share.client == tuple(range(cores - left, cores))


def test_core_share_of_one_core_is_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert core_share() == CoreShare()


def test_thread_settings_are_restored_afterwards():
    cores, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    with started_on([max(cores)]), before_other_programs():
        assert os.sched_getaffinity(0) == {max(cores)}
        assert os.getpriority(os.PRIO_PROCESS, 0) <= nice
    with started_on([]):
        assert os.sched_getaffinity(0) == cores
    assert os.sched_getaffinity(0) == cores
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice
