"""Does the plugin fit an installed server? Its own Python is asked, without a start."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from ....workloads.errors import SloBenchError
from .environments import Environment, home, recipe
from .recipe import Launch
from .server_process import plugin_folder

_PATIENCE_S = 300.0
_MARK = "slo_bench_hooks "  # servers print on stdout while they are imported
_CODE = {
    "vllm": "from slo_bench.harness.servers.plugins.vllm.hooks import "
    "HOOKS as names, moved, vllm_version as version",
    "sglang": "from slo_bench.harness.servers.plugins.sglang.targets import "
    "TARGETS as names, moved, sglang_version as version",
}


@dataclass(frozen=True)
class HookCheck:
    """Version of a server, how many of its functions the plugin uses, and those that moved."""

    environment: str
    version: str
    targets: int
    problems: tuple[str, ...]


def check_hooks(environment: Environment) -> HookCheck:
    """Compare the functions that the plugin uses with those of an installed server.

    Raises:
        SloBenchError: the server cannot be imported.
    """
    code = (
        f"import json\n{_CODE[environment.backend]}\n"
        f"print({_MARK!r} + json.dumps([version(), len(names), moved()]))"
    )
    launch = Launch(model="", port=0)
    environ = {**recipe(environment.backend).environ(environment.device, launch), **os.environ}
    try:
        done = subprocess.run(
            [environment.python, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            env={**environ, "PYTHONPATH": str(plugin_folder(home()))},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SloBenchError(f"{environment.name} cannot be asked: {error}") from error
    said = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not said:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise SloBenchError(f"{environment.name} cannot be imported: {last[0]}")
    version, targets, problems = json.loads(said[-1].removeprefix(_MARK))
    return HookCheck(environment.name, version, targets, tuple(problems))
