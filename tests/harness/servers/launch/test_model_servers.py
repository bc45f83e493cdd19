"""What a gateway process is told of the models whose servers it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slo_bench.harness.core.multi_model_policy import ServedModel
from slo_bench.harness.policies.prism.prism_controller import PrismGlobal
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.gateway.served_gpus import MeasuredPrefill
from slo_bench.harness.servers.launch.compatibility import limitation, refusal
from slo_bench.harness.servers.launch.model_servers import ModelServers
from slo_bench.harness.servers.launch.serve_settings import Serve
from slo_bench.predictors.operators.assembly import default_step_time
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model


def test_plan_of_models_is_the_same_on_the_other_side():
    place = Placement(model("llama-3.2-1b"), gpu("a10"), batched_tokens=2048)
    served = ServedModel(0, "m#2", place, default_step_time(place).model, 0.5, 100.0, 50.0, 2.0)
    common = Serve("vllm", "m", server_args=("--x=1",), cores=(1, 2), startup_timeout_s=7.0)
    plan = ModelServers(
        [served], {"m#2": "m"}, PrismGlobal(swaps=3), common, 2, 99, Path("servers/prism.log")
    )
    copy = ModelServers.from_plain(json.loads(json.dumps(plan.to_plain())))
    assert (copy.folders, copy.policy, copy.common) == ({"m#2": "m"}, plan.policy, common)
    assert (copy.gpus, copy.pages, copy.log) == (2, 99, plan.log)
    [other] = copy.models
    for name in ("index", "name", "rate_rps", "slo_s", "tp", "weight_pages"):
        assert getattr(other, name) == getattr(served, name)
    assert other.work_s == pytest.approx(served.work_s, rel=0.5)  # one time for all prompt tokens
    assert other.kv_demand / other.work_s == pytest.approx(served.kv_demand / served.work_s)


def test_measured_prefill_replaces_its_estimate_and_then_is_a_mean():
    times = MeasuredPrefill(s_per_token=1.0, decode_s=0.5)
    assert times.step_s(0, 0, ((0, 10),)) == 10.0
    assert times.step_s(2, 50, ((0, 10),)) == 10.5
    times.measured(2.0)
    times.measured(1.0)
    assert times.step_s(0, 0, ((0, 1),)) == pytest.approx(1.8)
    assert times.steps_within(1, 1, times.span_s(1, 1, 3)) == 3


@pytest.mark.parametrize("name", ["prism", "static-partition"])
def test_systems_of_several_models_run_on_vllm_in_part(name):
    assert refusal(system(name), "vllm") is None
    assert "memory of its own" in limitation(system(name), "vllm")
    assert "vLLM alone" in (refusal(system(name), "sglang") or "")
    for other in ("muxserve", "qlm"):
        assert "simulated alone" in (refusal(system(other), "vllm") or "")
