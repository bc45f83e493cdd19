"""`slo-bench serve` goes on while somebody can stand in for who has ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from slo_bench.cli.commands import serve_until_stopped
from slo_bench.cli.commands.serve_until_stopped import stop_on_signals
from slo_bench.harness.policies.systems import System, system
from slo_bench.harness.servers.launch.server_process import ServerError
from slo_bench.workloads.errors import SloBenchError


@dataclass
class Fake:
    """A server that has so many looks to live."""

    url: str
    looks: float
    name: str = "fake"
    log: Path = Path("fake.log")

    @property
    def running(self) -> bool:
        return self.looks > 0

    def check(self) -> None:
        raise ServerError(f"{self.url} ended")


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is said."""
    said_lines: list[str] = []
    monkeypatch.setattr(serve_until_stopped, "say", said_lines.append)
    return said_lines


def ends(monkeypatch, *groups: list[Fake]) -> str:
    """Why it ended."""

    def sleep(seconds: float) -> None:
        for group in groups:
            for server in group:
                server.looks -= 1

    monkeypatch.setattr(serve_until_stopped.time, "sleep", sleep)
    with pytest.raises(ServerError) as ended:
        serve_until_stopped.wait_while_served(groups)
    return str(ended.value)


def test_service_ends_when_its_last_server_ends(monkeypatch, lines):
    why = ends(monkeypatch, [Fake("a", 1), Fake("b", 9), Fake("c", 3)])
    assert why == "b ended"
    assert [line.split()[2] for line in lines] == ["a", "c"]


def test_service_ends_when_all_servers_of_one_kind_have_ended(monkeypatch, lines):
    why = ends(monkeypatch, [Fake("prefill", 4)], [Fake("decode", float("inf"))])
    assert why == "prefill ended"
    assert lines == []


@dataclass
class Wanted:
    """What is to be served, as far as lengths are concerned."""

    system: str
    patched: bool
    backend: str = "vllm"

    def resolved_system(self) -> System:
        return system(self.system)


@pytest.mark.parametrize(("inside", "patched"), [(True, False), (False, True)])
def test_length_predictor_without_a_patched_server_is_refused(inside, patched):
    with pytest.raises(SloBenchError, match="vllm has vllm as it is"):
        serve_until_stopped.check_hears(Wanted("vllm", patched), inside=inside)


def test_policy_that_ignores_predicted_lengths_gives_a_warning(lines):
    serve_until_stopped.check_hears(Wanted("slo-odbs-continuous", patched=True), inside=True)
    assert lines == []
    serve_until_stopped.check_hears(Wanted("edf", patched=True), inside=True)
    assert lines == [
        "edf does not use predicted lengths: each prediction takes time and changes nothing"
    ]


def test_serve_parameter_may_be_prefixed_with_its_system():
    parameters = serve_until_stopped.parameters_of(
        ["distserve.decode_instances=2", "x=0.5"], "distserve"
    )
    assert parameters == {"decode_instances": 2, "x": 0.5}
    with pytest.raises(SloBenchError, match="write NAME=VALUE"):
        serve_until_stopped.parameters_of(["x"], "distserve")


def test_sigint_ends_a_job_of_a_script_in_the_background():
    """A shell without job control begins those with SIGINT ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_on_signals(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert ended.value.code == 130
