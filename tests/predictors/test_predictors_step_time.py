import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.placement import Placement
from slo_bench.predictors.roofline import Coefficients, OperatorRoofline, Work
from slo_bench.predictors.specs import gpu, gpus, link, model, models
from slo_bench.predictors.step_time import (
    estimated_coefficients,
    fitted_pairs,
    layer_shape,
    step_time,
    work,
)
from slo_bench.workloads.errors import SloBenchError

ROUND = Coefficients(
    c0=2, c1=0.5, c2=3, c2_mixed=4, c3=5, c4=6, c5_s=0.25, c6_s=0.5, c7_s=7, c8_s=11
)
SIMPLE = OperatorRoofline.of(
    ROUND,
    Work(
        weight_read_s=8, linear_s_per_token=2, kv_read_s_per_token=0.125, attention_s_per_pair=0.25
    ),
    host_s=1,
)
LLAMA_8B = Placement(model("llama-3-8b"), gpu("a100-80g"))


def shared() -> Path:
    folder = os.environ.get("SLO_BENCH_SHARED")
    return Path(folder) if folder else Path(__file__).parents[2].parent / "shared"


def test_decode_step_by_hand():
    # Two tokens: reading (8) is longer than multiplying (4). 2*8 + 0.5*4, KV 3*0.125*40,
    # 2 tokens * 0.25, 2 sequences * 0.5, constant 11, host 1.
    assert SIMPLE.step_s(2, 40, ()) == 16 + 2 + 15 + 0.5 + 1 + 12
    # Ten tokens: multiplying (20) is longer. 2*20 + 0.5*8.
    assert SIMPLE.step_s(10, 40, ()) == 40 + 4 + 15 + 2.5 + 5 + 12


def test_mixed_step_by_hand():
    # 2 decodes with 40 KV tokens; 4 prefill tokens on 6: 6 tokens in all, reading 8, multiplying
    # 12; pairs 4 * (6 + 2) = 32; KV under prefill 10; 3 sequences; prefill present 7.
    linear = 2 * 12 + 0.5 * 8
    expected = (
        linear + 4 * 0.125 * 40 + 5 * 0.25 * 32 + 6 * 0.125 * 10 + 6 * 0.25 + 3 * 0.5 + 7 + 12
    )
    assert SIMPLE.step_s(2, 40, [(6, 4)]) == expected


def test_two_chunks_by_hand():
    # 4 tokens on 6 and 2 on none: pairs 32 + 2, KV 10 + 2, 6 tokens, 2 sequences.
    linear = 2 * 12 + 0.5 * 8
    expected = linear + 5 * 0.25 * 34 + 6 * 0.125 * 12 + 6 * 0.25 + 2 * 0.5 + 7 + 12
    assert SIMPLE.step_s(0, 0, [(6, 4), (0, 2)]) == expected


def test_step_time_of_one_chunk_equals_that_of_several():
    alone = SIMPLE.step_s(3, 50, [(5, 7)])
    beside_nothing = SIMPLE.step_s(3, 50, [(5, 7), (0, 0)])
    assert beside_nothing == pytest.approx(alone + SIMPLE.sequence_s)


def test_llama_3_8b_on_a100_by_hand():
    matrices = 32 * (2 * 4096 * 5120 + 3 * 4096 * 14336)
    read_s, multiply_s = 2 * matrices / 2.039e12, 2 * matrices / 312e12
    expected = (
        1.50858 * read_s
        + 0.85776 * multiply_s * 8
        + 0.89176 * 131_072 / 2.039e12 * 8000
        + 4.57776e-6 * 8
        + 0.7171e-3
    )
    # The norms' 266,240 parameters are streamed but were no part of the fit.
    assert step_time(LLAMA_8B, host_s=0).model.step_s(8, 8000, ()) == pytest.approx(expected, 1e-4)


@given(
    st.integers(0, 300),
    st.integers(0, 500_000),
    st.integers(1, 200),
    st.sampled_from(fitted_pairs()),
)
def test_roofline_span_equals_the_sum_of_its_steps(seqs, kv, steps, pair):
    roofline = step_time(Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)).model
    total = math.fsum(roofline.step_s(seqs, kv + i * seqs, ()) for i in range(steps))
    assert roofline.span_s(seqs, kv, steps) == pytest.approx(total, rel=1e-12)
    assert roofline.span_s(seqs, kv, 1) == roofline.step_s(seqs, kv, ())
    assert roofline.span_s(seqs, kv, 0) == 0
    base_s, token_s, *rest = roofline.decode_line(seqs, kv)
    assert base_s + token_s * kv == pytest.approx(roofline.step_s(seqs, kv, ()), rel=1e-12)
    assert rest == [0.0, math.inf, False]


@given(
    st.integers(0, 300),
    st.integers(0, 500_000),
    st.one_of(st.floats(0, 30), st.integers(1, 100_000)),
    st.sampled_from(fitted_pairs()),
)
def test_steps_within_is_the_fewest_that_reach_the_duration(seqs, kv, duration, pair):
    roofline = step_time(Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)).model
    if isinstance(duration, int):  # exactly on the edge of a step
        duration = roofline.span_s(seqs, kv, duration)
    steps = roofline.steps_within(seqs, kv, duration)
    assert roofline.span_s(seqs, kv, steps) >= duration
    assert steps == 0 or roofline.span_s(seqs, kv, steps - 1) < duration


def test_steps_within_by_naive_summation():
    roofline = step_time(LLAMA_8B).model
    for duration in (1e-9, 0.013, 0.5, 3.0):
        total, steps = 0.0, 0
        while total < duration:
            total += roofline.step_s(64, 60_000 + 64 * steps, ())
            steps += 1
        assert roofline.steps_within(64, 60_000, duration) == steps
    assert roofline.steps_within(64, 60_000, 0) == 0
    assert roofline.steps_within(64, 60_000, -1) == 0


@given(
    st.integers(0, 300),
    st.integers(0, 500_000),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 8192)), max_size=4),
    st.sampled_from(fitted_pairs()),
)
def test_more_work_never_takes_less_time(seqs, kv, chunks, pair):
    roofline = step_time(Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)).model
    base = roofline.step_s(seqs, kv, chunks)
    at_least = base * (1 - 1e-12)  # the two sides of the crossover round differently
    assert roofline.step_s(seqs + 1, kv, chunks) >= at_least
    assert roofline.step_s(seqs, kv + 100, chunks) >= at_least
    assert roofline.step_s(seqs, kv, [*chunks, (100, 100)]) >= at_least
    if chunks:
        (context, tokens), *others = chunks
        assert roofline.step_s(seqs, kv, [(context + 1, tokens), *others]) >= at_least
        assert roofline.step_s(seqs, kv, [(context, tokens + 1), *others]) >= at_least


@pytest.mark.parametrize("pair", fitted_pairs(), ids=lambda pair: pair.label)
def test_one_decode_takes_about_as_long_as_reading_the_weights(pair):
    placement = Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)
    read_s = work(placement).weight_read_s
    assert read_s < step_time(placement, host_s=0).model.step_s(1, 100, ()) < 1.9 * read_s


@pytest.mark.parametrize("pair", fitted_pairs(), ids=lambda pair: pair.label)
def test_a_long_prefill_runs_below_the_peak_but_not_far(pair):
    placement = Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)
    multiply_s = 4096 * work(placement).linear_s_per_token
    assert (
        0.8 * multiply_s < step_time(placement).model.step_s(0, 0, [(0, 4096)]) < 2.5 * multiply_s
    )


def test_fitted_step_time_is_used_for_its_model_shape():
    fitted = step_time(LLAMA_8B)
    assert fitted.fitted
    assert fitted.provenance == "fitted: llama-3-8b on a100-80g, MAPE 4.86 %"
    same_shape = step_time(replace(LLAMA_8B, model=model("llama-3.1-8b")))
    assert same_shape.model == fitted.model


DECODERS = [spec for spec in models().values() if spec.kind == "decoder" and spec.is_plain]
SAME_LAYERS = [
    (a, b)
    for a, b in itertools.combinations(DECODERS, 2)
    if layer_shape(a) == layer_shape(b) and a.layers == b.layers
]
BATCHES = [
    (1, 500, ()),
    (64, 64_000, ()),
    (300, 90_000, ()),
    (0, 0, ((0, 2000),)),
    (0, 0, ((512, 512), (0, 300))),
    (32, 32_000, ((0, 512),)),
]


@pytest.mark.parametrize(("a", "b"), SAME_LAYERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_models_of_one_shape_take_the_same_time(a, b, tp):
    """On every GPU; what differs is the output head."""
    head_bytes = 2 * abs(a.vocab - b.vocab) * a.hidden / tp
    for name, on in gpus().items():
        first, second = (step_time(Placement(spec, on, tp=tp)) for spec in (a, b))
        assert first.fitted == second.fitted, name
        for seqs, kv_tokens, chunks in BATCHES:
            times_s = [x.model.step_s(seqs, kv_tokens, chunks) for x in (first, second)]
            if a.vocab == b.vocab:
                assert times_s[0] == times_s[1], name
                continue
            computed = seqs + (len(chunks) if first.fitted else sum(n for _, n in chunks))
            read_s, multiply_s = head_bytes / on.bandwidth_bytes_per_s, head_bytes / on.flops(16)
            apart_s = abs(times_s[0] - times_s[1])
            assert 0.5 * read_s < apart_s < 2 * (read_s + computed * multiply_s), name


def test_fitted_step_time_names_the_model_it_was_fitted_to():
    mistral = step_time(replace(LLAMA_8B, model=model("mistral-7b")))
    assert mistral.fitted
    assert mistral.provenance == (
        "fitted: llama-3-8b on a100-80g, MAPE 4.86 %, "
        "for 32000 instead of 128256 tokens of vocabulary"
    )
    llama = step_time(LLAMA_8B)
    prefill = (0, 0, [(0, 2000)])
    assert mistral.model.step_s(*prefill) == pytest.approx(llama.model.step_s(*prefill), rel=0.01)


@pytest.mark.parametrize("batch", BATCHES)
def test_layers_of_a_fitted_model_take_equal_time(batch):
    times_s = [
        step_time(replace(LLAMA_8B, model=replace(LLAMA_8B.model, layers=layers))).model.step_s(
            *batch
        )
        for layers in (16, 32, 48)
    ]
    assert times_s[1] - times_s[0] == pytest.approx(times_s[2] - times_s[1])


@pytest.mark.parametrize(
    "other",
    [
        replace(LLAMA_8B, model=model("llama-2-7b")),
        replace(LLAMA_8B, gpu=gpu("a40")),
        replace(LLAMA_8B, gpu=gpu("a100-80g@300w")),
        replace(LLAMA_8B, tp=2),
        replace(LLAMA_8B, weight_dtype="fp8"),
        replace(LLAMA_8B, kv_dtype="fp8"),
    ],
    ids=["model", "gpu", "capped", "tp", "weights", "kv"],
)
def test_step_time_without_a_fit_is_marked_unfitted(other):
    estimate = step_time(other)
    assert not estimate.fitted
    assert estimate.provenance.startswith("unfitted: analytic estimate with coefficients c0..c4")


@pytest.mark.parametrize("pair", fitted_pairs(), ids=lambda pair: pair.label)
@pytest.mark.parametrize("batch", [(1, 500, ()), (64, 64_000, ()), (32, 32_000, ((0, 512),))])
def test_analytic_step_time_is_within_a_third_of_every_fit(pair, batch):
    placement = Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)
    fitted = step_time(placement).model.step_s(*batch)
    unfitted = OperatorRoofline.of(
        estimated_coefficients(placement.model), work(placement), host_s=0.001
    ).step_s(*batch)
    assert unfitted == pytest.approx(fitted, rel=0.34)


def test_narrow_weights_shorten_decode_steps():
    wide = step_time(replace(LLAMA_8B, gpu=gpu("h200-141g"))).model
    for dtype in ("fp8", "int4"):
        narrow = step_time(replace(LLAMA_8B, gpu=gpu("h200-141g"), weight_dtype=dtype)).model
        assert narrow.step_s(1, 100, ()) < 0.75 * wide.step_s(1, 100, ())


def test_tensor_parallel_step_pays_for_its_all_reduces():
    placement = Placement(model("llama-2-13b"), gpu("a100-80g"), tp=2)
    here = step_time(placement).model
    over_pcie = step_time(replace(placement, gpu=replace(placement.gpu, peer_link="pix"))).model
    # 2 a layer, 40 layers; ring over 2 GPUs: each byte once over the link; latency twice.
    nvlink, pix = link("nvlink3"), link("pix")
    latency = 80 * 2 * (pix.latency_s - nvlink.latency_s)
    wire = 80 * 5120 * 2 * (1 / pix.bandwidth_bytes_per_s - 1 / nvlink.bandwidth_bytes_per_s)
    slower = over_pcie.step_s(0, 0, [(0, 1000)]) - here.step_s(0, 0, [(0, 1000)])
    assert slower == pytest.approx(latency + 1000 * wire)


def test_pipeline_stages_divide_a_step():
    single, four = step_time(LLAMA_8B).model, step_time(replace(LLAMA_8B, pp=4)).model
    batch = (8, 8000, ((0, 512),))
    hop = link("nvlink3").latency_s + 520 * 4096 * 2 / link("nvlink3").bandwidth_bytes_per_s
    assert (single.stages, four.stages) == (1, 4)
    assert (single.hop_s(520), four.hop_s(520)) == (0, pytest.approx(hop))
    assert four.step_s(*batch) == pytest.approx(single.step_s(*batch) + 3 * hop)


def test_host_time_is_added_to_every_step():
    slow, fast = step_time(LLAMA_8B, host_s=0.005).model, step_time(LLAMA_8B, host_s=0).model
    assert slow.step_s(5, 500, ()) - fast.step_s(5, 500, ()) == pytest.approx(0.005)
    assert slow.span_s(5, 500, 9) - fast.span_s(5, 500, 9) == pytest.approx(0.045)


@pytest.mark.parametrize("host_s", [-1, math.nan, math.inf])
def test_negative_host_time_is_refused(host_s):
    with pytest.raises(SloBenchError, match="host_s must be"):
        step_time(LLAMA_8B, host_s=host_s)


def test_an_encoder_has_no_decode_steps():
    with pytest.raises(SloBenchError, match="bge-m3 is an encoder"):
        step_time(Placement(model("bge-m3"), gpu("a100-80g")))


def test_decode_step_time_agrees_with_a_measured_server():
    """vLLM 0.19, RTX PRO 6000, Llama-3.1-8B: the drain of a run of 300 ShareGPT requests."""
    run = shared() / "data/profiles/llmservingsim/RTXPRO6000-Llama-3.1-8B-bf16-tp1/real_vllm"
    if not run.is_dir():
        pytest.skip(f"needs the profiles in {run}")
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    rows = np.genfromtxt(run / "timeseries.csv", delimiter=",", names=True)
    roofline = step_time(Placement(model("llama-3.1-8b"), gpu("rtx-pro-6000"))).model
    end_s = max(r["last_token_ts"] for r in requests)
    errors = []
    for before, row in itertools.pairwise(rows):
        decode_only = row["prompt_throughput"] == 0 and row["waiting"] == 0
        if not decode_only or before["prompt_throughput"] or row["running"] < 10:
            continue
        at_s = end_s - (rows["t"][-1] - row["t"]) - 0.5
        running = [r for r in requests if r["first_token_ts"] < at_s < r["last_token_ts"]]
        kv_tokens = sum(
            r["input_toks"]
            + r["output_toks"]
            * (at_s - r["first_token_ts"])
            / (r["last_token_ts"] - r["first_token_ts"])
            for r in running
        )
        seqs = (before["running"] + row["running"]) / 2
        real_s = seqs / row["gen_throughput"]
        errors.append(roofline.step_s(len(running), int(kv_tokens), ()) / real_s - 1)
    assert len(errors) >= 8
    assert np.mean(np.abs(errors)) < 0.12
