"""Batches of static policies, run to completion by an engine that batches continuously."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from slo_bench import Experiment

FILE = Path(__file__).resolve().parents[2] / "scripts" / "static_batches.py"


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory):
    """The batches of 30 requests at once, each as (start, end, output tokens, SLOs)."""

    def run(policy, **parameters):
        folder = tmp_path_factory.mktemp(policy)
        result = Experiment(
            systems=[f"{FILE}:{policy}"],
            parameters={f"{FILE}:{policy}": parameters},
            arrivals="concurrency(30)",
            requests=30,
            seeds=1,
            front_end="none",
            output_tokens="uniform(16,192)",
            slo="e2e=uniform(1,60)",
            records="csv",
        ).run(folder / "runs", jobs=1)
        (row,) = result.cells.to_dict("records")
        requests = result.requests(row["cell"])
        return [
            (start_s, group["finish_s"].max(), group["output_tokens"], group["e2e_slo_s"])
            for start_s, group in requests.groupby("first_scheduled_s")
        ]

    return run


@pytest.mark.parametrize("policy", ["S3Batches", "SloOdbsBatches"])
def test_next_batch_waits_for_the_last_answer_of_the_one_before(batches_of, policy):
    batches = batches_of(policy, max_batch=8)
    assert sum(len(tokens) for *_, tokens, _ in batches) == 30
    assert max(len(tokens) for *_, tokens, _ in batches) == 8
    assert all(end_s <= start_s for (_, end_s, *_), (start_s, *_) in pairwise(batches))


def test_s3_batches_go_from_short_to_long_answers(batches_of):
    batches = batches_of("S3Batches", max_batch=8)
    ranges = [(tokens.min(), tokens.max()) for *_, tokens, _ in batches]
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(ranges))


def test_slo_odbs_batches_go_by_slo_and_answer(batches_of):
    batches = batches_of("SloOdbsBatches", max_batch=8, output_weight=0.0)
    slos_s = np.concatenate([np.sort(slo_s) for *_, slo_s in batches])
    assert (np.diff(slos_s) >= 0).all()
    weighted = batches_of("SloOdbsBatches", max_batch=8, slo_weight=0.0)
    ranges = sorted((tokens.min(), tokens.max()) for *_, tokens, _ in weighted)
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(ranges))
