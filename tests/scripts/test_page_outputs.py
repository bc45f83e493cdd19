"""Outputs in pages: which blocks have one, how it is written, and what stops the script."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "page_outputs.py"
PAGE = (
    "# A page\n\n```sh\necho first\necho second\n```\n\n<!-- output -->\n\n```text\nold\n```\n\n"
    "<!-- end -->\n\n```sh\nfalse\n```\n\nText.\n"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("page_outputs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outputs_of_marked_blocks_are_those_of_their_last_command(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert script.outputs_of(page) == ["second"]
    assert script.with_outputs(PAGE, ["second"]) == PAGE.replace("old", "second")
    empty = PAGE.replace("\n```text\nold\n```\n\n", "")
    assert script.with_outputs(empty, ["second"]) == PAGE.replace("old", "second")
    with pytest.raises(ValueError, match="1 blocks for 2 outputs"):
        script.with_outputs(PAGE, ["a", "b"])


def test_outputs_of_a_failing_command_stop_the_script(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("echo second", "false"))
    with pytest.raises(SystemExit, match="false: exit code 1"):
        script.outputs_of(page)


def test_output_is_cut_and_names_no_folder_of_its_own(script, tmp_path):
    text = script._output(f"seq {script.MOST_LINES + 5}", tmp_path)
    assert text.splitlines()[-2:] == [str(script.MOST_LINES), "…"]
    assert script._output(f"echo {tmp_path}/out/report.html", tmp_path) == "out/report.html"


def test_outputs_are_shown_by_readme_and_the_pages_of_jobs(script):
    names = script.names_with_outputs()
    assert names[0] == "README"
    assert len(names) == 11
    assert all(len(script.pages(name)) == 2 for name in names)
