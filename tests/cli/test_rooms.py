"""The map of the source in docs/ and the tree are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
PAGES = (
    "docs/architecture.md",
    "docs/papers.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "papers").glob("*.md")),
)


def modules() -> set[str]:
    return {
        str(path.relative_to(ROOT)) for room in PACKAGE for path in (ROOT / room).rglob("*.py")
    } | {
        str(path.relative_to(ROOT))
        for room in ("tests", "tools", "scripts", "examples")
        for path in (ROOT / room).rglob("*.py")
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page):
    """By its path, or by the end of it where the page has said which room it speaks of."""
    there = modules()
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    lost = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert not lost


@pytest.mark.parametrize("page", PAGES)
def test_every_folder_that_a_page_names_exists(page):
    named = re.findall(r"`([\w/]+/)`", (ROOT / page).read_text())
    rooms = [name for name in named if name.partition("/")[0] in PACKAGE]
    assert not [name for name in rooms if not (ROOT / name).is_dir()]


def test_architecture_page_names_every_folder_of_the_package():
    page = (ROOT / "docs/architecture.md").read_text()
    of_harness = [path for path in (ROOT / "harness").iterdir() if path.name[:2] != "__"]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in of_harness]
    names += [f"{room}/" for room in PACKAGE if room != "harness"]
    assert not [name for name in names if f"/{name}`" not in page and f"`{name}`" not in page]
