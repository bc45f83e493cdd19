"""The front end of servers: which row holds, and how requests queue."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.predictors.operators.front_end import FrontEnd, FrontEndQueue, front_end
from slo_bench.predictors.operators.server_version import NEWEST, ServerVersion


@pytest.mark.parametrize("engine", NEWEST)
@pytest.mark.parametrize("version", ["", "0.8", "nightly"])
def test_every_server_that_is_simulated_has_a_front_end(engine, version):
    passed = front_end(ServerVersion(engine, version))
    assert 0.005 < passed.latency_s < 0.02
    assert str(passed).startswith(f"front end of {ServerVersion(engine, version)}: ")


def test_passing_takes_longer_for_long_prompts():
    passed = FrontEnd("x", request_s=0.0, latency_s=0.01, token_s=1e-6)
    np.testing.assert_allclose(passed.passing_s(np.array([0, 1000])), [0.01, 0.011])


def test_requests_that_come_together_queue_and_later_ones_do_not():
    queue = FrontEndQueue(FrontEnd("x", request_s=0.5, latency_s=9.0, token_s=9.0))
    assert [queue.leaves_s(arrival_s) for arrival_s in (1.0, 1.0, 1.25, 7.0)] == [
        1.5,
        2.0,
        2.5,
        7.5,
    ]
