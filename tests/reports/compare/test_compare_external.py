"""Files of other load generators: converted figures by hand, and refusals by name."""

import json
import math

import numpy as np
import pytest

from slo_bench.reports.compare.comparing import compare, read_results
from slo_bench.reports.compare.results import NotComparableError, metrics_named
from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.request import Slo

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def vllm(n=60, slow=1.0, **changes):
    rng = np.random.default_rng(0)
    itls = [[0.02 * slow] * 9 for _ in range(n)]
    document = {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": MODEL,
        "num_prompts": n,
        "request_rate": 4.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 20.0,
        "completed": n,
        "request_throughput": n / 20,
        "input_lens": rng.integers(10, 500, n).tolist(),
        "output_lens": [10] * n,
        "ttfts": (slow * (0.1 + 0.01 * rng.random(n))).tolist(),
        "itls": itls,
        "start_times": (1000 + np.cumsum(rng.exponential(0.25, n))).tolist(),
        "errors": [""] * n,
        "generated_texts": ["x"] * n,
    }
    return {**document, **changes}


def write(path, document):
    path.write_text(json.dumps(document))
    return path


def guidellm_request(start, first, last, tokens, aimed=None):
    timings = {
        "targeted_start": start if aimed is None else aimed,
        "request_start": start,
        "first_token_iteration": first,
        "last_token_iteration": last,
        "request_end": last + 0.5,
    }
    return {"info": {"timings": timings}, "prompt_tokens": 100, "output_tokens": tokens}


def guidellm(requests, errored=(), incomplete=(), **config):
    return {
        "args": {"model": MODEL},
        "benchmarks": [
            {
                "config": {
                    "strategy": {"type_": "constant", "rate": 2.0},
                    "sample_requests": None,
                    **config,
                },
                "start_time": 0.0,
                "end_time": 100.0,
                "requests": {
                    "successful": list(requests),
                    "errored": list(errored),
                    "incomplete": list(incomplete),
                },
            }
        ],
    }


def aiperf_record(start_ns, ttft_ms, latency_ms, tokens, phase="profiling", error=None):
    metrics = {
        "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
        "request_latency": {"value": latency_ms, "unit": "ms"},
        "output_sequence_length": {"value": tokens, "unit": "tokens"},
        "input_sequence_length": {"value": 100, "unit": "tokens"},
    }
    about = {"request_start_ns": start_ns, "request_end_ns": start_ns, "benchmark_phase": phase}
    return {"metadata": about, "metrics": metrics, "error": error}


def only(results, slo=None):
    (cell,) = results.cells
    return cell.read().sample(results.clock, slo)


def test_vllm_results_have_vllms_figures(tmp_path):
    document = vllm()
    results = read_results(write(tmp_path / "a.json", document))
    run = only(results, Slo(ttft_s=0.105))
    assert results.clock == "sent"
    assert results.cells[0].rate_rps == 4.0
    assert run.requests.records.ttft_s == pytest.approx(document["ttfts"])
    assert run.requests.records.tpot_s == pytest.approx(np.full(60, 0.02))
    ends = np.add(document["start_times"], document["ttfts"]) + 0.18
    starts = document["start_times"]
    assert run.window.arrivals_s == run.window.goodput_s == pytest.approx(starts[-1] - starts[0])
    assert run.window.makespan_s == pytest.approx(ends.max() - starts[0])
    assert run.requests.met.mean() == pytest.approx(np.mean(np.array(document["ttfts"]) <= 0.105))


def test_goodput_divides_alike_where_one_side_has_no_rate(tmp_path):
    a = read_results(write(tmp_path / "a.json", vllm()))
    b = read_results(write(tmp_path / "b.json", vllm(request_rate="inf")))
    [row] = compare(a, b, metrics=metrics_named("goodput"), slo=Slo(ttft_s=9.0)).rows
    assert row.a == row.b
    assert row.verdict == "none"


def test_vllm_failures_count_as_missed(tmp_path):
    document = vllm(errors=["boom"] + [""] * 59, output_lens=[0] + [10] * 59)
    run = only(read_results(write(tmp_path / "a.json", document)), Slo(ttft_s=10.0))
    assert len(run) == 60
    assert run.requests.met.sum() == 59
    assert np.isnan(run.requests.records.ttft_s).sum() == 1


def test_vllm_without_details_is_refused(tmp_path):
    document = vllm()
    for name in ("ttfts", "itls", "input_lens", "output_lens", "errors", "start_times"):
        del document[name]
    with pytest.raises(FileFormatError, match="--save-detailed"):
        read_results(write(tmp_path / "a.json", document))


def test_vllm_results_with_max_concurrency_refuse_ttft(tmp_path):
    hidden = read_results(write(tmp_path / "a.json", vllm(max_concurrency=8)))
    assert "--max-concurrency 8" in hidden.refused["ttft"]
    assert "tpot" not in hidden.refused
    with_queue_times = read_results(
        write(tmp_path / "b.json", vllm(max_concurrency=8, queue_times=[0.5] * 60))
    )
    assert not with_queue_times.refused
    assert only(with_queue_times).requests.records.ttft_s.min() >= 0.6


def test_vllm_old_file_without_start_times(tmp_path):
    document = vllm()
    del document["start_times"]
    results = read_results(write(tmp_path / "a.json", document))
    assert only(results).window.makespan_s == 20.0
    assert "start_times" in results.refused["goodput"]  # nothing says when the last one arrived
    document["request_rate"] = "inf"
    at_once = read_results(write(tmp_path / "b.json", document))
    assert "goodput" not in at_once.refused
    assert only(at_once).window.goodput_s == 20.0
    assert any("start_times" in note for note in results.notes)


def test_vllm_appended_results_are_seeds(tmp_path):
    path = tmp_path / "a.json"
    results = [json.dumps(vllm(date=f"20260101-00000{second}")) for second in range(3)]
    path.write_text("\n".join(results))
    assert [cell.seed for cell in read_results(path).cells] == [0, 1, 2]
    path.write_text("\n".join(r.replace('"date": "', '"date": "\u2028') for r in results), "utf-8")
    assert [cell.seed for cell in read_results(path).cells] == [0, 1, 2]
    path.write_text("\n".join([*results, results[1]]))
    with pytest.raises(FileFormatError, match=r"repeats line 2; take .*line 4"):
        read_results(path)


def test_two_vllm_files_in_which_every_request_failed_are_nothing_to_compare(tmp_path):
    n = 60
    failed = vllm(n, completed=0, errors=["refused"] * n, output_lens=[0] * n, itls=[[]] * n)
    a, b = (read_results(write(tmp_path / f"{name}.json", failed)) for name in "ab")
    with pytest.raises(NotComparableError, match="nothing to compare: no request finished"):
        compare(a, b, slo=Slo(ttft_s=1.0))


def test_guidellm_tpot_leaves_out_the_first_token(tmp_path):
    request = guidellm_request(10.2, 11.0, 13.0, 5, aimed=10.0)
    request["time_per_output_token_ms"] = 1000 * (13.0 - 10.2) / 5
    results = read_results(write(tmp_path / "benchmarks.json", guidellm([request] * 3)))
    run = only(results)
    assert run.requests.records.tpot_s == pytest.approx(np.full(3, 0.5))
    assert run.requests.records.ttft_s == pytest.approx(np.full(3, 1.0))  # from the moment aimed at
    assert run.requests.records.e2e_s == pytest.approx(np.full(3, 3.0))
    assert results.cells[0].rate_rps == 2.0
    assert any("first token" in note for note in results.notes)


def test_guidellm_window_includes_its_first_request(tmp_path):
    """`start_time` is when the first request was sent, later than the moment aimed at."""
    requests = [guidellm_request(10.2 + k, 11.0 + k, 13.0 + k, 5, aimed=10.0 + k) for k in range(3)]
    document = guidellm(requests)
    document["benchmarks"][0]["start_time"] = 10.2
    results = read_results(write(tmp_path / "benchmarks.json", document))
    run = only(results)
    assert run.requests.records.ttft_s == pytest.approx([1.0] * 3)
    (cell,) = results.cells
    from_sending = cell.read().sample("sent", None)
    assert from_sending.requests.records.ttft_s == pytest.approx([0.8] * 3)
    document["benchmarks"][0]["start_time"] = 11.0  # after a warm-up
    assert len(only(read_results(write(tmp_path / "b.json", document)))) == 2


def test_guidellm_errors_and_interruptions_are_misses(tmp_path):
    good, bad = guidellm_request(1, 2, 3, 5), guidellm_request(2, 3, 4, 5)
    document = guidellm([good], errored=[bad], incomplete=[guidellm_request(3, 4, 5, 2)])
    results = read_results(write(tmp_path / "g.json", document))
    assert only(results, Slo(ttft_s=9.0)).requests.met.tolist() == [True, False, False]
    assert any("under way" in note for note in results.notes)


def test_guidellm_reads_sampled_and_old_files(tmp_path):
    sampled = guidellm([guidellm_request(1, 2, 3, 5)] * 4, sample_requests=4)
    results = read_results(write(tmp_path / "g.json", sampled))
    assert "sample" in results.refused["attainment"]
    # Of guidellm 0.3, times as in its examples/practice_on_vllm_simulator.md.
    request = {
        "scheduler_info": {"targeted_start_time": 1759354691.715061},
        **{"prompt_tokens": 8, "output_tokens": 16, "start_time": 1759354691.7182198},
        **{"first_token_time": 1759354692.9827628, "last_token_time": 1759354695.6479197},
        **{"end_time": 1759354695.648075, "inter_token_latency_ms": 177.67712275187174},
    }
    benchmark = {
        "args": {"strategy": {"type_": "constant", "rate": 10.0}},
        "request_totals": {"successful": 2, "errored": 0, "incomplete": 0, "total": 2},
        "requests": {"successful": [request] * 2, "errored": [], "incomplete": []},
    }
    results = read_results(write(tmp_path / "old.json", {"benchmarks": [benchmark]}))
    run = only(results)
    assert results.cells[0].rate_rps == 10.0
    assert 1000 * run.requests.records.tpot_s == pytest.approx([177.677] * 2, rel=1e-4)
    assert run.requests.records.ttft_s == pytest.approx([1.2677] * 2, rel=1e-4)
    assert not results.refused
    benchmark["request_totals"]["successful"] = 9
    refused = read_results(write(tmp_path / "few.json", {"benchmarks": [benchmark]})).refused
    assert "sample of 2 requests" in refused["attainment"]
    fewer = guidellm([guidellm_request(1, 2, 3, 5)] * 4)
    fewer["benchmarks"][0]["metrics"] = {"request_totals": {"successful": 9}}
    assert "sample of 4" in read_results(write(tmp_path / "f.json", fewer)).refused["attainment"]


def test_aiperf_records_are_read(tmp_path):
    records = [
        aiperf_record(10**18 + i * 10**9, 100.0 + i, 500.0 + i, 5, error=None) for i in range(4)
    ]
    records.append(aiperf_record(10**18, 1.0, 1.0, 5, phase="warmup"))
    records.append(aiperf_record(10**18 + 5 * 10**9, 1.0, 1.0, 5, error={"code": 500}))
    path = tmp_path / "profile_export.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "profile_export_aiperf.json").write_text(
        json.dumps(
            {
                "input_config": {
                    "endpoint": {"model_names": [MODEL]},
                    "loadgen": {"request_rate": 7.0},
                }
            }
        )
    )
    results = read_results(tmp_path)  # its folder will do
    run = only(results, Slo(e2e_s=0.502))
    assert len(run) == 5
    assert run.requests.records.tpot_s[:4] == pytest.approx(np.full(4, 0.1))
    assert run.requests.met.tolist() == [True, True, True, False, False]
    assert results.cells[0].rate_rps == 7.0
    assert results.cells[0].identity["model"] == MODEL


def test_aiperf_tokens_come_from_server_usage(tmp_path):
    """As aiperf 0.13 writes it: `output_sequence_length` is of its own tokenizer."""
    record = aiperf_record(10**18, 128.0, 945.0, 128)
    record["metrics"] |= {
        "usage_prompt_tokens": {"value": 43, "unit": "tokens"},
        "usage_completion_tokens": {"value": 64, "unit": "tokens"},
    }
    path = tmp_path / "profile_export.jsonl"
    results = read_results(write(path, record))
    (cell,) = results.cells
    requests = cell.read()
    assert requests.output_tokens.tolist() == [64]
    assert requests.prompt_tokens.tolist() == [43]
    assert only(results).requests.records.tpot_s == pytest.approx([(0.945 - 0.128) / 63])
    assert any("came to other counts in 1 requests" in note for note in results.notes)


@pytest.mark.parametrize(
    "config",
    [
        {"loadgen": {"request_rate": 10.0}, "endpoint": {"model_names": [MODEL]}},
        {
            "models": {"items": [{"name": MODEL}]},
            "phases": [
                {"name": "warmup", "kind": "warmup", "rate": 2.0},
                {"name": "profiling", "kind": "profiling", "type": "poisson", "rate": 10.0},
            ],
        },
    ],
    ids=["older", "0.13"],
)
def test_aiperf_rate_and_model_come_from_the_summary(tmp_path, config):
    path = write(tmp_path / "profile_export.jsonl", aiperf_record(10**18, 100.0, 500.0, 5))
    write(tmp_path / "profile_export_aiperf.json", {"input_config": config})
    (cell,) = read_results(path).cells
    assert (cell.rate_rps, cell.identity["model"]) == (10.0, MODEL)


def test_aiperf_refuses_summaries_and_unknown_units(tmp_path):
    summary = {"request_latency": {"avg": 1}, "time_to_first_token": {"avg": 1}}
    with pytest.raises(FileFormatError, match=r"profile_export\.jsonl"):
        read_results(write(tmp_path / "s.json", summary))
    record = aiperf_record(1, 1.0, 1.0, 2)
    record["metrics"]["request_latency"]["unit"] = "fortnights"
    with pytest.raises(FileFormatError, match="fortnights"):
        read_results(write(tmp_path / "u.jsonl", record))


def test_aiperf_without_streaming_has_no_ttft(tmp_path):
    record = aiperf_record(10**9, 1.0, 400.0, 5)
    del record["metrics"]["time_to_first_token"]
    results = read_results(write(tmp_path / "n.jsonl", record))
    with pytest.raises(NotComparableError, match="--streaming"):
        compare(results, results, metrics=metrics_named("ttft_p50"))
    metrics = metrics_named("attainment,e2e_p50")
    comparison = compare(results, results, metrics=metrics, slo=Slo(ttft_s=1.0))
    assert "ttft" in comparison.refused["attainment"]
    assert [row.metric.short for row in comparison.rows] == ["e2e_p50"]
    assert comparison.rows[0].b == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("1", "JSON object"),
        ("[1]", "neither"),
        ("{not json", "not JSON"),
        ('{"a": 1}', "neither"),
    ],
)
def test_unknown_result_files_are_refused(tmp_path, text, problem):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=problem):
        read_results(path)
    with pytest.raises(SloBenchError, match="there is no"):
        read_results(tmp_path / "nowhere.json")


def test_two_vllm_files_are_compared_in_pairs(tmp_path):
    a = read_results(write(tmp_path / "before.json", vllm(200)))
    b = read_results(write(tmp_path / "after.json", vllm(200, slow=1.2)))
    comparison = compare(a, b, metrics=metrics_named("attainment,ttft_p50,tpot_p99"))
    assert comparison.rows[0].paired
    assert [row.verdict for row in comparison.rows] == ["worse", "worse"]
    assert comparison.rows[0].relative == pytest.approx(0.2)
    assert "--slo" in comparison.refused["attainment"]
    assert comparison.matched.differs["system"] == ("before", "after")
    judged = compare(a, b, metrics=metrics_named("attainment"), slo=Slo(ttft_s=0.115))
    assert judged.rows[0].a == 1.0
    assert judged.rows[0].b < 0.5
    assert judged.rows[0].verdict == "worse"
    assert math.isclose(judged.rows[0].difference, judged.rows[0].b - 1.0)


def test_figures_that_only_clocks_round_do_not_differ(tmp_path):
    """Equal latencies were significantly worse by 0.0 %, as sums with the moments of sending."""
    same = {"ttfts": [0.05] * 60}
    later = [1e6 + start_s for start_s in vllm()["start_times"]]
    a = read_results(write(tmp_path / "a.json", vllm(**same)))
    b = read_results(write(tmp_path / "b.json", vllm(**same, start_times=later)))
    rows = compare(a, b, metrics=metrics_named("ttft_p50,tpot_p50,e2e_mean")).rows
    assert [row.verdict for row in rows] == ["none"] * 3
    assert [row.difference for row in rows] == [0.0] * 3


def test_sglang_results_are_read_like_vllms(tmp_path):
    document = vllm()
    for name in ("model_id", "request_throughput", "start_times"):
        document.pop(name, None)
    document |= {"backend": "sglang", "dataset_name": "random", "completed": 60, "duration": 30.0}
    path = write(tmp_path / "result.jsonl", document)
    results = read_results(path)
    assert (results.kind, results.clock) == ("SGLang's bench_serving", "sent")
    assert only(results).requests.records.ttft_s == pytest.approx(document["ttfts"])
    assert "window of arrivals" in results.refused["goodput"]
    oai = document | {"backend": "sglang-oai", "accept_length": 2.5}
    assert {"tpot", "e2e"} <= read_results(write(tmp_path / "oai.json", oai)).refused.keys()
    unstreamed = document | {"ttfts": [0.0] * 60, "itls": [[]] * 60}
    refused = read_results(write(tmp_path / "unstreamed.json", unstreamed)).refused
    assert "streaming" in refused["ttft"]
    del document["ttfts"]
    with pytest.raises(FileFormatError, match="--output-details"):
        read_results(write(tmp_path / "summary.json", document))


def test_result_files_without_single_requests_name_the_file_that_has_them(tmp_path):
    with pytest.raises(FileFormatError, match="genai-perf's"):
        read_results(write(tmp_path / "profile_export.json", {"experiments": []}))
    with pytest.raises(FileFormatError, match="individual_responses"):
        read_results(write(tmp_path / "summary.json", {"results_ttft_s_mean": 0.5}))
