"""A server process: started, waited for, watched, and stopped with everything it started.

with serving(kind, environment, launch, log=folder / "servers" / "edf.log") as server:
    server.wait_until_ready(startup_timeout_s=300)
    ...  # server.url answers; leaving the block stops it, whatever happened
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx

from ....workloads.errors import SloBenchError
from ....workloads.masking import masked, register
from ...engine.compiled_core import core_is_compiled
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.machine import started_on
from ..plugin.contract import (
    EMBEDDER_VARIABLE,
    HANDSHAKE_VARIABLE,
    NUM_CPU_BLOCKS_VARIABLE,
    POLICY_VARIABLE,
    STEP_LOG_VARIABLE,
    PolicySpec,
    tally_file,
)
from ..server_kinds import server_kinds
from .environments import Environment, home
from .server_args import expanded
from .server_kind import Launch, ServerKind

READY_S = 300.0
_GRACE_S = 20.0
_LOOK_EVERY_S = 0.2
_MOST_SOCKET_PATH = 107  # bytes, on Linux
_LOW_PORTS = range(20_000, 32_000)
_GUARD = Path(__file__).with_name("guard.py")
_OURS = (
    *(POLICY_VARIABLE, HANDSHAKE_VARIABLE, STEP_LOG_VARIABLE, NUM_CPU_BLOCKS_VARIABLE),
    EMBEDDER_VARIABLE,
)
_PACKAGE = Path(__file__).resolve().parents[3]
_VERSION = version("slo-bench")
_METADATA = f"Metadata-Version: 2.1\nName: slo-bench\nVersion: {_VERSION}\n"

Say = Callable[[str], None]


class ServerError(SloBenchError):
    """A server that did not start, lost its hooks or died; the message has the end of its log."""


@dataclass
class ServerProcess:
    """A server process. `handshake` is the plugin's report, known when the server is ready; empty
    if the server is unpatched.
    """

    name: str
    url: str
    log: Path
    metrics_url: str
    health_url: str = ""
    launch: Launch | None = None
    handshake: Mapping[str, object] = field(default_factory=dict)
    tally_file: Path | None = None
    api_key: str = field(default="", repr=False)
    log_begin: int = 0  # bytes of the log that are of earlier starts
    _process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise ServerError if it has ended."""
        if not self.running:
            code = None if self._process is None else self._process.returncode
            raise ServerError(self.with_log(f"{self.name} ended with exit code {code}"))

    @property
    def endpoint(self) -> Endpoint:
        """Its address, with its key if it has one."""
        return dataclasses.replace(Endpoint.parse(self.url), api_key=self.api_key)

    def http(self, timeout_s: float) -> httpx.Client:
        """A client for requests to it, whose paths begin with a slash."""
        endpoint = self.endpoint
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=f"http://{endpoint.authority}",
            transport=httpx.HTTPTransport(uds=endpoint.socket or None),
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
        )

    def with_log(self, problem: str) -> str:
        """The problem with the path of the log, and the last errors or lines of this start."""
        text = b""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self.log_begin)
            text = log.read()
        lines = masked(text.decode("utf-8", "replace")).splitlines()
        errors = [line for line in lines if "Error" in line and "Traceback" not in line]
        shown = [*errors[-3:], *lines[-5:]] if errors else lines[-8:]
        end = "".join(f"\n    {line[:300]}" for line in dict.fromkeys(shown))
        return f"{problem}; its log is {self.log}, which ends with:{end}"

    def wait_until_ready(self, startup_timeout_s: float, say: Say = lambda line: None) -> None:
        """Return when the server answers and its plugin has reported; `say` shows progress.

        Raises:
            ServerError: it ended, took longer than `startup_timeout_s`, or runs without the hooks.
        """
        assert self.launch is not None
        _wait_until_ready(self, startup_timeout_s, say)
        self.handshake = _handshake(self, self.launch)
        self.tally_file = self.launch.handshake and tally_file(self.launch.handshake)

    def wait(self) -> int:
        """Wait until the process ends; returns its exit code."""
        assert self._process is not None
        return self._process.wait()

    def metrics(self) -> str:
        """The server's metrics in Prometheus' text format; empty if it has none.

        Raises:
            ServerError: it does not answer.
        """
        if not self.metrics_url:
            return ""
        try:
            with self.http(10) as client:
                return client.get(self.metrics_url).raise_for_status().text
        except httpx.HTTPError as error:
            self.check()
            why = str(error).partition("\n")[0]  # a link follows
            raise ServerError(f"{self.metrics_url} does not answer: {why}") from error

    def tally(self) -> Mapping[str, int]:
        """Counters of the plugin so far; empty without a plugin."""
        if self.tally_file is None or not self.tally_file.is_file():
            return {}
        counters: dict[str, int] = json.loads(self.tally_file.read_text("utf-8"))
        return counters

    def stop(self) -> None:
        """Stop the server and all processes that it started; returns when none is left."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the guard's sign
        try:
            self._process.wait(_GRACE_S + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and with the guard, by PR_SET_PDEATHSIG, the server
            self._process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def free_low_port(host: str = "127.0.0.1") -> int:
    """A free port below the system's range for clients, so that it stays free until it is bound.

    Raises:
        SloBenchError: none was found.
    """
    for port in random.sample(_LOW_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise SloBenchError(f"no port from {_LOW_PORTS.start} to {_LOW_PORTS.stop - 1} is free")


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raise SloBenchError if the port cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise SloBenchError(f"--port {port} cannot be listened at: {error}") from error


@contextlib.contextmanager
def serving(
    kind: ServerKind, environment: Environment, launch: Launch, *, log: Path
) -> Iterator[ServerProcess]:
    """Start a server; leaving the block stops it. `wait_until_ready` says when it answers.

    Args:
        kind: what is known of the server.
        environment: where it is installed.
        launch: settings of the server. With a policy inside, the server counts as ready
            only when the plugin has reported that every hook is in place.
        log: the file of its output.
    """
    name = f"{environment.name} ({launch.system or 'unpatched'})"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as scratch:
        if _plugged(launch) and launch.handshake is None:
            launch = dataclasses.replace(launch, handshake=Path(scratch) / "handshake.json")
        url = base = f"http://{launch.host}:{launch.port}"
        api_key, words = "", list[str]()
        if launch.private:
            url, api_key, words = _private(kind, launch, url, Path(scratch))
            base = f"http://{Endpoint.parse(url).authority}"
        argv = [*kind.argv(environment.programs, environment.device, launch), *words]
        environ = _environ(kind, environment, launch)
        server = ServerProcess(
            name,
            url,
            log,
            base + kind.metrics_path if kind.metrics else "",
            base + kind.health_path,
            launch,
            api_key=api_key,
            log_begin=log.stat().st_size if log.is_file() else 0,
        )
        try:
            with started_on(launch.cores):
                server._process = _start(argv, environ, log)
            yield server
        finally:
            server.stop()


def _private(
    kind: ServerKind, launch: Launch, url: str, folder: Path
) -> tuple[str, str, list[str]]:
    """The URL and the key of a server that none but the user reaches, and words of its command
    line; what it is told by is in a `folder` that none but the user can read.

    Raises:
        SloBenchError: the server cannot be told so.
    """
    if kind.socket_option:
        path = folder / "server.sock"
        if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
            raise SloBenchError(f"{path} is too long for a Unix socket: set TMPDIR to a short path")
        return f"unix:{path}", "", [kind.socket_option, str(path)]
    if kind.config_option:
        names = ("--api-key", kind.config_option)
        if refused := [w for w in launch.server_args if w.partition("=")[0] in names]:
            raise SloBenchError(
                f"{kind.title} gets a key that the gateway alone knows: leave {refused[0]} out"
            )
        key, path = secrets.token_hex(32), folder / "server.yaml"
        register(key)
        path.touch(mode=0o600)
        path.write_text(f'api-key: "{key}"\n', "utf-8")
        return url, key, [kind.config_option, str(path)]
    raise SloBenchError(
        f"{kind.title} takes neither a key nor a Unix socket here: others on this machine would "
        "reach it past the gateway; leave --api-key-env out"
    )


def plugin_folder(under: Path) -> Path:
    """Folder for PYTHONPATH with this package and its entry points, made if it does not exist.

    It makes the plugins importable in a server's environment without an installation.

    Raises:
        SloBenchError: it cannot be written.
    """
    plugins = (kind.plugin for kind in server_kinds().values())
    # Servers load their group in every one of their processes.
    entry_points = "\n".join(f"[{p.group}]\n{p.name} = {p.value}\n" for p in plugins if p)
    content = f"{_PACKAGE}\n{_METADATA}\n{entry_points}"
    if core_is_compiled():
        content += f"\n{(_PACKAGE / '__init__.py').stat().st_mtime_ns}"  # of this installation
    folder = under / "plugins" / hashlib.sha256(content.encode()).hexdigest()[:12]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        _link_sources(part / "slo_bench")
        info = part / f"slo_bench-{_VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(_METADATA, "utf-8")
        (info / "entry_points.txt").write_text(entry_points, "utf-8")
    except OSError as error:
        raise SloBenchError(f"{folder} cannot be written: {error.strerror}") from error
    with contextlib.suppress(OSError):  # another process was faster: its folder is the same
        part.rename(folder)
    shutil.rmtree(part, ignore_errors=True)
    return folder


def _link_sources(folder: Path) -> None:
    """Make `folder` this package. A server runs the source, so that extension modules of a compiled
    core stay out.
    """
    if not core_is_compiled():
        folder.symlink_to(_PACKAGE, target_is_directory=True)
        return
    for path in _PACKAGE.rglob("*"):
        if path.is_file() and path.suffix not in (".so", ".pyd", ".pyc"):
            link = folder / path.relative_to(_PACKAGE)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def _environ(kind: ServerKind, environment: Environment, launch: Launch) -> dict[str, str]:
    """The process environment for a server: without this package's own variables, with those of its
    kind.
    """
    present = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *_OURS):
        present.pop(name, None)
    environ = {**kind.environ(environment.device, launch), **present}
    environ["PATH"] = f"{environment.programs}{os.pathsep}{present.get('PATH', os.defpath)}"
    environ["PYTHONUNBUFFERED"] = "1"
    if launch.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpus)
    if _plugged(launch) or launch.transfer is not None:
        environ["PYTHONPATH"] = str(plugin_folder(home()))
    if _plugged(launch):
        environ[HANDSHAKE_VARIABLE] = str(launch.handshake)
    if launch.step_log is not None:
        environ[STEP_LOG_VARIABLE] = str(launch.step_log.absolute())
    if launch.system is not None and launch.policy is not None:
        environ[POLICY_VARIABLE] = PolicySpec.of(launch.system, launch.policy).to_json()
        environ[NUM_CPU_BLOCKS_VARIABLE] = str(launch.num_cpu_blocks or 0)
        if launch.embedder is not None:
            environ[EMBEDDER_VARIABLE] = launch.embedder.to_json()
    return environ


def _plugged(launch: Launch) -> bool:
    """Whether the plugin runs inside the server, to decide or to log steps."""
    return launch.system is not None or launch.step_log is not None


def _start(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        output.write(f"$ {' '.join(argv)}\n".encode())
        output.flush()
        return subprocess.Popen(
            [sys.executable, "-S", "-E", str(_GUARD), str(_GRACE_S), *expanded(argv)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )


def _wait_until_ready(server: ServerProcess, startup_timeout_s: float, say: Say) -> None:
    begin_s = time.monotonic()
    said_s = begin_s
    while True:
        server.check()
        with contextlib.suppress(httpx.HTTPError), server.http(5) as client:
            if client.get(server.health_url).status_code == 200:
                return
        now_s = time.monotonic()
        if now_s - begin_s > startup_timeout_s:
            problem = f"{server.name} was not ready within {startup_timeout_s:.0f} s"
            raise ServerError(server.with_log(problem))
        if now_s - said_s > 15:
            said_s = now_s
            say(f"{server.name} is starting ({now_s - begin_s:.0f} s)")
        time.sleep(_LOOK_EVERY_S)


def _handshake(server: ServerProcess, launch: Launch) -> Mapping[str, object]:
    """The plugin's report. Raises ServerError if the plugin was asked for and has not reported."""
    if not _plugged(launch):
        return {}
    assert launch.handshake is not None
    if not launch.handshake.is_file():
        missing = f"the policy {launch.system}" if launch.system else "the log of its steps"
        raise ServerError(
            server.with_log(
                f"{server.name} came up, but {missing} is not in it: its hooks "
                "never said that they are in place (does the server's version fit?)"
            )
        )
    report: dict[str, object] = json.loads(launch.handshake.read_text("utf-8"))
    return report
