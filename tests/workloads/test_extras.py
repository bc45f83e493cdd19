from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.extras import (
    USES,
    import_failure,
    is_installed,
    module_of,
    need,
    requirements,
)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    extra: texts for extra, texts in PROJECT["optional-dependencies"].items() if extra != "test"
}
METADATA = [
    "scipy>=1.11",
    "typer>=0.15",
    "uvloop>=0.21; sys_platform != 'win32'",
    "pyarrow>=17; extra == 'parquet'",
    "psycopg[binary]>=3.2; extra == 'postgres'",
    "scikit-learn>=1.4; extra == 'regressors'",
    "scikit-learn>=1.4; extra == 'torch'",
    "torch>=2.9; extra == 'torch'",
]


@pytest.fixture(autouse=True)
def metadata(monkeypatch):
    """What pip knows of slo-bench: an editable install may know an older pyproject.toml."""
    monkeypatch.setattr("importlib.metadata.requires", lambda name: METADATA)
    requirements.cache_clear()
    yield
    requirements.cache_clear()


def test_requirements_are_grouped_by_extra():
    assert list(requirements()) == ["scipy", "typer", "uvloop"]
    assert requirements("postgres") == {"psycopg": "psycopg[binary]>=3.2"}
    assert list(requirements("torch")) == ["scikit-learn", "torch"]


def test_every_extra_has_a_description():
    assert set(USES) == set(OPTIONAL)


@pytest.mark.parametrize("extra", ["parquet", "regressors"])
def test_need_names_packages_and_extra(monkeypatch, extra):
    package = next(iter(requirements(extra)))
    need(extra, "--option")
    monkeypatch.setitem(sys.modules, module_of(package), None)
    with pytest.raises(SloBenchError) as raised:
        need(extra, "--option")
    assert str(raised.value) == f"--option needs {package}: pip install 'slo-bench[{extra}]'"


def test_a_folder_without_code_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("no_such_package")


def failure_of(statement: str) -> str | None:
    """What becomes of the ImportError of a statement."""
    try:
        exec(compile(statement, "command", "exec"), {"__name__": "slo_bench.cli.command"})
    except ImportError as error:
        failure = import_failure(error)
        return None if failure is None else str(failure)
    raise AssertionError("the import succeeded")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("scipy", "scipy is not installed: pip install 'scipy>=1.11'"),
        ("sklearn", "scikit-learn is not installed: pip install 'slo-bench[regressors]'"),
        ("torch", "torch is not installed: pip install 'slo-bench[torch]'"),
        ("no_such_package", None),
    ],
)
def test_import_failure_names_what_installs_a_missing_module(monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    assert failure_of(f"import {module}") == message


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('libpq.so.5: cannot open\\nmore')", "libpq.so.5: cannot open"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("from psycopg import absent", "cannot import name 'absent' from"),
    ],
)
def test_import_failure_tells_broken_from_missing(tmp_path, monkeypatch, code, reason):
    (tmp_path / "psycopg.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    message = failure_of("import psycopg")
    assert message is not None
    assert message.startswith(f"psycopg is installed but cannot be imported ({reason}")
    assert message.endswith("): pip install --force-reinstall 'psycopg[binary]>=3.2'")


def test_import_failure_of_a_users_module_is_theirs(tmp_path, monkeypatch):
    (tmp_path / "users_policy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    assert failure_of("import users_policy") is None


def test_import_failure_names_the_last_package_whose_import_broke(tmp_path, monkeypatch):
    (tmp_path / "psycopg.py").write_text("import pyarrow")
    (tmp_path / "pyarrow.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    for loaded in [key for key in sys.modules if key.partition(".")[0] in ("psycopg", "pyarrow")]:
        monkeypatch.delitem(sys.modules, loaded)
    message = failure_of("import psycopg")
    assert message is not None
    assert message.startswith("pyarrow is installed but cannot be imported (No module named")


@pytest.mark.parametrize("statement", ["from scipy import absent", "import scipy.absent"])
def test_import_failure_blames_no_package_for_a_name_that_a_users_file_invents(
    tmp_path, monkeypatch, statement
):
    (tmp_path / "users_hook.py").write_text(f"def queue_key():\n    {statement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert failure_of("import users_hook; users_hook.queue_key()") is None
    ours = failure_of(statement)
    assert ours is not None
    assert " is installed but cannot be imported (" in ours


# The following holds the imports of the package against the groups of pyproject.toml.

INSIDE_SERVERS = (
    "harness/servers/plugin/",
    "harness/servers/vllm/plugin/",
    "harness/servers/sglang/plugin/",
    "harness/servers/sglang/cpu/",
)
# Lazy imports that no guard in the same module precedes, since the caller has one.
GUARDED_BY_CALLER = {
    "harness/engine/torch/threads.py",  # computes in an engine that was loaded
    "harness/load_generator/load_workers.py",  # `RayStation` gets the module ray
    "predictors/costs/regressors.py",  # `fit_costs` asks
    "predictors/lengths/evaluate_predictor.py",  # `latency` gets a loaded predictor
}


def import_names(requirements_of_group: list[str]) -> set[str]:
    return {module_of(re.split(r"[^\w.-]", text)[0]) for text in requirements_of_group}


ALWAYS_THERE = import_names(PROJECT["dependencies"]) | {"slo_bench"}
BROUGHT_BY = {
    module: {extra for extra, texts in OPTIONAL.items() if module in import_names(texts)}
    for texts in OPTIONAL.values()
    for module in import_names(texts) - ALWAYS_THERE
}


@dataclass
class Module:
    """The imports of a module: what it imports at its top, and in which line inside functions."""

    path: str
    top: set[str]
    lazy: dict[str, int]
    guards: set[str]  # extras and modules that it asks for

    def is_guarded(self, imported: str) -> bool:
        return bool(self.guards & (BROUGHT_BY.get(imported, set()) | {imported}))


def package_files() -> Iterator[Path]:
    yield from ROOT.glob("*.py")
    for folder in sorted(ROOT.glob("*/__init__.py")):
        yield from sorted(folder.parent.rglob("*.py"))


def catches_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and "ImportError" in ast.unparse(handler.type)


def read_module(path: Path, name: str, names: set[str]) -> Module:
    text = path.read_text()
    guards = set(re.findall(r'\b(?:need|is_installed)\("(\w+)"', text))
    module = Module(path.relative_to(ROOT).as_posix(), set(), {}, guards)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base

    def read(node: ast.AST, *, inside_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Try) and any(map(catches_import_error, child.handlers)):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in targets(child):
                    imported = target if target in names else target.partition(".")[0]
                    if inside_function:
                        module.lazy.setdefault(imported, child.lineno)
                    else:
                        module.top.add(imported)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            read(child, inside_function=inside_function or function)

    read(ast.parse(text), inside_function=False)
    return module


@cache
def modules_of_the_package() -> dict[str, Module]:
    files = {}
    for path in package_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("slo_bench", *(part for part in parts if part != "__init__")))
        files[name] = path
    return {name: read_module(path, name, set(files)) for name, path in files.items()}


@pytest.mark.slow
def test_modules_of_an_extra_are_imported_behind_its_guard_alone():
    modules = modules_of_the_package()
    needs = {
        name: {package for package in module.top if package in BROUGHT_BY}
        for name, module in modules.items()
    }
    grown = True
    while grown:  # what a module needs at its top, through others too
        before = sum(map(len, needs.values()))
        for name, module in modules.items():
            needs[name] |= {
                package for imported in module.top for package in needs.get(imported, ())
            }
        grown = sum(map(len, needs.values())) > before
    wrong = []
    for name, module in modules.items():
        if module.path.startswith(INSIDE_SERVERS) or module.path in GUARDED_BY_CALLER:
            continue
        if module.path.startswith("cli/") and needs[name]:
            wrong.append(f"{module.path} needs {needs[name]} at its top")
        if needs[name]:  # whoever imports it has the guard
            continue
        for imported, line in module.lazy.items():
            for needed in needs.get(imported, {imported} & BROUGHT_BY.keys()):
                if not module.is_guarded(needed):
                    wrong.append(f"{module.path}:{line} imports {imported}: {needed}")
    assert not wrong, "\n".join(wrong)


def test_every_import_is_declared():
    declared = ALWAYS_THERE | BROUGHT_BY.keys() | sys.stdlib_module_names
    undeclared = {
        f"{module.path} imports {name}"
        for module in modules_of_the_package().values()
        for name in {*module.top, *module.lazy}
        if name.partition(".")[0] not in declared
    }
    assert not undeclared


def test_exceptions_of_the_guard_exist():
    assert all((ROOT / path).is_file() for path in GUARDED_BY_CALLER)


def test_commands_load_without_any_extra():
    blocked = sorted(BROUGHT_BY)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
        "import importlib, pkgutil, slo_bench.cli.commands as commands\n"
        "for entry in pkgutil.iter_modules(commands.__path__):\n"
        "    importlib.import_module(f'{commands.__name__}.{entry.name}')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
