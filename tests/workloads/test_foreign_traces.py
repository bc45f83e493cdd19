"""Traces of other tools, and files that are no plain text."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.readers.formats import read

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def stored(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_files_of_another_form_are_refused_with_the_command_that_converts_them(tmp_path):
    text = HEADER + "0,10,20\n1,10,20\n"
    plain = tmp_path / "a trace.csv"
    plain.write_text(text)
    packed = {
        "a trace.csv.zst": ("zstd", ["zstd", "-q", "-k", str(plain)]),
        "a trace.csv.xz": ("xz", ["xz", "-k", str(plain)]),
        "a trace.csv.bz2": ("bzip2", ["bzip2", "-k", str(plain)]),
        "trace.zip": ("unzip", []),
        "utf16.csv": ("iconv", []),
        "latin.csv": ("iconv", []),
    }
    with zipfile.ZipFile(tmp_path / "trace.zip", "w") as archive:
        archive.write(plain, "trace.csv")
    (tmp_path / "utf16.csv").write_text(text, encoding="utf-16")
    latin = text.replace("\n", ",class\n", 1).replace("20\n", "20,\xe4\n")
    (tmp_path / "latin.csv").write_text(latin, encoding="latin-1")
    for name, (tool, command) in packed.items():
        if shutil.which(tool) is None:
            continue
        if command:
            subprocess.run(command, check=True)
        plain.unlink(missing_ok=True)
        check_conversion(tmp_path / name)
        plain.write_text(text)


def check_conversion(path):
    with pytest.raises(FileFormatError, match=r"; run[ ,]") as refused:
        read(path)
    command = str(refused.value).partition("; run")[2].partition(f" ({path})")[0]
    command = command.removeprefix(", say,")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": path})
    out = Path(shlex.split(command)[-1])
    assert read(out).workload.prompt_tokens.tolist() == [10, 10]


def test_parquet_is_refused_with_the_command_that_converts_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = tmp_path / "trace.parquet"
    pandas.DataFrame({"arrival_s": [0, 1], "prompt_tokens": 10, "output_tokens": 20}).to_parquet(
        path
    )
    check_conversion(path)


def test_example_of_a_refused_header_works_on_such_a_file(tmp_path):
    path = stored(tmp_path, "sent,in,out\n1000,5,6\n2500,7,8\n", "trace.csv")
    with pytest.raises(FileFormatError, match="name them") as refused:
        read(path)
    columns = str(refused.value).partition("--columns ")[2].split()[0]
    assert read(path, columns=columns).workload.arrival_s.tolist() == [0, 1.5]


def test_column_names_may_have_commas_and_spaces(tmp_path):
    path = stored(tmp_path, '"sent, UTC",in tokens,a:s\n1000,5,6\n2500,7,8\n', "trace.csv")
    named = 'arrival_s="sent, UTC":ms,prompt_tokens=in tokens,output_tokens="a:s"'
    trace = read(path, columns=named)
    assert trace.workload.arrival_s.tolist() == [0, 1.5]
    assert trace.workload.output_tokens.tolist() == [6, 8]
    assert "arrival_s is read from sent, UTC (ms)" in trace.notes
    with pytest.raises(SloBenchError, match="a double quote has no other"):
        read(path, columns='arrival_s="sent')


def test_sessions_of_llmservingsim_are_calls_after_tools(tmp_path):
    calls = [
        {"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 127_000_000},
        {"input_toks": 1582, "output_toks": 125, "tool_duration_ns": 0, "input_tok_ids": [1]},
    ]
    rows = [
        {"session_id": "a", "arrival_time_ns": 5_000_000_000, "sub_requests": calls},
        {"arrival_time_ns": 4_000_000_000, "input_toks": 10, "output_toks": 7},
    ]
    trace = read(stored(tmp_path, "".join(f"{json.dumps(row)}\n" for row in rows), "w.jsonl"))
    workload = trace.workload
    assert workload.arrival_s.tolist() == [0, 1, 1]
    assert workload.prompt_tokens.tolist() == [10, 1472, 1582]
    assert workload.follows.tolist() == [-1, -1, 1]
    assert workload.think_s.tolist() == [0, 0, 0.127]
    assert "not used: input_tok_ids" in trace.notes
    with pytest.raises(FileFormatError, match="is empty; it has no call"):
        read(stored(tmp_path, '{"sub_requests": []}\n', "empty.jsonl"))
    bad = stored(tmp_path, '{"arrival_time_ns": 1, "sub_requests": 3}\n', "bad.jsonl")
    with pytest.raises(FileFormatError, match="must be a list of objects"):
        read(bad)


def test_images_and_tools_of_chats_are_named(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "x"}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {"role": "assistant", "content": "A cat.", "tool_calls": [{"id": "1"}]},
    ]
    path = stored(tmp_path, json.dumps({"messages": chat, "tools": [{"a": 1}]}) + "\n", "c.jsonl")
    assert "not used: image_url, tool_calls, tools of messages" in read(path).notes
    del chat[0]["content"][1], chat[1]["tool_calls"]
    path = stored(tmp_path, json.dumps({"messages": chat}) + "\n", "d.jsonl")
    assert not any("not used" in note for note in read(path).notes)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_columns_may_be_parted_by_tabs_and_semicolons(tmp_path, mark):
    path = stored(tmp_path, (HEADER + "0,10,20\n1.5,11,21\n").replace(",", mark))
    trace = read(path)
    assert trace.workload.arrival_s.tolist() == [0, 1.5]
    assert trace.workload.output_tokens.tolist() == [20, 21]


def test_prompts_of_anthropic_have_the_tokens_from_the_cache(tmp_path):
    rows = [
        {"created_at": f"2026-01-01T00:00:0{k}Z", "usage": {"input_tokens": 10, **cached}}
        for k, cached in enumerate(({"cache_read_input_tokens": 500}, {}))
    ]
    rows[0]["usage"]["cache_creation_input_tokens"] = 7
    for row in rows:
        row["usage"]["output_tokens"] = 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    trace = read(stored(tmp_path, text, "log.jsonl"))
    assert trace.workload.prompt_tokens.tolist() == [517, 10]
    assert any("usage.cache_read_input_tokens" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("name", "gaps"),
    [("interarrival_s", "7,1.5,0.25"), ("InterArrivalTimeMs", "7000,1500,250")],
)
def test_times_since_the_request_before_are_summed_to_arrivals(tmp_path, name, gaps):
    rows = [f"{gap},{10 + k},20" for k, gap in enumerate(gaps.split(","))]
    path = stored(tmp_path, "\n".join([f"{name},prompt_tokens,output_tokens", *rows]) + "\n")
    trace = read(path)
    assert trace.workload.arrival_s.tolist() == [0, 1.5, 1.75]
    assert trace.has_arrivals
    assert any(f"the sum of {name}" in note for note in trace.notes)
    assert not any("not used" in note for note in trace.notes)


def test_negative_times_since_the_request_before_are_refused_with_their_line(tmp_path):
    path = stored(tmp_path, "interarrival_s,prompt_tokens,output_tokens\n0,10,20\n-1,11,20\n")
    with pytest.raises(FileFormatError, match=r"from 0 on but is .-1.*line 3"):
        read(path)
