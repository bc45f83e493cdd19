"""The front end that made a client's log is found back, with the step times beside it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reference.logs import PROFILE, simulated_log
from slo_bench.harness.validation.calibration.calibrate import calibrate
from slo_bench.harness.validation.calibration.fitted_front_end import Waited, fitted_front_end
from slo_bench.harness.validation.replay.log_replay import validate
from slo_bench.predictors.operators.front_end import FrontEnd
from slo_bench.predictors.profiles.calibration import Calibration

USUAL = FrontEnd("a server", request_s=2e-4, latency_s=8e-3, token_s=3e-6)
SLOW = Calibration(("made up",), (1.0, 64.0, 512.0, 2048.0), (0.9, 0.95, 1.1, 1.2))


def client_log(front_end: FrontEnd, seed: int, together: int = 1, longest_prompt: int = 900):
    profile = dataclasses.replace(PROFILE, calibration=SLOW)
    log, _ = simulated_log(
        100_000,
        caching=False,
        seed=seed,
        profile=profile,
        front_end=front_end,
        together=together,
        gap_s=0.25,
        longest_prompt=longest_prompt,
    )
    return log


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [0.0, 0.06])
def test_latency_of_the_front_end_is_found_beside_the_step_times(latency_s):
    true = FrontEnd("a server", 2e-4, latency_s, 0.0)
    log, other = client_log(true, seed=1), client_log(true, seed=2)
    calibrated = calibrate([log], PROFILE, host_s=0.004)
    learned = calibrated.profile.front_end
    assert learned is not None
    mean_tokens = float(log.prompt_tokens.mean())
    assert learned.latency_s + learned.token_s * mean_tokens == pytest.approx(latency_s, abs=3e-3)
    rows = validate(other, calibrated.profile, host_s=0.004).rows()
    errors = {row.metric: abs(row.error) for row in rows if row.statistic == "mean"}
    assert max(errors.values()) < 0.02


@pytest.mark.slow
def test_share_by_prompt_tokens_is_found():
    true = FrontEnd("a server", 2e-4, 5e-3, 60e-6)
    learned = calibrate([client_log(true, seed=1)], PROFILE, host_s=0.004).profile.front_end
    assert learned is not None
    assert learned.token_s == pytest.approx(60e-6, rel=0.2)


def test_queue_of_requests_that_come_together_is_found():
    true = FrontEnd("a server", 5e-3, 8e-3, 3e-6)
    log = client_log(true, seed=1, together=8, longest_prompt=60)
    learned = calibrate([log], PROFILE, host_s=0.004).profile.front_end
    assert learned is not None
    assert 2e-3 <= learned.request_s <= 1e-2  # neighbours of a list


def test_log_of_an_engine_tells_no_front_end():
    log = dataclasses.replace(client_log(USUAL, seed=1), of_client=False)
    calibrated = calibrate([log], PROFILE, host_s=0.004)
    assert calibrated.profile.front_end is None
    assert "front end" in " ".join(calibrated.notes)


def test_without_requests_that_tell_it_the_usual_front_end_stays():
    nothing = np.zeros(0)
    chosen = [np.zeros(0, dtype=np.bool_)]
    learned = fitted_front_end(USUAL, lambda queued: [Waited(nothing, nothing, nothing)], chosen)
    assert learned == USUAL
