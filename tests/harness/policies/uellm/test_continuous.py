"""SLO-ODBS on a server that batches continuously, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.policies.uellm.slo_odbs import OpenBatch
from slo_bench.harness.policies.uellm.slo_odbs_continuous import SloOdbsContinuous
from slo_bench.harness.servers.launch.compatibility import refusal

# Of requests that all ask for 10 s, the (n + 1)-th makes the total 1.2 · 20 · (n + 1).
BY_SLO = SloOdbsContinuous(output_weight=0.0, threshold=80.0)
AT_ONCE = [(0.0, 16, 10)] * 5


def test_continuous_batch_admits_while_total_is_within_the_threshold():
    batch = OpenBatch(BY_SLO)
    sizes = []
    while not batch.closed_by(10, 10.0):
        batch.add(10, 10.0)
        sizes.append(batch.size)
    assert sizes == [1, 2, 3]  # the fourth would make it 96
    assert not OpenBatch(BY_SLO).closed_by(10, 1e6)  # alone, anybody may run


def test_continuous_batch_runs_at_most_max_num_seqs(serve_each_way, requests):
    served = serve_each_way(requests(*AT_ONCE, e2e_slo_s=np.full(5, 10.0)), BY_SLO)
    first_s = served.result.records.first_token_s
    finish_s = served.result.records.finish_s
    assert first_s[:3].tolist() == [1.0, 1.0, 1.0]
    assert (first_s[3:] > finish_s[:3].max()).all()


def test_continuous_batch_admits_the_next_when_one_ends(serve_each_way, requests):
    rows = [(0.0, 16, 3), *AT_ONCE[1:]]
    records = serve_each_way(requests(*rows, e2e_slo_s=np.full(5, 10.0)), BY_SLO).result.records
    assert records.finish_s[0] == 3.0
    assert records.first_token_s[3] == 4.0  # while the second and third still run
    assert records.finish_s[1] == 10.0


def test_continuous_batch_admits_by_tightest_slo(serve_each_way, requests):
    slos = np.array([np.inf, 30.0, 20.0, 10.0])
    policy = SloOdbsContinuous(max_num_seqs=1)
    records = serve_each_way(requests(*AT_ONCE[:4], e2e_slo_s=slos), policy).result.records
    assert np.argsort(records.finish_s).tolist() == [3, 2, 1, 0]


def test_continuous_odbs_groups_by_predicted_lengths(serve_each_way, requests):
    rows = [(0.0, 16, 40), (0.0, 16, 10), (0.0, 16, 40), (0.0, 16, 10)]
    # Another of 10 adds nothing; one of 40 would make it 1.2 · 30 · 3 · 0.5 = 54.
    policy = SloOdbsContinuous(slo_weight=0.0, sort_by="weighted", threshold=50.0)
    records = serve_each_way(requests(*rows), policy).result.records
    assert (records.first_token_s == 1.0).tolist() == [False, True, False, True]
    assert records.first_token_s[0] == records.finish_s[1] + 1.0


@pytest.mark.parametrize("name", ["slo-odbs", "slo-dbs", "odbs"])
def test_static_uellm_systems_name_their_continuous_variant(name):
    assert "slo-odbs-continuous" in (refusal(SYSTEMS[name], "vllm") or "")
    assert refusal(SYSTEMS["slo-odbs-continuous"], "vllm") is None
