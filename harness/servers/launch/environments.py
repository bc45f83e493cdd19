"""Isolated environments for servers: their pins conflict with each other and with ours.

    <home>/environments/<backend>-<version>-<device>/
        bin/ lib/ …           a virtual environment
        slo-bench.json        written last: an environment without it is unfinished
        install.log           output of the installer

`home` is `$SLO_BENCH_HOME`, or the platform's folder for application data.

A server that is installed beside slo-bench itself (`pip install 'slo-bench[vllm]'`) is an
environment too, which is taken where there is no isolated one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from platformdirs import user_data_path

from ....workloads.errors import SloBenchError, UnknownNameError
from ....workloads.parsing import parse_json
from ..server_kinds import LAUNCHED, SERVERS, server_kind, server_kinds
from .server_kind import Build, InstallStep, ServerKind

HOME_VARIABLE = "SLO_BENCH_HOME"
TORCH_INDEX_VARIABLE = "SLO_BENCH_TORCH_INDEX"  # a mirror of PyTorch's index; empty: none
THIS = "this environment"
_MARKER = "slo-bench.json"
_LOG = "install.log"
_PROBE_S = 300.0

Say = Callable[[str], None]


def home() -> Path:
    """`$SLO_BENCH_HOME`, or the platform's folder for application data."""
    if chosen := os.environ.get(HOME_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return user_data_path("slo-bench", appauthor=False)


@dataclass(frozen=True)
class Environment:
    """A server's Python environment: path, backend, version and device."""

    path: Path
    backend: str
    version: str
    device: str

    @property
    def name(self) -> str:
        """Name in `slo-bench backends list`."""
        return f"{self.backend}-{self.version}-{self.device}"

    @property
    def programs(self) -> Path:
        """Folder of the environment's executables."""
        return self.path / ("Scripts" if sys.platform == "win32" else "bin")

    @property
    def python(self) -> Path:
        """Path of the Python interpreter."""
        return self.programs / "python"

    @property
    def kind(self) -> ServerKind:
        """What is known of the server."""
        return server_kind(self.backend)


def _folder() -> Path:
    return home() / "environments"


def installed() -> list[Environment]:
    """All finished environments; of each server the newest version first."""
    present = (_read(path.parent) for path in _folder().glob(f"*/{_MARKER}"))
    environments = [environment for environment in present if environment is not None]
    environments.sort(key=lambda e: (_version_key(e.version), e.device), reverse=True)
    return sorted(environments, key=lambda e: e.backend)


def beside_us() -> list[Environment]:
    """Servers in the Python environment of slo-bench itself."""
    environments = []
    for backend, kind in server_kinds().items():
        for distribution in kind.distributions:
            try:
                version, _, local = version_of(distribution).partition("+")
            except PackageNotFoundError:
                continue
            on_cpu = "cpu" in local or distribution.endswith("-cpu")
            device = "cpu" if on_cpu else "cuda"
            if device not in kind.builds:  # one build, whose packages do not name its device
                device = next(iter(kind.builds), device)
            environments.append(Environment(Path(sys.prefix), backend, version, device))
            break
    return environments


def unfinished() -> list[Path]:
    """Folders of interrupted installations."""
    folders = sorted(path for path in _folder().glob("*") if path.is_dir())
    return [path for path in folders if _read(path) is None]


def _read(path: Path) -> Environment | None:
    """The environment in a folder; None if its marker is not there, or is no marker."""
    marker = path / _MARKER
    if not marker.is_file():
        return None
    try:
        kept = parse_json(marker.read_bytes())
    except (OSError, ValueError):
        return None
    match kept:
        case {"backend": str(backend), "version": str(version), "device": str(device)}:
            return Environment(path, backend, version, device)
    return None


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def server_of(name: str) -> str:
    """The server that `environment` looks for by this name: `vllm` for `vllm==0.32.0` and for
    `vllm-0.32.0-cpu`.
    """
    servers = [server for server in SERVERS if f"{name}-".startswith((f"{server}-", f"{server}=="))]
    return max(servers, key=len, default=name.partition("==")[0].partition("-")[0])


def environment(name: str) -> Environment:
    """The newest environment of a server (`vllm`), or a certain one (`vllm==0.32.0`, or its name).

    Isolated ones come before that of slo-bench itself.

    Raises:
        SloBenchError: it is not installed; says how to install it.
    """
    backend, _, version = name.partition("==")
    environments = [*installed(), *beside_us()]
    for candidate in environments:
        if candidate.name == name or (
            candidate.backend == backend and version in ("", candidate.version)
        ):
            return candidate
    if backend not in LAUNCHED:
        raise UnknownNameError("backend", name, [*LAUNCHED, *(e.name for e in environments)])
    version_option = f" --version {version}" if version else ""
    there = ", ".join(e.name for e in environments) or "nothing"
    raise SloBenchError(
        f"{name} is not installed; install it with: slo-bench backends install "
        f"{backend}{version_option} [--cpu] (under {_folder()} and beside slo-bench there is "
        f"{there})"
    )


def install(
    kind: ServerKind,
    device: str,
    *,
    version: str | None = None,
    packages: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Environment:
    """Install a server in an environment of its own unless it is installed, and add packages to it.

    Args:
        kind: of the server.
        device: that it is built for: cpu or cuda.
        version: of the server; by default the one that is tested.
        packages: additional requirements, as for pip.
        say: receives each step and the output of the installer.

    Raises:
        SloBenchError: no such build, no Python that fits, or the installer fails.
    """
    if device not in kind.builds:
        raise UnknownNameError(f"device of {kind.name}", device, kind.builds)
    build = kind.builds[device]
    version = version or build.version
    path = _folder() / f"{kind.name}-{version}-{device}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SloBenchError(
            f"{path.parent} cannot be made ({error.strerror}); set {HOME_VARIABLE} to a folder "
            "you may write to"
        ) from error
    with _alone(path):
        installer = _Installer(path, _python(build, kind.name), say)
        if _read(path) is not None:
            say(f"{path.name} is installed already")
        else:
            if path.exists():
                say("clearing an unfinished installation")
                shutil.rmtree(path)
            _build(installer, build, version)
            marker = {
                "backend": kind.name,
                "version": version,
                "device": device,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            part = path / (_MARKER + ".part")
            part.write_text(json.dumps(marker, indent=2) + "\n", "utf-8")
            part.replace(path / _MARKER)
        if packages:
            say(f"adding {', '.join(packages)}")
            installer.add(InstallStep(tuple(packages)), build.without)
        return Environment(path, kind.name, version, device)


def fetch_server(beside: Environment, version: str, folder: Path) -> None:
    """Put another version of a server into a folder, without its dependencies.

    Raises:
        SloBenchError: the index does not have it for the Python of `beside`.
    """
    names = beside.kind.distributions
    complaint = ""
    for name in names[::-1] if beside.device == "cpu" else names:
        requirement = f"{name}=={version}"
        if uv := shutil.which("uv"):
            words = [uv, "pip", "install", "--quiet", "--python", str(beside.python)]
        else:
            words = [str(beside.python), "-m", "pip", "install", "--quiet"]
        words += ["--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, env=_clean_environ()
            )
        except OSError as error:
            raise SloBenchError(f"{words[0]} cannot be run: {error}") from error
        if not done.returncode:
            return
        complaint = (done.stderr.strip().splitlines() or ["the installer said nothing"])[-1]
    raise SloBenchError(f"{beside.backend}=={version} cannot be fetched: {complaint}")


def remove(name: str) -> list[Path]:
    """Delete an environment by its name, or all environments of one server; returns their folders.

    Raises:
        UnknownNameError: there is nothing of that name.
    """
    folders = [e.path for e in installed()] + unfinished()
    gone = [p for p in folders if name in (p.name, server_of(p.name))]
    if not gone:
        raise UnknownNameError("environment", name, [p.name for p in folders])
    for path in gone:
        (path / _MARKER).unlink(
            missing_ok=True
        )  # first: a partly deleted environment is not installed
        shutil.rmtree(path)
    return gone


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock an environment's folder against a second installer."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.with_suffix(path.suffix + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SloBenchError(f"{path.name} is being installed by another process") from None
        yield


def _python(build: Build, backend: str) -> str:
    """A Python interpreter that the build supports; this process's own if it does."""
    oldest, newest = build.oldest_python, build.newest_python
    if oldest <= sys.version_info[:2] <= newest:
        return sys.executable
    if shutil.which("uv"):
        return f"{oldest[0]}.{oldest[1]}"  # uv downloads it if it is missing
    for minor in range(newest[1], oldest[1] - 1, -1):
        if interpreter := shutil.which(f"python{newest[0]}.{minor}"):
            return interpreter
    raise SloBenchError(
        f"{backend} needs Python {_dotted(oldest)} to {_dotted(newest)} and this is "
        f"{_dotted(sys.version_info[:2])}; install one of them, or uv, and try again"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _build(installer: _Installer, build: Build, version: str) -> None:
    steps = build.steps(version)
    last = len(steps) + 2
    installer.say(f"[1/{last}] making the environment with {installer.tool}")
    installer.make()
    for number, step in enumerate(steps, 2):
        installer.say(f"[{number}/{last}] installing {', '.join(step.packages)}")
        installer.add(step, build.without)
    installer.drop(build.without)
    if build.finish is not None:
        build.finish(installer.site_packages(), version)
    installer.say(f"[{last}/{last}] trying it")
    installer.probe(build.probe)


class _Installer:
    """Installer of packages in one environment: uv if there is one, else venv and pip."""

    def __init__(self, path: Path, python: str, say: Say) -> None:
        self._path = path
        self._base = python
        self._uv = shutil.which("uv")
        self._log = path / _LOG
        self.say = say
        self.tool = "uv" if self._uv else "venv and pip"

    @property
    def _python(self) -> Path:
        return Environment(self._path, "", "", "").python

    def make(self) -> None:
        self._path.mkdir()
        self._log.touch()
        if self._uv:
            self._run([self._uv, "venv", "--allow-existing", "--python", self._base, self._path])
        else:
            self._run([self._base, "-m", "venv", self._path])

    def add(self, step: InstallStep, without: Sequence[str]) -> None:
        flags: list[str | Path] = [] if step.dependencies else ["--no-deps"]
        index = step.index and os.environ.get(TORCH_INDEX_VARIABLE, step.index)
        if self._uv:
            if without:
                overrides = self._path / "overrides.txt"
                lines = [f"{name} ; sys_platform == 'never'\n" for name in without]
                overrides.write_text("".join(lines), "utf-8")
                flags += ["--overrides", overrides]
            # A version with +cpu is on one index only: look at all of them.
            flags += ["--index-strategy", "unsafe-best-match", "--python", self._python]
            command = [self._uv, "pip", "install", *step.packages, *flags]
            if index:
                try:
                    self._run([*command, "--extra-index-url", index])
                    return
                except SloBenchError:
                    self.say(f"once more without {index}")
            self._run(command)
        else:
            if index:  # --retries: of an index that cannot be reached, do without
                flags += ["--extra-index-url", index, "--retries", "1"]
            pip = ["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
            self._run([self._python, *pip, *flags, *step.packages])

    def drop(self, without: Sequence[str]) -> None:
        if without and not self._uv:
            self._run([self._python, "-m", "pip", "uninstall", "-y", *without])

    def site_packages(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        done = subprocess.run(
            [self._python, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        return Path(done.stdout.strip())

    def probe(self, code: str) -> None:
        self._run([self._python, "-c", code], timeout_s=_PROBE_S)

    def _run(self, command: Sequence[str | Path], timeout_s: float | None = None) -> None:
        """Run a command and log its output; an error quotes the end of the log."""
        words = [str(word) for word in command]
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(words)}\n")
            log.flush()
            try:
                with subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=_clean_environ(),
                ) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        log.write(line)
                        log.flush()
                        self.say("    " + line.rstrip())
                    code = process.wait(timeout_s)
            except OSError as error:
                raise SloBenchError(f"{words[0]} cannot be run: {error}") from error
        if code:
            lines = self._log.read_text("utf-8").splitlines()[-12:]
            end = "\n".join(f"    {line}" for line in lines)
            raise SloBenchError(
                f"`{' '.join(words[:5])} …` ended with code {code}; its last words:\n{end}\n"
                f"everything is in {self._log}; mend the cause and run the command again"
            )


def _clean_environ() -> dict[str, str]:
    """The process environment without variables that point the installer or the server at another
    environment.
    """
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "UV_PYTHON")
    return {name: value for name, value in os.environ.items() if name not in ours}
