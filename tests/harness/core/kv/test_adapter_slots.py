"""Slots for adapters, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.core.kv.adapter_slots import NO_ADAPTER, AdapterSlots
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.policies.systems import system
from slo_bench.predictors.lora import Lora
from slo_bench.predictors.specs import link, model
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload


class Request:
    def __init__(self, number):
        self.id = number


def test_least_recently_used_adapter_is_evicted():
    slots = AdapterSlots([0, 1, 2, 0, NO_ADAPTER], slots=2, load_s=0.5)
    adapter_0, adapter_1, adapter_2, adapter_0_again, base = map(Request, range(5))
    slots.begin([])
    assert [slots.enter(r) for r in (adapter_0, adapter_1, adapter_0_again, base)] == [
        0.5,
        0.5,
        0,
        0,
    ]
    assert not slots.admits(adapter_2)  # the batch has two adapters
    assert slots.admits(adapter_0_again)
    assert slots.admits(base)
    slots.begin([adapter_0])
    assert slots.admits(adapter_2)
    assert slots.enter(adapter_2) == 0.5  # in place of adapter 1
    slots.begin([adapter_0_again])
    assert slots.enter(adapter_0) == 0
    assert slots.enter(adapter_1) == 0.5  # in place of adapter 2
    assert slots.loads == 4


def test_bytes_and_seconds_by_hand():
    lora = Lora(model("llama-3.1-8b"), slots=4, rank=8, gpus=2)
    matrices = (4096 + 4096) * 2 + (4096 + 1024) * 2 + 3 * (4096 + 14336)  # rows + columns
    assert lora.parameters == 32 * 8 * matrices
    assert lora.adapter_bytes == lora.parameters  # 2 bytes each, on two GPUs
    pcie = link("16gb/s@20us")
    assert lora.load_s(pcie) == pytest.approx(20e-6 + lora.parameters / 16e9)


def on_h100(max_loras=None, rank=16):
    return placed(PlacementSpec("llama-3.1-8b", "h100-80g", 1, max_loras=max_loras, lora_rank=rank))


def test_slots_take_memory_and_time():
    plain, four, eight = on_h100(), on_h100(4), on_h100(8)
    lost = [
        plain.placement.num_gpu_blocks - deployment.placement.num_gpu_blocks
        for deployment in (four, eight)
    ]
    block_bytes = plain.placement.block_bytes_per_gpu
    assert lost == pytest.approx(
        [deployment.lora.slot_bytes / block_bytes for deployment in (four, eight)], abs=1
    )
    steps = [deployment.step_time.model.step_s(8, 8000, ()) for deployment in (plain, four, eight)]
    read_s = four.lora.slot_bytes / plain.placement.gpu.bandwidth_bytes_per_s
    assert np.diff(steps) == pytest.approx([read_s, read_s])


def test_tables_of_operators_take_the_slots_time_too():
    plain, four = (
        placed(PlacementSpec("llama-3.1-8b", "h100-80g", 1, max_loras=slots, profile="operators"))
        for slots in (None, 4)
    )
    steps = [deployment.step_time.model.step_s(8, 8000, ()) for deployment in (plain, four)]
    read_s = four.lora.slot_bytes / plain.placement.gpu.bandwidth_bytes_per_s
    assert steps[1] - steps[0] == pytest.approx(read_s)


def served(adapters, max_loras):
    place = on_h100(max_loras)
    n = len(adapters)
    load = Workload(
        np.zeros(n),
        np.full(n, 64),
        np.full(n, 50),
        model_index=np.array(adapters),
        model_names=("llama-3.1-8b", "a", "b", "c"),
    )
    return simulate(load, system("vllm"), place.placement, place.step_time.model, lora=place.lora)


def test_request_without_a_free_slot_waits_and_later_ones_pass_it():
    result = served([1, 2, 3, 1, 0], max_loras=2)
    first = result.records.first_scheduled_s
    assert result.counts["adapter_loads"] == 3
    assert first[[0, 1, 3, 4]].tolist() == [0.0] * 4
    # The third adapter waits for the end of the first requests.
    assert first[2] >= result.records.finish_s[[0, 1, 3]].min()
    everybody = served([1, 2, 3, 1, 0], max_loras=3)
    assert everybody.records.first_scheduled_s.max() == 0.0


def test_requests_without_adapter_load_nothing():
    result = served([0, 0, 0], max_loras=1)
    assert result.counts["adapter_loads"] == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"adapters": "zipf(4)"}, "give max_loras"),
        ({"max_loras": 2, "model": "mixtral-8x7b", "tp": 2}, "dense decoders, not for mixtral"),
        (
            {"max_loras": 2, "backend": "sglang", "systems": "sglang"},
            "no effect with backend sglang",
        ),
        ({"max_loras": 2, "speculation": "ngram:2@0.5"}, "neither speculation"),
    ],
)
def test_plan_refuses_impossible_adapter_settings(settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        plan(ExperimentSchema(**{"systems": "vllm", "gpu": "h100-80g", "rates": 1, **settings}))


def test_simulate_refuses_adapters_with_static_batches():
    place = on_h100(2)
    load = Workload(np.zeros(2), np.full(2, 64), np.full(2, 50))
    with pytest.raises(SloBenchError, match="static batches"):
        simulate(load, system("s3"), place.placement, place.step_time.model, lora=place.lora)


def test_run_with_adapters_has_columns_of_attainment_by_adapter(tmp_path):
    from slo_bench import Experiment

    run = Experiment(
        systems="vllm",
        gpu="h100-80g",
        workload="sharegpt",
        adapters="zipf(4, exponent=1)",
        max_loras=2,
        rates=2,
        requests=40,
        seeds=1,
    ).run(tmp_path / "run", jobs=1)
    (row,) = run.cells.to_dict("records")
    assert row["count_adapter_loads"] >= 4
    shares = [row[f"attainment_model-{k}"] for k in range(4)]
    assert row["attainment_spread"] == pytest.approx(max(shares) - min(shares))
