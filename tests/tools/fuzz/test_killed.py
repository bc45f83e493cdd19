"""Kill -9 at a few random moments, full disks, folders that cannot be written or were damaged;
killed.py does a hundred.
"""

import importlib.util
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import slo_bench
from reference.examples import examples
from slo_bench import Experiment, SloBenchError, write_report
from slo_bench.harness.results.run_folder import open_run_folder, read_rows

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals")


@pytest.fixture(scope="module")
def killed():
    """`killed.py` of `tools/fuzz`, which is no package, so it is loaded by its path."""
    path = Path(__file__).parents[3] / "tools" / "fuzz" / "killed.py"
    spec = importlib.util.spec_from_file_location("killed", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["killed"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "capacity", "tune"])
def test_run_killed_at_random_is_resumed_to_the_same_bytes(killed, kind, tmp_path):
    kills = str(examples(6))
    command = [sys.executable, killed.__file__, "--kind", kind, "--moments", kills, "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {kills} kills" in done.stdout


def kill_workers():
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"execution.workers" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("done", [0, 1])
def test_run_whose_workers_are_killed_names_it_and_is_resumed(tmp_path, done):
    """Before any cell was done, and after one."""
    experiment, killed = small(rates=[2, 4, 6, 8], requests=2000), []

    def struck(progress):
        if not killed and progress.finished >= done:
            killed.append(progress)
            kill_workers()

    with pytest.raises(SloBenchError, match=r"was killed \(signal 9\)"):
        experiment.run(tmp_path / "out", jobs=2, progress=struck)
    resume = (tmp_path / "out").is_dir()
    again = experiment.run(tmp_path / "out", jobs=2, resume=resume)
    whole = experiment.run(tmp_path / "whole", jobs=1)
    assert (again.folder / "cells.csv").read_bytes() == (whole.folder / "cells.csv").read_bytes()


def test_wall_clock_steps_during_a_run_change_no_result(tmp_path, monkeypatch):
    quiet = small().run(tmp_path / "quiet", jobs=1)
    steps = itertools.cycle((0.0, 3600.0, -3600.0))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(steps))
    monkeypatch.setattr(time, "time_ns", lambda: round(1e9 * time.time()))
    stepped = small().run(tmp_path / "stepped", jobs=1)
    files = [path for path in quiet.folder.rglob("*") if path.is_file()]
    names = [path.relative_to(quiet.folder) for path in files if path.name != "environment.json"]
    assert names
    for name in names:
        assert (stepped.folder / name).read_bytes() == (quiet.folder / name).read_bytes()


WALL_CLOCK = {  # what reads it, and none of it is a duration of anything measured
    "harness/servers/launch/environments.py": "when an environment was made",
    "harness/experiments/backends/launched.py": "the name of a folder",
    "harness/servers/torch/torch_embeddings.py": "a field of OpenAI's answers",
    "harness/servers/torch/torch_generation.py": "a field of OpenAI's answers",
    "harness/servers/torch/torch_server.py": "a field of OpenAI's answers",
    "harness/experiments/backends/vllm_json.py": "a field of vLLM's files",
    "harness/engine/torch/tiers.py": "an order, which a step back does not turn round",
    "harness/experiments/experiment.py": "the name of a folder, and when a run was made",
    "workloads/file_cache.py": "whether a file changed lately, beside its time stamps",
    "cli/commands/calibrate.py": "the date of a profile",
    "tuner/search/trial_leases.py": "signs of life between machines",
}


def test_durations_are_not_measured_by_the_wall_clock():
    root = Path(slo_bench.__file__).parent
    rooms = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
    reads = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)\(")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    readers = {str(p.relative_to(root)) for p in files if reads.search(p.read_text("utf-8"))}
    assert readers == set(WALL_CLOCK)


def small(**changes):
    settings = {"systems": "vllm", "rates": [2, 4], "seeds": 1, "requests": 20, "records": "csv"}
    return Experiment(**{**settings, **changes})


@pytest.mark.slow
def test_full_disk_is_an_error_and_the_run_is_resumed(tmp_path):
    """A limit on the size of files fails writes as a full disk does."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from slo_bench import Experiment, SloBenchError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        experiment = Experiment(
            systems="vllm", rates=[2, 4], seeds=1, requests=400, records="csv"
        )
        try:
            experiment.run("out", jobs=1)
        except SloBenchError as error:
            print(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            print(len(experiment.run("out", jobs=1).rows()))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    message, rows = done.stdout.splitlines()
    assert message.startswith("cannot write out/")
    assert "File too large" in message
    assert rows == "2"
    assert not list(tmp_path.rglob("*.part"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SloBenchError, match="cannot write to"):
            small().run(tmp_path / "out", jobs=1)
    finally:
        tmp_path.chmod(0o700)


def test_run_into_a_folder_in_use_is_refused(tmp_path):
    text = small().to_toml()
    held = open_run_folder(
        tmp_path / "out", cells=["a"], experiment_toml=text, environment={}, resume=False
    )
    with held, pytest.raises(SloBenchError, match="in use by another run"):
        small().run(tmp_path / "out", jobs=1, resume=True)


def test_run_killed_before_its_first_file_can_begin_again(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".experiment.toml.4711.part").write_text("name =")
    assert len(small().run(out, jobs=1).rows()) == 2


@pytest.fixture
def run(tmp_path):
    return small().run(tmp_path / "run", jobs=1).folder


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("cells.csv", lambda b: b[: len(b) // 2], "cells.csv"),
        ("cells.csv", lambda b: b.replace(b"\nvllm", b"\n../../vllm"), "plain"),
        ("cells.csv", lambda b: b"", "cells.csv"),
        ("environment.json", lambda b: b[:-9], "environment.json"),
        ("requests/vllm_rate-2_seed-0.csv.gz", lambda b: b[:-20], "vllm_rate-2_seed-0"),
        ("timelines/vllm_rate-2_seed-0.csv.gz", lambda b: b"", "vllm_rate-2_seed-0"),
        ("experiment.toml", None, "experiment.toml is missing"),
    ],
)
def test_report_names_the_damaged_file_of_a_run_folder(run, tmp_path, name, damage, says):
    path = run / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SloBenchError, match=says):
        write_report([run], tmp_path / "report.html")


def test_rows_that_name_files_outside_their_folder_are_refused(run):
    table = run / "cells.csv"
    table.write_text(table.read_text().replace("\nvllm", "\n../vllm"))
    with pytest.raises(SloBenchError, match=r"plain name but is '\.\./vllm"):
        read_rows(table)
