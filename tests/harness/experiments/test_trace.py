"""Watched runs: the same as unwatched ones, and every moment of a request is told."""

import functools
import gzip
import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.loop.traced_instance import EngineTrace
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import (
    PlacementSpec,
    WorkloadSpec,
    placed,
    source,
)
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.explain.latency_breakdown import (
    LatencySpan,
    SpanKind,
    latency_breakdown,
    totals_s,
)
from slo_bench.harness.experiments.explain.trace import (
    MeasuredCell,
    cell_names,
    measured_on,
    replay,
    write_events,
)
from slo_bench.harness.policies.systems import SYSTEMS, system
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving
from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.slo import parse_slo

# Little KV memory, so that requests are preempted.
PLACE = PlacementSpec("llama-3.1-8b", "a100-80g", 1, memory_share=0.26, host_memory_gib=2)
LANES = PLACE.replaced(pp=2, memory_share=0.2)
SIMULATED = [name for name, s in SYSTEMS.items() if s.least_instances == 1]
CONTINUOUS = [name for name in SIMULATED if isinstance(SYSTEMS[name].policy, Policy)]


@functools.cache
def watched(name, place=PLACE, requests=120, rate_rps=9.0, **options):
    spec = placed(place)
    workload = source(WorkloadSpec("sharegpt")).make(
        rate_rps=rate_rps, requests=requests, seed=1, slo=parse_slo("ttft=5")
    )
    arguments = (workload, system(name), spec.placement, spec.step_time.model)
    plain = simulate(*arguments, overlong_requests="reject", **options)
    trace = EngineTrace()
    return plain, simulate(*arguments, overlong_requests="reject", trace=trace, **options), trace


def told(result, trace):
    """The stays of every finished request, by its number."""
    finished = np.flatnonzero(result.records.outcome == Outcome.FINISHED).tolist()
    records = result.records
    return {
        r: latency_breakdown(
            trace.log_of(r), r, float(records.arrival_s[r]), float(records.finish_s[r])
        )
        for r in finished
    }


def check(result, trace):
    everything = told(result, trace)
    assert everything
    for request, stays in everything.items():
        arrival_s = float(result.records.arrival_s[request])
        finish_s = float(result.records.finish_s[request])
        assert stays[0].begin_s == arrival_s
        assert stays[-1].end_s == finish_s
        assert all(a.end_s == b.begin_s and a.part is not b.part for a, b in pairwise(stays))
        total = sum((Fraction(s.end_s) - Fraction(s.begin_s) for s in stays), Fraction(0))
        assert total == Fraction(finish_s) - Fraction(arrival_s)
        assert sum(totals_s(stays).values()) == pytest.approx(finish_s - arrival_s, rel=1e-12)
    return everything


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_trace_spans_add_up_to_the_time_of_each_request(name):
    plain, result, trace = watched(name)
    for column in ("first_scheduled_s", "first_token_s", "finish_s", "preemptions_recompute"):
        before, after = (getattr(r.records, column) for r in (plain, result))
        assert np.array_equal(before, after, equal_nan=True)
    assert repr(plain.totals) == repr(result.totals)  # some are NaN
    check(result, trace)


@pytest.mark.parametrize("name", ["vllm", "sglang", "fifo"])
def test_trace_spans_of_pipeline_lanes(name):
    _, result, trace = watched(name, LANES, requests=60)
    everything = check(result, trace)
    assert len(trace.instances) == 2
    if name != "fifo":
        assert any(s.part is SpanKind.PIPELINE for stays in everything.values() for s in stays)


def test_trace_spans_of_several_instances():
    _, result, trace = watched("vllm", instances=2)
    check(result, trace)
    assert set(trace.instances) == {0, 1}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_trace_queue_and_prefill_add_up_to_ttft(name):
    """The first stay is the queue, and the first token ends one."""
    _, result, trace = watched(name)
    records = result.records
    for request, stays in told(result, trace).items():
        first_s = records.first_token_s[request]
        before = [stay for stay in stays if stay.end_s <= first_s]
        assert before[-1].end_s == first_s
        if stays[0].part is SpanKind.QUEUE:
            assert stays[0].end_s == records.first_scheduled_s[request]
        else:
            assert records.first_scheduled_s[request] == records.arrival_s[request]


def test_trace_names_preemptions_under_pressure():
    _, result, trace = watched("vllm", requests=300)
    everything = told(result, trace)
    again = np.flatnonzero(result.records.preemptions_recompute).tolist()
    assert again
    for request, stays in everything.items():
        parts = {stay.part for stay in stays}
        assert (SpanKind.RECOMPUTE in parts) == (request in again)
    _, result, trace = watched("vllm-swap", requests=300)
    everything = told(result, trace)
    swapped = np.flatnonzero(result.records.preemptions_swap).tolist()
    assert swapped
    assert all(SpanKind.SWAPPED in {s.part for s in everything[r]} for r in swapped)
    assert any(SpanKind.SWAP in {s.part for s in stays} for stays in everything.values())


def test_trace_of_static_batches_has_padding():
    _, result, trace = watched("fifo")
    everything = told(result, trace)
    padded = [r for r, stays in everything.items() if stays[-1].part is SpanKind.PADDING]
    # Of each batch all but the longest wait for it.
    assert len(everything) / 2 < len(padded) < len(everything)


def test_trace_decode_waits_for_prefill_by_hand():
    """Steps: without mixing, a decode stands still while others are prefilled."""
    _, result, trace = watched("vllm-v0", requests=40)
    (log,) = trace.instances.values()
    alone = [step for step in log.steps if step.chunks and not step.decode_seqs]
    assert alone
    everything = told(result, trace)
    for request, stays in everything.items():
        first_s, finish_s = (
            float(result.records.first_token_s[request]),
            float(result.records.finish_s[request]),
        )
        expected = sum(
            step.end_s - step.begin_s
            for step in alone
            if step.begin_s >= first_s and step.end_s <= finish_s
        )
        if result.records.preemptions_recompute[request] == 0:
            held_up = totals_s(stays).get(SpanKind.BEHIND_PREFILL, 0.0)
            assert held_up == pytest.approx(expected, abs=1e-9)


def test_every_span_kind_has_a_description():
    assert len({kind.meaning for kind in SpanKind}) == len(SpanKind)
    assert LatencySpan(1.0, 3.0, SpanKind.QUEUE).duration_s == 2.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    Experiment(systems=["vllm", "fifo"], rates=[6], seeds=1, requests=(60,), records="csv").run(
        folder, jobs=1
    )
    return folder


def test_replay_of_a_cell_equals_its_records(run):
    names = cell_names(run)
    assert names == ["vllm_rate-6_seed-0", "fifo_rate-6_seed-0"]
    cell = replay(run, names[0])
    with gzip.open(run / "requests" / f"{names[0]}.csv.gz", "rt") as file:
        head, *rows = [line.rstrip("\n").split(",") for line in file]
    finish_s = [float(row[head.index("finish_s")]) for row in rows]
    assert cell.result.records.finish_s == pytest.approx(finish_s, abs=1e-6)
    with pytest.raises(UnknownNameError, match="vllm_rate-6"):
        replay(run, "vllm_rate-7_seed-0")
    with pytest.raises(SloBenchError, match=r"experiment\.toml"):
        cell_names(run.parent)


def check_trace_events(text):
    """The rules of the trace event format (JSON object form) for the events that we write."""
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    named, stacks = set(), {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert event["ts"] >= 0
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            track = (event["pid"], event["tid"])
            assert ("thread_name", *track) in named
            stacks.setdefault(track, []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in stacks.values():  # on a track one is within the other or they do not meet
        open_until = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002  # written to a nanosecond
            open_until.append(end)
    assert {pid for kind, pid, _ in named if kind == "process_name"} == {t[0] for t in stacks}
    return document["traceEvents"]


@pytest.mark.parametrize("place", [0, 1])
def test_replay_writes_perfetto_events(run, tmp_path, place):
    cell = replay(run, cell_names(run)[place])
    path = write_events(cell.events(), tmp_path / "trace.json")
    packed = write_events(cell.events(), tmp_path / "trace.json.gz")
    assert gzip.decompress(packed.read_bytes()) == path.read_bytes()
    events = check_trace_events(path.read_text())
    assert len(events) == len(list(cell.events()))
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    whole = [event for event in slices if event["name"].startswith("request ")]
    assert len(whole) == 60
    # On one track nothing overlaps but what is within another.
    for track in {(event["pid"], event["tid"]) for event in whole}:
        begins = sorted(e["ts"] for e in whole if (e["pid"], e["tid"]) == track)
        ends = sorted(e["ts"] + e["dur"] for e in whole if (e["pid"], e["tid"]) == track)
        assert all(end <= begin + 0.01 for end, begin in zip(ends, begins[1:], strict=False))
    with pytest.raises(SloBenchError, match="cannot write"):
        write_events(cell.events(), path / "no" / "trace.json")


@pytest.mark.parametrize("records", ["csv", "parquet"])
def test_replay_of_a_measured_cell_has_the_clients_spans(tmp_path, records):
    if records == "parquet":
        pytest.importorskip("pyarrow")
    folder = tmp_path / "run"
    slow_to_answer = MockConfig(ttft_s=0.02, itl_s=0.002, fault=InjectedFault.BROKEN, fault_every=4)
    with serving(slow_to_answer) as server:
        result = Experiment(
            backend="openai",
            client={"base_urls": server.url, "send_delay_limit_s": 60.0},
            workload="sharegpt",
            prompt_tokens="fixed(8)",
            output_tokens="fixed(5)",
            requests=12,
            rates=200.0,
            seeds=1,
            records=records,
        ).run(folder)
    (row,) = result.rows()
    name = str(row["cell"])
    assert measured_on(folder, name) == "openai"
    cell = MeasuredCell.read(folder, name)
    finished = cell.requests.index[cell.requests["outcome"] == "finished"].tolist()
    assert 0 < len(finished) < 12
    for request in finished:
        stays = cell.phases(request)
        row = cell.requests.iloc[request]
        assert stays[0].begin_s == row["arrival_s"]
        assert stays[-1].end_s == row["finish_s"]
        assert all(a.end_s == b.begin_s for a, b in pairwise(stays))
        assert totals_s(stays)[SpanKind.UNTIL_ANSWER] > 0
        assert {stay.part for stay in stays} <= {
            SpanKind.CLIENT,
            SpanKind.UNTIL_ANSWER,
            SpanKind.ANSWER,
        }
    path = write_events(cell.events(), tmp_path / "trace.json")
    events = check_trace_events(path.read_text())
    whole = [e["args"]["request"] for e in events if e["name"].startswith("request ")]
    assert sorted(whole) == finished
    invocation = CliRunner().invoke(app, ["explain", str(folder), str(finished[0]), "--json"])
    assert invocation.exit_code == 0, invocation.output
    plain = json.loads(invocation.stdout)
    assert sum(plain["breakdown_s"].values()) == pytest.approx(plain["e2e_s"])
    lost = next(r for r in range(12) if r not in finished)
    refused = CliRunner().invoke(app, ["explain", str(folder), str(lost)])
    assert refused.exit_code == 1
    assert "there is no time to explain" in str(refused.exception)
    trace = tmp_path / "slowest.json.gz"
    slowest = CliRunner().invoke(app, ["explain", str(folder), "slowest", "--trace", str(trace)])
    assert "until first token" in slowest.output
    check_trace_events(gzip.decompress(trace.read_bytes()).decode())
