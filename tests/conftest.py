"""For all tests: properties without deadlines, skips that fail where nothing may be skipped; and
what tests of real servers need.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slo_bench.cli.main import main
from slo_bench.harness.servers.launch.environments import Environment, environment
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.harness.servers.server_kinds import server_kind
from slo_bench.workloads.errors import SloBenchError

# Threads of torch spin while they wait for each other: beside other work, tests would stand still.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What vLLM found out about a model's class it keeps for one of its releases at a time: with another
# running beside it, every start would find it out again.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["VLLM_CACHE_ROOT"] = str(Path(tempfile.gettempdir()) / f"slo-bench-vllm-{worker}")

# No property is judged by how long an example takes. Everybody gets the same examples; new ones are
# drawn by `pytest --hypothesis-profile=search`.
# A busy machine draws slowly.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

SKIP_NOTHING = os.environ.get("SLO_BENCH_SKIP_NOTHING") == "1"


def _failed_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if SKIP_NOTHING and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"must not be skipped, but was: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _failed_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _failed_if_skipped(report)
    return report


@pytest.fixture
def slo_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line, as it is installed, in an empty folder: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slo-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


Says = bytes | Callable[[socket.socket], None]


@pytest.fixture
def scripted_server() -> Generator[Callable[..., str]]:
    """An address where each request gets the given bytes, or what a function of the socket sends.

    With `close=True` the connection is closed after an answer. `asked` of the function collects
    the requests.
    """
    listening: list[socket.socket] = []
    request_heads: list[bytes] = []

    def read_request(peer: socket.socket) -> bytes:
        buffer = b""
        while b"\r\n\r\n" not in buffer:
            more = peer.recv(1 << 16)
            if not more:
                return b""
            buffer += more
        head, _, body = buffer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        missing = int(length[1]) - len(body) if length else 0
        while missing > 0:
            missing -= len(peer.recv(1 << 16)) or missing
        return head

    def talk(peer: socket.socket, says: Sequence[Says], close: bool) -> None:
        with peer, contextlib.suppress(OSError):
            while head := read_request(peer):
                request_heads.append(head)
                for part in says:
                    part(peer) if callable(part) else peer.sendall(part)
                if close:
                    return

    def serve(*says: Says, close: bool = False) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    threading.Thread(target=talk, args=(peer, says, close), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    serve.asked = request_heads  # type: ignore[attr-defined]
    yield serve
    for server in listening:
        server.close()


VLLM = server_kind("vllm").builds["cpu"]
# Releases whose kernels no torch at hand fits, or that have no build for CPU: their schedulers run
# without kernels, in the environment of another release.
BORROWED_VLLM = {"0.33.0": VLLM.version, "0.31.0": VLLM.version, "0.19.1": VLLM.also_tested[-1]}
# `.ci/run` tries the newest scheduler, and real servers of the release installed by default.
WEEKLY_VLLM = (VLLM.version, "0.31.0", "0.19.1", *VLLM.also_tested)
VLLM_FOLDERS = "SLO_BENCH_VLLM_FOLDERS"  # a folder for each, named by its version


@pytest.fixture(scope="session")
def installed() -> Callable[..., Environment]:
    """The environment of a server, with a module more if it is named; skips where there is none."""

    def find(backend: str, module: str | None = None) -> Environment:
        try:
            server = environment(backend)
        except SloBenchError as error:
            pytest.skip(str(error))
        if module is not None:
            tried = [server.python, "-c", f"import {module}"]
            if subprocess.run(tried, capture_output=True, check=False).returncode:
                pytest.skip(
                    f"{server.name} has no {module}: backends install {backend} --with {module}"
                )
        return server

    return find


def _marked(versions: Iterable[str], weekly: Collection[str]) -> list[object]:
    return [pytest.param(v, marks=[pytest.mark.weekly] * (v in weekly)) for v in versions]


@pytest.fixture(
    scope="session",
    params=_marked([VLLM.version, *VLLM.also_tested], weekly=VLLM.also_tested),
)
def vllm(request: pytest.FixtureRequest) -> str:
    """Each release of vLLM that is served by the tests, as `--backend` takes it; older ones weekly:
    `vllm_python` tries their schedulers each time.
    """
    return f"vllm=={request.param}"


@dataclass(frozen=True)
class VllmPython:
    """A Python that has vLLM's scheduler, if `folder` is on its path."""

    version: str
    python: Path
    folder: str


@pytest.fixture(
    scope="session",
    params=_marked([VLLM.version, *VLLM.also_tested, *BORROWED_VLLM], weekly=WEEKLY_VLLM),
)
def vllm_python(
    request: pytest.FixtureRequest, installed: Callable[..., Environment]
) -> VllmPython:
    """Each release whose scheduler the plugin is to fit; some borrow an environment."""
    version = request.param
    if version not in BORROWED_VLLM:
        return VllmPython(version, installed(f"vllm=={version}").python, "")
    folder = Path(os.environ.get(VLLM_FOLDERS, "")) / version
    if VLLM_FOLDERS not in os.environ or not folder.is_dir():
        pytest.skip(f"{VLLM_FOLDERS} names no folder with vLLM {version}; see .ci/run")
    return VllmPython(version, installed(f"vllm=={BORROWED_VLLM[version]}").python, str(folder))


@pytest.fixture(scope="session")
def tiny_model(
    installed: Callable[..., Environment], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with a tiny Llama; skips where the server is not installed."""

    @functools.cache
    def make(backend: str) -> Path:
        installed(backend)
        folder = tmp_path_factory.mktemp("models") / f"tiny-{backend.replace('==', '-')}"
        return make_model(folder, {**model_fields(), "max_position_embeddings": 4096})

    return make


@pytest.fixture
def opened() -> Callable[[object, Mapping[str, object]], object]:
    """A function from a value of a page's data to the value with what it refers to."""

    def whole(value, data):
        if isinstance(value, dict):
            if "$" in value:
                return whole(data["shared"][value["$"]], data)
            return {key: whole(inner, data) for key, inner in value.items()}
        return [whole(inner, data) for inner in value] if isinstance(value, list) else value

    return whole
