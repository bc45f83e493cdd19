"""Which models stand, which sleep, and what is refused; servers are stand-ins."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.policies.prism.prism_controller import PrismGlobal
from slo_bench.harness.servers.launch import model_lifecycle as standing
from slo_bench.harness.servers.launch import serve_settings as serve_module
from slo_bench.harness.servers.launch.environments import Environment
from slo_bench.harness.servers.launch.model_lifecycle import (
    ServerLifecycle,
    served_names,
    shared_policy,
    stage_of,
)
from slo_bench.harness.servers.launch.serve_settings import Serve
from slo_bench.harness.servers.launch.server_kind import KVCACHED, Launch
from slo_bench.harness.servers.launch.server_process import ServerError, ServerProcess
from slo_bench.harness.servers.sglang.sglang_kind import SGLANG
from slo_bench.harness.servers.vllm.vllm_kind import VLLM
from slo_bench.workloads.errors import SloBenchError


@dataclass
class FakeServer:
    """Keeps what it is told over HTTP."""

    url: str = ""
    running: bool = True
    paths: list[str] = field(default_factory=list)
    status: int = 200
    api_key: str = ""
    endpoint = ServerProcess.endpoint
    http = ServerProcess.http


@pytest.fixture
def fakes(monkeypatch) -> Iterator[list[FakeServer]]:
    """Every server that is started, in order."""
    started: list[FakeServer] = []
    with ExitStack() as open_ones:

        def start(self: Serve, stack: ExitStack, log: Path, **more: object) -> list[FakeServer]:
            fake_server = FakeServer()

            class Answers(http.server.BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    fake_server.paths.append(self.path)
                    self.send_response(fake_server.status)
                    self.end_headers()

                def log_message(self, *args: object) -> None:
                    pass

            server = open_ones.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Answers))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            open_ones.callback(thread.join)
            open_ones.callback(server.shutdown)
            fake_server.url = f"http://127.0.0.1:{server.server_address[1]}"
            stack.callback(lambda: setattr(fake_server, "running", False))
            started.append(fake_server)
            return [fake_server]

        monkeypatch.setattr(Serve, "start", start)
        yield started


def stage(tmp_path: Path, *, sleeps: bool) -> ServerLifecycle:
    serves = {name: Serve("vllm", name) for name in "ab"}
    return ServerLifecycle(serves, tmp_path / "log", sleeper=VLLM if sleeps else None)


def test_models_without_sleep_mode_are_stopped_and_started(tmp_path, fakes):
    model_stage = stage(tmp_path, sleeps=False)
    first = model_stage.activate("a", (0,), None)
    model_stage.evict("a", (0,))
    assert [fake.running for fake in fakes] == [False]
    assert model_stage.activate("a", (0,), None).url != first.url
    model_stage.activate("b", (0,), None)
    assert [fake.running for fake in fakes] == [False, True, True]
    model_stage.close()
    assert not any(fake.running for fake in fakes)
    assert not any(fake.paths for fake in fakes)
    assert model_stage.servers == []


def test_models_with_sleep_mode_are_started_once(tmp_path, fakes):
    model_stage = stage(tmp_path, sleeps=True)
    first = model_stage.activate("a", (0,), None)
    for _ in range(2):
        model_stage.evict("a", (0,))
        assert model_stage.activate("a", (0,), None) == first
    [fake] = fakes
    assert fake.paths == ["/sleep?level=1", "/wake_up"] * 2
    assert fake.running
    model_stage.evict("a", (0,))
    fake.running = False  # it died in its sleep
    model_stage.activate("a", (0,), None)
    assert len(fakes) == 2
    fakes[1].status = 500
    with pytest.raises(ServerError, match="sleep"):
        model_stage.evict("a", (0,))
    model_stage.close()


def test_model_that_sleeps_on_one_gpu_is_started_on_another(tmp_path, fakes):
    model_stage = stage(tmp_path, sleeps=True)
    first = model_stage.activate("a", (0,), None)
    model_stage.evict("a", (0,))
    assert model_stage.activate("a", (1,), None) != first
    assert model_stage.activate("a", (0,), None) == first
    assert [fake.paths for fake in fakes] == [["/sleep?level=1", "/wake_up"], []]
    model_stage.close()


def test_server_of_a_model_gets_its_gpu_and_its_kv_memory(tmp_path, fakes, monkeypatch):
    launches: list[Serve] = []
    start = Serve.start
    monkeypatch.setattr(
        Serve, "start", lambda self, *a, **k: launches.append(self) or start(self, *a, **k)
    )
    serves = {name: Serve("vllm", name) for name in "ab"}
    model_stage = ServerLifecycle(serves, tmp_path / "log", gpu_names=("x", "y"), block_size=32)
    model_stage.activate("a", (1,), 1000)
    assert (launches[0].own_gpus, launches[0].num_gpu_blocks, launches[0].block_size) == (
        ("y",),
        31,
        32,
    )
    assert launches[0]._gpus(1) == [("y",)]
    model_stage.close()


def test_model_server_that_starts_after_closing_is_stopped(tmp_path, fakes):
    model_stage = stage(tmp_path, sleeps=False)
    model_stage.close()
    model_stage.activate("a", (0,), None)
    assert not fakes[0].running


@pytest.fixture
def cuda(monkeypatch, tmp_path) -> Environment:
    """As if vLLM's CUDA build were installed."""
    cuda_environment = Environment(tmp_path, "vllm", "0.32.0", "cuda")
    for module in (serve_module, standing):
        monkeypatch.setattr(module, "environment", lambda name: cuda_environment)
    return cuda_environment


def test_stage_uses_sleep_mode_where_the_server_has_it(cuda, tmp_path):
    messages: list[str] = []
    common = Serve("vllm", "m")
    models = {"a": "x/a", "b": "x/b"}
    stage_of(models, common, PrismGlobal(), tmp_path / "log", say=messages.append)
    naive = PrismGlobal(activation="naive")
    stage_of(models, common, naive, tmp_path / "log", say=messages.append)
    assert "are woken up" in messages[0]
    assert "are stopped" in messages[1]


def test_launch_with_sleep_mode_has_its_arguments():
    launch = Launch(model="m", port=1, sleeps=True)
    assert "--enable-sleep-mode" in VLLM.argv(Path("/env/bin"), "cuda", launch)
    assert VLLM.environ("cuda", launch)["VLLM_SERVER_DEV_MODE"] == "1"
    plain = Launch(model="m", port=1)
    assert "--enable-sleep-mode" not in VLLM.argv(Path("/env/bin"), "cuda", plain)
    assert "VLLM_SERVER_DEV_MODE" not in VLLM.environ("cuda", plain)


@pytest.mark.parametrize("kind", [VLLM, SGLANG])
def test_kvcached_launch_sets_its_environment(kind):
    with_it, without = (Launch(model="m", port=1, kvcached=on) for on in (True, False))
    assert KVCACHED == {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
    assert KVCACHED.items() <= kind.environ("cuda", with_it).items()
    assert not KVCACHED.keys() & kind.environ("cuda", without).keys()
    words = [list(kind.argv(Path("/env/bin"), "cuda", launch)) for launch in (with_it, without)]
    assert words[0] == words[1]


def test_kvcached_without_its_package_is_refused(cuda, monkeypatch):
    def answers(code: int) -> None:
        class Done:
            returncode = code

        monkeypatch.setattr(serve_module.subprocess, "run", lambda *args, **more: Done)

    answers(0)
    Serve("vllm", "m", "vllm", kvcached=True).check()
    with pytest.raises(SloBenchError, match="leave them out"):
        Serve("vllm", "m", "vllm", num_gpu_blocks=10, kvcached=True).check()
    with pytest.raises(SloBenchError, match="the server as it is"):
        Serve("vllm", "m", "edf", kvcached=True).check()
    answers(1)
    with pytest.raises(SloBenchError, match="pip install kvcached --no-build-isolation"):
        Serve("vllm", "m", "vllm", kvcached=True).check()
    cpu = Environment(cuda.path, "vllm", "0.32.0", "cpu")
    monkeypatch.setattr(serve_module, "environment", lambda name: cpu)
    with pytest.raises(SloBenchError, match="needs a CUDA build"):
        Serve("vllm", "m", "vllm", kvcached=True).check()


def test_prism_alone_of_multi_model_systems_runs_on_servers():
    assert shared_policy("vllm", {}, "vllm") is None
    assert shared_policy("prism", {"worth_s": 3.0}, "vllm") == PrismGlobal(worth_s=3.0)
    with pytest.raises(SloBenchError, match="simulated alone"):
        shared_policy("muxserve", {}, "vllm")
    with pytest.raises(SloBenchError, match="low_memory decides nothing"):
        shared_policy("prism", {"low_memory": 0.3}, "vllm")
    assert served_names(["x/a", "b/"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["vllm", "--model", "a", "--model", "b"], "vllm serves one model"),
        (
            ["vllm", "--model", "a", "--max-active-models", "1"],
            "--max-active-models goes with prism",
        ),
        (["prism", "--model", "a", "--instances", "2"], "leave --served-name"),
        (["prism"], "needs --model"),
        (["ascendra", "--model", "a", "--router", "round-robin"], "leave --router out"),
    ],
)
def test_serve_refuses_contradicting_model_options(words, problem):
    done = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(done.exception, SloBenchError)
    assert problem in str(done.exception)
