"""Paths of this repository that pages, the justfile, pyproject.toml and CI name exist, and every
page of docs/ is linked.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("cli", "docs", "examples", "harness", "predictors", "reports", "scripts", "tests")
FOLDERS += ("tuner", "workloads", ".ci", ".github")
PATH = re.compile(rf"(?<![\w./@<-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*[\w/*]")
FILES = [
    *(ROOT / name for name in ("justfile", "pyproject.toml", "action.yml", "mkdocs.yml")),
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("SECURITY.md", "Containerfile")),
    ROOT / ".pre-commit-config.yaml",
    *sorted((ROOT / ".ci").iterdir()),
    *sorted((ROOT / ".github").rglob("*.*ml")),
    *sorted(DOCS.rglob("*.md")),
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


def linked_pages(page):
    """The pages that a page links by a relative address."""
    links = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links}


def folder_indexes(pages):
    """Those of some pages that are the index of a folder: `papers.md`, `decisions/index.md`."""
    return {page for page in pages if page.name == "index.md" or page.with_suffix("").is_dir()}


def test_every_page_is_linked_from_the_index_or_an_index_that_it_links():
    index = DOCS / "index.md"
    linked = linked_pages(index)
    linked = linked.union(*map(linked_pages, folder_indexes(linked)))
    pages = {page for page in DOCS.rglob("*.md") if page != index}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []


def test_page_of_every_paper_links_measured_runs_of_its_systems():
    table = (DOCS / "papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^]]+\]\((papers/\w+\.md)\).*\| (.+) \|$", table, re.M)
    assert len(rows) >= 6
    for page, systems in rows:
        linked = [link for link in linked_pages(DOCS / page) if link.parent.name == "measurements"]
        texts = [link.read_text(encoding="utf-8") for link in linked]
        names = re.findall(r"`([\w-]+)`", systems)
        assert any(name in text for name in names for text in texts), f"{page}: {names}"


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
