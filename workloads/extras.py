"""Packages that slo-bench always needs, and those that an extra adds.

Both are read from the metadata of the installed slo-bench, that is from pyproject.toml. `need`
stands where a command begins. `import_failure` turns a later ImportError into the same line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from traceback import walk_tb

from .errors import SloBenchError

DISTRIBUTION = "slo-bench"
ALWAYS = ""  # in place of an extra's name
_PACKAGE = __name__.partition(".")[0]

# What people get from each extra. A package of several is named with the first of them.
USES: Mapping[str, str] = {
    "parquet": "records and profiles as Parquet",
    "postgres": "studies in a PostgreSQL",
    "ray": "cells on several machines",
    "regressors": "cost models of preemption, TF-IDF predictions, importances by fANOVA",
    "torch": "torch engine, learnt length predictors, tokenizers",
    "encoder": "base model of learnt length predictors",
    "vllm": "vLLM for CUDA in this environment; `backends install` keeps it apart",
    "sglang": "SGLang for CUDA in this environment; `backends install` keeps it apart",
}

# Import names that do not follow from the package's name.
_MODULES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml", "scikit-learn": "sklearn"}


def module_of(package: str) -> str:
    """The import name of a package."""
    return _MODULES.get(package, package.replace("-", "_"))


@cache
def requirements(extra: str = ALWAYS) -> Mapping[str, str]:
    """What is always needed, or what an extra adds, on this platform: the requirement as pip takes
    it by the package's name. Nothing where the metadata of slo-bench is not at hand, as in the
    environment of a server.
    """
    from importlib.metadata import PackageNotFoundError, requires  # a quarter of `--version`

    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    by_name = {}
    for text in declared:
        requirement, _, condition = text.partition(";")
        if "sys_platform" in condition and sys.platform == "win32":
            continue
        group = re.search(r"extra == ['\"]([^'\"]+)['\"]", condition)
        if (group[1] if group else ALWAYS) == extra:
            name = re.split(r"[<>=!~\[\s]", requirement.strip())[0]
            by_name[name] = requirement.strip()
    return by_name


def is_installed(module: str) -> bool:
    """Whether a module can be found. A folder of its name on the path, without code, is none."""
    try:
        spec = find_spec(module)
    except ValueError:  # it is loaded, and was made without a spec
        return True
    return spec is not None and spec.origin is not None


def missing(extra: str = ALWAYS) -> list[str]:
    """Names of the packages of an extra that are not installed."""
    return [name for name in requirements(extra) if not is_installed(module_of(name))]


def install_command(extra: str, names: Iterable[str] = ()) -> str:
    """The command that installs an extra, or those of the packages that are always needed."""
    if extra:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install {shlex.join(requirements()[name] for name in names)}"


def reinstall_command(extra: str, name: str) -> str:
    """The command that replaces a package that is installed but broken."""
    return f"pip install --force-reinstall {shlex.quote(requirements(extra)[name])}"


def need(extra: str, purpose: str) -> None:
    """Check that an extra is installed.

    Args:
        extra: its name in pyproject.toml.
        purpose: what the user asked for, in their words: `--executor ray`.

    Raises:
        SloBenchError: a package is missing; names the command that installs the extra.
    """
    if names := missing(extra):
        raise SloBenchError(f"{purpose} needs {', '.join(names)}: {install_command(extra)}")


def import_failure(error: ImportError) -> SloBenchError | None:
    """The error as one line with its remedy if a package of slo-bench or of an extra is missing, or
    is there and broken; None if the error has another origin.
    """
    origins = {
        module_of(name): (extra, name)
        for extra in (*reversed(list(USES)), ALWAYS)
        for name in requirements(extra)
    }
    module = (error.name or "").partition(".")[0]
    if module in origins and not is_installed(module):
        extra, name = origins[module]
        return SloBenchError(f"{name} is not installed: {install_command(extra, [name])}")
    importing, in_users_code = _being_imported(error, origins)
    if importing or in_users_code:
        module = importing
    if module not in origins:
        return None
    extra, name = origins[module]
    reason = str(error).strip().partition("\n")[0]
    return SloBenchError(
        f"{name} is installed but cannot be imported ({reason}): {reinstall_command(extra, name)}"
    )


def _being_imported(error: ImportError, modules: Mapping[str, object]) -> tuple[str, bool]:
    """The last of `modules` whose import broke off with the error, or an empty string; and whether
    the failed import stands in code of a user.
    """
    importing, module = "", ""
    for frame, _ in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module == _PACKAGE:
            importing = ""
        elif module in modules and frame.f_code.co_name == "<module>":
            importing = module
    return importing, module != _PACKAGE and module not in modules
