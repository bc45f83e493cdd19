"""Long cells without records: the same figures as with all requests in memory, and no more memory
for more requests.
"""

import dataclasses
import math
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.examples import examples
from slo_bench import Experiment
from slo_bench.harness.core.records.quantile_sketch import RELATIVE_ERROR
from slo_bench.harness.core.records.request_records import (
    EndedBlock,
    Outcome,
    Records,
)
from slo_bench.harness.engine.cluster import recorder
from slo_bench.harness.engine.cluster.failures import parse_failures
from slo_bench.harness.engine.simulator.simulate import simulate, simulate_blocks
from slo_bench.harness.experiments.execution import cell_bands as bands
from slo_bench.harness.experiments.execution import cells
from slo_bench.harness.experiments.execution.cell_specs import EXACT_REQUESTS, configured, placed
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.experiments.execution.offered_load import estimate
from slo_bench.harness.results import request_fold
from slo_bench.harness.results.stationarity import BatchFold, batches_of, left_s
from slo_bench.workloads import base
from slo_bench.workloads.blocks import WorkloadBlocks
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

ROWS = 500
CELL = {
    "systems": ["vllm"],
    "rates": [6.45],
    "requests": 2_100,
    "seeds": 1,
    "workload": "azure-conv",
    "model": "llama-3-8b",
    "gpu": "a100-80g",
    "overlong_requests": "reject",
}
CASES = [
    {},
    {"systems": ["sarathi"], "warmup_s": 101.5},
    {"instances": [3], "rates": [20]},
    {"systems": ["vllm-drop"], "rates": [12]},  # overloaded, with requests that are dropped
    {"systems": ["edf"], "rates": [9], "num_gpu_blocks": 300},  # overlong ones, and preemptions
    {"systems": ["vllm"], "num_gpu_blocks": 300, "overlong_requests": "truncate"},
    {"systems": ["sjf"], "rates": [2]},  # static batches
    {"systems": ["edf"], "pp": [2], "instances": [2], "rates": [12]},  # lanes
    {"systems": ["ascendra-lp"], "instances": [2], "rates": [16]},
    {"systems": ["ascendra"], "instances": [3], "rates": [24]},  # requests are given back
    {"systems": ["distserve"], "instances": [4], "rates": [12], "warmup_s": 20.5},
    {"systems": ["llumnix"], "instances": [3], "rates": [24], "failures": ["1@40..90"]},
    {"requests": None, "duration_s": [600], "max_output_tokens": [2000], "slo": "e2e=20"},
]


def spec_of(**changes):
    changed = {**CELL, **changes}
    settings = {name: value for name, value in changed.items() if value is not None}
    [spec] = plan(Experiment(**settings)).cells
    return spec


@pytest.fixture
def in_small_blocks(monkeypatch):
    monkeypatch.setattr(cells, "EXACT_REQUESTS", 1000)
    monkeypatch.setattr(base, "BLOCK_ROWS", ROWS)
    monkeypatch.setattr(recorder, "BLOCK_ROWS", ROWS)
    for module in (bands, request_fold):
        monkeypatch.setattr(module, "MOST_SAMPLED", 700)


def quantile(name):
    return (
        name.removeprefix("band_low_")
        .removeprefix("band_high_")
        .endswith(("_p50_s", "_p90_s", "_p99_s"))
    )


@pytest.mark.parametrize("changes", CASES)
def test_figures_in_blocks_equal_those_of_all_requests(changes, in_small_blocks, tmp_path):
    spec = spec_of(**changes)
    exact = cells.run_cell(spec, tmp_path / "exact", records="csv")
    blockwise = cells.run_cell(spec, tmp_path / "found", records="none")
    assert "quantile_error" not in exact
    assert blockwise.pop("quantile_error") == RELATIVE_ERROR
    assert list(blockwise) == list(exact)
    for name, value in exact.items():
        if quantile(name):
            assert blockwise[name] == pytest.approx(value, rel=1.001 * RELATIVE_ERROR, nan_ok=True)
        elif isinstance(value, float):
            assert blockwise[name] == pytest.approx(value, rel=1e-9, abs=2e-9, nan_ok=True), name
        else:
            assert blockwise[name] == value, name
    timelines = [(tmp_path / folder / "timelines").glob("*") for folder in ("exact", "found")]
    assert [path.read_bytes() for path in timelines[0]] == [p.read_bytes() for p in timelines[1]]
    assert not (tmp_path / "found" / "requests").exists()


@pytest.mark.slow
def test_long_cell_cases_drop_reject_truncate_and_overtake(in_small_blocks, tmp_path):
    rows = [cells.run_cell(spec_of(**case), tmp_path, records="none") for case in CASES]
    highest = {
        name: max(float(row.get(name) or 0) for row in rows)
        for name in ("dropped", "rejected", "overlong", "overlong_truncated", "count_overtakes")
    }
    assert min(highest.values()) > 0, highest
    assert {row["stationary"] for row in rows} >= {True, False}
    assert max(row["preemptions_recompute"] for row in rows) > 0
    assert any(name.startswith("wait_mean_s_") for row in rows for name in row)
    assert max(row["unfinished"] for row in rows) == 0


@pytest.mark.parametrize("changes", CASES)
def test_blocks_pass_on_every_request_once_and_in_order(changes, in_small_blocks):
    spec = spec_of(**changes)
    place, chosen = placed(spec.placement), configured(spec.system, spec.parameters)
    options = {
        "instances": spec.instances,
        "overlong_requests": spec.overlong_requests,
        "failures": parse_failures(spec.failures) if spec.failures else (),
    }
    arguments = (chosen, place.placement, place.step_time.model)
    whole = simulate(cells.workload_of(spec), *arguments, **options)
    blocks, ended = list[EndedBlock](), []
    blockwise = simulate_blocks(
        cells.in_blocks(spec),
        *arguments,
        blocks.append,
        progress=lambda done, _: ended.append(done),
        **options,
    )
    assert [block.first_row for block in blocks] == list(range(0, len(whole.records), ROWS))
    for field in dataclasses.fields(Records):
        column = getattr(whole.records, field.name)
        joined = np.concatenate([getattr(block.records, field.name) for block in blocks])
        assert joined.dtype == column.dtype
        assert joined.tobytes() == column.tobytes(), field.name
    served = cells.workload_of(spec) if whole.served is None else whole.served
    for name in ("prompt_tokens", "output_tokens", "max_output_tokens"):
        joined = np.concatenate([getattr(block.served, name) for block in blocks])
        assert joined.tolist() == getattr(served, name).tolist()
    assert ended[-1] == len(served)
    assert (blockwise.overlong, len(blockwise.records)) == (whole.overlong, 0)
    assert blockwise.gaps.count.sum() == whole.gaps.count.sum()
    assert blockwise.gaps.mean_s() == pytest.approx(whole.gaps.mean_s(), rel=1e-12, nan_ok=True)
    assert str((blockwise.totals, blockwise.instances)) == str((whole.totals, whole.instances))


def test_errors_in_blocks_equal_those_of_the_whole(in_small_blocks, tmp_path):
    for changes in ({"overlong_requests": "error", "num_gpu_blocks": 300}, {"warmup_s": 1e6}):
        messages = []
        for records in ("csv", "none"):
            with pytest.raises(SloBenchError) as caught:
                cells.run_cell(spec_of(**changes), tmp_path, records=records)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"arrivals": "concurrency(8)", "rates": None},
        {"sessions": ["sessions(turns=3)"]},
        {"workload": "mooncake-conversation"},
        {"workload": "mix(a=azure-conv:0.5,b=sharegpt:0.5)"},
        {"slo": "ttft=uniform(1,2)"},
        {"slo": "deadline=60"},
        {"length_predictor": ["noisy(0.3)"]},
    ],
)
def test_cells_that_need_all_requests_are_not_run_in_blocks(changes, in_small_blocks):
    assert cells.in_blocks(spec_of()) is not None
    assert cells.in_blocks(spec_of(**changes)) is None


def test_short_cells_are_not_run_in_blocks():
    assert cells.in_blocks(spec_of(requests=EXACT_REQUESTS)) is None
    assert cells.in_blocks(spec_of(requests=EXACT_REQUESTS + 1)) is not None
    by_time = {"requests": None, "rates": [10]}
    assert cells.in_blocks(spec_of(duration_s=[EXACT_REQUESTS / 10], **by_time)) is None
    assert cells.in_blocks(spec_of(duration_s=[EXACT_REQUESTS / 10 + 1], **by_time)) is not None


def test_memory_estimate_does_not_grow_in_blocks():
    def bytes_of(requests, records):
        return estimate(Experiment(**{**CELL, "requests": requests}, records=records)).memory_bytes

    assert bytes_of(10**9, "none") == bytes_of(EXACT_REQUESTS, "none")
    assert bytes_of(EXACT_REQUESTS, "none") == bytes_of(EXACT_REQUESTS, "csv")
    assert bytes_of(10**9, "csv") > 100 * bytes_of(10**9, "none")


PEAK = """
import resource, sys
from pathlib import Path
from slo_bench import Experiment
from slo_bench.harness.experiments.execution import cells
from slo_bench.harness.experiments.execution.experiment_plan import plan
cells.EXACT_REQUESTS = 1000
[spec] = plan(Experiment(systems=["vllm"], workload="synthetic(prompt=50,output=4)", rates=[40],
                         requests=int(sys.argv[1]), seeds=1)).cells
cells.run_cell(spec, Path(sys.argv[2]), records="none")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_of_a_long_cell_does_not_grow_with_its_requests(tmp_path):
    small, large = (
        int(subprocess.check_output([sys.executable, "-c", PEAK, str(n), tmp_path]))
        for n in (30_000, 90_000)
    )
    assert large - small < 5_000, (small, large)  # KiB; with all requests in memory 15 MiB


@hypothesis.settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(150, 900),
    st.sampled_from([0.0, 3.0, 30.0]),
    st.sampled_from([0.0, 7.0]),
    st.integers(40, 400),
    st.booleans(),
)
def test_stationarity_in_blocks_equals_that_of_the_whole(seed, n, horizon_s, warmup_s, rows, grows):
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.standard_exponential(n)) / 5
    stay_s = rng.lognormal(0.0, 1.0, n) * (1 + grows * np.arange(n) / 50)
    records = Records.empty(n)
    records.arrival_s[:] = arrival_s
    records.first_token_s[:] = arrival_s + stay_s / 3
    records.finish_s[:] = arrival_s + stay_s
    records.outcome[:] = Outcome.FINISHED
    gone = rng.random(n) < 0.1
    records.outcome[gone] = Outcome.DROPPED
    records.first_token_s[gone] = records.finish_s[gone] = np.nan
    met = (stay_s < 2) & ~gone

    def parts():
        return (arrival_s[first : first + rows] for first in range(0, n, rows))

    blocks = WorkloadBlocks.of(parts, lambda: iter(()))
    exact = batches_of(
        arrival_s=arrival_s,
        end_s=left_s(records),
        met=met,
        first_token_s=records.first_token_s,
        horizon_s=horizon_s,
        warmup_s=warmup_s,
    )
    fold = BatchFold(blocks, horizon_s=horizon_s, warmup_s=warmup_s)
    nothing = Workload(np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    for first in range(0, n, rows):
        some = slice(first, first + rows)
        columns = {f.name: getattr(records, f.name)[some] for f in dataclasses.fields(Records)}
        fold.add(EndedBlock(first, nothing, nothing, Records(**columns)), met[some])
    batches = fold.batches()
    for field in dataclasses.fields(batches):
        value, expected = getattr(batches, field.name), getattr(exact, field.name)
        if field.name in ("backlog", "waiting"):
            # Expected numbers in the system of about 10, rounded to whole requests.
            assert np.abs(np.subtract(value, expected)).max() <= 1, field.name
        elif isinstance(expected, float):
            assert math.isclose(value, expected, rel_tol=1e-12), field.name
        else:
            assert value == expected, field.name
