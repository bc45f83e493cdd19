"""Prefixes in host memory and on disk beside one instance's GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.server_kinds import server_kind
from slo_bench.predictors.specs import GIB
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

PROMPT = 1024
# Two prompts in turn; the GPU holds one at a time.
LOAD = Workload(
    np.arange(4) * 10.0,
    np.full(4, PROMPT + 1),
    np.full(4, 2),
    prefix_blocks=[tuple(range(1 + 100 * k, 65 + 100 * k)) for k in (0, 1, 0, 1)],
)


def served(name="vllm", **settings):
    spec = PlacementSpec("llama-3.1-8b", "h100-80g", 1, num_gpu_blocks=80, **settings)
    place = placed(spec)
    return place.placement, simulate(LOAD, system(name), place.placement, place.step_time.model)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_prefix_evicted_from_the_gpu_is_read_back_from_host_memory(name):
    _, plain = served(name)
    assert plain.records.cached_tokens.max() < PROMPT / 2
    placement, tiered = served(name, kv_offload_gib=1.0)
    assert tiered.records.cached_tokens.tolist() == [0, 0, PROMPT, PROMPT]
    assert tiered.counts["store_hits"] == 2
    ttft = tiered.records.first_token_s - LOAD.arrival_s
    load_s = placement.host_link.transfer_s(64 * placement.block_bytes_per_gpu)
    assert load_s < ttft[2] < ttft[0]


def test_disk_tier_is_below_host_memory_and_slower():
    block_bytes = served()[0].block_bytes_per_gpu
    host_gib = 64 * block_bytes / GIB  # host memory for one prompt
    results = [
        served(kv_offload_gib=h, kv_disk_gib=d)[1]
        for h, d in ((host_gib, 0), (host_gib, 1), (0, 1))
    ]
    hits = [result.records.cached_tokens.tolist()[2:] for result in results]
    assert max(hits[0]) < PROMPT / 2
    assert hits[1:] == [[PROMPT, PROMPT], [PROMPT, PROMPT]]
    ttft = [result.records.first_token_s[2] for result in (served(kv_offload_gib=1)[1], results[2])]
    assert ttft[0] < ttft[1]


def test_each_instance_has_tiers_of_its_own():
    place = placed(
        PlacementSpec("llama-3.1-8b", "h100-80g", 1, num_gpu_blocks=80, kv_offload_gib=1.0)
    )
    workload = dataclasses.replace(LOAD, prefix_blocks=[LOAD.prefix_blocks[0]] * 4)
    result = simulate(
        workload,
        system("vllm"),
        place.placement,
        place.step_time.model,
        instances=2,
        router="round-robin",
    )
    assert result.records.cached_tokens.tolist() == [0, 0, PROMPT, PROMPT]


@pytest.mark.parametrize(("name", "problem"), [("vllm-v0", "no prefix cache"), ("mooncake", "own")])
def test_systems_that_cannot_use_kv_tiers_are_refused(name, problem):
    place = placed(PlacementSpec("llama-3.1-8b", "h100-80g", 1, kv_offload_gib=1.0))
    with pytest.raises(SloBenchError, match=problem):
        simulate(LOAD, system(name), place.placement, place.step_time.model, instances=2)


@pytest.mark.parametrize(
    ("backend", "setting"), [("torch", "kv_offload_gib"), ("vllm", "kv_disk_gib")]
)
def test_kv_tier_settings_unknown_to_a_server_are_refused(backend, setting):
    with pytest.raises(SloBenchError, match=setting):
        plan(ExperimentSchema(backend=backend, systems=backend, rates=1, **{setting: 1.0}))


def test_kv_offload_args_of_each_server():
    vllm, sglang = (server_kind(name).kv_offload_args for name in ("vllm", "sglang"))
    assert vllm(64, 2) == ["--kv-offloading-size", "64"]
    # 64 GiB are 68.7 GB, and each of two processes has its own.
    hierarchical = ["--enable-hierarchical-cache", "--hicache-size"]
    assert sglang(64, 1) == [*hierarchical, "68"]
    assert sglang(64, 2) == [*hierarchical, "34"]
    with pytest.raises(SloBenchError, match=r"at least 1\.87"):
        sglang(1.86, 2)
    assert sglang(1.87, 2)[-1] == "1"
