"""Servers are waited for, watched, and stopped with everything they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from slo_bench import SloBenchError
from slo_bench.harness.load_generator.server_metrics import MetricNames
from slo_bench.harness.policies.systems import system as system_by_name
from slo_bench.harness.servers.gateway.replies import CollectedReply
from slo_bench.harness.servers.gateway.upstream import Upstream
from slo_bench.harness.servers.http.http_server import HttpRequest
from slo_bench.harness.servers.launch.environments import Environment
from slo_bench.harness.servers.launch.server_kind import Launch, ServerKind
from slo_bench.harness.servers.launch.server_process import (
    ServerError,
    ServerProcess,
    free_port,
    serving,
)
from slo_bench.workloads import masking

FAKE = Path(__file__).with_name("fake_server.py")
SOON_S = 30.0


def kind(mode: str, **options: str) -> ServerKind:
    return ServerKind(
        name="fake",
        title="Fake",
        metrics=MetricNames(prefix="fake:"),
        argv=lambda programs, device, launch: [sys.executable, str(FAKE), str(launch.port), mode],
        own_environ=lambda device, launch: {"FAKE": "1"},
        **options,
    )


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    environment = Environment(tmp_path / "fake-1-cpu", "fake", "1", "cpu")

    @contextlib.contextmanager
    def started(
        mode: str,
        startup_timeout_s: float = SOON_S,
        system: str | None = None,
        step_log: Path | None = None,
        cores: tuple[int, ...] = (),
        server_args: tuple[str, ...] = (),
        private: bool = False,
        **options: str,
    ):
        policy = system and system_by_name(system).policy
        launch = Launch(
            model="m",
            port=free_port(),
            system=system,
            policy=policy,
            step_log=step_log,
            cores=cores,
            server_args=server_args,
            private=private,
        )
        log = tmp_path / "servers" / "fake.log"
        with serving(kind(mode, **options), environment, launch, log=log) as server:
            server.wait_until_ready(startup_timeout_s)
            yield server

    return started


def gone(process: int) -> bool:
    """It has ended (a dead one that nobody has fetched yet has ended too)."""
    end_s = time.monotonic() + SOON_S
    while time.monotonic() < end_s:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def child_of(log: Path) -> int:
    [line] = [line for line in log.read_text().splitlines() if line.startswith("child ")]
    return int(line.split()[1])


def test_server_process_answers_and_is_stopped(start):
    with start("ready") as server:
        assert server.metrics() == "fake:requests 1\n"
        assert server.running
        assert server.handshake == {}
    assert not server.running
    with pytest.raises(ServerError):
        server.metrics()


def test_server_process_death_at_start_shows_the_end_of_its_log(start):
    with (
        pytest.raises(ServerError, match=r"exit code 3.*fake\.log(?s:.*)no such model"),
        start("dies"),
    ):
        pytest.fail("it must not count as started")


def test_server_process_error_is_of_this_start(start, monkeypatch):
    monkeypatch.setenv("WORD", "before")
    with pytest.raises(ServerError, match="no such model before"), start("dies"):
        pass
    monkeypatch.setenv("WORD", "now")
    with pytest.raises(ServerError, match="no such model now") as raised, start("dies"):
        pass
    assert "before" not in str(raised.value)
    with pytest.raises(ServerError) as raised, start("never", startup_timeout_s=1):
        pass
    assert "no such model" not in str(raised.value)


def test_server_process_log_is_the_users_alone_and_masked_where_it_is_quoted(start, monkeypatch):
    monkeypatch.setenv("WORD", "sesame-open")
    masking.register("sesame-open")
    with pytest.raises(ServerError) as raised, start("dies"):
        pass
    assert "no such model [secret]" in str(raised.value)
    log = Path(str(raised.value).partition("its log is ")[2].partition(", which")[0])
    assert log.stat().st_mode & 0o77 == 0


def forwarded(server: ServerProcess, path: str) -> int:
    """Status with which the gateway's connection to a server is answered."""

    async def ask() -> int:
        reply = CollectedReply()
        upstream = Upstream(server.endpoint)
        headers = [(b"authorization", b"Bearer of-a-client")]
        await upstream.exchange(HttpRequest("GET", path, headers), reply)
        upstream.close()
        await asyncio.sleep(0)  # for its last callbacks
        return reply.status

    return asyncio.run(ask())


# httpcore leaves a socket that nobody listens at yet to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_private_server_with_a_socket_has_no_port(start):
    with start("ready", private=True, socket_option="--uds") as server:
        socket = Path(server.url.removeprefix("unix:"))
        assert socket.parent.stat().st_mode & 0o77 == 0
        assert server.metrics() == "fake:requests 1\n"
        assert forwarded(server, "/v1/models") == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{server.launch.port}/health")


def test_private_server_with_a_key_answers_nobody_else(start):
    with start("ready", private=True, config_option="--config") as server:
        assert server.metrics() == "fake:requests 1\n"
        assert forwarded(server, "/v1/models") == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert server.api_key not in repr(server) + repr(server.endpoint) + server.log.read_text()
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(server.api_key.encode() in command for command in commands)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "neither a key nor a Unix socket"),
        ({"config_option": "--config", "server_args": ("--api-key=$K",)}, "leave --api-key=.K out"),
    ],
)
def test_server_that_cannot_be_private_is_refused(start, options, problem):
    with pytest.raises(SloBenchError, match=problem), start("ready", private=True, **options):
        pytest.fail("it must not start")


def test_server_process_not_ready_in_time_is_an_error(start):
    with (
        pytest.raises(ServerError, match="not ready within 1 s"),
        start("never", startup_timeout_s=1),
    ):
        pytest.fail("it must not count as started")


def test_server_process_stop_ends_children_in_other_sessions(start):
    with start("leaves") as server:
        child = child_of(server.log)
        os.kill(child, 0)
    assert gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are pinned on Linux alone")
def test_server_process_and_children_keep_to_their_cores(start):
    cores_before = os.sched_getaffinity(0)
    core = max(cores_before)
    with start("leaves", cores=(core,)) as server:
        assert os.sched_getaffinity(child_of(server.log)) == {core}
    assert os.sched_getaffinity(0) == cores_before


@pytest.mark.slow
def test_server_process_without_a_policy_handshake_is_an_error(start):
    with start("ready", system="edf") as server:
        assert server.handshake["hooks"] == ["one"]
    with pytest.raises(ServerError, match="edf is not in it"), start("unhooked", system="edf"):
        pytest.fail("it must not count as started")


def test_server_process_without_a_step_log_handshake_is_an_error(start, tmp_path):
    log = tmp_path / "steps.jsonl"
    with start("ready", step_log=log) as server:
        assert server.handshake["hooks"] == ["one"]
    problem = "the log of its steps is not in it"
    with pytest.raises(ServerError, match=problem), start("unhooked", step_log=log):
        pytest.fail("it must not count as started")


def test_server_process_ends_with_a_killed_parent(tmp_path):
    log = tmp_path / "servers" / "fake.log"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import test_servers as t\n"
        "from pathlib import Path\n"
        "environment = t.Environment(Path('x'), 'fake', '1', 'cpu')\n"
        "launch = t.Launch(model='m', port=t.free_port())\n"
        "with t.serving(t.kind('leaves'), environment, launch, log=Path(sys.argv[2])) as up:\n"
        "    up.wait_until_ready(300); print('up', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(FAKE.parent), str(log)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        guard = int(Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text())
        server = int(Path(f"/proc/{guard}/task/{guard}/children").read_text())
        child = child_of(log)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert gone(child)
    assert gone(server)
    assert gone(guard)
