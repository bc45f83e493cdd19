import filecmp
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments import experiment
from slo_bench.harness.experiments.execution.workers import LocalExecutor
from slo_bench.harness.experiments.experiment import new_folder
from slo_bench.harness.experiments.suite_files import suites
from slo_bench.workloads.errors import FileFormatError, SloBenchError

SMALL = {"systems": ["vllm", "fifo"], "rates": [2, 4], "seeds": 2, "requests": 20}


def small(**changes):
    return Experiment(**{**SMALL, "records": "csv", **changes})


def same_files(left, right, *, but=("environment.json",)):
    names = sorted(p.relative_to(left) for p in left.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(right) for p in right.rglob("*") if p.is_file())
    names = [str(name) for name in names if name.name not in but]
    _, different, unreadable = filecmp.cmpfiles(left, right, names, shallow=False)
    assert (different, unreadable) == ([], [])


def test_run_writes_a_row_and_details_for_every_cell(tmp_path):
    result = small().run(tmp_path / "run", jobs=1)
    cells = result.cells
    assert cells["cell"].tolist()[:2] == ["vllm_rate-2_seed-0", "vllm_rate-2_seed-1"]
    assert len(cells) == 8
    assert set(cells["backend"]) == {"simulated"}
    assert cells["attainment"].between(0, 1).all()
    requests = result.requests("vllm_rate-4_seed-1")
    assert len(requests) == 20
    row = cells[cells["cell"] == "vllm_rate-4_seed-1"].iloc[0]
    assert requests["slo_met"].mean() == pytest.approx(row["attainment"])
    ttft = (requests["first_token_s"] - requests["arrival_s"]).mean()
    assert ttft == pytest.approx(row["ttft_mean_s"], abs=2e-6)
    assert result.timeline("fifo_rate-2_seed-0")["running"].max() > 0
    assert result.rows()[0]["system"] == "vllm"
    with pytest.raises(SloBenchError, match="vllm_rate-4_seed-1"):
        result.requests("vllm_rate-4_seed-9")


@pytest.mark.slow
def test_resolved_experiment_gives_the_same_bytes_on_any_number_of_jobs(tmp_path):
    small().run(tmp_path / "one", jobs=1)
    again = Experiment.load(tmp_path / "one" / "experiment.toml")
    again.run(tmp_path / "two", jobs=3)
    same_files(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("changes", "jobs", "processes"),
    [
        ({}, None, 1),
        ({}, 3, 3),
        ({"requests": 2500}, None, 4),
        ({"requests": 1500}, None, 3),
        ({"requests": None, "duration_s": 700}, None, 4),
    ],
)
def test_short_runs_start_few_processes(tmp_path, monkeypatch, changes, jobs, processes):
    """8 cells of 20 requests, or of so many that three or five processes would have 4,000 each."""
    begun = []

    class Told(LocalExecutor):
        def run(self, specs, folder, *, records, tell):
            begun.append(self.jobs)

    monkeypatch.setattr(experiment, "LocalExecutor", Told)
    monkeypatch.setattr(experiment, "cores", lambda: 4)
    small(**changes).run(tmp_path / "run", jobs=jobs)
    assert begun == [processes]


def test_resolved_experiment_contains_the_defaults(tmp_path):
    Experiment(systems="vllm", requests=10, seeds=1).run(tmp_path, jobs=1)
    resolved = Experiment.load(tmp_path / "experiment.toml")
    assert resolved.tp == (1,)
    assert resolved.instances == (1,)
    assert len(resolved.rates) == 4
    assert resolved.refine == 2
    assert resolved.records != "auto"
    assert resolved.plan().resolved == resolved
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["step_time"]["llama-3.1-8b on a100-80g tp1"]["fitted"] is True


def test_resume_runs_only_missing_cells(tmp_path):
    class EnoughError(Exception):
        pass

    def stop_after_three(progress):
        if progress.finished == 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        small().run(tmp_path / "run", jobs=1, progress=stop_after_three)
    ran = []

    class Watched(LocalExecutor):
        def run(self, specs, folder, **more):
            ran.extend(spec.cell for spec in specs)
            super().run(specs, folder, **more)

    small().run(tmp_path / "run", executor=Watched(1), resume=True)
    assert len(ran) == 5
    small().run(tmp_path / "whole", jobs=1)
    same_files(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_worker_process_stops_with_the_run(tmp_path):
    class EnoughError(Exception):
        pass

    def stop_soon(progress):
        if progress.finished == 1:
            raise EnoughError

    many = small(seeds=8)
    with pytest.raises(EnoughError):
        many.run(tmp_path / "run", jobs=2, progress=stop_soon)
    rows = (tmp_path / "run" / "cells.csv").read_text().splitlines()
    assert 2 <= len(rows) < 32


@pytest.mark.slow
def test_failing_cell_is_named_and_leaves_no_files(tmp_path):
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,900000,10\n")
    for jobs in (1, 2):
        run = Experiment(systems=["vllm", "fifo"], workload=str(trace), overlong_requests="error")
        with pytest.raises(SloBenchError, match="1 of 2 requests are too long"):
            run.run(tmp_path / "run", jobs=jobs)
        assert not (tmp_path / "run").exists()
    done = Experiment(systems="vllm", workload=str(trace), replay_speeds=1)
    (row,) = done.run(tmp_path / "run", jobs=1).rows()
    assert (row["attainment"], row["rejected"], row["overlong"]) == (0.5, 1, 1)


def test_trace_without_rates_runs_at_three_speeds(tmp_path):
    trace = tmp_path / "trace.csv"
    lines = [f"{k * 0.5},100,10" for k in range(11)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    rows = Experiment(systems="vllm", workload=str(trace)).run(tmp_path / "a", jobs=1).rows()
    assert [(row["replay_speed"], row["rate_rps"], row["seed"]) for row in rows] == [
        (0.5, 1.0, 0),
        (1.0, 2.0, 0),
        (2.0, 4.0, 0),
    ]
    assert {row["requests"] for row in rows} == {11}
    assert {row["workload"] for row in rows} == {"trace.csv"}
    at_rate = Experiment(systems="vllm", workload=str(trace), rates=4, seeds=1)
    (row,) = at_rate.run(tmp_path / "b", jobs=1).rows()
    assert row["ttft_mean_s"] == rows[2]["ttft_mean_s"]


def test_paths_in_an_experiment_file_are_relative_to_it(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n")
    (folder / "study.toml").write_text(
        'systems = "vllm"\nworkload = "trace.csv"\nreplay_speeds = 1\nslo = { ttft = 1 }\n'
    )
    monkeypatch.chdir(tmp_path)
    Experiment.load("study/study.toml").run("out", jobs=1)
    monkeypatch.chdir("/")
    again = Experiment.load(tmp_path / "out" / "experiment.toml")
    again.run(tmp_path / "again", jobs=1)
    same_files(tmp_path / "out", tmp_path / "again")


def test_closed_loop_row_has_the_resulting_rate(tmp_path):
    closed = Experiment(systems="vllm", arrivals="concurrency(4)", requests=40, seeds=1)
    (row,) = closed.run(tmp_path, jobs=1).rows()
    assert row["cell"] == "vllm_closed_seed-0"
    assert 0.5 * row["throughput_rps"] < row["rate_rps"] < 2 * row["throughput_rps"]
    with pytest.raises(SloBenchError, match="sets the load itself"):
        Experiment(arrivals="concurrency(4)", rates=2).plan()


@pytest.mark.slow
def test_script_without_a_main_guard_runs_several_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from slo_bench import Experiment
            print("once")
            r = Experiment(systems="vllm", rates=[2, 4], seeds=1, requests=10).run("out", jobs=2)
            print(len(r.rows()))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["once", "2"]


OWN_SYSTEM = """
from dataclasses import dataclass
from slo_bench.harness.core.policy import Policy

print("a policy may print")

@dataclass(frozen=True)
class Newest(Policy):
    '''Last come, first served.'''

    def queue_key(self, r, view):
        return -r.arrival_s
"""


@pytest.mark.slow
def test_policy_file_runs_in_worker_processes(tmp_path, monkeypatch):
    (tmp_path / "newest.py").write_text(OWN_SYSTEM)
    monkeypatch.chdir(tmp_path)
    result = Experiment(systems=["newest.py", "vllm"], rates=[3, 4], seeds=1, requests=100).run(
        "out", jobs=2
    )
    rows = result.rows()
    assert [row["system"] for row in rows] == ["newest", "newest", "vllm", "vllm"]
    assert rows[1]["ttft_p99_s"] != rows[3]["ttft_p99_s"]
    policy_file = str(tmp_path / "newest.py")
    assert Experiment.load("out/experiment.toml").systems == (policy_file, "vllm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratse = [1]\n", r"unknown setting 'ratse'; did you mean rates.*x\.toml, line 1"),
        ("\nrates = [1, -3]\n", r"rates must be greater than 0 but is -3.*x\.toml, line 2"),
        ("rates = [nan]\n", "rates must be a finite number but is nan"),
        ("rates = []\n", "rates must have at least one value"),
        ("tp = [1, 1]\n", "tp has 1 twice"),
        ("rates = 1\nreplay_speeds = 1\n", "rates and replay_speeds contradict"),
        ("requests = 5\nduration_s = 5\n", "requests and duration_s contradict"),
        (
            'overlong_requests = "drop"\n',
            "overlong_requests must be 'error', 'reject' or 'truncate' but is 'drop'",
        ),
        (
            "[parameters.vlm]\nmax_num_seqs = 1\n",
            r"parameters are set for 'vlm', .* not among the systems",
        ),
        ("a = = 1\n", r"is not TOML.*line 1"),
    ],
)
def test_experiment_file_with_an_error_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        Experiment.load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"systems": "vlm"}, "unknown system 'vlm'; did you mean vllm"),
        ({"model": "llama-3-9b"}, "unknown model"),
        ({"gpu": "a100"}, "unknown GPU"),
        ({"workload": "sharegp"}, "unknown workload 'sharegp'; did you mean sharegpt"),
        ({"router": "robin"}, "unknown router"),
        ({"slo": "tfft=1"}, "unknown SLO"),
        ({"model": "llama-3-70b", "tp": 1}, "llama-3-70b needs .* use tp"),
        ({"tp": 2, "gpus": 3}, "3 GPUs cannot be shared out to instances of tp 2"),
        ({"gpus": 4, "instances": 3}, "gpus = 4 contradicts 3 instances"),
        ({"replay_speeds": 2}, "replay_speeds need a workload with arrivals of its own"),
        ({"arrivals": ["poisson", "concurrency(2)"]}, "run them as two experiments"),
        (
            {"parameters": {"vllm": {"max_num_seq": 1}}, "systems": "vllm"},
            "did you mean max_num_seqs",
        ),
        (
            {"parameters": {"vllm": {"max_num_seqs": 0}}, "systems": "vllm"},
            "max_num_seqs must be from",
        ),
    ],
)
def test_plan_refuses_impossible_settings(settings, message):
    with pytest.raises(SloBenchError, match=message):
        Experiment(**settings).plan()


@pytest.mark.skipif(os.name == "nt", reason="folder permissions")
def test_default_run_folders_have_distinct_names(tmp_path):
    first = new_folder("night/run", tmp_path)
    first.mkdir()
    second = new_folder("night/run", tmp_path)
    assert first != second
    assert first.parent == second.parent == tmp_path


@pytest.mark.parametrize("name", suites())
def test_suites_can_be_planned(name):
    planned = Experiment.suite(name).plan()
    assert len(planned.cells) == len({cell.cell for cell in planned.cells})
    first_line = Path(suites()[name]).read_text().splitlines()[0]
    assert first_line.startswith("# ")


def test_unknown_suite_is_refused_with_a_suggestion():
    with pytest.raises(SloBenchError, match="did you mean quickstart"):
        Experiment.suite("quickstrat")


def test_run_of_the_library_writes_the_report(tmp_path):
    from slo_bench import write_report

    result = small().run(tmp_path / "run", jobs=1)
    page = write_report([result.folder], result.folder / "report.html")
    assert "simulated" in page.read_text()
