"""Speculative decoding in step times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.vllm.vllm_kind import speculative_args
from slo_bench.predictors.specs import model
from slo_bench.predictors.speculation import parse_speculation
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload


def on_h100(speculation):
    return placed(
        PlacementSpec("qwen3-32b", "h100-80g", 2, profile="operators", speculation=speculation)
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ngram:1@1", 2),
        ("eagle:3@0.5", 1 + 0.5 + 0.25 + 0.125),
        ("mtp:3@0.8/0.5", 1 + 0.8 + 0.4 + 0.2),  # the last share holds for the third
        ("eagle:4@0", 1),
        ("ngram:2@0.8/0.5*0.5", 1 + 0.5 * (0.8 + 0.4)),  # half of the steps have proposals
    ],
)
def test_speculation_tokens_of_a_step_by_hand(text, tokens):
    assert parse_speculation(text).tokens_per_step == pytest.approx(tokens)


@pytest.mark.parametrize(
    "text",
    [
        "eagle",
        "eagle:0@0.5",
        "eagle:3@1.5",
        "eagle:3@0.5<",
        "x:2@./.",
        "ngram=x:2@1",
        "ngram:2*0.5",
    ],
)
def test_parse_speculation_refuses_malformed_text(text):
    with pytest.raises(SloBenchError, match="METHOD:TOKENS@ACCEPTANCE"):
        parse_speculation(text)


@pytest.mark.parametrize("text", ["ngram:4", "eagle=a/head:3@0.8/0.6<64", "ngram:4@runs/a"])
def test_speculation_text_survives_parsing(text):
    assert str(parse_speculation(text)) == text


def test_simulated_speculation_needs_the_acceptance():
    with pytest.raises(SloBenchError, match=r"needs the acceptance.*ngram:4@0.6/0.4"):
        on_h100("ngram:4")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("ngram:4@0.5", {"method": "ngram"}),
        ("mtp:4", {"method": "mtp"}),
        ("eagle3=a/head:4", {"method": "eagle3", "model": "a/head"}),
        ("a/draft:4", {"method": "draft_model", "model": "a/draft"}),
        (
            "ngram:4<64",
            {
                "method": "ngram",
                "num_speculative_tokens_per_batch_size": [[1, 64, 4], [65, 1 << 20, 0]],
            },
        ),
    ],
)
def test_speculative_args_of_vllm(text, config):
    (option,) = speculative_args(parse_speculation(text))
    name, _, argument = option.partition("=")
    assert name == "--speculative-config"
    assert json.loads(argument) == {**config, "num_speculative_tokens": 4}


def test_eagle_on_a_server_needs_its_head():
    with pytest.raises(SloBenchError, match="eagle=FOLDER:4"):
        speculative_args(parse_speculation("eagle:4@0.5"))


def test_speculation_with_sglang_is_refused():
    with pytest.raises(SloBenchError, match="no effect with backend sglang"):
        ExperimentSchema(
            backend="sglang", systems="sglang", speculation="ngram:4", rates=1
        ).check_effects()


def test_draft_model_path_is_relative_to_the_experiment_file(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    schema = ExperimentSchema(speculation=["none", "ngram:4@runs/a<8"]).anchored(tmp_path)
    assert schema.speculation == ("none", f"ngram:4@{tmp_path}/runs/a<8")


def test_unknown_draft_model_is_refused():
    with pytest.raises(SloBenchError, match="nobody"):
        on_h100("nobody:3@0.5")


def test_speculation_gains_for_few_sequences_and_not_for_many():
    plain, fast = on_h100(None).step_time.model, on_h100("ngram:4@0.6").step_time.model
    assert fast.step_s(1, 1000, []) < 0.5 * plain.step_s(1, 1000, [])
    assert fast.step_s(256, 256_000, []) > plain.step_s(256, 256_000, [])
    # Nothing accepted: the same work for one token.
    never = on_h100("ngram:4@0").step_time.model
    gain = parse_speculation("ngram:4@0.6").tokens_per_step
    assert never.step_s(8, 8000, []) == pytest.approx(gain * fast.step_s(8, 8000, []))


def test_speculation_is_off_above_the_given_load():
    plain, off = on_h100(None).step_time.model, on_h100("eagle:3@0.7<64").step_time.model
    assert off.step_s(64, 64_000, []) < plain.step_s(64, 64_000, [])
    for chunks in ([], [(0, 512)]):
        assert off.step_s(65, 65_000, chunks) == plain.step_s(65, 65_000, chunks)


def test_draft_model_costs_time_and_memory():
    free, eagle = on_h100("ngram:3@0.7"), on_h100("eagle:3@0.7")
    draft = on_h100("qwen3-0.6b:3@0.7")
    times = [deployed.step_time.model.step_s(8, 8000, []) for deployed in (free, eagle, draft)]
    assert times[0] < times[1] < times[2]
    held = model("qwen3-0.6b").weight_bytes() // 2
    assert draft.placement.beside_bytes == held
    assert draft.placement.num_gpu_blocks < free.placement.num_gpu_blocks


def test_speculation_span_equals_the_sum_of_its_steps():
    timed = on_h100("qwen3-0.6b:4@0.7").step_time.model
    total = sum(timed.step_s(16, 16_000 + 16 * i, []) for i in range(600))
    assert timed.span_s(16, 16_000, 600) == pytest.approx(total)
    assert timed.steps_within(16, 16_000, total * 0.9999) == 600


def test_single_request_is_faster_by_the_tokens_of_a_step():
    workload = Workload(np.zeros(1), np.array([500]), np.array([401]))
    tpot_s = []
    for speculation in (None, "ngram:4@0.6"):
        deployed = on_h100(speculation)
        records = simulate(
            workload, system("vllm"), deployed.placement, deployed.step_time.model
        ).records
        tpot_s.append(float((records.finish_s - records.first_token_s)[0]) / 400)
    verified = on_h100("ngram:4@0").step_time.model.step_s(1, 700, [])
    gain = parse_speculation("ngram:4@0.6").tokens_per_step
    assert tpot_s[1] == pytest.approx(verified / gain, rel=0.02)
    assert tpot_s[1] < tpot_s[0]
