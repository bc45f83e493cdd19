"""Calibration: factors that a log was made with are found again, and are kept with their origin."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from reference.logs import LOGS as REAL
from reference.logs import PROFILE, SHARED, log_file, needs_data, simulated_log
from slo_bench.cli.main import app
from slo_bench.harness.results import engine_logs
from slo_bench.harness.results.engine_logs import EngineSettings, RealLog, measured_logs, read_log
from slo_bench.harness.validation.calibration.calibrate import calibrate
from slo_bench.harness.validation.calibration.calibrate_table import calibrate_table
from slo_bench.harness.validation.calibration.equations import KNOTS, at_bounds
from slo_bench.harness.validation.replay.log_replay import Validation, validate
from slo_bench.predictors.operators.front_end import FrontEnd
from slo_bench.predictors.profiles.build_model import linear_curve, table_step_time, with_peer_link
from slo_bench.predictors.profiles.calibration import Calibration
from slo_bench.predictors.profiles.importers import ImportOptions, import_profile
from slo_bench.predictors.profiles.profile_format import Profile, read_profile, write_profile
from slo_bench.predictors.profiles.scope import Scope
from slo_bench.workloads.errors import FileFormatError, SloBenchError

FACTORS = Calibration(("made up",), (1.0, 64.0, 512.0, 2048.0), (0.8, 0.9, 1.2, 1.3))


def means(validation: Validation) -> dict[str, float]:
    return {row.metric: row.error for row in validation.rows() if row.statistic == "mean"}


def slow_log(num_gpu_blocks: int, seed: int) -> RealLog:
    """A log of a machine whose linear layers take `FACTORS` times what the profile says."""
    slow = dataclasses.replace(PROFILE, calibration=FACTORS)
    log, _ = simulated_log(num_gpu_blocks, caching=False, seed=seed, profile=slow)
    return log


def test_calibrate_recovers_factors_that_hold_for_another_log():
    fitted_log, other_log = slow_log(400, 1), slow_log(400, 2)
    before = means(validate(other_log, PROFILE, host_s=0.004))
    assert min(before.values()) > 0.1
    calibrated = calibrate([fitted_log], PROFILE, host_s=0.004)
    after = means(validate(other_log, calibrated.profile, host_s=0.004))
    assert max(abs(error) for error in after.values()) < 0.02
    calibration = calibrated.calibration
    assert calibration.requests == len(fitted_log)
    assert calibration.steps > 500
    assert max(calibration.held_out_percent.values()) < 4
    assert all(abs(error) < 1 for error in calibration.after_percent.values())
    assert calibration.before_percent["e2e"] > 10
    # Sizes that many steps have: decode batches of up to 32, chunks up to the budget of 1,024.
    true, learned = (
        linear_curve(dataclasses.replace(PROFILE, calibration=factors))
        for factors in (FACTORS, calibration)
    )
    for tokens in (8, 24, 1024):
        assert learned(tokens) == pytest.approx(true(tokens), rel=0.04)


def test_calibrated_profile_names_the_logs_of_its_factors():
    fitted_log, other_log = slow_log(400, 1), slow_log(400, 2)
    calibrated = calibrate([fitted_log], PROFILE, host_s=0.004)
    assert calibrated.calibration.digests == (fitted_log.digest,)
    assert "calibrated on this log" in " ".join(validate(fitted_log, calibrated.profile).notes)
    assert "calibrated on this log" not in " ".join(validate(other_log, calibrated.profile).notes)
    renamed = dataclasses.replace(fitted_log, name="copy")
    assert "calibrated on this log" in " ".join(validate(renamed, calibrated.profile).notes)


def test_calibrate_finds_the_number_of_kv_blocks_that_ran_out():
    log = slow_log(400, 1)
    unknown = dataclasses.replace(log, engine=dataclasses.replace(log.engine, num_gpu_blocks=None))
    assert unknown.engine.num_gpu_blocks is None
    # A GPU with about as much memory: the search begins at the catalogue's estimate.
    guess = calibrate([log], PROFILE, host_s=0.004, overrides=EngineSettings(num_gpu_blocks=430))
    assert "another order" in " ".join(guess.notes)
    roomy = slow_log(100_000, 1)
    roomy = dataclasses.replace(
        roomy, engine=dataclasses.replace(roomy.engine, num_gpu_blocks=None)
    )
    calibrated = calibrate([roomy], PROFILE, host_s=0.004)
    assert calibrated.calibration.num_gpu_blocks == 0
    assert [note.partition(":")[0] for note in calibrated.notes] == ["times are the engine's own"]


def test_calibration_survives_the_file_and_scales_the_tables(tmp_path):
    kept = dataclasses.replace(
        FACTORS,
        requests=7,
        digests=("ab",),
        before_percent={"ttft": -1.5},
        after_percent={"ttft": 0.25},
        held_out_percent={"ttft": 1.21, "tpot": 0.5},
        num_gpu_blocks=12,
        block_size=16,
    )
    front_end = FrontEnd("vLLM 0.19", 2e-4, 8.5e-3, 3e-6)
    scope = Scope("vllm-0.19", "2026-10-01", (1.0, 8.0), (20.0, 900.0), None, (1.0, 40.0))
    profile = dataclasses.replace(PROFILE, calibration=kept, front_end=front_end, scope=scope)
    read = read_profile(write_profile(profile, tmp_path / "p.toml"))
    assert (read.calibration, read.front_end, read.scope) == (kept, front_end, scope)
    assert read.verdict == (
        "good to ± 1.3 % (TTFT), ± 0.5 % (TPOT) for these loads (1 to 8 req/s, prompts of 20 to "
        "900 tokens, 1 to 40 requests at once)"
    )
    bare, scaled = linear_curve(PROFILE), linear_curve(read)
    np.testing.assert_allclose(scaled.seconds / bare.seconds, kept.at(np.maximum(1, bare.counts)))
    assert kept.at(np.array([1.0, 64.0, 9999.0])).tolist() == pytest.approx([0.8, 0.9, 1.3])
    assert table_step_time(read).step_s(1, 16, ()) < table_step_time(PROFILE).step_s(1, 16, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tokens = [2, 1]\nfactors = [1, 1]", "ascending tokens"),
        ("tokens = [1, 2]\nfactors = [1]", "a factor for each"),
        ("tokens = [1]\nfactors = [0]", "must be above 0"),
        ("tokens = [1]\nfactors = [1]\nsteps = [1]\nfoo = 1", "unexpected keyword"),
        ("tokens = [1, nan]\nfactors = [1, 1]", "ascending tokens|1 or more"),
        ("tokens = [1]\nfactors = [1e300]", "at most 1000"),
        ('tokens = [1]\nfactors = [1]\nnum_gpu_blocks = "2966"', "num_gpu_blocks"),
        ("tokens = [1]\nfactors = [1]\nblock_size = -16", "block_size"),
        ("tokens = [1]\nfactors = [1]\nheld_out_percent = {ttft = nan}", "held_out_percent"),
        ("tokens = [1]\nfactors = [1]\nheld_out_percent = 4", "held_out_percent|not iterable"),
        ("tokens = [1]\nfactors = [1]\ndigests = [3]", "digests"),
    ],
)
def test_damaged_calibration_in_a_profile_is_named(tmp_path, line, message):
    file = write_profile(PROFILE, tmp_path / "p.toml")
    file.write_text(f'{file.read_text()}\n[calibration]\norigin = ["x"]\n{line}\n')
    with pytest.raises(FileFormatError, match=message):
        read_profile(file)


def test_factors_at_their_bounds_are_named():
    [note] = at_bounds(Calibration((), (1.0, 64.0, 2048.0), (0.2, 1.0, 5.0)))
    assert note.startswith("factors of steps of 1, 2,048 tokens are as far from 1")
    assert not at_bounds(Calibration((), (1.0, 64.0), (0.3, 4.8)))


@pytest.mark.parametrize(
    ("name", "values"),
    [("model", ("llama-3.1-8b", "qwen3-8b")), ("tp", (1, 2)), ("system", ("vllm", "sarathi"))],
)
def test_calibrate_refuses_logs_of_different_servers(name, values):
    logs = [slow_log(400, seed) for seed in (1, 2)]
    for place, value in enumerate(values):
        settings = dataclasses.replace(logs[place].engine, **{name: value})
        logs[place] = dataclasses.replace(logs[place], engine=settings)
    with pytest.raises(SloBenchError, match=f"the logs differ in {name}"):
        calibrate(logs, PROFILE)


def test_log_of_two_instances_that_requests_tell_is_calibrated_as_two_logs(tmp_path):
    parts = [slow_log(400, seed) for seed in (1, 2)]
    rows = [
        {
            "arrival_time": log.arrival_s[k],
            "queued_ts": log.begin_s[k],
            "input_toks": int(log.prompt_tokens[k]),
            "output_toks": int(log.output_tokens[k]),
            "first_token_ts": log.first_s[k],
            "last_token_ts": log.last_s[k],
            "instance": f"10.0.0.{7 + number}",
        }
        for number, log in enumerate(parts)
        for k in range(len(log))
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = dataclasses.replace(
        read_log(file), engine=dataclasses.replace(parts[0].engine, instances=2)
    )
    calibrated = calibrate([log], PROFILE, host_s=0.004)
    assert calibrated.calibration.requests == 160
    assert calibrated.calibration.origin[1].endswith("requests.jsonl, instance 1")
    separate = calibrate(parts, PROFILE, host_s=0.004).calibration
    assert calibrated.calibration.factors == pytest.approx(separate.factors, abs=2e-4)
    untold = dataclasses.replace(log, instance=None)
    with pytest.raises(SloBenchError, match="of 2 instances, and its requests do not tell"):
        calibrate([untold], PROFILE, host_s=0.004)


def test_what_two_logs_lack_is_said_once():
    logs = [dataclasses.replace(slow_log(400, seed), notes=("a note",)) for seed in (1, 2)]
    assert calibrate(logs, PROFILE, host_s=0.004).notes.count("a note") == 1


def test_calibrate_refuses_logs_that_do_not_suffice():
    log = slow_log(400, 1)
    few = dataclasses.replace(
        log,
        **{
            name: getattr(log, name)[:5]
            for name in (
                "arrival_s",
                "begin_s",
                "prompt_tokens",
                "output_tokens",
                "first_s",
                "last_s",
            )
        },
    )
    with pytest.raises(SloBenchError, match="needs 20"):
        calibrate([few], PROFILE)
    with pytest.raises(SloBenchError, match="has no step times to calibrate"):
        calibrate([log], dataclasses.replace(PROFILE, tables={}))
    other = dataclasses.replace(log, first_s=slow_log(400, 2).first_s + log.first_s)
    other = dataclasses.replace(other, last_s=other.first_s + log.last_s[::-1])
    with pytest.raises(SloBenchError, match=r"another order|needs 20"):
        calibrate([other], PROFILE)


def test_several_gpus_need_a_measured_link():
    two = dataclasses.replace(PROFILE, tp=2)
    with pytest.raises(SloBenchError, match=r"has no all-reduce.*--peer-link 16gb/s@20us"):
        table_step_time(two)
    for text in ("pcie4-x16", "16", "fast@20us"):
        with pytest.raises(SloBenchError):
            with_peer_link(two, text)
    linked = linear_curve(with_peer_link(two, "16gb/s@20us"))
    bare = linear_curve(PROFILE)
    # Llama-3.1-8B: 32 layers with two all-reduces of 4,096 bf16 values a token; tp 2 sends all.
    expected_s = 64 * (2 * 20e-6 + bare.counts * 4096 * 2 / 16e9)
    np.testing.assert_allclose(linked.seconds - bare.seconds, expected_s)


def test_calibrate_takes_the_link_of_the_log_if_the_profile_has_none():
    two = dataclasses.replace(PROFILE, tp=2)
    log = slow_log(400, 1)
    linked_log = dataclasses.replace(
        log, engine=dataclasses.replace(log.engine, tp=2, peer_link="16gb/s@20us")
    )
    with pytest.raises(SloBenchError, match="has no all-reduce"):
        validate(dataclasses.replace(linked_log, engine=log.engine), two)
    by_log = means(validate(linked_log, two))
    assert by_log == means(validate(linked_log, with_peer_link(two, "16gb/s@20us")))
    assert by_log["tpot"] < means(validate(linked_log, with_peer_link(two, "1gb/s@20us")))["tpot"]
    assert "peer" in calibrate([linked_log], two).profile.links


# -------------------------------------------------------------------- command


def test_profile_calibrate_command_writes_a_profile(tmp_path):
    log, profile = log_file(tmp_path), write_profile(PROFILE, tmp_path / "p.toml")
    out = tmp_path / "c.toml"
    arguments = ["profile", "calibrate", str(log), "--profile", str(profile), "--out", str(out),
             "--num-gpu-blocks", "400", "--block-size", "16", "--no-prefix-caching"]  # fmt: skip
    runner = CliRunner()
    invocation = runner.invoke(app, [*arguments, "--json"])
    assert invocation.exit_code == 0, invocation.output
    printed = json.loads(invocation.stdout)
    assert printed["tokens"] == list(KNOTS)
    assert printed["requests"] == 80
    assert printed["origin"] == ["/".join(log.parts[-3:])]
    assert (
        set(printed["before_percent"]) == set(printed["after_percent"]) == {"ttft", "tpot", "e2e"}
    )
    assert read_profile(out).calibration is not None
    invocation = runner.invoke(app, arguments)
    assert "factor on step times" in invocation.stdout
    assert "in-sample" in invocation.stdout
    invocation = runner.invoke(app, ["profile", "show", str(out)])
    assert "calibrated" in invocation.stdout
    invocation = runner.invoke(
        app, ["profile", "calibrate", str(tmp_path / "no.jsonl"), *arguments[3:]]
    )
    assert isinstance(invocation.exception, SloBenchError)
    assert "there is no file" in str(invocation.exception)


def test_calibrate_takes_cells_of_measured_runs_only(tmp_path, monkeypatch):
    run = tmp_path / "run"
    CliRunner().invoke(
        app, ["run", "--system", "vllm", "--requests", "20", "--rates", "1,2", "--seeds", "1",
              "--jobs", "1", "--no-report", "--out", str(run)]
    )  # fmt: skip
    with pytest.raises(SloBenchError, match="was simulated"):
        measured_logs(run)
    rows = engine_logs.read_rows(run / "cells.csv")
    measured = [{**row, "backend": "vllm"} for row in rows]
    monkeypatch.setattr(engine_logs, "read_rows", lambda path: measured)
    with pytest.raises(SloBenchError, match="no cell 'x'"):
        measured_logs(run, "x")
    assert [len(log) for log in measured_logs(run)] == [20, 20]
    measured[1]["invalid_because"] = "the client was late"
    first, second = measured_logs(run)
    assert not first.notes
    assert second.notes == (f"{rows[1]['cell']} is not valid: the client was late",)


TABLE = """engine,version,gpu,model,concurrency,prompt_tokens,output_tokens,ttft_mean_s,tpot_mean_s
vllm,0.19,rtx-4090,llama-3.1-8b,2,512,64,{a},{b}
vllm,0.19,rtx-4090,llama-3.1-8b,8,512,64,{c},{d}
vllm,0.19,h100-80g,llama-3.1-8b,8,512,64,1,1
"""


def test_a_closed_loop_table_gives_two_factors(tmp_path):
    from slo_bench.harness.validation.accuracy.predict import predict
    from slo_bench.harness.validation.accuracy.readers import read_folder
    from slo_bench.predictors.profiles.formulas import profiled_step_time
    from slo_bench.predictors.profiles.step_time_table import Host

    file = tmp_path / "loops.csv"
    file.write_text(TABLE.format(a=1, b=1, c=1, d=1))
    slow = dataclasses.replace(PROFILE, calibration=Calibration((), (512.0, 513.0), (1.25, 0.9)))
    step_time = profiled_step_time(slow, Host(graph_tokens=512))
    figures = [predict(row.case, step_time_model=step_time).figures for row in read_folder(file)][
        :2
    ]
    values = {"a": figures[0]["ttft_mean"], "b": figures[0]["tpot_mean"]}
    values |= {"c": figures[1]["ttft_mean"], "d": figures[1]["tpot_mean"]}
    file.write_text(TABLE.format(**values))
    calibrated = calibrate_table(file, PROFILE)
    assert calibrated.calibration.factors[0] == pytest.approx(1.25, rel=0.03)
    assert calibrated.calibration.factors[1] == pytest.approx(0.9, rel=0.08)
    # Of two rows whose clients come in step a factor moves TPOT by leaps of some 2 %.
    assert (
        abs(calibrated.calibration.after_percent["tpot"])
        < 3
        < -calibrated.calibration.before_percent["tpot"]
    )
    assert calibrated.notes == ("1 rows of other models, GPUs or formats are left out",)
    with pytest.raises(SloBenchError, match=r"has no closed loop of llama-3\.1-70b"):
        calibrate_table(file, dataclasses.replace(PROFILE, model="llama-3.1-70b"))


# -------------------------------------------------------------------- real logs


def beside_blocks(tmp_path, folder, blocks: str) -> RealLog:
    """A log with `hash_ids.jsonl` beside it."""
    import gzip

    for name in ("requests.jsonl", "meta.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    packed = SHARED / "measured" / "llmservingsim" / f"prefix_blocks.{blocks}.jsonl.gz"
    (tmp_path / "hash_ids.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    return read_log(tmp_path / "requests.jsonl")


def imported(folder) -> Profile:
    return import_profile("llmservingsim", folder, ImportOptions())


@needs_data
@pytest.mark.weekly
def test_calibrate_rtx_4090_with_unknown_kv_blocks(tmp_path):
    """Halves of the log predict each other, and the number of blocks is found."""
    folder = SHARED / "measured" / "llmservingsim" / "RTX4090-Llama-3.1-8B-2026-08-17"
    log = beside_blocks(tmp_path, folder, "sharegpt-llama-3.1-8b-300-sps10")
    calibrated = calibrate([log], imported(REAL / "RTX4090-Llama-3.1-8B-bf16-tp1"))
    assert calibrated.calibration.num_gpu_blocks == 2951  # one holds nothing
    assert max(calibrated.calibration.held_out_percent.values()) < 2
    assert max(abs(e) for e in calibrated.calibration.after_percent.values()) < 0.5


@needs_data
def test_validate_qwen_on_two_gpus_with_the_measured_link(tmp_path):
    """Nothing is fitted to this log."""
    folder = REAL / "RTXPRO6000-Qwen3-32B-bf16-tp1" / "real_vllm"
    log = beside_blocks(tmp_path, folder, "sharegpt-qwen3-300-sps10")
    tables = SHARED / "measured" / "llmservingsim" / "profiles" / "RTXPRO6000-Qwen3-32B-bf16-tp2"
    profile = imported(tables)
    with pytest.raises(SloBenchError, match="has no all-reduce"):
        validate(log, profile)
    validation = validate(log, with_peer_link(profile, "16gb/s@20us"))
    assert max(abs(error) for error in means(validation).values()) < 0.02
