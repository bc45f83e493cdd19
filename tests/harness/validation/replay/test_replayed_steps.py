"""Leaping equals stepping with step times from tables, unequal lengths, asynchronous scheduling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.examples import examples
from reference.plain import PlainInstance
from slo_bench.harness.core.records.request_records import Records
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.profiles.step_time_table import (
    Curve,
    DecodeGrid,
    Host,
    MixedGrid,
    TableStepTime,
)
from slo_bench.predictors.specs import ModelSpec, model
from slo_bench.workloads.workload import Workload


@dataclass(frozen=True)
class SmallMemory:
    """A placement with as few blocks as the test wants."""

    num_gpu_blocks: int
    num_cpu_blocks: int = 32
    pp: int = 1
    dp: int = 1
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    state_slots: int | None = None
    lanes: int = 1
    tp: int = 1
    block_size: int = 16
    swap_s_per_block: float = 0.0004
    model: ModelSpec = dataclasses.field(default_factory=lambda: model("llama-3-8b"))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def table(resident: float) -> TableStepTime:
    """A GPU whose attention is far from straight, so that stretches are short."""
    sequences, kv = floats(1, 2, 8, 64), floats(16, 40, 100, 300, 800)
    decode_s = 1e-5 * np.sqrt(sequences)[:, None] * np.sqrt(kv)[None, :]
    chunks, contexts, mixed_sequences = floats(16, 128), floats(0, 200), floats(0, 1, 4, 64)
    mixed_s = (
        1e-6 * (chunks[:, None, None, None] + 0.2 * contexts[None, :, None, None])
        + 2e-6 * mixed_sequences[None, None, :, None] * kv[None, None, None, :]
    )
    return TableStepTime(
        Curve(floats(1, 32, 64, 256), floats(0.01, 0.011, 0.014, 0.03)),
        Curve(floats(1, 64), floats(0.001, 0.002)),
        DecodeGrid(sequences, kv, decode_s),
        MixedGrid(chunks, contexts, mixed_sequences, kv, mixed_s),
        Host(step_s=0.0005, launch_s=0.004, graph_tokens=48),
        resident,
    )


TABLES = {"equal": table(0.0), "unequal": table(3.0)}


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rate = draw(st.sampled_from([2.0, 10.0, 40.0, 1000.0]))
    return Workload(
        np.cumsum(rng.exponential(1 / rate, n)),
        rng.integers(1, draw(st.sampled_from([30, 200, 600])), n),
        rng.integers(1, draw(st.sampled_from([3, 60, 300])), n),
    )


@pytest.mark.parametrize("lengths", TABLES)
@pytest.mark.parametrize("name", ["vllm", "vllm-async", "vllm-swap", "sarathi"])
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    blocks=st.sampled_from([70, 90, 400]),
    batch=st.sampled_from([2, 7, 64]),
)
def test_leaping_equals_stepping_with_table_step_times(name, lengths, workload, blocks, batch):
    system = SYSTEMS[name.removesuffix("-async")].with_parameters(max_num_seqs=batch)
    if name == "vllm-async":
        system = system.with_parameters(async_scheduling=True, max_num_batched_tokens=128)
    leapt, stepped = (
        simulate(
            workload,
            system,
            SmallMemory(blocks),
            TABLES[lengths],
            overlong_requests="reject",
            engine=engine,
        ).records
        for engine in (None, PlainInstance)
    )
    for field in dataclasses.fields(Records):
        a, b = getattr(leapt, field.name), getattr(stepped, field.name)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=field.name)


@given(
    seqs=st.integers(1, 80),
    mean=st.floats(1, 1500),
    tail_s=st.floats(0, 0.01),
    steps=st.integers(1, 900),
    lengths=st.sampled_from(sorted(TABLES)),
)
def test_spans_are_sums_of_steps_and_steps_within_inverts_them(seqs, mean, tail_s, steps, lengths):
    step_time = TABLES[lengths]
    kv = round(seqs * mean)
    each = [step_time.step_s(seqs, kv + k * seqs, (), tail_s) for k in range(steps)]
    span_s = step_time.span_s(seqs, kv, steps, tail_s)
    assert span_s == pytest.approx(sum(each), rel=1e-9)
    within = step_time.steps_within(seqs, kv, span_s, tail_s)
    assert within == steps
    assert step_time.steps_within(seqs, kv, np.nextafter(span_s, 1e9), tail_s) == steps + 1
    assert step_time.steps_within(seqs, kv, 0.0, tail_s) == 0


def test_async_scheduling_decides_the_next_batch_during_a_step():
    """With asynchronous scheduling, who arrives during a step misses the one after it as well."""
    workload = Workload(floats(0.0, 0.005), np.array([10, 10]), np.array([4, 1]))
    system = SYSTEMS["vllm"]
    step_time = TABLES["equal"]
    now, ahead = (
        simulate(
            workload,
            system.with_parameters(async_scheduling=value),
            SmallMemory(100),
            step_time,
        ).records
        for value in (False, True)
    )
    first_s = step_time.step_s(0, 0, [(0, 10)])
    second_s = step_time.step_s(1, 10, [(0, 10)])
    assert now.first_token_s[1] == pytest.approx(first_s + second_s)
    decode_s = step_time.step_s(1, 10, ())
    late_s = step_time.step_s(1, 11, [(0, 10)])
    assert ahead.first_token_s[1] == pytest.approx(first_s + decode_s + late_s)


def tail_s(step_time: TableStepTime, lengths: list[int]) -> float:
    begins = sorted(5 - length for length in lengths)
    return step_time.tail_s(begins, sum(begins))


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_tail_time_is_that_of_the_longest_sequences(lengths):
    """Read together until the shortest ends, then the rest, and so on; less the same for equal
    lengths.
    """
    step_time = TABLES["unequal"]
    lone_s, full_s = step_time._lone_s_per_token, step_time._full_s_per_token
    assert lone_s > 2 * full_s > 0
    left, begin, read_s = len(lengths), 0, 0.0
    for length in sorted(lengths):
        read_s += (length - begin) * max(lone_s, left * full_s)
        left, begin = left - 1, length
    mean, n = sum(lengths) / len(lengths), len(lengths)
    expected = read_s - mean * max(lone_s, n * full_s)
    assert tail_s(step_time, lengths) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_one_long_sequence_among_short_ones_takes_longer_than_equal_ones():
    step_time = TABLES["unequal"]
    assert step_time.wants_lengths
    assert not TABLES["equal"].wants_lengths
    assert tail_s(step_time, [300] * 8) == pytest.approx(0, abs=1e-12)
    long_s = tail_s(step_time, [2000] + [57] * 7)
    assert long_s > tail_s(step_time, [1000] + [200] * 7) > 0
    equal_s = step_time.step_s(8, 8 * 300, ())
    assert step_time.step_s(8, 8 * 300, (), long_s) == equal_s + long_s
    chunk = [(0, 16)]
    assert step_time.step_s(8, 2400, chunk, long_s) == step_time.step_s(8, 2400, chunk) + long_s
    # Two sequences are split over the GPU, so that their lengths do not matter.
    assert step_time.step_s(2, 600, (), long_s) == step_time.step_s(2, 600, ())
    # A workload with one long request among short ones, in both engines.
    n = 8
    prompts = np.full(n, 20)
    prompts[0] = 900
    workload = Workload(np.zeros(n), prompts, np.full(n, 50))
    same = Workload(np.zeros(n), np.full(n, int(prompts.mean())), np.full(n, 50))
    system = SYSTEMS["vllm"]
    unequal, equal = (
        simulate(w, system, SmallMemory(400), step_time).totals.makespan_s for w in (workload, same)
    )
    assert unequal > equal
