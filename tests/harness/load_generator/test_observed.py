"""What is read from metrics: recorded ones of vLLM and SGLang on a CPU, and ones that are made."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from slo_bench import SloBenchError
from slo_bench.harness.load_generator.observed import observed
from slo_bench.harness.load_generator.server_metrics import (
    HistogramCounts,
    MetricNames,
    MetricsSnapshot,
    read_text,
    snapshot,
)
from slo_bench.harness.servers.server_kinds import metrics_by_server
from slo_bench.predictors.profiles.whole_steps import made_of
from slo_bench.predictors.specs import model
from slo_bench.workloads.lengths import mean_tokens
from slo_bench.workloads.source import load_source

KNOWN = metrics_by_server()
RECORDED = Path(__file__).parent / "recorded"


def recorded(name):
    """Times and texts of `/metrics`, in order."""
    with gzip.open(RECORDED / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def seen(name):
    return observed([read_text(text, time_s, {}, KNOWN) for time_s, text in recorded(name)])


def test_observed_vllm_metrics_give_workload_and_step_times():
    """Three rates of uniform(20,400) prompts and uniform(20,120) answers, 32 at a time."""
    server = seen("vllm-0.32.0")
    assert (server.last.engine, server.last.model) == ("vllm", "tiny")
    assert server.last.kv_tokens == 400 * 128
    assert server.requests == 612
    assert server.most_sequences == 32
    assert server.cached_share == server.total("preemptions") == 0
    assert mean_tokens(server.lengths("prompt")) == pytest.approx(133122 / 612, rel=0.01)
    assert mean_tokens(server.lengths("output")) == pytest.approx(44059 / 612, rel=0.01)
    assert server.mean_s("ttft") < server.mean_s("e2e")
    kinds = {bool(step.chunks) for step in server.steps}
    assert kinds == {False, True}
    assert len(server.step_errors()) == 10
    assert not server.notes


def test_observed_sglang_metrics_give_workload_and_step_times():
    server = seen("sglang-0.5.23")
    assert (server.last.engine, server.last.model) == ("sglang", "tiny")
    assert server.last.kv_tokens == 1_692_837
    assert server.most_sequences is None
    assert 0 < server.cached_share < 0.02
    assert server.peak("running") == 136
    assert {bool(step.chunks) for step in server.steps} == {False, True}


BASE_S, SEQUENCE_S, TOKEN_S = 0.004, 0.0005, 0.0001


def made_snapshots(windows=60, seed=0):
    """Metrics of a server whose steps take a constant, and time for sequences and tokens."""
    rng = np.random.default_rng(seed)
    shots, total = [], dict.fromkeys(("prompt", "output", "itl", "itl_n", "ttft", "ttft_n"), 0.0)
    for window in range(windows + 1):
        figures = {"running": 0.0, "waiting": 0.0, "output_tokens": total["output"]}
        running = 1.0 + window % 24
        figures |= {"running": running, "prompt_tokens": total["prompt"], "cached_tokens": 0.0}
        histograms = {
            "itl": HistogramCounts(total["itl"], total["itl_n"]),
            "ttft": HistogramCounts(total["ttft"], total["ttft_n"]),
            "e2e": HistogramCounts(total["ttft"] + total["itl"], total["ttft_n"]),
        }
        shots.append(
            MetricsSnapshot(2.0 * window, "vllm", "m", figures, histograms, 0.1, 100_000, 16)
        )
        batch, prompts = running + 0.5 if (window + 1) % 24 else 12.5, 1 + int(rng.integers(6))
        tokens = int(rng.integers(50, 800))
        prefill_s = BASE_S + SEQUENCE_S * batch + TOKEN_S * tokens
        steps = 200
        total["prompt"] += prompts * tokens
        total["output"] += steps * batch + prompts
        total["itl"] += steps * batch * (BASE_S + SEQUENCE_S * batch) + prompts * batch * prefill_s
        total["itl_n"] += (steps + prompts) * batch
        total["ttft"] += prompts * prefill_s
        total["ttft_n"] += prompts
    return shots


def test_observed_metrics_recover_known_step_times():
    server = observed(made_snapshots())
    profile = server.profile(model("llama-3.1-8b"), "")
    step_time = made_of(profile.fits[profile.best].coefficients)
    for batch in (2, 8, 20):
        assert step_time.step_s(batch, 0, []) == pytest.approx(BASE_S + SEQUENCE_S * batch, rel=0.1)
        expected = BASE_S + SEQUENCE_S * batch + TOKEN_S * 400
        assert step_time.step_s(batch, 0, [(0, 400)]) == pytest.approx(expected, rel=0.1)
    assert np.abs(server.step_errors()).max() < 0.1


def test_observed_burstiness_of_poisson_and_bursty_arrivals():
    server = observed(made_snapshots())
    assert server.burstiness >= 1

    def counted(per_window):
        total, shots = 0, []
        for window, n in enumerate([0, *per_window]):
            total += n
            figures = {"running": 1.0, "waiting": 0.0, "prompt_tokens": 100.0 * total}
            histograms = {"e2e": HistogramCounts(total, total)}
            shots.append(MetricsSnapshot(window, "vllm", "m", figures, histograms, 0.1, 1000, 16))
        return observed(shots).burstiness

    rng = np.random.default_rng(0)
    assert counted(rng.poisson(8, 100).tolist()) == 1
    assert counted(rng.poisson(np.linspace(2, 40, 100)).tolist()) == 1  # a drift
    assert counted((rng.poisson(2, 100) * 6).tolist()) == pytest.approx(math.sqrt(6), rel=0.3)


def test_observed_interval_with_a_restart_is_left_out():
    shots = made_snapshots()
    again = made_snapshots(seed=1)
    later = [MetricsSnapshot(200.0 + s.time_s, *list(vars(s).values())[1:]) for s in again]
    server = observed([*shots, *later])
    assert "started anew 1 times" in server.notes[0]
    assert all(step.duration_s > 0 for step in server.steps)


def test_observed_prefix_cache_hits_become_shared_blocks(monkeypatch):
    server = seen("vllm-0.32.0")
    assert "sessions" not in server.load
    assert "hash_ids" not in server.trace()[0]
    monkeypatch.setattr(type(server), "cached_share", 0.5)
    shared = server.shared_tokens
    assert shared == 96  # of 218
    assert server.load["sessions"] == ("sessions(turns=1, system_prompt_tokens=96)",)
    rows = server.trace()
    assert len(rows) == pytest.approx(server.requests, abs=30)
    assert {row["hash_ids"][0] for row in rows} == {0}
    assert all(len(row["hash_ids"]) == -(-row["prompt_tokens"] // 16) for row in rows)
    rest = load_source("synthetic", **load_settings(server)).make(rate_rps=5, requests=4000)
    assert rest.prompt_tokens.mean() == pytest.approx(218, rel=0.1)
    assert all(blocks[:6] == (0, 1, 2, 3, 4, 5) for blocks in rest.prefix_blocks[:50])


def load_settings(server):
    names = ("prompt_tokens", "output_tokens", "arrivals", "sessions")
    return {name: server.load[name][0] for name in names}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm:num_requests_running abc\n", "is no number"),
        ('vllm:x_bucket{le="?"} 1\nvllm:num_requests_running 1\n', "is no number"),
        (
            'vllm:num_requests_running{model_name="a"} 1\n'
            'vllm:num_requests_running{model_name="b"} 1\n',
            "--only model_name=…: a, b",
        ),
    ],
)
def test_malformed_metrics_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        read_text(text, 0.0, {}, KNOWN)


def test_metrics_are_restricted_to_the_chosen_model():
    text = (
        'vllm:num_requests_running{model_name="a"} 1\nvllm:num_requests_running{model_name="b"} 2\n'
    )
    shot = read_text(text, 0.0, {"model_name": "b"}, KNOWN)
    assert (shot.model, shot.figures["running"]) == ("b", 2)
    assert read_text(text, 0.0, {"model_name": "c"}, KNOWN) is None
    assert read_text("other_metric 1\n", 0.0, {}, KNOWN) is None


def test_metrics_of_a_server_with_names_of_its_own_are_read():
    names = {"running": ("busy",), "output_tokens": ("tokens_total",)}
    servers = {**KNOWN, "other": MetricNames(prefix="other_", names=names)}
    shot = read_text("other_busy 3\nother_tokens_total 8\n", 0.0, {}, servers)
    assert (shot.engine, shot.kv_usage) == ("other", None)
    assert shot.figures == {"running": 3, "output_tokens": 8}
    servers["other"] = MetricNames(prefix="other_", names={"output_tokens": ("tokens_total",)})
    assert read_text("other_tokens_total 8\n", 0.0, {}, servers) is None


OLD_VLLM = """\
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 1
vllm:prompt_tokens_total{engine="0"} 800
vllm:generation_tokens_total{engine="0"} 90
vllm:gpu_cache_usage_perc{engine="0"} 0.25
vllm:gpu_prefix_cache_queries_total{engine="0"} 800
vllm:gpu_prefix_cache_hits_total{engine="0"} 400
vllm:num_preemptions_total{engine="0"} 2
vllm:request_success_total{engine="0",finished_reason="stop"} 7
vllm:time_per_output_token_seconds_bucket{engine="0",le="0.1"} 60
vllm:time_per_output_token_seconds_sum{engine="0"} 3
vllm:time_per_output_token_seconds_count{engine="0"} 80
"""


@pytest.mark.parametrize(
    ("name", "other"), [("vllm:", "vllm_"), ("vllm:", "ray_vllm_"), ("_total", ""), ("", "")]
)
def test_old_and_renamed_metrics_are_read_like_todays(name, other):
    """Prometheus and routers write underscores for colons, Ray a prefix of its own."""
    shot = read_text(OLD_VLLM.replace(name, other), 0.0, {}, KNOWN)
    assert (shot.engine, shot.kv_usage) == ("vllm", 0.25)
    assert shot.figures == {
        **{"running": 3, "waiting": 1, "prompt_tokens": 800, "output_tokens": 90},
        **{"cached_tokens": 400, "looked_up_tokens": 800, "preemptions": 2, "ended": 7},
    }
    assert shot.histograms["itl"] == HistogramCounts(3, 80, ((0.1, 60),))


def test_labels_end_before_an_exemplar():
    text = 'vllm:a_bucket{le="0.5",m="x}\\"y",} 3 # {trace_id="ab"} 0.4 1.2\nvllm:b 4\n'
    bucket, plain = KNOWN["vllm"].samples(text)
    assert bucket == ("a_bucket", 'le="0.5",m="x}\\"y",', "3")
    assert plain == ("b", "", "4")


def test_labels_end_with_their_line():
    text = 'vllm:a{le="0.5 3\nvllm:b{x 1\nvllm:c{d="}"} 4\n' + "vllm:a{\n" * 100_000
    assert list(KNOWN["vllm"].samples(text)) == [("c", 'd="}"', "4")]


def test_a_router_that_is_no_server_has_no_metrics_of_one():
    page = "sglang_router_requests_total 5\nvllm_router:num_requests_total 5\n"
    assert read_text(page, 0.0, {}, KNOWN) is None


def test_share_of_prefix_hits_is_unknown_where_the_server_does_not_count_them():
    shots = []
    for shot in made_snapshots():
        figures = {k: v for k, v in shot.figures.items() if k != "cached_tokens"}
        shots.append(dataclasses.replace(shot, figures=figures))
    server = observed(shots)
    assert (server.cached_share, server.shared_tokens) == (None, 0)
    assert any("prefix_cache_hits_total" in note for note in server.notes)
    assert observed(made_snapshots()).cached_share == 0


def test_observed_refuses_too_few_readings_and_requests():
    shots = made_snapshots()
    with pytest.raises(SloBenchError, match="two readings"):
        observed(shots[:1])
    with pytest.raises(SloBenchError, match="requests arrived within"):
        observed(shots[:3])


def sglang_page(*lines):
    labels = 'model_name="m",'
    return "\n".join(f"sglang:{line}".replace("{", "{" + labels) for line in lines)


def test_queue_by_priority_is_not_added_to_the_queue():
    """SGLang with --enable-priority-scheduling: the whole queue has an empty priority."""
    page = sglang_page(
        'num_running_reqs{priority=""} 5', 'num_running_reqs{priority="1"} 3',
        'num_running_reqs{priority="2"} 2', 'num_queue_reqs{priority=""} 4',
        'num_queue_reqs{priority="1"} 4', 'prompt_tokens_total{priority="1"} 100',
        'prompt_tokens_total{priority=""} 50',
    )  # fmt: skip
    shot = read_text(page, 0.0, {}, KNOWN)
    assert (shot.figures["running"], shot.figures["waiting"], shot.ranks) == (5, 4, 1)
    assert shot.figures["prompt_tokens"] == 150  # of requests with a priority, and without


def test_data_parallel_ranks_are_added():
    page = sglang_page(
        *(f'num_running_reqs{{dp_rank="{rank}"}} 3' for rank in range(2)),
        *(f'max_total_num_tokens{{dp_rank="{rank}"}} 1000' for rank in range(2)),
        *(f'page_size{{dp_rank="{rank}"}} 16' for rank in range(2)),
        *(f'token_usage{{dp_rank="{rank}"}} 0.{rank + 1}' for rank in range(2)),
    )
    shot = read_text(page, 0.0, {}, KNOWN)
    assert (shot.figures["running"], shot.kv_tokens, shot.block_size) == (6, 2000, 16)
    assert shot.kv_usage == pytest.approx(0.15)
    assert shot.ranks == 2
    cache = 'cache_config_info{engine="%d",num_gpu_blocks="10",block_size="16"} 1'
    vllm = [f'num_requests_running{{engine="{rank}"}} 1' for rank in range(3)]
    page = "\n".join(f"vllm:{line}" for line in (*vllm, *(cache % rank for rank in range(3))))
    shot = read_text(page, 0.0, {}, KNOWN)
    assert (shot.kv_tokens, shot.block_size, shot.ranks) == (480, 16, 3)


def without(shot, *names):
    figures = {name: value for name, value in shot.figures.items() if name not in names}
    histograms = {name: value for name, value in shot.histograms.items() if name not in names}
    return dataclasses.replace(shot, figures=figures, histograms=histograms)


def test_reading_without_a_counter_that_others_have_is_left_out():
    shots = made_snapshots()
    whole = observed(shots)
    shots[20] = without(shots[20], "e2e", "prompt_tokens")
    server = observed(shots)
    assert server.requests == pytest.approx(whole.requests)
    assert server.notes[0] == "1 of 61 readings are left out: some metrics were missing"


def test_requests_are_counted_by_their_ends_where_no_histogram_does():
    shots = made_snapshots()
    whole = observed(shots)
    ended = [
        dataclasses.replace(
            without(shot, "e2e"),
            figures={**shot.figures, "ended": shot.histograms["e2e"].count},
        )
        for shot in shots
    ]
    server = observed(ended)
    assert server.arrival_rps == pytest.approx(whole.arrival_rps)
    assert any("e2e_request_latency_seconds" in note for note in server.notes)
    with pytest.raises(SloBenchError, match="neither e2e_request_latency_seconds nor request_succ"):
        observed([without(shot, "e2e") for shot in shots])


def test_samples_that_are_no_number_say_nothing():
    """A gauge of a rank that has not begun made all readings unknown: no request had arrived."""
    page = OLD_VLLM + 'vllm:num_requests_waiting{engine="1"} NaN\nvllm:num_preemptions_total +Inf\n'
    assert read_text(page, 0.0, {}, KNOWN) == read_text(OLD_VLLM, 0.0, {}, KNOWN)
    parsed = [("vllm:num_requests_running", {}, 3.0), ("vllm:kv_cache_usage_perc", {}, math.nan)]
    shot = snapshot(parsed, 0.0, {}, KNOWN)
    assert (shot.figures, shot.kv_usage) == ({"running": 3.0}, None)
    parsed = [("vllm:num_requests_running", {}, math.inf), ("vllm:kv_cache_usage_perc", {}, 0.5)]
    shot = snapshot(parsed, 0.0, {}, KNOWN)
    assert (shot.figures, shot.kv_usage) == ({}, 0.5)
