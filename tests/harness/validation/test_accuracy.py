"""Accuracy: readers, blind predictions, summaries, resumption, and what a fit has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slo_bench.harness.experiments.execution.workers import LocalPool
from slo_bench.harness.validation.accuracy import (
    aiconfigurator,
    lmbenchmark,
)
from slo_bench.harness.validation.accuracy import (
    prediction_errors as errors,
)
from slo_bench.harness.validation.accuracy.clients import (
    INFERENCEX,
    client_of,
    other_setup,
    server_of,
)
from slo_bench.harness.validation.accuracy.highest_rate import WITHIN, highest_rate
from slo_bench.harness.validation.accuracy.measurement import (
    Case,
    ClosedLoop,
    HighestRate,
    Measurement,
    OpenLoop,
    Skipped,
)
from slo_bench.harness.validation.accuracy.predict import placed_as_measured, predict, token_budget
from slo_bench.harness.validation.accuracy.prediction_errors import judge, judge_one, summaries
from slo_bench.harness.validation.accuracy.readers import read_folder
from slo_bench.harness.validation.accuracy.shipped import SHIPPED, seen
from slo_bench.predictors.operators.front_end import front_end
from slo_bench.predictors.operators.server_version import ServerVersion
from slo_bench.predictors.specs import model as catalogue_model
from slo_bench.reports.pages.accuracy_page import figures, write_accuracy
from slo_bench.workloads.errors import FileFormatError, SloBenchError

OWN = """engine,gpu,model,tp,concurrency,prompt_tokens,output_tokens,ttft_mean_s,tpot_mean_s
vllm,h100-80g,llama-3.1-8b,1,2,256,16,0.03,0.008
sglang,h100-80g,llama-3.1-8b,1,2,256,16,,0.009
"""


@pytest.fixture
def measured_folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.csv").write_text(OWN)
    return tmp_path


def test_read_folder_reads_a_users_table(measured_folder):
    first, second = read_folder(measured_folder)
    assert (first.set, first.row, first.mode) == ("mine", "2", "closed-loop")
    assert first.case.load == ClosedLoop(2, 256, 16)
    assert first.measured["e2e_mean"] == pytest.approx(0.03 + 15 * 0.008)
    assert first.measured["throughput"] == pytest.approx(32 / (0.03 + 15 * 0.008))
    assert set(second.measured) == {"tpot_mean"}


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        ("h100-80g,llama-3.1-8b,1,2,256", "h100-80g,llama-3.1-8b,1,two,256", "two"),
        ("vllm,h100-80g", "vllm,h1000", "h1000"),
        ("0.03,0.008", ",", "neither ttft_mean_s nor tpot_mean_s"),
    ],
)
def test_damaged_measurement_row_is_named(measured_folder, was, now, problem):
    (measured_folder / "mine.csv").write_text(OWN.replace(was, now, 1))
    with pytest.raises(FileFormatError, match=problem):
        list(read_folder(measured_folder))


RATES = """engine,gpu,model,tp,prompt_tokens,output_tokens,ttft_p99_s,tpot_mean_s,max_rate_rps
vllm,h100-80g,llama-3.1-8b,1,8192,64,2.0,0.05,2
vllm,h100-80g,llama-3.1-8b,1,8192,64,,0.05,2
"""


@pytest.mark.slow
def test_read_folder_reads_a_table_of_highest_rates(tmp_path):
    (tmp_path / "rates.csv").write_text(RATES)
    first, second = read_folder(tmp_path)
    assert first.mode == "max-rate"
    assert first.measured == {"max_rate": 2.0}
    assert first.case.load == HighestRate(8192, 64, (("ttft_p99", 2.0), ("tpot_mean", 0.05)))
    assert second.case.load.bounds == (("tpot_mean", 0.05),)
    assert "ttft_p99 ≤ 2 s" in str(first.case)
    judged = judge_one(first)
    assert judged.predicted["max_rate"] > 2
    assert judged.in_band("max_rate") is None
    looser = replace(
        first.case, load=HighestRate(8192, 64, (("ttft_p99", 4.0), ("tpot_mean", 1.0)))
    )
    assert predict(looser).figures["max_rate"] > judged.predicted["max_rate"]


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        ("2.0,0.05,2", ",,2", "has no bound"),
        ("2.0,0.05,2", "2.0,0.05,", "max_rate_rps = nan is not a number above 0"),
        ("2.0,0.05,2", "-1,0.05,2", "ttft_p99_s = -1.0 is not a number above 0"),
        ("8192,64,2.0", "8192,0,2.0", "output_tokens = 0 is not"),
    ],
)
def test_a_damaged_row_of_highest_rates_is_named(tmp_path, was, now, problem):
    (tmp_path / "rates.csv").write_text(RATES.replace(was, now, 1))
    with pytest.raises(FileFormatError, match=rf"{problem}.*rates.csv, line 2"):
        list(read_folder(tmp_path))


@pytest.mark.parametrize("true_rps", [0.3, 8.0, 700.0])
def test_highest_rate_search_finds_a_known_rate(true_rps):
    """TTFT 1 / (10 true - rate) seconds: the bound is met up to `true_rps`."""

    def serve(workload):
        rate_rps = (len(workload) - 1) / np.ptp(workload.arrival_s)
        ttft_s = 1 / (10 * true_rps - rate_rps) if rate_rps < 10 * true_rps else np.inf
        return {"ttft": np.full(len(workload), min(ttft_s, 1e9))}

    highest_rps, figures_at_rate = highest_rate(
        HighestRate(1, 1, (("ttft_mean", 1 / (9 * true_rps)),)), serve
    )
    # The draws of 1,000 requests or more have a rate of their own, the same at every scale.
    assert highest_rps == pytest.approx(true_rps, rel=WITHIN + 0.07)
    assert figures_at_rate["ttft_mean"] <= 1 / (9 * true_rps)


@pytest.mark.parametrize(("ttft_s", "which"), [(0.0, "every rate"), (1.0, "no rate")])
def test_highest_rate_of_bounds_never_or_always_met_is_refused(ttft_s, which):
    def serve(workload):
        return {"ttft": np.full(len(workload), ttft_s)}

    with pytest.raises(SloBenchError, match=which):
        highest_rate(HighestRate(1, 1, (("ttft_mean", 0.5),)), serve)


def test_folder_without_measurements_is_refused(tmp_path):
    with pytest.raises(SloBenchError, match="holds no measurements"):
        list(read_folder(tmp_path))
    with pytest.raises(SloBenchError, match="does not exist"):
        list(read_folder(tmp_path / "none"))


def test_table_of_an_unknown_layout_is_skipped_and_named(measured_folder):
    (measured_folder / "energy.csv").write_text("gpu,watts\nh100,700\n")
    [skipped] = [row for row in read_folder(measured_folder) if isinstance(row, Skipped)]
    assert (skipped.set, skipped.reason) == (
        "energy",
        "a table whose columns are of no known layout",
    )


@pytest.mark.slow
def test_shipped_measurements_can_be_read():
    rows = list(read_folder(SHIPPED))
    measurements = [row for row in rows if isinstance(row, Measurement)]
    closed = [m for m in measurements if m.set == "silicon" and m.case.engine in ("vllm", "sglang")]
    dense = [m for m in closed if catalogue_model(m.case.model).is_plain]
    assert len([m for m in dense if m.case.weight_dtype != "nvfp4"]) == 333
    experts = [m for m in closed if catalogue_model(m.case.model).experts]
    assert len([m for m in experts if m.case.dp == 1]) == 1147
    assert len([m for m in experts if m.case.dp > 1]) == 61
    # `tp 8, ep 8` is recorded as tp 64: the same figures stand there twice, under both.
    assert {m.case.tp for m in experts} == {1, 2, 4, 8}
    reasons = {row.reason for row in rows if isinstance(row, Skipped)}
    assert {"disaggregated serving", SPECULATIVE} <= reasons
    levels = [m for m in measurements if isinstance(m.case.load, OpenLoop)]
    assert {m.set.partition("_")[0] for m in levels} == {"a100-80g", "h100-80g"}
    assert all(m.case.instances == 2 and m.case.tp == 2 for m in levels)
    # Cold starts are in these TTFTs.
    cold = [m for m in measurements if (m.case.engine, m.case.version) == ("trtllm", "1.0.0rc3")]
    assert cold
    assert all(set(m.measured) == {"tpot_mean"} for m in cold)
    assert len({m.key for m in measurements}) == len(measurements)


DAILY = "source_file=2026-04-06.csv; model=M; silicon_concurrency=4; measured="
SPECULATIVE = "speculative decoding"


@pytest.mark.parametrize(
    ("case", "gpus", "source", "why"),
    [
        # tp 4 without expert parallelism ran with multi-token prediction alone (pull/898).
        ("sglang b200 qwen3.5-397b-a17b fp8", (4, 1), DAILY + "2026-03-20", SPECULATIVE),
        ("sglang b200 qwen3.5-397b-a17b fp8", (4, 4), DAILY + "2026-03-24", ""),
        ("sglang b200 qwen3.5-397b-a17b nvfp4", (4, 1), "db-dump/2026-04-27", ""),
        # Both on one day: only the database's dump says which.
        ("sglang b200 deepseek-r1 fp8", (8, 1), DAILY + "2026-03-25", SPECULATIVE),
        ("sglang b200 deepseek-r1 fp8", (8, 1), "db-dump/2026-04-27", ""),
        ("sglang b200 deepseek-r1 fp8", (4, 1), DAILY + "2026-03-25", ""),
        ("sglang b200 deepseek-r1 fp8", (8, 1), DAILY + "2025-12-31", ""),
        ("trtllm h200-141g deepseek-r1 fp8", (8, 8), DAILY + "2026-01-14", SPECULATIVE),
        ("trtllm h200-141g deepseek-r1 fp8", (8, 8), DAILY + "2026-01-28", ""),
        ("vllm h200-141g deepseek-r1 fp8", (8, 8), DAILY + "2026-01-14", ""),
        (
            "vllm h100-80g gpt-oss-120b mxfp4",
            (2, 1),
            "source_file=2026-04-06.csv; silicon_concurrency=512; measured=2025-12-05",
            "512 clients, an unknown limit of sequences",
        ),
        ("vllm h100-80g gpt-oss-120b mxfp4", (2, 1), DAILY + "2025-12-05", ""),
    ],
)
def test_rows_of_another_set_up_than_their_table_tells_are_known(case, gpus, source, why):
    assert other_setup(*case.split(), gpus, source) == why


def test_prediction_does_not_depend_on_the_measured_values(measured_folder):
    first, _ = read_folder(measured_folder)
    other = Measurement(first.set, first.row, first.mode, first.case, {"tpot_mean": 123.0})
    assert judge_one(first).predicted == judge_one(other).predicted
    assert first.key == other.key


def test_case_that_cannot_run_has_its_reason():
    case = Case("vllm", "", "rtx-4090", "llama-3.1-70b", ClosedLoop(1, 10, 10))
    judged = judge_one(Measurement("s", "1", "closed-loop", case, {"tpot_mean": 1.0}))
    assert "llama-3.1-70b needs" in judged.reason
    assert not judged.predicted


def test_token_budgets_are_vllms_defaults():
    load = ClosedLoop(1, 10, 10)
    assert token_budget(Case("vllm", "", "a100-80g", "llama-3.1-8b", load)) == 2048
    assert token_budget(Case("vllm", "", "rtx-4090", "llama-3.1-8b", load)) == 2048
    assert token_budget(Case("vllm", "", "h100-80g", "llama-3.1-8b", load)) == 8192
    assert token_budget(Case("vllm", "", "h100-80g", "llama-3.1-8b", load, token_budget=9)) == 9


@pytest.mark.slow
def test_cases_have_the_settings_of_their_harness():
    """AIConfigurator's sweeps: repeated prompts, the checkpoint's KV format, steps by prompt."""
    rows = {m.row: m for m in read_folder(SHIPPED) if isinstance(m, Measurement)}
    cases = [m.case for m in rows.values() if isinstance(m.case.load, ClosedLoop)]
    [sweep] = [
        case
        for case in cases
        if (case.engine, case.model, case.tp) == ("vllm", "llama-3.1-8b", 1)
        and case.load == ClosedLoop(64, 8000, 1000)
    ]
    assert (sweep.harness, sweep.kv_dtype, sweep.token_budget) == ("aiconfigurator", "fp8", 9564)
    assert client_of(sweep.harness, sweep.engine, sweep.version).prompts == 100
    grid = [c for c in cases if (c.engine, c.gpu, c.model) == ("vllm", "h100-80g", "qwen3-32b")]
    kinds = {c.harness: client_of(c.harness, c.engine, c.version).prompts for c in grid}
    assert kinds == {"aiconfigurator": 100, "other": None}
    engines = {c.engine: set() for c in cases}
    for case in cases:
        if case.harness == "inferencex":
            engines[case.engine].add(case.token_budget)
    assert engines == {
        "vllm": {None, 2048, 16384},
        "trtllm": {None},
        "sglang": {None, 8192, 16384, 32768},
    }


@pytest.mark.slow
def test_servers_have_the_options_of_published_recipes():
    rows = [m for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    shares = {(m.case.engine, m.case.gpu, m.case.model, m.case.tp): set() for m in rows}
    for m in rows:
        if m.mode == "closed-loop":
            case = m.case
            formats = shares[case.engine, case.gpu, case.model, case.tp]
            formats.add((case.weight_dtype, case.memory_share))
    assert shares["sglang", "b200", "deepseek-r1", 4] == {("fp8", 0.95), ("nvfp4", 0.85)}
    assert shares["sglang", "b200", "deepseek-r1", 8] == {("fp8", 0.82), ("nvfp4", 0.85)}
    assert shares["vllm", "b200", "minimax-m2.5", 2] == {
        ("fp8", 0.95),  # vLLM 0.17
        ("fp8", 0.9),
        ("nvfp4", 0.9),
    }
    minimax = [
        m.case
        for m in rows
        if (m.case.model, m.case.gpu, m.case.version) == ("minimax-m2.5", "b200", "0.19.0")
    ]
    assert {(case.kv_dtype, case.token_budget) for case in minimax} == {
        ("fp8", 2048),
        ("fp8", 16384),
    }
    assert shares["vllm", "h100-80g", "minimax-m2.5", 4] == {("fp8", 0.9)}


def test_repeated_prompts_are_computed_once():
    load = ClosedLoop(16, 4000, 20)
    repeated, different = (
        predict(Case("vllm", "0.12.0", "h200-141g", "llama-3.1-8b", load, harness=harness)).figures
        for harness in ("aiconfigurator", "other")
    )
    assert repeated["e2e_mean"] < 0.5 * different["e2e_mean"]


def test_memory_is_that_of_the_measured_server_and_version():
    load = ClosedLoop(1, 10, 10)
    places = {
        name: placed_as_measured(Case(engine, version, "h100-80g", "qwen3-32b", load))
        for name, engine, version in (
            ("new", "vllm", "0.19.0"),
            ("unknown", "vllm", "nightly-5b8c30d62b754b57"),
            ("old", "vllm", "0.12.0"),
            ("older", "vllm", "0.8"),
            ("sglang", "sglang", "0.5.9"),
            ("trtllm", "trtllm", "1.0"),
        )
    }
    assert {name: (place.server, place.server_version) for name, place in places.items()} == {
        "new": ("vllm", "0.19.0"),
        "unknown": ("vllm", ""),
        "old": ("vllm", "0.12.0"),
        "older": ("any", ""),
        "sglang": ("sglang", "0.5.9"),
        "trtllm": ("any", ""),
    }
    assert places["new"].kv_tokens > places["old"].kv_tokens  # samples with less
    assert places["new"].sampled_sequences == 1024
    assert places["older"].beside_bytes == 1024 * 151936 * 30


def test_a_closed_loop_passes_the_front_end_of_its_server():
    load = ClosedLoop(2, 1000, 20)
    case = Case("vllm", "0.15.1", "h100-80g", "llama-3.1-8b", load)
    passed = front_end(ServerVersion("vllm", "0.15.1"))
    least_s = passed.passing_s(np.array([0.97 * 1000]))[0]
    assert predict(case).figures["ttft_mean"] > 0.012 + least_s


def test_open_loop_counts_answered_requests_alone():
    arrival = np.linspace(0.0, 2.0, 20)
    tokens = np.full(20, 50)
    answered = np.arange(20) < 10
    load = OpenLoop(arrival, tokens, np.where(answered, 50, 1), answered)
    predicted = predict(Case("vllm", "0.8", "h100-80g", "llama-3.1-8b", load)).figures
    assert predicted["e2e_p50"] > 49 * 0.004  # not the answers of one token


@pytest.mark.slow
def test_lmbenchmark_conversations_have_growing_prompts():
    """Prompts of LMBenchmark hold the conversation so far; the second questions came before."""
    levels = [m for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    level = next(m for m in levels if m.set.endswith("_sharegpt"))
    load = level.case.load
    assert isinstance(load, OpenLoop)
    assert load.prefix_blocks is not None
    warm_up = len(lmbenchmark.TURNS)
    assert (warm_up, len(load.arrival_s)) == (55, 55 + 252)
    assert not load.answered[:warm_up].any()
    assert level.case.load.span_s == pytest.approx(251 / float(level.row.split("_")[-1]), rel=0.01)
    last: dict[int, int] = {}
    continued = 0
    for row, blocks in enumerate(load.prefix_blocks):
        before = last.get(blocks[0]) if blocks else None
        if before is not None:
            assert blocks[: len(load.prefix_blocks[before])] == load.prefix_blocks[before]
            if before >= warm_up:
                continued += 1
                context = load.prompt_tokens[before] + load.output_tokens[before]
                assert load.prompt_tokens[row] > context
        last[blocks[0] if blocks else -1] = row
    assert continued == 252 - 55
    short = replace(load, arrival_s=load.arrival_s[:9])
    assert lmbenchmark.conversations(short) is short


def test_summary_has_the_median_errors(measured_folder):
    judged, skipped = judge(measured_folder)
    assert not skipped
    rows = {(row.engine, row.metric): row for row in summaries(judged)}
    row = rows["vllm", "tpot_mean"]
    error = judged[0].predicted["tpot_mean"] / 0.008 - 1
    assert (row.n, row.bias) == (1, pytest.approx(error))
    assert row.median_error == row.mean_error == pytest.approx(abs(error))
    assert row.in_band in (0.0, 1.0)  # of one row
    assert ("sglang", "ttft_mean") not in rows


def test_interrupted_accuracy_run_is_resumed(measured_folder, tmp_path, monkeypatch):
    out = tmp_path / "errors.jsonl"
    judge(measured_folder, out)
    lines = out.read_text().splitlines()
    assert len(lines) == 2
    out.write_text(lines[0] + "\n" + lines[1][:20])  # killed while it wrote
    with pytest.raises(SloBenchError, match="--resume"):
        judge(measured_folder, out)
    predicted_cases = []
    monkeypatch.setattr(
        errors,
        "predict",
        lambda case, without, analytic: predicted_cases.append(case) or predict(case),
    )
    judged, _ = judge(measured_folder, out, resume=True)
    assert [case.engine for case in predicted_cases] == ["sglang"]
    assert [row.engine for row in judged] == ["vllm", "sglang"]
    assert out.read_text().splitlines() == lines


def test_predictions_that_cannot_be_written_are_told(measured_folder, tmp_path):
    with pytest.raises(SloBenchError, match=r"cannot write .*errors\.jsonl: No such file"):
        judge(measured_folder, tmp_path / "missing" / "errors.jsonl")


def test_accuracy_command_resumes_the_file_of_out(measured_folder, tmp_path, slo_bench):
    out = tmp_path / "errors.jsonl"
    words = ("accuracy", str(measured_folder), "--jobs", "1", "--out", str(out))
    code, _, err = slo_bench(*words, "--resume")
    assert (code, "no such file" in err) == (2, True)
    assert slo_bench(*words)[0] == 0
    whole = out.read_text()
    out.write_text(whole.splitlines()[0] + "\n")
    assert slo_bench(*words, "--resume")[0] == 0
    assert out.read_text() == whole


@pytest.mark.slow
def test_worker_processes_predict_the_same(measured_folder, tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    judge(measured_folder, here)
    with LocalPool(2) as pool:
        judge(measured_folder, there, begin=pool.begin)
    assert there.read_text() == here.read_text()


def test_rows_of_one_case_are_predicted_once(measured_folder, monkeypatch):
    rows = OWN.splitlines()
    again = rows[1].replace("0.03,0.008", "0.05,0.010")
    (measured_folder / "mine.csv").write_text("\n".join([*rows, again]) + "\n")
    predicted_cases = []
    monkeypatch.setattr(
        errors,
        "predict",
        lambda case, without, analytic: predicted_cases.append(case) or predict(case),
    )
    first, _, third = judge(measured_folder)[0]
    assert len(predicted_cases) == 2
    assert third.predicted == first.predicted
    assert (first.measured["ttft_mean"], third.measured["ttft_mean"]) == (0.03, 0.05)
    assert (first.row, third.row) == ("2", "4")
    assert first.key != third.key


def test_servers_poll_for_requests_as_their_recipes_say():
    """Every 10 or 30 steps, or every step; half of that passes on average."""
    seconds = {
        (model, weights): [
            server_of(INFERENCEX, "sglang", "", "b200", model, weights, 8).unseen_s(clients, 0.01)
            for clients in (8, 16)
        ]
        for model, weights in (("deepseek-r1", "fp8"), ("glm-5", "fp8"), ("glm-5", "nvfp4"))
    }
    assert seconds["deepseek-r1", "fp8"] == pytest.approx([0.045, 0.145])
    assert seconds["glm-5", "fp8"] == [0, 0]
    assert seconds["glm-5", "nvfp4"] == pytest.approx([0.045, 0.045])


@pytest.mark.slow
def test_experts_are_placed_as_the_recipes_say():
    """Recipes of MiniMax-M2.5 turned expert parallelism on in every case, on B200 with Triton's
    kernels before vLLM 0.18; gpt-oss takes Marlin on Hopper.
    """

    def told(version: str, gpu: str, model: str, weights: str, tp: int) -> tuple[bool, str]:
        server = server_of(INFERENCEX, "vllm", version, gpu, model, weights, tp)
        return server.expert_parallel, server.experts_kernel

    minimax = ("minimax-m2.5", "fp8")
    assert told("0.17.0", "b200", *minimax, 2) == (True, "triton")
    assert told("0.19.0", "b200", *minimax, 2) == told("", "b200", *minimax, 2) == (False, "")
    assert told("0.18.0", "h200-141g", *minimax, 8) == (True, "")
    assert told("0.16.0", "h200-141g", *minimax, 4) == (False, "")
    for version, kernel in (("0.11.2", ""), ("0.18.0", "marlin")):
        assert told(version, "h100-80g", "gpt-oss-120b", "mxfp4", 4) == (False, kernel)
    other = server_of("other", "vllm", "0.17.0", "b200", *minimax, 2)
    assert not other.expert_parallel
    rows = [m.case for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    early = [c for c in rows if c.model == "minimax-m2.5" and c.version.startswith("0.17.")]
    assert {(c.gpu, c.weight_dtype) for c in early} == {("b200", "fp8")}
    assert all(c.ep == c.tp * c.dp > 1 for c in early)


@pytest.mark.slow
def test_seen_names_the_rows_used_for_fits():
    """Constants were chosen with these rows in view, and with no others."""
    rows = [m for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    seen_setups = {(m.case.engine, m.case.gpu, m.case.model) for m in rows if seen(m)}
    unseen = {(m.case.engine, m.case.gpu, m.case.model) for m in rows if not seen(m)}
    assert ("sglang", "h200-141g", "llama-3.1-8b") in unseen - seen_setups
    assert ("vllm", "h200-141g", "llama-3.1-8b") in seen_setups - unseen
    assert all(not seen(m) for m in rows if m.mode == "open-loop")
    assert all(m.case.engine != "trtllm" for m in rows if seen(m))


@pytest.mark.slow
def test_accuracy_command_prints_json(measured_folder, slo_bench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = slo_bench("accuracy", str(measured_folder), "--json")
    assert code == 0
    rows = json.loads(out)
    assert {"set", "engine", "gpu", "model", "mode", "metric", "n"} <= set(rows[0])
    assert {"median_error", "mean_error", "p90_error", "bias", "in_band"} <= set(rows[0])
    assert {row["set"] for row in rows} == {"mine"}
    code, out, _ = slo_bench("accuracy", str(measured_folder))
    assert code == 0
    assert "Errors of 2 predictions" in out
    assert "in band" in out
    assert "AIConfigurator" not in out, "a column without a figure"
    monkeypatch.setenv("COLUMNS", "80")
    assert "not shown in 80 columns: p90, in band" in slo_bench("accuracy", str(measured_folder))[1]
    code, _, err = slo_bench("accuracy", str(measured_folder), "--without", "h1000")
    assert code == 2
    assert "h1000" in err
    code, _, err = slo_bench("accuracy", str(measured_folder), "--resume")
    assert code == 2
    assert "--out" in err


def test_a_gpu_can_be_left_out(measured_folder):
    whole, without = (judge(measured_folder, without=names)[0] for names in ((), ("h100-80g",)))
    assert whole[0].predicted != without[0].predicted
    assert whole[0].key != without[0].key


@pytest.mark.slow
def test_a_run_takes_step_times_from_operators(slo_bench):
    options = (
        "--system",
        "vllm",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h200-141g",
        "--rates",
        "2",
        "--seeds",
        "1",
    )
    few = ("--requests", "20", "--json")
    e2e_s = {}
    for profile in ("operators", "operators:sglang"):
        code, out, err = slo_bench("run", *options, *few, "--profile", profile)
        assert code == 0, err
        (row,) = json.loads(out)
        e2e_s[profile] = row["e2e_p50_s"]
    assert len(set(e2e_s.values())) == 2
    code, _, err = slo_bench("run", *options, *few, "--profile", "operators:sgl")
    assert code == 2
    assert "unknown engine 'sgl'" in err


@pytest.mark.weekly
def test_shipped_measurements_are_predicted_within_their_errors():
    """Medians over the closed loops of vLLM and SGLang, dense and with experts, and open loops."""
    judged, _ = judge(SHIPPED)
    closed = [row for row in judged if row.mode == "closed-loop" and row.engine != "trtllm"]
    dense = [row for row in closed if catalogue_model(row.model).is_plain]
    experts = [row for row in closed if not catalogue_model(row.model).is_plain]
    opened = [row for row in judged if row.mode == "open-loop"]
    bounds = [(dense, "tpot_mean", 0.07), (dense, "ttft_mean", 0.20)]
    bounds += [(experts, "tpot_mean", 0.09), (experts, "ttft_mean", 0.27)]
    for gpu, ttft in (("a100-80g", 0.12), ("h100-80g", 0.05)):
        levels = [row for row in opened if row.gpu == gpu]
        bounds += [(levels, "e2e_p50", 0.05), (levels, "e2e_p99", 0.10), (levels, "ttft_p50", ttft)]
    for rows, metric, limit in bounds:
        errors_of = [abs(row.errors()[metric]) for row in rows if metric in row.errors()]
        assert np.median(errors_of) <= limit, (metric, rows[0].mode, rows[0].gpu)
    for rows in (dense, experts):
        for metric in ("tpot_mean", "ttft_mean"):
            inside = [row.in_band(metric) for row in rows if metric in row.errors()]
            # If not, residuals are of other predictions: scripts/residuals.py
            assert (
                0.85
                <= np.mean([is_inside for is_inside in inside if is_inside is not None])
                <= 0.95
            ), metric


def test_accuracy_page_shows_every_point(measured_folder, tmp_path):
    judged, skipped = judge(measured_folder)
    page = write_accuracy(judged, skipped, tmp_path / "accuracy.html").read_text("utf-8")
    figure = next(entry for entry in figures(judged) if entry.id == "tpot_mean")
    for view in figure.views.values():
        points = [
            point
            for series in view["series"]
            for point in zip(series["x"], series["y"], strict=True)
        ]
        assert sorted(points) == sorted(
            (row.measured["tpot_mean"], row.predicted["tpot_mean"]) for row in judged
        )
    label = figure.views["engine"]["series"][1]["labels"][0]
    assert label.startswith("mine, 2: llama-3.1-8b on h100-80g, vllm, bf16, tp 1, 256 + 16 tokens")
    assert label in page
    with pytest.raises(SloBenchError, match="nothing to show"):
        write_accuracy([], skipped, tmp_path / "none.html")


@pytest.mark.slow
def test_aiconfigurator_is_compared_on_the_rows_that_it_predicted():
    predictions = aiconfigurator.predictions()
    rows = [m for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    by_id = {(m.set, m.row): m for m in rows}
    assert set(predictions) <= set(by_id)
    (where, theirs), (_, others) = list(predictions.items())[:2]
    assert theirs != others
    measurement = by_id[where]
    case, measured = measurement.case, {"tpot_mean": 1.0}
    names = ("", *where, "closed-loop", case.engine, case.gpu, case.model, "")
    mine = errors.Judged(*names, measured, {"tpot_mean": 1.5})
    strange = errors.Judged("", "mine", "2", *names[3:], measured, {"tpot_mean": 9.0})
    comparison = aiconfigurator.beside([mine, strange], "tpot_mean")
    assert (comparison.n, comparison.ours) == (1, pytest.approx(0.5))
    assert comparison.theirs == pytest.approx(abs(theirs["tpot_mean"] - 1))
    assert aiconfigurator.beside([strange], "tpot_mean") is None
