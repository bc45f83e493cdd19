"""`run --backend torch`: an experiment on the real engine, as on any other."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.engine.torch.threads import available_cores
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.workloads.errors import SloBenchError

pytestmark = pytest.mark.torch


torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

LOAD = ["--workload", "alpaca", "--rates", "40", "--requests", "12", "--seeds", "1"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "cells.csv").open() as file:
        return list(csv.DictReader(file))


def run(tmp_path: Path, *more: str) -> tuple[Path, str]:
    out = tmp_path / "run"
    words = ["run", "--backend", "torch", "--no-report", "--out", str(out), *more]
    words += ["--cpu-wait-limit", "1"]  # other tests run beside this one
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return out, done.output


def test_run_without_a_model_makes_a_tiny_one_and_names_it(tmp_path: Path) -> None:
    out, output = run(tmp_path, *LOAD, "--system", "vllm", "--system", "fifo")
    assert "a tiny Llama with random weights" in output
    assert "took " in output
    cells = rows(out)
    assert [row["system"] for row in cells] == ["vllm", "fifo"]
    for row in cells:
        assert row["backend"] == "torch"
        assert row["model"] == "tiny-llama"
        assert row["gpu"] == "cpu"
        assert row["step_time"] == "measured"
        assert row["valid"] == "True"
        assert row["finished"] == "12"


def test_run_of_a_model_folder_swaps_under_memory_pressure(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("qwen3")
    pressed = ["--sweep", "num_gpu_blocks=26", "--sweep", "num_cpu_blocks=64"]
    out, _ = run(tmp_path, *LOAD, *pressed, "--model", str(folder), "--system", "vllm-swap")
    (row,) = rows(out)
    assert row["model"] == folder.name
    assert row["valid"] == "True"


def test_torch_backend_has_short_defaults() -> None:
    short = ExperimentSchema(backend="torch")
    assert (short.workload, short.rates, short.requests) == (("alpaca",), (4.0, 8.0), (60,))
    assert (short.systems, short.seeds) == (("vllm", "sarathi"), 1)
    assert ExperimentSchema(backend="torch", rates=2.0, duration_s=5.0).requests == (None,)
    named = ExperimentSchema(backend="torch", workload="sharegpt")
    assert (named.rates, named.requests, named.seeds) == (None, (None,), None)
    assert ExperimentSchema().workload == ("sharegpt",)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--tp", "2"], "one device"),
        (["--model", "nowhere"], "no config.json"),
        (["--gpu", "tpu"], "device must be"),
        (["--sweep", "num_gpu_blocks=100000000"], "GiB"),
        (["--system", "splitwise"], "splitwise cannot run on torch"),
    ],
)
def test_torch_run_refuses_impossible_settings(tmp_path: Path, more: list[str], word: str) -> None:
    system = [] if "--system" in more else ["--system", "vllm"]
    words = ["run", "--backend", "torch", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*words, *LOAD, *system, *more])
    assert isinstance(done.exception, SloBenchError)
    assert word in str(done.exception)


def test_torch_run_has_the_prompt_and_output_lengths_of_the_workload(tmp_path: Path) -> None:
    out, _ = run(tmp_path, *LOAD, "--system", "sglang", "--sweep", "records=csv")
    (details,) = (out / "requests").glob("*.csv.gz")
    with gzip.open(details, "rt") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 12
    assert all(row["output_tokens"] == row["expected_output_tokens"] for row in table)


def test_torch_run_in_bfloat16_is_valid(tmp_path: Path) -> None:
    out, _ = run(tmp_path, *LOAD, "--system", "vllm", "--dtype", "bfloat16")
    (row,) = rows(out)
    assert row["valid"] == "True"
    with pytest.raises(
        SloBenchError,
        match=r"server\.dtype \(--dtype\) has no effect with backend vllm, only with torch",
    ):
        Experiment(
            **{"backend": "vllm", "model": "nowhere", "systems": "vllm", "workload": "alpaca"},
            **{"rates": 40.0, "requests": 3, "seeds": 1, "server": {"dtype": "bfloat16"}},
        ).run(tmp_path / "vllm")


def test_torch_run_on_the_cpu_clock_skips_waits(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text(
        'backend = "torch"\nsystems = ["vllm"]\nworkload = "alpaca"\nrates = 0.01\n'
        'requests = 3\nseeds = 1\nserver = {clock = "cpu", step_log = true}\n'
    )
    out = tmp_path / "run"
    if len(available_cores()) > 1:
        words = ["run", str(file), "--threads", "2", "--out", str(tmp_path / "two")]
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, SloBenchError)
        assert "leave it out or set it to 1" in str(done.exception)
    done = CliRunner().invoke(app, ["run", str(file), "--no-report", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (row,) = rows(out)
    assert row["valid"] == "True"
    assert float(row["makespan_s"]) > 50  # on its clock, and not on the wall's
    (meta,) = (out / "servers").glob("*.meta.json")
    assert json.loads(meta.read_text())["clock"] == "cpu"


def test_torch_run_validate_writes_validation_json(tmp_path: Path) -> None:
    out, output = run(tmp_path, *LOAD, "--system", "vllm", "--validate")
    (level,) = json.loads((out / "validation.json").read_text())
    assert level["requests"] == 12
    assert level["fitted_on"] == [f"profiling-{level['cell']}"]
    assert {row["metric"] for row in level["rows"]} == {"ttft", "tpot", "e2e"}
    assert "asynchronous" not in output
    log = out / "servers" / f"{level['cell']}.steps.jsonl"
    steps = log.read_text().splitlines()
    assert len(steps) > 60
    # Measured three times; and decided as in the run, where steps take what they took.
    assert level["measured"] == 3
    assert level["replayed_iterations"] == len(steps) // 2
    for row in level["rows"]:
        if row["statistic"] != "mape":
            assert row["spread"] >= 0
            assert abs(row["replayed_error"]) < 1e-6
    assert "every iteration decided as in the run" in " ".join(output.split())
    # Another decision is no replay.
    log.write_text("\n".join([steps[0].replace('"chunks": [[0, ', '"chunks": [[0, 1'), *steps[1:]]))
    again = CliRunner().invoke(app, ["validate", str(out)])
    assert again.exit_code == 0, again.output
    assert "not replayed with its own step times: iteration 1 of" in " ".join(again.output.split())


@pytest.mark.parametrize(
    "system",
    [
        *(pytest.param(name, marks=pytest.mark.weekly) for name in ("vllm-swap", "sglang")),
        "adaptivellm",
    ],
)
def test_validate_replays_the_decisions_of_a_run_under_pressure(
    tmp_path: Path, system: str
) -> None:
    pressed = ["--sweep", "num_gpu_blocks=26", "--sweep", "num_cpu_blocks=64", "--system", system]
    load = ["--workload", "alpaca", "--rates", "200", "--requests", "12", "--seeds", "1"]
    out, _ = run(tmp_path, *load, *pressed, "--validate")
    (level,) = json.loads((out / "validation.json").read_text())
    assert level["replayed_iterations"] > 30
    assert all(abs(row["replayed_error"]) < 1e-6 for row in level["rows"] if row["real_s"])


def test_torch_run_finds_evicted_prefixes_in_its_kv_store(tmp_path: Path) -> None:
    """So few blocks that a conversation's next turn finds nothing of it there, but in the store."""
    file = tmp_path / "store.toml"
    store = [f"{tmp_path}/memory=0.004", f"{tmp_path}/disk=0.1"]
    text = (
        'backend = "torch"\nsystems = ["vllm"]\nworkload = "alpaca"\nrates = 20\nrequests = 30\n'
        'seeds = 1\nnum_gpu_blocks = 80\noverlong_requests = "truncate"\nrecords = "csv"\n'
        'sessions = "sessions(turns=fixed(5), think_s=1, system_prompt_tokens=64)"\n'
    )
    file.write_text(f"{text}server = {{kv_store = {json.dumps(store)}, cpu_wait_limit = 1.0}}\n")
    cells = {}
    for name in ("with", "without"):
        out = tmp_path / name
        done = CliRunner().invoke(app, ["run", str(file), "--no-report", "--out", str(out)])
        assert done.exit_code == 0, done.output
        (row,) = rows(out)
        assert row["valid"] == "True"
        cells[name] = row
        file.write_text(f"{text}server = {{cpu_wait_limit = 1.0}}\n")
    assert int(cells["with"]["kv_store_loaded_bytes"]) > 0
    assert "kv_store_loaded_bytes" not in cells["without"]
    for tier in store:  # nothing is left
        assert list(Path(tier.partition("=")[0]).iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "no requests of alpaca share a prefix"),
        ({"systems": "orca"}, "looks for no prefixes"),
        ({"server": {"kv_store": "kv"}}, "a folder and its size in GiB"),
        ({"server": {"kv_store": "/proc/nowhere=1"}, "sessions": "sessions"}, "cannot be made"),
        ({"server": {"kv_store": "kv=1", "clock": "cpu"}}, "threads of its own"),
        ({"server": {"kv_store": "kv=1", "validated": True}}, "cannot be validated"),
        ({"backend": "vllm", "model": "nowhere"}, "no effect with backend vllm, only with torch"),
    ],
)
def test_kv_store_where_it_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, object], word: str
) -> None:
    settings = {"systems": "vllm", "workload": "alpaca", "rates": 40.0, "requests": 3, "seeds": 1}
    store = {"kv_store": f"{tmp_path}/kv=0.1"}
    with pytest.raises(SloBenchError, match=word):
        Experiment(**{"backend": "torch", **settings, "server": store, **changes}).run(
            tmp_path / "r"
        )


def test_first_step_time_excludes_the_set_up(tmp_path, monkeypatch):
    ahead_s = 0.0

    class Ahead:
        sleep = time.sleep

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + ahead_s

    @contextlib.contextmanager
    def for_days() -> Iterator[None]:
        nonlocal ahead_s
        ahead_s = 1e6
        yield

    monkeypatch.setattr("slo_bench.harness.engine.torch.clock.time", Ahead)
    monkeypatch.setattr("slo_bench.harness.experiments.backends.torch_engine.heap_frozen", for_days)
    file = tmp_path / "logged.toml"
    file.write_text(
        'backend = "torch"\nsystems = "vllm"\nworkload = "alpaca"\nrates = 50\nrequests = 3\n'
        "seeds = 1\n[server]\nstep_log = true\n"
    )
    out = tmp_path / "o"
    done = CliRunner().invoke(app, ["run", str(file), "--no-report", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (log,) = (out / "servers").glob("*.steps.jsonl")
    begun, done = map(json.loads, log.read_text().splitlines()[:2])
    assert (begun["event"], done["event"]) == ("step", "done")
    assert done["time_s"] < 1e5
