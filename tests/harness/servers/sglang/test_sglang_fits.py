"""Which policies SGLang takes; needs no SGLang."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slo_bench.harness.core.decisions import Limits
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.servers.launch.compatibility import limitation as limitation_of_system
from slo_bench.harness.servers.plugin.contract import POLICY_VARIABLE, PolicySpec
from slo_bench.harness.servers.sglang.plugin.sglang_compatibility import limitation, refusal
from slo_bench.harness.servers.sglang.plugin.sglang_plugin import register
from slo_bench.harness.servers.sglang.plugin.targets import HOOKS, moved


@pytest.mark.parametrize(
    "name",
    [
        *("vllm", "vllm-v0", "sarathi", "edf", "edf-drop"),
        *("ascendra-lp", "prism-queue", "slo-odbs-continuous", "static-split"),
        *("collocation", "collocation-lru", "collocation-open", "collocated-fcfs"),
    ],
)
def test_sglang_runs_policies_of_order_limits_room_and_dropping(name):
    assert refusal(SYSTEMS[name].policy) == ""
    assert limitation(SYSTEMS[name].policy) == ""


@pytest.mark.parametrize("name", ["adaptivellm", "adaptivellm-deadlines", "fastserve"])
def test_sglang_runs_the_order_of_policies_that_swap_and_says_so(name):
    assert refusal(SYSTEMS[name].policy) == ""
    assert "each victim is recomputed" in limitation(SYSTEMS[name].policy)
    assert "each victim is recomputed" in limitation_of_system(SYSTEMS[name], "sglang")
    assert limitation_of_system(SYSTEMS[name], "vllm") == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm-swap", "it decides preemption_mode"),
        ("orca", "it decides reserved_blocks"),
        ("fifo", "it forms static batches"),
        ("sglang", "run the server unpatched"),
    ],
)
def test_sglang_refuses_unsupported_systems_with_the_reason(name, reason):
    assert reason in refusal(SYSTEMS[name].policy)


@dataclass(frozen=True)
class _WholePromptsBesideDecodes(Policy):
    def limits(self, view):
        return Limits(chunked=False)


def test_sglang_refuses_whole_prompts_beside_decodes():
    assert "it computes whole prompts beside decodes" in refusal(_WholePromptsBesideDecodes())


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
