"""Result files that one table of names is enough for."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from slo_bench.reports.compare.comparing import read_results
from slo_bench.workloads.errors import FileFormatError
from slo_bench.workloads.request import Slo


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def only(results, slo=None):
    (cell,) = results.cells
    return cell.read().sample(results.clock, slo)


def inference_perf(i, *, old=False, error=None):
    """A request, as inference-perf before and after multimodal prompts wrote it."""
    times = [100 + i + 0.2, 100 + i + 0.3, 100 + i + 0.4]
    response = {"output_tokens": 3, "output_token_times": times}
    info = {"input_tokens": 50, **response}
    if not old:
        metrics = {"request_metrics": {"text": {"input_tokens": 50}}, "response_metrics": response}
        info = {**metrics, "input_tokens": 50}
    span = {"start_time": 100.0 + i, "end_time": 100.5 + i}
    return {**span, "request": "{}", "response": "", "info": info, "error": error}


@pytest.mark.parametrize("old", [False, True])
def test_inference_perf_requests_are_divided_into_its_stages(tmp_path, old):
    requests = [inference_perf(i, old=old) for i in range(5)]
    requests[4]["error"] = {"error_type": "TimeoutError", "error_msg": ""}
    for stage, (count, rate) in enumerate([(2, 1.0), (3, 2.0)]):
        load = {"load_summary": {"count": count, "requested_rate": rate}}
        write(tmp_path / f"stage_{stage}_lifecycle_metrics.json", load)
    write(tmp_path / "per_request_lifecycle_metrics.json", requests[::-1])
    results = read_results(tmp_path)
    assert [cell.rate_rps for cell in results.cells] == [1.0, 2.0]
    last = results.cells[1].read().sample("sent", Slo(ttft_s=1.0)).requests
    assert last.records.ttft_s[:2] == pytest.approx([0.2, 0.2])
    assert last.records.tpot_s[:2] == pytest.approx([0.1, 0.1])
    assert last.met.tolist() == [True, True, False]
    (tmp_path / "stage_1_lifecycle_metrics.json").unlink()
    assert [cell.rate_rps for cell in read_results(tmp_path).cells] == [None]
    with pytest.raises(FileFormatError, match=r"only a summary.*per_request: true"):
        read_results(tmp_path / "stage_0_lifecycle_metrics.json")


def test_requests_without_a_moment_of_sending_are_refused(tmp_path):
    requests = [inference_perf(0), {**inference_perf(1), "start_time": None}]
    with pytest.raises(FileFormatError, match="a request without start_time"):
        read_results(write(tmp_path / "x.json", requests))


@pytest.mark.parametrize(("unit", "scale"), [(None, 1.0), ("s", 1.0), ("ms", 1000.0)])
def test_genai_bench_times_are_read_in_the_files_unit(tmp_path, unit, scale):
    counts = {"num_input_tokens": 100, "num_output_tokens": 11, "error_code": None}
    request = {"ttft": 0.1 * scale, "e2e_latency": 0.3 * scale, **counts}
    failed = {**request, "error_code": 500}
    document = {
        "aggregated_metrics": {"run_duration": 4.0},
        "individual_request_metrics": [request, request, failed],
        **({} if unit is None else {"_time_unit": unit}),
    }
    write(tmp_path / "experiment_metadata.json", {"api_model_name": "org/model"})
    results = read_results(write(tmp_path / "D100_100.json", document))
    run = only(results, Slo(ttft_s=1.0))
    assert run.requests.records.tpot_s[:2] == pytest.approx([0.02, 0.02])
    assert run.requests.met.tolist() == [True, True, False]
    assert run.window.makespan_s == 4.0
    assert results.cells[0].identity["model"] == "org/model"
    with pytest.raises(FileFormatError, match="times in 'h'"):
        read_results(write(tmp_path / "x.json", {**document, "_time_unit": "h"}))


def test_llmperf_responses_have_no_duration_to_divide_by(tmp_path):
    # As in github.com/ray-project/llmperf, benchmarks/results/yi/4xa10g.
    response = {
        **{"error_code": None, "error_msg": "", "inter_token_latency_s": 0.04658090811874445},
        **{"ttft_s": 0.6055155840003863, "end_to_end_latency_s": 7.453143953000108},
        **{"number_total_tokens": 710, "number_output_tokens": 160, "number_input_tokens": 550},
    }
    results = read_results(write(tmp_path / "individual_responses.json", [response] * 3))
    records = only(results).requests.records
    assert records.tpot_s == pytest.approx([(7.453143953 - 0.605515584) / 159] * 3)
    assert set(results.refused) == {"goodput", "output_tokens"}


EVALSCOPE = "request TEXT, start_time REAL, completed_time REAL, first_chunk_latency REAL, \
prompt_tokens INTEGER, completion_tokens INTEGER, is_stream INTEGER"


def evalscope(path, rows, table="result"):
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE {table}({EVALSCOPE})")
        database.executemany(f"INSERT INTO {table} VALUES ('x', ?, ?, ?, ?, ?, ?)", rows)
        database.commit()
    return path


def test_evalscope_database_is_read_with_its_rate_and_model(tmp_path):
    rows = [(10.0, 12.0, 0.5, 50, 4, 1), (11.0, 13.0, 0.5, 50, 4, 1), (12.0, 13.0, *[None] * 3, 1)]
    evalscope(tmp_path / "benchmark_data.db", rows)
    write(tmp_path / "benchmark_args.json", {"model": "org/model", "rate": 1.0})
    results = read_results(tmp_path)
    (cell,) = results.cells
    assert (results.kind, cell.rate_rps, cell.identity["model"]) == ("evalscope", 1.0, "org/model")
    requests = only(results, Slo(ttft_s=1.0)).requests
    assert requests.records.ttft_s[:2] == pytest.approx([0.5, 0.5])
    assert requests.records.tpot_s[:2] == pytest.approx([0.5, 0.5])
    assert requests.met.tolist() == [True, True, False]


def test_evalscope_without_streaming_has_no_first_token(tmp_path):
    path = evalscope(tmp_path / "a.db", [(10.0, 12.0, 2.0, 50, 4, 0)] * 2)
    assert {"ttft", "tpot"} <= read_results(path).refused.keys()
    other = evalscope(tmp_path / "b.db", [], table="other")
    with pytest.raises(FileFormatError, match="none of evalscope"):
        read_results(other)


def test_example_for_files_of_unknown_tools_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    with pytest.raises(FileFormatError, match="write it as inference-perf does") as refused:
        read_results(path)
    path.write_text(str(refused.value).partition("seconds: ")[2].partition(" (")[0])
    records = only(read_results(path)).requests.records
    assert records.ttft_s == pytest.approx([0.2])
    assert records.tpot_s == pytest.approx([1 / 8])
