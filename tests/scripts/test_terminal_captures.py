"""Last screens of eight commands: how they are taken, and that the answer stands on each."""

from __future__ import annotations

import importlib.util
import shutil
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREENS = ROOT / "docs" / "images" / "terminal"
TESTED = ("llama-3.1-8b on", "observed: models/tiny on vllm", "of llama-3.1-8b,")


def _script():
    path = ROOT / "scripts" / "terminal_captures.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine")
def test_last_screen_has_the_last_lines_of_a_long_output(tmp_path):
    lines = script.last_screen("seq 100", tmp_path).splitlines()
    assert lines == [*map(str, range(78, 101)), "$"]


@pytest.mark.parametrize("name", script.COMMANDS)
def test_last_screen_names_what_was_tested_and_has_the_width_of_a_terminal(name):
    lines = (SCREENS / f"{name}.txt").read_text("utf-8").splitlines()
    assert len(lines) <= script.LINES
    assert max(map(len, lines)) <= script.COLUMNS
    assert lines[-1] == "$"
    assert any(text in " ".join(lines) for text in TESTED)
    assert not any(unicodedata.category(c) == "Cc" for line in lines for c in line)


def test_index_links_every_last_screen():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert all(f"(images/terminal/{name}.txt)" in index for name in script.COMMANDS)
