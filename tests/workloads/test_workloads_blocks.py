"""Workloads in blocks are the same requests as drawn at once."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest

from slo_bench.workloads.base import DrawnSource
from slo_bench.workloads.blocks import BLOCK_ROWS
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source

SLO = parse_slo("ttft=1,tpot=0.15", 1.3)
SYNTHETIC = "synthetic(prompt=lognormal(median=300,sigma=1,max=4000),output=geometric(mean=30))"


@pytest.mark.parametrize(
    "amounts",
    [
        {"requests": BLOCK_ROWS + 1},
        {"requests": 2 * BLOCK_ROWS},
        {"duration_s": 5000.5},
        {"requests": 3 * BLOCK_ROWS, "duration_s": 3000},
    ],
)
@pytest.mark.parametrize("arrivals", ["poisson", "gamma(cv=2)", "weibull(shape=0.7)", "ramp(1,3)"])
@pytest.mark.parametrize("workload", ["azure-conv", "sharegpt", SYNTHETIC])
def test_source_blocks_join_to_the_whole(workload, arrivals, amounts):
    source = load_source(workload, arrivals=arrivals)
    whole = source.make(rate_rps=6.45, seed=3, slo=SLO, **amounts)
    blocks = source.blocks(rate_rps=6.45, seed=3, slo=SLO, **amounts)
    assert blocks is not None
    assert (len(blocks), blocks.first_s, blocks.last_s) == (
        len(whole),
        whole.arrival_s[0],
        whole.arrival_s[-1],
    )
    parts = list(blocks.draw())
    assert {len(part) for part in parts[:-1]} <= {BLOCK_ROWS}
    for field in dataclasses.fields(whole):
        column = getattr(whole, field.name)
        if isinstance(column, np.ndarray):
            joined = np.concatenate([getattr(part, field.name) for part in parts])
            assert joined.dtype == column.dtype
            assert joined.tobytes() == np.ascontiguousarray(column).tobytes(), field.name
    again = np.concatenate(list(blocks.draw_arrivals()))
    assert again.tobytes() == whole.arrival_s.tobytes()


@pytest.mark.parametrize(
    ("source", "slo"),
    [
        (load_source("azure-conv", arrivals="concurrency(8)"), "ttft=1"),
        (load_source("mooncake-conversation"), "ttft=1"),
        (load_source("azure-conv", sessions="sessions(turns=3)"), "ttft=1"),
        (load_source("azure-conv", models="zipf(2)"), "ttft=1"),
        (load_source("mix(a=azure-conv:0.5,b=sharegpt:0.5)"), "ttft=1"),
        (load_source("azure-conv"), "ttft=uniform(1,2)"),
        (load_source("azure-conv"), "deadline=60"),
    ],
)
def test_sources_that_need_the_whole_have_no_blocks(source, slo):
    drawn = isinstance(source, DrawnSource)  # others have none at all
    assert not drawn or source.blocks(rate_rps=1.0, requests=10, slo=parse_slo(slo)) is None


def test_memory_of_source_blocks_does_not_grow_with_requests():
    def peak_bytes(requests):
        tracemalloc.start()
        blocks = load_source("azure-conv").blocks(rate_rps=6.45, requests=requests, slo=SLO)
        for _ in blocks.draw():
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(BLOCK_ROWS)
    assert peak_bytes(16 * BLOCK_ROWS) < 1.1 * peak_bytes(4 * BLOCK_ROWS)
