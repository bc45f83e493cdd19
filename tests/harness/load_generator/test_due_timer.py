"""The timer that sending waits for, with the system's timers and with those of the loop alone."""

import asyncio
import math
from time import perf_counter

import pytest

from slo_bench.harness.load_generator import due_timer
from slo_bench.harness.load_generator.due_timer import DueTimer
from slo_bench.harness.load_generator.machine import run_event_loop


@pytest.fixture(params=["system", "loop"])
def timers(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.setattr(due_timer, "_timer_file", lambda: None)


@pytest.mark.usefixtures("timers")
@pytest.mark.parametrize("wait_s", [-1.0, 0.0, 0.003])
def test_a_timer_fires_once_and_not_before_it_is_due(wait_s):
    async def fired_at():
        loop = asyncio.get_running_loop()
        times_s, done = [], loop.create_future()

        def fire():
            times_s.append(perf_counter())
            timer.set(math.inf)
            done.set_result(None)

        timer = DueTimer(loop, fire)
        due_s = perf_counter() + wait_s
        timer.set(due_s)
        await done
        for _ in range(3):
            await asyncio.sleep(0)
        timer.close()
        return [time_s - due_s + timer.early_s for time_s in times_s]

    (late_s,) = run_event_loop(fired_at())
    assert late_s >= 0


@pytest.mark.usefixtures("timers")
@pytest.mark.parametrize("end", ["set", "close"])
def test_a_timer_that_is_switched_off_or_closed_does_not_fire(end):
    async def fired():
        loop = asyncio.get_running_loop()
        times_s, later = [], loop.create_future()
        timer = DueTimer(loop, lambda: times_s.append(perf_counter()))
        timer.set(perf_counter() - 1.0)
        if end == "set":
            timer.set(math.inf)
        else:
            timer.close()
        other = DueTimer(loop, lambda: (other.set(math.inf), later.set_result(None)))
        other.set(perf_counter())
        await later
        other.close()
        if end == "set":
            timer.close()
        return times_s

    assert run_event_loop(fired()) == []
