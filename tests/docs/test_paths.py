"""Paths of this repository that pages, the justfile, pyproject.toml and CI name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cli", "docs", "examples", "harness", "predictors", "reports", "scripts", "tests")
FOLDERS += ("tuner", "workloads", ".ci", ".github")
PATH = re.compile(rf"(?<![\w./@<-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*[\w/*]")
FILES = [
    *(ROOT / name for name in ("justfile", "pyproject.toml", "action.yml", "mkdocs.yml")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Containerfile")),
    ROOT / ".pre-commit-config.yaml",
    *sorted((ROOT / ".ci").iterdir()),
    *sorted((ROOT / ".github").rglob("*.*ml")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def missing_paths(text, folder):
    """Paths in a text that exist neither from the root nor from `folder`; NAME is any name."""
    paths = {path for path in PATH.findall(text) if not re.search(r"\b[A-Z]+\.\w+$", path)}
    return sorted(
        path for path in paths if not any(any(base.glob(path)) for base in (ROOT, folder))
    )


def test_missing_paths_are_found_and_placeholders_are_not():
    text = "see `tests/policies`, `harness/policies/NAME.py`, `scripts/*.py`; `tests/docs/`."
    assert missing_paths(text, ROOT) == ["tests/policies"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_named_paths_exist(file):
    assert missing_paths(file.read_text(encoding="utf-8"), file.parent) == []
