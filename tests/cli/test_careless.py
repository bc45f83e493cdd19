"""Absurd, contradictory and hostile input: exit code 2 and one line, before anything is made."""

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.cells import workload_of
from slo_bench.harness.experiments.execution.offered_load import estimate
from slo_bench.harness.results.run_folder import read_rows
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.input_files import SIZE_VARIABLE, check_input, parse_size
from slo_bench.workloads.machine_memory import available_bytes, check_memory

RUN = ["run", "-s", "vllm", "--seeds", "1", "--rates", "1", "--requests", "5", "--no-report"]
HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.fixture
def limit(monkeypatch):
    """Sets the most bytes of an input file, as --max-input-size does, for one test."""
    return lambda size: monkeypatch.setenv(SIZE_VARIABLE, size)


def refused(slo_bench, *arguments):
    code, out, err = slo_bench(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ")
    return err


FLEET = ("--models", "fleet(llama-3.1-8b*2)")


@pytest.mark.parametrize(
    ("words", "name", "counts"),
    [
        (
            ("--max-input-size", "1M", "--max-input-size", "2G", "list", "gpus"),
            "max-input-size",
            "",
        ),
        (("calibrate", "x", "--prefix-caching", "--no-prefix-caching"), "prefix-caching", "x"),
        ((*RUN, "--arrivals", "gamma(2)", "--arrivals", "wrong"), "arrivals", "wrong"),
    ],
)
def test_the_last_of_an_option_counts_and_a_line_says_so(slo_bench, words, name, counts):
    _, _, err = slo_bench(*words)
    assert f"--{name} takes one value but is given 2 times: the last counts" in err
    assert counts in err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*RUN, "--out", ""), "--out"),
        (("report", ""), "DIR"),
        (("compare", "x", ""), "B"),
        (("explain", ""), "RUN"),
    ],
)
def test_an_empty_path_is_no_folder(slo_bench, words, name):
    assert f"{name} is an empty path" in refused(slo_bench, *words)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--requests", 10**18], "of memory"),
        (["--seeds", 10**9], "cells: 1,000,000,000"),
        (["--instances", 10**9], "1,000,000,000 instances"),
        (["--sessions", "sessions(turns=1000000000)"], "31 years"),
        (["--rates", "1e-300"], "1e-300"),
        (["--prompt-tokens", 10**20], "at most 2,147,483,648"),
        (["--base-url", "http://127.0.0.1:1", "--backend", "simulated"], "only with openai"),
        (["--base-url", "http://127.0.0.1:1", "--sweep", "tp=1,2"], "tp (--tp) has 2 values"),
        (["--api", "chat"], "client.api (--api) has no effect with backend simulated"),
        (["--server-arg=--x"], "server.args (--server-arg) has no effect"),
        (["--dtype", "float32", "--backend", "vllm"], "(--dtype) has no effect with backend vllm"),
        (["--threads", 2], "(--threads) has no effect with backend simulated, only with torch"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_run_with_impossible_settings_is_refused(slo_bench, more, message):
    arguments = list(RUN)
    for option in ("--seeds", "--requests", "--rates", "-s"):
        if option in more:
            position = arguments.index(option)
            del arguments[position : position + 2]
    assert message in refused(slo_bench, *arguments, *more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capacity", "--rates", "9,1"], "lowest and the highest"),
        (["capacity", "--rates", "1,2,3"], "rates are 1, 2, 3"),
        (["capacity", "-s", "vllm", "--slo", ""], "no SLO"),
        (["capacity", "--resume", "--out", "none", "--rates", "1"], "nothing to resume in none"),
        (["workload", "show", "sharegpt", "--requests", 10**12], "making 1,000,000,000,000"),
        (["workload", "show", "/dev/zero"], "is a device"),
        (["derive-slo", *FLEET, "--rate", 2, "--duration", "1e12"], "making 2,000,000,000,000"),
        (["derive-slo", *FLEET, "--rate", "1e-6", "--duration", "1e12"], "31 years"),
        (["tune", "placement", "--gpu", "a100-80g", "--devices", 10**6], "at most 1,024 devices"),
        (
            [
                "tune",
                "placement",
                "--gpu",
                "a100-80g",
                "--devices",
                2,
                "--check",
                "--trials",
                10**9,
            ],
            "study of 1,000,000,000 trials",
        ),
        (["run", "/dev/zero"], "is a device"),
        (["selftest", "--rates", "nan", "--no-search"], "--rates must be positive"),
        (["selftest", "--seconds", "inf", "--no-search"], "--seconds must be positive"),
        (
            ["serve", "vllm", "--backend", "torch", "--model", "x", "--dtype", "half"],
            "--dtype must be 'float32' or 'bfloat16' but is 'half'",
        ),
        (["--max-input-size", "much", "list", "gpus"], "cannot read the size 'much'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_commands_with_impossible_values_are_refused(slo_bench, arguments, message):
    assert message in refused(slo_bench, *arguments)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("1e15", r"1e+15 s after the first"),
        ("1e300", "1e+300 s after the first"),
        ("1700000000000000000", "nanoseconds?"),
        ("-1", "from 0 on"),
        ("nan", "from 0 on"),
    ],
)
def test_trace_with_impossible_arrival_times_is_refused(slo_bench, tmp_path, last, message):
    (tmp_path / "t.csv").write_text(f"{HEADER}0,10,10\n{last},10,10\n")
    for command in (["workload", "show", "t.csv"], ["run", "--workload", "t.csv", "-s", "vllm"]):
        error = refused(slo_bench, *command)
        assert message in error
        assert "t.csv, line 3" in error


def test_special_files_are_refused_before_they_are_opened_by_a_command(slo_bench, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("t.csv", "e.toml", "model/config.json"):
        os.mkfifo(tmp_path / name)
    for options in (["--workload", "t.csv"], ["--model", "./model"], ["--profile", "t.csv"]):
        assert "is a named pipe" in refused(slo_bench, *RUN, *options)
    assert "is a named pipe" in refused(slo_bench, "run", "e.toml")


def test_special_files_in_a_run_folder_are_refused_by_report(slo_bench, tmp_path):
    """Their checksums were read without an end."""
    assert slo_bench(*RUN, "--records", "csv", "--out", "r")[0] == 0
    requests = next((tmp_path / "r" / "requests").iterdir())
    requests.unlink()
    os.mkfifo(requests)
    assert "is a named pipe" in refused(slo_bench, "report", "r")
    requests.unlink()
    requests.symlink_to("/dev/zero")
    assert "is a device" in refused(slo_bench, "report", "r")


def test_gzip_file_is_limited_by_its_unpacked_size(slo_bench, tmp_path, limit):
    limit("1M")
    for name, content in {
        "line.csv.gz": HEADER.encode() + b"0" * (1 << 24),
        "array.json.gz": b"[" + b" " * (1 << 24),
        "rows.csv.gz": HEADER.encode() + b"1,1,1\n" * (1 << 20),
    }.items():
        with gzip.open(tmp_path / name, "wb") as file:
            file.write(content)
        assert (tmp_path / name).stat().st_size < 1 << 18
        error = refused(slo_bench, "workload", "show", name)
        assert "more than 1 MiB of text" in error
        assert "--max-input-size" in error


def test_run_folder_is_held_to_the_limits_of_a_command(slo_bench, tmp_path, limit):
    limit("1M")
    assert slo_bench(*RUN, "--records", "csv", "--out", "r")[0] == 0
    with gzip.open(next((tmp_path / "r" / "requests").iterdir()), "ab") as file:
        file.write(b"0" * (1 << 24))
    assert "more than 1 MiB of text" in refused(slo_bench, "explain", "r", "slowest")
    experiment_file = tmp_path / "r" / "experiment.toml"
    whole = experiment_file.read_text()
    experiment_file.write_text(re.sub(r"(?m)^requests = .*", "requests = 1000000000000", whole))
    assert "of memory" in refused(slo_bench, "explain", "r", "slowest")
    os.mkfifo(tmp_path / "t.csv")
    experiment_file.write_text(re.sub(r"(?m)^workload = .*", 'workload = "t.csv"', whole))
    assert "is a named pipe" in refused(slo_bench, "explain", "r", "slowest")


def test_explain_of_one_system_has_nothing_to_compare(slo_bench):
    assert slo_bench(*RUN, "--records", "csv", "--out", "r")[0] == 0
    for more in ((), ("--json",)):
        assert "r has nothing to compare" in refused(slo_bench, "explain", "r", *more)


def test_toml_key_with_too_many_dots_is_refused(slo_bench, tmp_path):
    (tmp_path / "e.toml").write_text("a." * 50_000 + "a = 1\n")
    assert "100 names joined by dots" in refused(slo_bench, "run", "e.toml")


def test_truncated_requests_are_counted_with_their_new_lengths(slo_bench, tmp_path):
    cut = [*RUN, "--num-gpu-blocks", "16", "--overlong-requests", "truncate", "--records", "csv"]
    code, out, _ = slo_bench(*cut, "--out", "r")
    assert code == 0
    row = read_rows(tmp_path / "r" / "cells.csv")[0]
    planned = Experiment.load(tmp_path / "r" / "experiment.toml").plan()
    workload = workload_of(planned.cells[0])
    tokens = workload.prompt_tokens + workload.output_tokens
    assert row["overlong_truncated"] == (tokens > 16 * 16).sum() > 0
    assert f"{row['overlong_truncated']} of 5 requests (truncated)" in out
    with gzip.open(next((tmp_path / "r" / "requests").iterdir()), "rt") as file:
        names = file.readline().strip().split(",")
        table = np.array([line.split(",") for line in file])
    kept = sum(
        table[:, names.index(name)].astype(int) for name in ("prompt_tokens", "output_tokens")
    )
    assert (kept == np.minimum(tokens, 16 * 16)).all()


def test_run_with_very_long_names_writes_its_folder(slo_bench, tmp_path):
    (tmp_path / "e.toml").write_text(f'name = "{"ä" * 5000}"\n')
    assert slo_bench("run", "e.toml", *RUN[1:])[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_memory_estimate_counts_the_planned_cells():
    experiment = Experiment(
        systems=["vllm", "sarathi"],
        parameters={"sarathi": {"chunk_tokens": [256, 512], "max_num_seqs": [8, 16]}},
        rates=[1, 2],
        seeds=3,
        requests=[10, 20],
        instances=2,
    )
    size = estimate(experiment)
    assert size.cells == len(experiment.plan().cells) == 60
    assert (size.requests, size.instances) == (20, 2)
    one_at_a_time = experiment.model_copy(update={"combinations": "one-at-a-time"})
    assert estimate(one_at_a_time).cells == len(one_at_a_time.plan().cells)


def test_check_memory_and_parse_size():
    check_memory(available_bytes() / 2, "half")
    with pytest.raises(SloBenchError, match=r"a lot needs about .* are available"):
        check_memory(1e20, "a lot")
    assert [parse_size(text) for text in ("7", "2k", "3MiB", "1GB")] == [7, 2048, 3 << 20, 1 << 30]
    with pytest.raises(SloBenchError, match="device"):
        check_input(Path("/dev/null"))
