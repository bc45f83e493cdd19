"""Reading logs of real engines: fields, clocks, settings, run folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.results.engine_logs import EngineSettings, is_log, read_log
from slo_bench.workloads.errors import FileFormatError, SloBenchError

FIRST = {
    "request_id": "a",
    "input_toks": 100,
    "output_toks": 11,
    "arrival_time": 1_777_000_000.0,  # a wall clock
    "queued_ts": 500.002,  # a monotonic one
    "first_token_ts": 500.102,
    "last_token_ts": 501.102,
}
SECOND = FIRST | {
    "arrival_time": 1_777_000_001.0,
    "queued_ts": 501.012,
    "first_token_ts": 501.2,
    "last_token_ts": 502.0,
}


def written(folder: Path, *rows: object, meta: object = None) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return file


def test_log_with_two_clocks_is_aligned(tmp_path):
    log = read_log(written(tmp_path, FIRST, SECOND))
    assert log.arrival_s == pytest.approx([0.0, 1.0])
    # The first was taken in at once, the second after another 10 ms: the engine was busy.
    assert log.begin_s == pytest.approx([0.0, 1.01], abs=1e-6)  # as fine as a wall clock is
    assert log.first_s - log.begin_s == pytest.approx([0.1, 0.188], abs=1e-6)
    assert log.prompt_tokens.tolist() == [100, 100]
    assert log.engine == EngineSettings()


def test_log_is_sorted_by_arrival_without_unfinished_requests(tmp_path):
    lost = FIRST | {"first_token_ts": None, "last_token_ts": None}
    log = read_log(written(tmp_path, SECOND | {"request_id": "b"}, lost, "", FIRST))
    assert "1 of 3 requests of the log did not finish and are left out" in log.notes[0]
    assert log.arrival_s == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "failed"},
        {"outcome": "rejected"},
        {"success": False},
        {"error": "timeout"},
        {"error": {"code": 500}},
    ],
)
def test_requests_that_failed_are_left_out_of_a_log(tmp_path, fields):
    log = read_log(written(tmp_path, FIRST, SECOND | fields))
    assert len(log) == 1
    assert "1 of 2 requests of the log did not finish and are left out" in log.notes[0]


@pytest.mark.parametrize(
    ("column", "fine", "failed"),
    [
        *(("outcome", "finished", "failed"), ("success", "True", "False")),
        *(("error", "", "timeout"), ("error", "None", "timeout"), ("error", "nan", "timeout")),
    ],
)
def test_rows_that_failed_are_left_out_of_a_table(tmp_path, column, fine, failed):
    file = tmp_path / "table.csv"
    head = "arrival_s,prompt_tokens,output_tokens,first_token_s,finish_s"
    file.write_text(f"{head},{column}\n1,9,3,2,3,{fine}\n2,9,3,4,5,{failed}\n")
    assert len(read_log(file)) == 1


def test_requests_that_say_how_they_finished_are_kept(tmp_path):
    fields = {"outcome": "finished", "success": True, "error": None}
    assert len(read_log(written(tmp_path, FIRST | fields, SECOND | {"error": ""}))) == 2


def test_request_ids_that_repeat_are_named(tmp_path):
    log = read_log(written(tmp_path, FIRST, SECOND))
    assert "1 requests have the request_id of an earlier one ('a' is there 2 times)" in log.notes[0]
    assert not read_log(written(tmp_path, FIRST, SECOND | {"request_id": "b"})).notes
    unnamed = {"request_id": None}
    assert not read_log(written(tmp_path, FIRST | unnamed, SECOND | unnamed)).notes


def test_lines_end_where_lines_of_a_file_do(tmp_path):
    rows = [
        json.dumps(row | {"prompt": "a\u2028b\x85"}, ensure_ascii=False) for row in (FIRST, SECOND)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("\ufeff" + "\r\n".join(rows), "utf-8")
    assert len(read_log(file)) == 2
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert len(read_log(packed)) == 2


def test_a_table_with_first_tokens_at_the_end_is_a_log(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("\narrival_s,prompt_tokens,output_tokens,finish_s,first_token_s\n1,9,3,3,2\n")
    assert is_log(file)


def test_log_with_one_clock_is_read(tmp_path):
    rows = [
        {"arrival_s": t, "prompt_tokens": 5, "output_tokens": 2, "first_token_s": t + 1,
         "finish_s": t + 2}
        for t in (3.0, 7.0)
    ]  # fmt: skip
    log = read_log(written(tmp_path, *rows))
    assert log.arrival_s.tolist() == log.begin_s.tolist() == [0.0, 4.0]
    only_queued = [{k: v for k, v in FIRST.items() if k != "arrival_time"}]
    assert read_log(written(tmp_path, *only_queued)).arrival_s.tolist() == [0.0]


def test_log_settings_are_read_from_the_file_beside_it(tmp_path):
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "vllm_version": "0.19.0",
        "engine_kwargs": {
            "tensor_parallel_size": 2,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "max_model_len": None,
        },
        "kv_cache": {"num_gpu_blocks": 1900, "block_size": 16, "enable_prefix_caching": False},
    }
    assert read_log(written(tmp_path, FIRST, meta=meta)).engine == EngineSettings(
        model="meta-llama/Llama-3.1-8B",
        tp=2,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        num_gpu_blocks=1900,
        block_size=16,
        prefix_caching=False,
        version="0.19.0",
    )


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([FIRST, "{"], "not readable as JSON: .*line 2"),
        ([[1, 2]], "must be a JSON object, .*line 1"),
        ([""], "has no arrival_time"),
        ([FIRST | {"input_toks": 10.5}], "numbers of tokens must be whole"),
        ([{"input_toks": 1}], "has no queued_ts or queued_s|has no arrival_time"),
        ([{k: v for k, v in FIRST.items() if k != "input_toks"}], "has no input_toks or prompt"),
        ([FIRST | {"input_toks": "many"}], "input_toks: could not convert"),
        ([FIRST | {"first_token_ts": None}], "has no request with a first and a last token"),
        ([FIRST | {"first_token_ts": 400.0}], "are these times of one clock"),
        (
            [FIRST | {"last_token_ts": None}, FIRST, FIRST | {"first_token_ts": 400.0}],
            "request 2 has its first token",
        ),
    ],
)
def test_log_with_an_error_is_refused_with_its_line(tmp_path, rows, problem):
    with pytest.raises(FileFormatError, match=problem):
        read_log(written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ([], "must hold a JSON object"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "max_num_seqs must be a whole number above 0"),
        ({"kv_cache": {"enable_prefix_caching": "yes"}}, "must be true or false but is 'yes'"),
        ({"kv_cache": 7}, "kv_cache must be a JSON object"),
    ],
)
def test_log_settings_with_an_error_are_refused(tmp_path, meta, problem):
    with pytest.raises(FileFormatError, match=problem):
        read_log(written(tmp_path, FIRST, meta=meta))


def test_missing_log_is_refused(tmp_path):
    with pytest.raises(SloBenchError, match="there is no file"):
        read_log(tmp_path / "nothing.jsonl")
    with pytest.raises(FileFormatError, match="is not a run folder"):
        read_log(tmp_path)
    with pytest.raises(SloBenchError, match="--cell is for run folders"):
        read_log(written(tmp_path, FIRST), cell="x")


@pytest.mark.parametrize("records", ["csv", "parquet"])
def test_run_folder_is_read_as_a_log(tmp_path, records):
    if records == "parquet":
        pytest.importorskip("pyarrow")
    run = tmp_path / "run"
    result = Experiment(
        systems="vllm",
        workload="sharegpt",
        rates=(2.0, 4.0),
        requests=30,
        seeds=1,
        records=records,
        gpu="a100-80g",
        model="llama-3-8b",
    ).run(run)
    rows = result.rows()
    with pytest.raises(SloBenchError, match="has 2 cells; name one with --cell"):
        read_log(run)
    with pytest.raises(SloBenchError, match="has no cell 'other'"):
        read_log(run, "other")
    log = read_log(run, str(rows[1]["cell"]))
    assert len(log) == 30
    assert log.engine.model == "llama-3-8b"
    assert np.mean(log.first_s - log.arrival_s) == pytest.approx(rows[1]["ttft_mean_s"], abs=1e-5)
    file = next((run / "requests").glob(f"{rows[1]['cell']}.*"))
    assert read_log(file).last_s == pytest.approx(log.last_s)
    file.unlink()
    with pytest.raises(FileFormatError, match="is missing"):
        read_log(run, str(rows[1]["cell"]))
