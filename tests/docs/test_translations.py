"""The Chinese pages have the commands, outputs and links of the English ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEN = (
    *("guide-capacity", "getting-started", "guide-choose", "guide-gate", "guide-replay"),
    *("guide-predictor", "guide-policy", "guide-tune", "guide-profile", "observe"),
)
PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    *((DOCS / f"{name}.md", DOCS / "zh" / f"{name}.md") for name in TEN),
]
OUTPUT = re.compile(r"<!-- output -->\n\n```text\n(.+?)```\n\n<!-- end -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[str]:
    """Fenced blocks: commands, files and outputs."""
    return re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def links(page: Path) -> set[str]:
    """Where a page links to, each file by its path from the root and the ten by their name."""
    targets = set()
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        address, _, anchor = link.partition("#")
        if link.startswith("http") or not address:
            targets.add(link)
            continue
        target = (page.parent / address).resolve()
        assert target.exists(), f"{page.name}: {link}"
        ours = target.stem in TEN and target.parent in (DOCS, DOCS / "zh")
        name = target.stem if ours else str(target.relative_to(ROOT))
        targets.add(f"{name}#{anchor}" if anchor and not ours else name)
    return targets - {"README.md", "README.zh-CN.md"}


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda page: page.stem)
def test_both_languages_have_the_same_commands_outputs_and_links(english, chinese):
    assert blocks(chinese) == blocks(english)
    assert links(chinese) == links(english)
    text = chinese.read_text(encoding="utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 150


@pytest.mark.parametrize("name", TEN)
def test_page_of_a_job_has_command_output_reading_and_next_step(name):
    for folder, reading, following in (
        (DOCS, "How to read it", "Next"),
        (DOCS / "zh", "如何解读", "下一步"),
    ):
        text = (folder / f"{name}.md").read_text(encoding="utf-8")
        assert OUTPUT.search(text), f"{name}: python scripts/page_outputs.py {name}"
        if name != "guide-policy":
            places = [text.index(part) for part in ("```", f"## {reading}", f"## {following}")]
            assert places == sorted(places)
    page = DOCS / f"{name}.md"
    words = len(page.read_text(encoding="utf-8").split()) - sum(
        len(b.split()) for b in blocks(page)
    )
    assert words < 900  # read in less than five minutes


def test_ten_pages_are_in_the_navigation_of_both_languages():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {name}.md\n" in navigation for name in TEN)
    assert all(f": zh/{name}.md\n" in navigation for name in TEN)
    assert "README.zh-CN.md" in (ROOT / "README.md").read_text(encoding="utf-8")
