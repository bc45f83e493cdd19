"""Profiles measured on this machine: the grid, the file of rows, the format, the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.predictors.profiles.build_model import profiled_gpu, profiled_model
from slo_bench.predictors.profiles.profile_format import read_profile
from slo_bench.workloads.errors import SloBenchError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch import measure, profiling  # noqa: E402
from slo_bench.harness.engine.torch.measure import BatchShape, grid, swaps  # noqa: E402
from slo_bench.harness.engine.torch.timing import Timing  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_profiling_grid_has_all_step_kinds_within_the_context() -> None:
    shapes = list(grid(2048, 32))
    assert len(set(shapes)) == len(shapes)
    assert all(s.before + s.tokens <= 2048 and s.kv_tokens < 2048 for s in shapes)
    assert all(s.sequences <= 32 for s in shapes)
    assert {bool(s.chunks) + 2 * bool(s.sequences) for s in shapes} == {1, 2, 3}
    assert any(s.before for s in shapes)
    assert any(s.chunks > 1 for s in shapes)
    assert {s.direction for s in swaps(8)} == {"to-host", "to-gpu"}
    assert max(s.blocks for s in swaps(8)) == 8


def test_profile_run_measures_resumes_and_fits(
    tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cpu.toml"
    calls: list[BatchShape] = []
    real = measure.BatchTimer.timed

    def counted(meter: measure.BatchTimer, shape: BatchShape) -> Timing:
        calls.append(shape)
        if len(calls) == 60:
            raise KeyboardInterrupt
        return real(meter, shape)

    monkeypatch.setattr(measure.BatchTimer, "timed", counted)
    monkeypatch.setattr(measure, "ROUNDS", 2)
    words = ["profile", "run", "--model", str(model_folder("llama")), "--out", str(out)]
    words += ["--max-seqs", "4", "--name", "a-llama"]
    monkeypatch.setattr("slo_bench.harness.engine.torch.measure._MOVED_BLOCKS", (4, 8))
    assert CliRunner().invoke(app, words).exit_code != 0
    rows = tmp_path / "cpu.rows.jsonl"
    assert len(rows.read_text().splitlines()) == 60
    with rows.open("a") as file:
        file.write("[[1, 2")  # cut off in the midst of a line
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert len(calls) == 2 * len(set(calls)) + 1  # only the one that was interrupted came again
    assert calls.index(calls[0], 1) > len(set(calls))  # all of them before any comes again
    assert "a batch that never changes took" in done.output
    profile = read_profile(out)
    assert profile.model == "a-llama"
    assert profile.gpu == "cpu"
    assert profile.weight_dtype == "fp32"
    assert profile.best == "sums"
    assert set(profile.tables) == {"steps", "transfers", "moves"}
    assert set(profile.tables["moves"].words["what"]) == {"layers", "heads", "sequence"}
    assert set(profile.links) == {"host", "peer"}
    assert all(link.bandwidth_bytes_per_s > 0 for link in profile.links.values())
    assert done.output.count("off on copies held out") == 4
    assert "\n  to-host: " in done.output
    assert "\n  to-gpu: " in done.output
    assert profile.device is not None
    assert profiled_gpu(profile).memory_bytes > 0
    assert profiled_model(profile).layers == 2
    assert len(profile.tables["steps"]) >= 30
    assert set(profile.tables["transfers"].words["direction"]) == {"to-host", "to-gpu"}
    assert "µs of each step" in profile.sources[0].note
    assert "CPU time of one thread" in profile.sources[0].note
    fitted = CliRunner().invoke(app, ["profile", "fit", str(out)])
    assert fitted.exit_code == 0, fitted.output
    assert "host link" in fitted.output
    assert read_profile(out).best == "sums"
    words = ["run", "--profile", str(out), "--system", "banaserve", "--instances", "2"]
    words += ["--workload", "alpaca", "--rates", "5", "--requests", "20", "--seeds", "1"]
    ran = CliRunner().invoke(app, [*words, "--no-report", "--out", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.output
    assert "100.0 %" in ran.output


def test_profiling_divides_the_speed_of_the_machine_out(tmp_path: Path) -> None:
    """A machine that is half as quick in one round says the same of every step."""
    rows = profiling._Rows(tmp_path / "cpu.rows.jsonl", {})
    shapes = {BatchShape(sequences=n, kv_tokens=64): 0.001 * n for n in range(1, 9)}
    copies = {BatchShape(blocks=n, direction="to-host"): 0.0001 * n for n in range(1, 9)}
    for slower in (1.0, 2.0, 1.2):
        for shape, seconds in shapes.items():
            rows.add(shape, Timing(slower * seconds, slower * 0.004))
        for shape, seconds in copies.items():
            rows.add(shape, Timing(slower * seconds))
    for shape, seconds in shapes.items():
        assert rows.rounds(shape) == 3
        assert rows.time_s(shape) == pytest.approx(1.2 * seconds)  # the median speed
    for shape, seconds in copies.items():
        assert rows.time_s(shape) == seconds  # the quickest
    assert rows.time_s(BatchShape(sequences=9, kv_tokens=64)) is None
    assert rows.steadiness().startswith("a batch that never changes took 4.00 to 8.00 ms")
    assert rows.steadiness().endswith("a step differs by 0.0% between rounds")
    again = profiling._Rows(tmp_path / "cpu.rows.jsonl", {})
    assert again.time_s(BatchShape(sequences=4, kv_tokens=64)) == pytest.approx(0.0048)


def test_profiling_refuses_rows_of_another_model(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    (tmp_path / "cpu.rows.jsonl").write_text(json.dumps({"model": "another"}) + "\n")
    options = profiling.ProfilingOptions(model_folder("llama"), tmp_path / "cpu.toml")
    with pytest.raises(SloBenchError, match="something else"):
        profiling.measure_profile(options)


def test_profile_run_refuses_an_unknown_backend(tmp_path: Path) -> None:
    words = ["profile", "run", "--model", str(tmp_path), "--out", str(tmp_path / "p.toml")]
    done = CliRunner().invoke(app, [*words, "--backend", "tgi"])
    assert isinstance(done.exception, SloBenchError)
    assert "vllm" in str(done.exception)
    done = CliRunner().invoke(app, [*words, "--backend", "vllm"])
    assert isinstance(done.exception, SloBenchError)
    assert "config.json" in str(done.exception)


def test_profiling_without_time_names_the_command_to_continue(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    options = profiling.ProfilingOptions(model_folder("llama"), tmp_path / "cpu.toml", budget_s=0.0)
    with pytest.raises(SloBenchError, match="go on with the same command"):
        profiling.measure_profile(options)
