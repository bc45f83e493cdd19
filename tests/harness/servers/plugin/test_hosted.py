"""Errors of a policy end requests, not the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from slo_bench.harness.core.decisions import Admission, NextQueue
from slo_bench.harness.core.policy import Policy, overrides, parameter
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.wire import FAILED
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.plugin.contract import IdleView
from slo_bench.harness.servers.plugin.hosted import FIRST, PolicyErrors, guarded
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo


@dataclasses.dataclass(frozen=True)
class Fails(Policy):
    """Every hook fails for long prompts."""

    longest: int = parameter(100, 1, 1000)

    def _check(self, r: RequestState) -> None:
        if r.prompt_tokens > self.longest:
            raise ValueError(f"{r.prompt_tokens} tokens are too many")

    def admit(self, r: RequestState, view: Any) -> Admission:
        self._check(r)
        return Admission.ADMIT

    def queue_key(self, r: RequestState, view: Any) -> float:
        self._check(r)
        return r.prompt_tokens

    def victim_key(self, r: RequestState, view: Any) -> float:
        self._check(r)
        return r.prompt_tokens

    def next_queue(self, view: Any) -> NextQueue:
        raise KeyError("which")


def request(tokens: int) -> RequestState:
    return RequestState(tokens, 0.0, tokens, 5, 5, Slo())


def test_guarded_policy_error_fails_its_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    errors = PolicyErrors()
    policy = guarded(Fails(longest=50), errors)
    view: Any = IdleView(policy)
    short, long = request(10), request(60)
    assert policy.queue_key(short, view) == 10
    assert errors.failed() == {}
    assert policy.admit(long, view) is Admission.ADMIT
    assert policy.queue_key(long, view) is FIRST
    (failed,) = errors.failed().items()
    assert failed[0] is long
    assert failed[1] == f"{FAILED}: admit of Fails raised ValueError: 60 tokens are too many"
    assert errors.failed() == {}
    assert errors.count == 2
    assert capsys.readouterr().err.count("Traceback") == 1


def test_guarded_policy_of_a_file_fails_requests_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "misspelt.py"
    path.write_text(
        "from slo_bench.policy import Policy\n"
        "class Misspelt(Policy):\n"
        "    def queue_key(self, r, view):\n"
        "        return r.promt_tokens\n"
    )
    policy = system(str(path)).policy
    assert isinstance(policy, Policy)
    errors = PolicyErrors()
    view: Any = IdleView(policy)
    assert guarded(policy, errors).queue_key(request(5), view) is FIRST
    (message,) = errors.failed().values()
    assert f"queue_key of Misspelt raised {path}, line 4, in queue_key: AttributeError" in message
    assert message.endswith("did you mean prompt_tokens?")


def test_guarded_hooks_that_raise_answer_the_default() -> None:
    errors = PolicyErrors()
    policy = guarded(Fails(), errors)
    view: Any = IdleView(policy)
    assert policy.next_queue(view) is Policy.next_queue(Fails(), view)
    assert errors.count == 1
    assert errors.failed() == {}
    assert policy.limits(view) == Fails().limits(view)


def test_guarded_policy_keeps_type_and_parameters() -> None:
    policy = guarded(Fails(longest=7), PolicyErrors())
    assert isinstance(policy, Fails)
    assert policy.longest == 7
    assert type(policy).__name__ == "Fails"
    assert overrides(policy, "admit")
    assert not overrides(policy, "timeout")


def test_key_of_a_failed_request_sorts_first() -> None:
    keys = [3.0, FIRST, -1.0, FIRST]
    assert sorted((key, index) for index, key in enumerate(keys)) == [
        (FIRST, 1),
        (FIRST, 3),
        (-1.0, 2),
        (3.0, 0),
    ]
    assert sorted([(1, 2), FIRST, (0, 5)]) == [FIRST, (0, 5), (1, 2)]
    assert min(3.0, FIRST) is FIRST


def test_policy_limits_that_raise_at_the_start_stop_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class NoLimits(Policy):
        def limits(self, view: Any) -> Any:
            raise ValueError("none")

    with pytest.raises(ValueError, match="none"):
        guarded(NoLimits(), PolicyErrors()).limits(None)  # type: ignore[arg-type]


def test_wrong_use_of_the_policy_interface_is_raised() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(Policy):
        def queue_key(self, r: RequestState, view: Any) -> float:
            raise SloBenchError("it reads the clock")

    errors = PolicyErrors()
    with pytest.raises(SloBenchError, match="clock"):
        guarded(Wrong(), errors).queue_key(request(3), None)  # type: ignore[arg-type]
    assert not errors.count
