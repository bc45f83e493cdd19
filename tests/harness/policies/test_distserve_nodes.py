"""DistServe on several hosts: which link KV takes, and where answers are decoded."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.core.network import NodeNetwork
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import LinkSpec, gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model
WITHIN, ACROSS = LinkSpec("nvlink", 100e9, 1e-6), LinkSpec("network", 1e9, 1e-3)


def served(n: int, every_s: float, **parameters):
    workload = Workload(
        arrival_s=np.arange(n) * every_s,
        prompt_tokens=np.full(n, 2000),
        output_tokens=np.full(n, 100),
    )
    system = SYSTEMS["distserve"].with_parameters(
        prefill_instances=2, network_gb_per_s=1.0, **parameters
    )
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=4)


def test_links_within_a_host_and_between_hosts():
    network = NodeNetwork(WITHIN, ACROSS, {0: 0, 1: 0, 2: 1, 3: 1})
    assert network.send(0, 1, 10**9, 0.0) == pytest.approx(0.01, rel=1e-3)
    assert network.send(0, 2, 10**9, 0.0) == pytest.approx(1.001)
    # The same link into the network, and another one within the host.
    assert network.send(0, 3, 10**9, 0.0) == pytest.approx(2.001)
    assert network.send(0, 1, 10**9, 0.0) == pytest.approx(0.02, rel=1e-3)
    assert network.across_bytes == 2 * 10**9
    assert network.spec is ACROSS


def test_decode_stays_on_the_host_of_its_prefill_while_there_is_room():
    near = served(40, 0.5, nodes=2)
    far = served(40, 0.5, nodes=2, near_first=False)
    network = served(40, 0.5, near_first=False)
    kv_s = 2000 * PLACEMENT.kv_bytes_per_token / 1e9
    assert near.records.transfer_s.max() < 0.1 * kv_s
    assert np.median(network.records.transfer_s) >= kv_s
    assert 0.1 < (far.records.transfer_s >= kv_s).mean() < 0.9  # about half of them cross
    prefilled, decoded = near.instances[:2], near.instances[2:]
    assert [instance.role for instance in (*prefilled, *decoded)] == ["prefill"] * 2 + [
        "decode"
    ] * 2


def test_distserve_nodes_are_refused_on_servers():
    assert "nodes" in SYSTEMS["distserve"].with_parameters(nodes=2).on_servers.refusals[""]
    assert not SYSTEMS["distserve"].on_servers.refusals
