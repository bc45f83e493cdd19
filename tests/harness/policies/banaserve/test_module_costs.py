"""Costs of moves, and what a placement is worth, by hand."""

from __future__ import annotations

import pytest

from slo_bench.harness.policies.banaserve.module_costs import (
    head_move,
    head_toll,
    layer_move,
    layer_toll,
)
from slo_bench.harness.policies.banaserve.objective import BanaServeObjective, ObjectiveWeights
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import LinkSpec, gpu, model

LINK = LinkSpec("link", bandwidth_bytes_per_s=100e9, latency_s=1e-5)
LLAMA = Placement(model("llama-13b"), gpu("a100-80g"))


def test_layer_move_carries_weights_and_kv():
    cost = layer_move(LLAMA, layers=4, kv_tokens=1000, over=LINK, sync_s=0.002)
    assert cost.weight_bytes == 4 * LLAMA.model.layer_weight_bytes()
    assert cost.kv_bytes == 4 * 1000 * 2 * 5120 * 2  # K and V, 16 bits, 40 heads of 128
    assert cost.seconds == pytest.approx(cost.moved_bytes / 100e9 + 1e-5 + 0.002)


def test_weights_outweigh_kv_only_for_short_batches():
    """§4.3.1 takes it for granted; a layer of 13B is worth 31,000 tokens of KV."""
    few, many = (layer_move(LLAMA, 1, tokens, LINK) for tokens in (1_000, 40_000))
    assert few.weight_bytes > 10 * few.kv_bytes
    assert many.kv_bytes > many.weight_bytes


def test_head_move_carries_only_its_kv():
    cost = head_move(LLAMA, kv_heads=10, kv_tokens=1000, over=LINK, sync_s=0.0)
    assert cost.weight_bytes == 0
    assert cost.kv_bytes == 1000 * LLAMA.kv_bytes_per_token // 4
    assert cost.seconds < layer_move(LLAMA, 10, 1000, LINK, sync_s=0.0).seconds


def test_tolls_of_moved_layers_and_heads_by_hand():
    layers = layer_toll(LLAMA, LINK)
    assert layers.step_s(0) == pytest.approx(2e-5)
    assert layers.step_s(100) == pytest.approx(2e-5 + 100 * 2 * 5120 * 2 / 100e9)
    heads = head_toll(LLAMA, 10, LINK)
    # A quarter of Q, O, K and V, each 5120 wide, in each of 40 layers.
    assert heads.step_s(0) == pytest.approx(40 * 2e-5)
    assert heads.step_s(100) - heads.step_s(0) == pytest.approx(40 * 100 * 5120 * 2 / 100e9)
    grouped = head_toll(Placement(model("llama-3.1-8b"), gpu("a100-80g")), 8, LINK)
    assert grouped.s_per_token == pytest.approx(32 * 2 * (2 * 4096 + 2 * 1024) / 100e9)


def test_objective_sums_both_latencies():
    objective = BanaServeObjective(0.75, 3.0, 0.1, 500.0, ObjectiveWeights(2.0, 0.5, 4.0))
    assert objective.latency_s == 3.1
    assert objective.value == pytest.approx(2 * 0.75 - 0.5 * 3.1 + 4 * 0.5)
