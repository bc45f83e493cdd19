"""The line that `slo-bench serve` shows while it serves."""

from __future__ import annotations

import contextlib

from slo_bench.cli.output import serving
from slo_bench.cli.output.serving import ServingStatus, serving_display

SAID = """\
vllm:num_requests_running{{model_name="m"}} {running}
vllm:num_requests_waiting{{model_name="m"}} {waiting}
vllm:kv_cache_usage_perc{{model_name="m"}} {kv}
vllm:generation_tokens_total{{model_name="m"}} {tokens}
vllm:e2e_request_latency_seconds_count{{model_name="m"}} {ended}
vllm:e2e_request_latency_seconds_sum{{model_name="m"}} 1.0
vllm:time_to_first_token_seconds_count{{model_name="m"}} {ended}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} {ttft}
"""
IDLE = {"running": 0, "waiting": 0, "kv": 0, "tokens": 0, "ended": 0, "ttft": 0}
BUSY = {"running": 3, "waiting": 1, "kv": 0.25, "tokens": 500, "ended": 6, "ttft": 0.3}


def saying(answering, figures):
    """A server whose metrics are those of `figures`, which may change."""
    return answering(
        lambda path: (200, SAID.format(**figures)) if path == "/metrics" else (404, "")
    )


def test_serving_status_sums_servers_and_skips_one_without_metrics(answering):
    first, second = dict(IDLE), dict(IDLE)
    dead = "http://127.0.0.1:9"
    status = ServingStatus([saying(answering, first), saying(answering, second), dead])
    assert ServingStatus([dead]).line(100.0) is None  # nothing is known
    assert status.line(100.0) == status.line(105.0) == ""  # nothing happens
    first.update(BUSY)
    second.update(BUSY, kv=0.75, ttft=0.9)
    # 12 requests ended and 8 are held: 20 in 5 s.
    assert status.line(110.0) == (
        "6 running, 2 waiting, KV 50.0 %, 4 req/s, 200 tokens/s, TTFT 100 ms"
    )
    first.update(running=0, waiting=0, ended=10, tokens=700, ttft=0.7)
    second.update(running=0, waiting=0, ended=10, tokens=700, ttft=1.3)
    assert status.line(120.0) == (
        "0 running, 0 waiting, KV 50.0 %, 0 req/s, 40 tokens/s, TTFT 100 ms"
    )
    assert status.line(125.0) == ""
    first.update(running=2)
    fresh = ServingStatus([saying(answering, first)])
    assert (
        fresh.line(130.0) == "2 running, 0 waiting, KV 25.0 %"
    )  # no rate without a reading before


def test_serving_display_without_terminal_prints_a_line_after_requests(
    answering, monkeypatch, capsys
):
    monkeypatch.setattr(serving, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(serving, "_LIMIT_S", 60.0)
    monkeypatch.setattr("slo_bench.cli.output.progress.LINE_EVERY_S", 0.0)
    figures = dict(IDLE)
    with serving_display([saying(answering, figures)]) as look:
        look()
        look()
        figures.update(BUSY)
        look()
    (line,) = [printed for printed in capsys.readouterr().err.splitlines() if "running" in printed]
    assert line.startswith("3 running, 1 waiting, KV 25.0 %, ")


def test_serving_display_without_terminal_forgets_what_was_when_servers_are_idle(
    answering, monkeypatch
):
    texts = []

    @contextlib.contextmanager
    def display(*columns):
        yield lambda description: texts.append(description)

    monkeypatch.setattr(serving, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(serving, "_LIMIT_S", 60.0)
    monkeypatch.setattr(serving, "display", display)
    figures = dict(BUSY)
    with serving_display([saying(answering, figures)]) as look:
        look()
        figures.update(running=0, waiting=0)
        look()
    assert [text[:9] for text in texts] == ["", "3 running", ""]
