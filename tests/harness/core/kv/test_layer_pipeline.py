"""The three-stage pipeline of BanaServe's KV store: the paper's figures, and what a run shows."""

from __future__ import annotations

import numpy as np
import pytest

from reference.workloads import one_prefix
from slo_bench.harness.core.decisions import Limits
from slo_bench.harness.core.kv.layer_pipeline import pipeline_s
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.shared.kv_store_parameters import SSD, SharedStoreLedgers
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import LinkSpec, gpu, model
from slo_bench.predictors.step_time import step_time

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model
LAYERS = 32
NETWORK = LinkSpec("200 Gb/s", 25e9, 0.0)
DISK = LinkSpec("5 GB/s", 5e9, 0.0)


def prefill(hit_rate, link, forward_s=0.27, tokens=1000):
    """Loading and computing a prompt of the paper's example, seconds of all layers."""
    loaded = int(hit_rate * tokens)
    return link.transfer_s(loaded * PLACEMENT.kv_bytes_per_token), forward_s * (1 - hit_rate)


def test_layer_times_of_the_papers_example():
    """Eq. 4-13, 4-14: 4 KB a layer and token; 4.22 ms to compute a layer, 0.082 ms to load it."""
    assert PLACEMENT.kv_bytes_per_token == LAYERS * 4096
    load_s, compute_s = prefill(0.5, NETWORK)
    assert compute_s / LAYERS == pytest.approx(4.22e-3, rel=1e-3)
    assert load_s / LAYERS == pytest.approx(0.082e-3, rel=1e-2)
    # All loading hides behind computation but that of the first layer.
    assert pipeline_s(LAYERS, load_s, compute_s) == pytest.approx(compute_s + load_s / LAYERS)


@pytest.mark.parametrize(("link", "crossover"), [(NETWORK, 0.98), (DISK, 0.91)])
def test_loading_bounds_the_pipeline_above_a_hit_rate(link, crossover):
    for hit_rate in np.arange(0.5, 1, 0.001):
        load_s, compute_s = prefill(hit_rate, link)
        hidden = pipeline_s(LAYERS, load_s, compute_s) <= compute_s + load_s / LAYERS + 1e-12
        if not hidden:
            break
    assert hit_rate == pytest.approx(crossover, abs=0.005)


def test_slowest_stage_bounds_the_pipeline():
    assert pipeline_s(4, 4.0, 8.0, 4.0) == 1 + 4 * 2
    assert pipeline_s(4, 8.0, 4.0, 4.0) == 4 * 2 + 1
    assert pipeline_s(4, 0.0, 4.0, 8.0) == 3 * 2 + 1  # the last layer is stored later
    assert pipeline_s(4, 0.0, 4.0) == 4


def test_exposed_swap_time_of_an_iteration():
    assert Limits().exposed_swap_s(2.0, 1.0) == 1.0
    assert Limits(overlap_swap=True).exposed_swap_s(2.0, 1.0) == 0.0
    layered = Limits(overlap_swap=True, layers=4, store_s_per_token=0.1)
    assert layered.exposed_swap_s(2.0, 1.0) == pytest.approx(0.25)
    # 40 tokens are stored in 4 s: three layers of 1 s each and a last one of 0.5 s.
    assert layered.exposed_swap_s(2.0, 0.0, ((100, 30), (0, 10))) == pytest.approx(1.5)


def test_run_pays_first_layer_and_transfer_through_the_store():
    """The second prompt finds 624 of its 640 tokens in the store, on another instance."""
    workload = one_prefix()
    banaserve = SYSTEMS["banaserve"].with_parameters(
        prefill_instances=2, decode_instances=2, layer_moves=False, head_moves=False
    )
    records = simulate(workload, banaserve, PLACEMENT, STEP_TIME, instances=4).records
    host = PLACEMENT.host_link
    store_s = 16 * PLACEMENT.kv_bytes_per_token / host.bandwidth_bytes_per_s
    load_s = host.transfer_s(624 * PLACEMENT.kv_bytes_per_token)
    compute_s = STEP_TIME.step_s(0, 0, ((624, 16),))
    assert load_s / LAYERS > 1e-5
    expected_s = pipeline_s(LAYERS, load_s, compute_s, store_s)
    elsewhere = 1 if records.instance[1] != records.instance[0] else 2
    assert records.first_token_s[elsewhere] - 5.0 == pytest.approx(expected_s)
    # The decode instance reads the KV of the whole prompt from host memory.
    read_s = host.transfer_s(640 * PLACEMENT.kv_bytes_per_token)
    second_token_s = records.finish_s[0] - records.first_token_s[0]
    assert second_token_s == pytest.approx(read_s + STEP_TIME.step_s(1, 641, ()), rel=1e-3)
    direct = simulate(
        workload, banaserve.with_parameters(handover="network"), PLACEMENT, STEP_TIME, instances=4
    ).records
    assert direct.finish_s[0] - direct.first_token_s[0] < second_token_s


def test_gpus_of_a_node_share_its_disk_bandwidth():
    ledgers = SharedStoreLedgers(PLACEMENT, 4, cpu_gib=0.0, ssd_gib=1.0)
    manager = ledgers(100, 16, 0, 16)
    manager.store.put([1, 2])
    two_units = 2 * PLACEMENT.block_bytes_per_gpu
    alone_s = SSD.transfer_s(two_units) - SSD.latency_s
    assert manager.store.load_s([1, 2]) == pytest.approx(SSD.latency_s + 4 * alone_s)
