"""Which policies SGLang takes; needs no SGLang."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slo_bench.harness.core.decisions import Limits, NextQueue
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.servers.plugin.contract import POLICY_VARIABLE, PolicySpec
from slo_bench.harness.servers.sglang.plugin.sglang_compatibility import refusal
from slo_bench.harness.servers.sglang.plugin.sglang_plugin import register
from slo_bench.harness.servers.sglang.plugin.targets import HOOKS, moved


@pytest.mark.parametrize("name", ["vllm", "edf", "edf-drop"])
def test_sglang_runs_policies_of_order_victims_and_dropping(name):
    assert refusal(SYSTEMS[name].policy) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm-swap", "it decides preemption_mode"),
        ("adaptivellm", "it decides preemption_mode"),
        ("orca", "it decides reserved_blocks"),
        ("vllm-v0", "it never splits a prompt"),
        ("sarathi", "it keeps blocks free"),
        ("fifo", "it forms static batches"),
        ("sglang", "run the server unpatched"),
    ],
)
def test_sglang_refuses_unsupported_systems_with_the_reason(name, reason):
    assert reason in refusal(SYSTEMS[name].policy)


@dataclass(frozen=True)
class _Groups(Policy):
    def next_queue(self, view):
        return NextQueue.WAITING


@dataclass(frozen=True)
class _Varying(Policy):
    dynamic_limits = True

    def limits(self, view):
        return Limits(max_seqs=1 + view.n_waiting)


def test_sglang_refuses_policies_with_phases_or_varying_limits():
    assert "it decides next_queue" in refusal(_Groups())
    assert "limits change" in refusal(_Varying())


def test_sglang_register_without_a_policy_does_nothing(monkeypatch):
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    register()  # would fail: there is no SGLang here


def test_sglang_register_of_an_unsupported_policy_exits(monkeypatch):
    spec = PolicySpec.of("orca", SYSTEMS["orca"].policy)
    monkeypatch.setenv(POLICY_VARIABLE, spec.to_json())
    with pytest.raises(
        SystemExit, match="orca cannot run inside SGLang: it decides reserved_blocks"
    ):
        register()


def test_sglang_register_without_hooks_exits(monkeypatch):
    spec = PolicySpec.of("edf", SYSTEMS["edf"].policy)
    monkeypatch.setenv(POLICY_VARIABLE, spec.to_json())
    with pytest.raises(SystemExit, match=r"Scheduler\.run_batch is gone"):
        register()
    assert len(moved()) >= len(HOOKS)
