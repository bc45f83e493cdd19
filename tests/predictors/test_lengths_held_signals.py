"""Signals that come within a step act at its end, and a second one at once."""

from __future__ import annotations

import signal

import pytest

from slo_bench.predictors.lengths.held_signals import held_signals


@pytest.fixture(autouse=True)
def ctrl_c_raises(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_signal_waits_for_the_end_and_is_kept():
    events = []

    def step() -> None:
        with held_signals(lambda: events.append("kept")):
            signal.raise_signal(signal.SIGINT)
            events.append("end of the step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert events == ["end of the step", "kept"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_signal_acts_at_once_and_nothing_is_kept():
    events = []

    def step() -> None:
        with held_signals(lambda: events.append("kept")):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            events.append("end of the step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert events == []


def test_second_signal_while_it_is_kept_acts_at_once():
    events = []

    def keep() -> None:
        signal.raise_signal(signal.SIGINT)
        events.append("kept")

    def step() -> None:
        with held_signals(keep):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert events == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_signals(lambda: pytest.fail("nothing came")):
        signal.raise_signal(signal.SIGINT)


def test_error_in_a_step_is_raised_with_the_handlers_restored():
    with pytest.raises(ValueError, match="loss"), held_signals(lambda: pytest.fail("not whole")):
        raise ValueError("loss is NaN")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
