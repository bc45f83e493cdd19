"""Does the plugin fit a server? Python with the server's packages is asked, without a start.

A version that is not installed is fetched without its dependencies, and read by the Python of the
installed version of the same server.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ....workloads.errors import SloBenchError
from .environments import Environment, environment, fetch_server, home, installed
from .server_kind import Launch
from .server_process import plugin_folder

_PATIENCE_S = 300.0
_MARK = "slo_bench_hooks "  # servers print on stdout while they are imported


@dataclass(frozen=True)
class HookCheck:
    """Version of a server, how many of its functions the plugin uses, and those that moved."""

    environment: str
    version: str
    targets: int
    problems: tuple[str, ...]


def check_hooks(name: str) -> HookCheck:
    """Compare the functions that the plugin uses with those of a server: `vllm`, `vllm==V`, or the
    name of an environment.

    Raises:
        SloBenchError: the server cannot be imported; or it is not installed, and cannot be fetched
            or no other version is installed.
    """
    backend, _, version = name.partition("==")
    try:
        installation = environment(name)
    except SloBenchError:
        others = [other for other in installed() if other.backend == backend]
        if not version or not others:
            raise
        # Of the nearest version: its dependencies fit best.
        nearest = min(others, key=lambda other: _distance(other.version, version))
        with tempfile.TemporaryDirectory(prefix="slo-bench-") as folder:
            fetch_server(nearest, version, Path(folder))
            _, targets, problems = _check_inside(nearest, folder)
        return HookCheck(f"{name} with the packages of {nearest.name}", version, targets, problems)
    version, targets, problems = _check_inside(installation)
    return HookCheck(installation.name, version, targets, problems)


def _distance(version: str, other_version: str) -> list[int]:
    """How far versions are from each other, part by part."""
    parts = (
        [int(n) if n.isdigit() else 0 for n in text.split(".")[:3]]
        for text in (version, other_version)
    )
    return [abs(a - b) for a, b in zip(*parts, strict=False)]


def _check_inside(installation: Environment, folder: str = "") -> tuple[str, int, tuple[str, ...]]:
    """Version, number of functions and what moved, by the Python of an environment; packages in
    `folder` come first.
    """
    kind = installation.kind
    if kind.hooks is None:
        raise SloBenchError(f"no plugin runs in {kind.title}: there is nothing to check")
    code = (
        f"import json\nfrom {kind.hooks.__name__} import TARGETS, moved, server_version\n"
        f"print({_MARK!r} + json.dumps([server_version(), len(TARGETS), moved()]))"
    )
    if folder:  # and nothing else is what was asked
        path = f"{installation.backend}.__file__"
        code += f"\nimport {installation.backend}\nassert {path}.startswith({folder!r}), {path}"
    launch = Launch(model="", port=0)
    environ = {**kind.environ(installation.device, launch), **os.environ}
    paths = os.pathsep.join(filter(None, (folder, str(plugin_folder(home())))))
    try:
        done = subprocess.run(
            [installation.python, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            env={**environ, "PYTHONPATH": paths},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SloBenchError(f"{installation.name} cannot be asked: {error}") from error
    report_lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not report_lines or (folder and done.returncode):
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise SloBenchError(f"{installation.name} cannot be imported: {last[0]}")
    version, targets, problems = json.loads(report_lines[-1].removeprefix(_MARK))
    return str(version), int(targets), tuple(problems)
