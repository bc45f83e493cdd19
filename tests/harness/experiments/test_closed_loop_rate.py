"""The rate of cells to which none is offered."""

import math

import numpy as np
import pytest

from slo_bench.harness.experiments.execution.cells import _arrival_rate_rps


@pytest.mark.parametrize(
    ("arrival_s", "clients", "rate_rps"),
    [
        ([0, 1, 2, 4], 1, 0.75),
        ([0, 0, 0, 4, 5, 6, 8], 3, 0.5),  # three clients get four answers in 8 s
        ([0, 0, 0, 4, 4, 4, 8, 8, 8], 3, 0.75),  # answers of one length: clients come together
        ([0, 0, 0, 4], 3, 0.25),
        ([0, 0, 4, math.nan], 2, 0.25),
        ([0, 0, 0], 3, math.nan),
        ([0, 1e-4], 3, math.nan),  # fewer requests than clients, sent one after the other
        ([], 3, math.nan),
    ],
)
def test_a_closed_loop_has_the_rate_of_what_its_clients_send_after_answers(
    arrival_s, clients, rate_rps
):
    rate = _arrival_rate_rps(np.array(arrival_s, dtype=np.float64), clients)
    np.testing.assert_equal(rate, rate_rps)
