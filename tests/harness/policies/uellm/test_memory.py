"""KV of static batches that outgrow what was reserved for them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.uellm.s3 import S3
from slo_bench.harness.policies.uellm.slo_odbs import SloOdbs
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.length_buckets import bucket_of


def test_reservation_grows_while_there_are_blocks(serve, requests):
    # Told 8 tokens each (one block with the prompt), they take three; six blocks are enough.
    workload = requests((0, 4, 40), (0, 4, 40), max_output_tokens=[44, 44])
    predicted_tokens = np.array([4, 4])
    served = serve(workload, S3(), num_gpu_blocks=6, predicted_output_tokens=predicted_tokens)
    assert served.records.finish_s.tolist() == [40, 40]
    assert served.records.preemptions_recompute.tolist() == [0, 0]
    assert served.result.totals.kv_cache_usage_peak == 1


def test_last_request_restarts_where_blocks_run_out(serve, requests):
    # Four blocks hold two requests of 32 tokens: after 29 tokens (28 in the cache) they are full.
    workload = requests((0, 4, 40), (0, 4, 40), max_output_tokens=[44, 44])
    predicted_tokens = np.array([4, 4])
    served = serve(workload, S3(), num_gpu_blocks=4, predicted_output_tokens=predicted_tokens)
    records, totals = served.records, served.result.totals
    assert records.preemptions_recompute.tolist() == [0, 1]
    assert records.finish_s.tolist() == [40, 80]
    assert records.first_scheduled_s.tolist() == [0, 0]
    assert records.first_token_s.tolist() == [40, 80]  # the returns of both batches
    assert records.output_tokens.tolist() == [40, 40]
    # Two prefills, 28 steps for both, 11 for the one; then the other from the start.
    assert totals.decode_tokens == 2 * 28 + 11 + 39
    assert totals.prefill_tokens == 4 + 4 + 4
    assert totals.padded_tokens == 0
    assert totals.kv_cache_usage_peak == 1


def test_finished_answers_are_not_padded_where_memory_is_short(serve, requests):
    workload = requests((0, 4, 2), (0, 4, 40), max_output_tokens=[44, 44])
    served = serve(workload, S3(), num_gpu_blocks=4, predicted_output_tokens=np.array([2, 2]))
    assert served.records.finish_s.tolist() == [40, 40]  # given back together all the same
    assert served.records.preemptions_recompute.tolist() == [0, 0]
    totals = served.result.totals
    assert totals.decode_tokens == 2 * 28 + 11
    assert totals.padded_tokens == 28 - 1


def test_fifo_reserves_the_maximum_and_never_runs_out(serve, requests):
    workload = requests((0, 4, 40), (0, 4, 40), max_output_tokens=[44, 44])
    served = serve(workload, Fifo(), num_gpu_blocks=4, predicted_output_tokens=np.array([4, 4]))
    assert served.records.first_scheduled_s.tolist() == [0, 40]
    assert served.records.preemptions_recompute.tolist() == [0, 0]


@pytest.mark.parametrize("policy", [S3(max_batch=6), SloOdbs(max_batch=6), Fifo(max_batch=6)])
def test_all_requests_finish_whatever_is_predicted(policy, serve, requests):
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(1, 25))
        rows = zip(
            np.sort(rng.uniform(0, 50, n)),
            rng.integers(1, 30, n),
            rng.integers(1, 60, n),
            strict=True,
        )
        workload = requests(*rows, max_output_tokens=[60] * n)
        predicted_tokens = rng.integers(1, 80, n)
        served = serve(workload, policy, num_gpu_blocks=8, predicted_output_tokens=predicted_tokens)
        records, totals = served.records, served.result.totals
        assert np.isfinite(records.finish_s).all()
        assert records.output_tokens.tolist() == workload.output_tokens.tolist()
        assert (records.first_scheduled_s >= records.arrival_s).all()
        assert totals.kv_cache_usage_peak <= 1
        useful = totals.prefill_tokens + totals.decode_tokens - totals.padded_tokens
        least = int((workload.prompt_tokens + workload.output_tokens - 1).sum())
        assert useful == least or (useful > least and records.preemptions_recompute.any())


def test_predictions_for_other_requests_are_refused(serve, requests):
    with pytest.raises(SloBenchError, match="has 3 values for 1 requests"):
        serve(requests((0, 4, 2)), S3(), predicted_output_tokens=np.array([1, 2, 3]))
    with pytest.raises(SloBenchError, match="output_tokens_p90 has 2 values for 1 requests"):
        serve(requests((0, 4, 2)), S3(), output_tokens_p90=np.array([1, 2]))


@pytest.mark.parametrize("system", ["s3", "slo-odbs"])
def test_mispredictions_are_kept_for_retraining(system, tmp_path):
    experiment = Experiment(
        systems=[system],
        workload="alpaca",
        length_predictor="noisy(0.7)",
        requests=100,
        rates=[1],
        seeds=1,
        slo="e2e=100",
        records="csv",
    )
    result = experiment.run(tmp_path / "run", jobs=1)
    (row,) = result.rows()
    lines = (result.folder / "mispredictions" / f"{row['cell']}.jsonl").read_text().splitlines()
    assert len(lines) == round(100 * (1 - row["length_bucket_accuracy"]))
    assert 10 < len(lines) < 50
    outputs = result.requests(row["cell"])["output_tokens"]
    for line in map(json.loads, lines):
        assert outputs[line["id"]] == line["output_tokens"]
        assert bucket_of(line["predicted_tokens"]) != bucket_of(line["output_tokens"])


def test_oracle_writes_no_mispredictions(tmp_path):
    experiment = Experiment(systems=["s3"], workload="alpaca", requests=50, rates=[1], seeds=1)
    result = experiment.run(tmp_path / "run", jobs=1)
    assert not (result.folder / "mispredictions").exists()
    assert "length_bucket_accuracy" not in result.rows()[0]
