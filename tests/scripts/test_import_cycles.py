"""Circles of a toy package, and the contracts of pyproject.toml, held against empty folders."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = (
    "__init__.py",
    "policy.py",
    "cli",
    "harness",
    "predictors",
    "reports",
    "tuner",
    "workloads",
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes modules into a package `toy`, and returns the name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources: str) -> str:
        for name, text in {"__init__": "from .low import x\n", **sources}.items():
            path = tmp_path / "toy" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return "toy"

    return write


def test_imports_one_way_are_no_circle(toy, import_cycles, capsys):
    package = toy(top="import json\nfrom .low import x\nfrom . import y\n", low="from . import y\n")
    assert import_cycles.main([package]) == 0
    assert capsys.readouterr().out == "no circle between modules\n"


@pytest.mark.parametrize(
    "hidden",
    [
        "from .top import b\n",
        "def f():\n    from .top import b\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .top import b\n",
        "class C:\n    def f(self):\n        import toy.top\n",
    ],
    ids=["at the top", "in a function", "under TYPE_CHECKING", "in a method"],
)
def test_circle_through_three_modules_is_named(toy, import_cycles, capsys, hidden):
    package = toy(top="from . import middle\n", middle="from .low import x\n", low=hidden)
    assert import_cycles.main([package]) == 1
    modules = capsys.readouterr().out.strip().split(" → ")
    assert modules[0] == modules[-1]
    assert set(modules) == {"toy.top", "toy.middle", "toy.low"}
    imported_by = {"toy.middle": "toy.top", "toy.low": "toy.middle", "toy.top": "toy.low"}
    assert [imported_by[module] for module in modules[:-1]] == modules[1:]


def linted(folder, **sources):
    """What lint-imports says of the package with other `sources`, all else of it left empty."""
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--", *PACKAGE], check=True, capture_output=True, text=True
    ).stdout.split()
    for name in (file for file in files if file.endswith(".py")):
        text = (ROOT / name).read_text()
        kept = (
            text if name == "__init__.py" else "".join(re.findall(r".*import __version__\n", text))
        )
        path = folder / "slo_bench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kept.strip() + "\n")
    for name, text in sources.items():
        path = folder / "slo_bench" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    program = "from importlinter.cli import lint_imports_command as command; command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_contracts_hold_for_folders_that_import_nothing(tmp_path):
    checked = linted(tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "5 kept, 0 broken" in checked.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("workloads/low", "from ..tuner import high", "slo_bench.workloads.low -> slo_bench.tuner"),
        (
            "harness/core/low",
            "def f():\n    from ..policies import systems",
            "slo_bench.harness.core.low -> slo_bench.harness.policies.systems",
        ),
        ("harness/core/low", "from ...policy import Policy", "core.low -> slo_bench.policy"),
        ("harness/core/low", "from ... import Experiment", "harness.core.low -> slo_bench"),
        ("stray/__init__", "", "slo_bench.stray"),
        ("harness/stray", "", "slo_bench.harness.stray"),
    ],
    ids=["upward", "upward in the harness", "policy.py", "facade", "new folder", "new module"],
)
def test_contracts_break_by_a_module_that(tmp_path, module, source, named):
    checked = linted(tmp_path, **{module: f"{source}\n"})
    assert checked.returncode == 1
    assert named in checked.stdout
