"""Circles and upward imports of a toy package with three folders."""

import pytest

CONTRACT = """
[tool.importlinter]
root_package = "toy"

[[tool.importlinter.contracts]]
name = "Imports run one way"
type = "layers"
layers = ["toy.top", "toy.inner.middle", "toy.inner.low"]
"""
CLEAN = {
    "__init__.py": "from .top.a import a\n",
    "top/__init__.py": "",
    "top/a.py": "from ..inner.middle.b import b\nfrom .. import __version__\n",
    "inner/__init__.py": "",
    "inner/middle/__init__.py": "",
    "inner/middle/b.py": "import json\nimport toy.inner.low.c\n",
    "inner/low/__init__.py": "",
    "inner/low/c.py": "from . import d\n",
    "inner/low/d.py": "",
}


@pytest.fixture
def checked(tmp_path, import_cycles):
    def check(**changed: str):
        (tmp_path / "pyproject.toml").write_text(CONTRACT)
        for name, text in {**CLEAN, **changed}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return import_cycles.check(tmp_path)

    return check


def test_clean_package_has_no_findings(checked, tmp_path, import_cycles, capsys):
    findings = checked()
    assert not findings.is_wrong
    assert not findings.module_circles
    assert import_cycles.main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "circles between modules: 0",
        "circles between folders: 0",
        "imports that go upward: 0",
        "modules in no folder of the contract: 0",
    ]


@pytest.mark.parametrize(
    "hidden",
    [
        "def f():\n    from ..middle.b import b\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..middle import b\n",
        "class C:\n    def f(self):\n        import toy.inner.middle.b\n",
    ],
    ids=["in a function", "under TYPE_CHECKING", "in a method"],
)
def test_hidden_upward_import_makes_a_folder_circle(
    checked, tmp_path, import_cycles, capsys, hidden
):
    findings = checked(**{"inner/low/c.py": hidden})
    assert findings.folder_circles == [("toy.inner.low", "toy.inner.middle")]
    assert findings.module_circles == [("toy.inner.low.c", "toy.inner.middle.b")]
    assert [(i.importer, i.imported) for i in findings.upward] == [
        ("toy.inner.low.c", "toy.inner.middle.b")
    ]
    assert import_cycles.main(["--root", str(tmp_path), "--folders-only"]) == 1
    printed = capsys.readouterr().out
    assert "inner/low → inner/middle → inner/low" in printed
    assert "between modules" not in printed


def test_circle_in_one_folder_is_no_error(checked):
    findings = checked(**{"inner/low/d.py": "from .c import x\n"})
    assert findings.module_circles == [("toy.inner.low.c", "toy.inner.low.d")]
    assert not findings.is_wrong


def test_folder_below_may_not_import_the_facade(checked):
    findings = checked(**{"inner/low/d.py": "from ... import a\n"})
    assert [i.imported for i in findings.upward] == ["toy"]


def test_module_outside_all_folders_is_named(checked):
    assert checked(**{"inner/stray.py": ""}).homeless == ["toy.inner.stray"]


def test_shortest_circle_through_each_node(import_cycles):
    graph = {"a": {"b"}, "b": {"c", "a"}, "c": {"d"}, "d": {"b"}, "e": {"a"}}
    assert import_cycles.circles(graph) == [("a", "b"), ("b", "c", "d")]
