"""The GitHub Action's script, run as the action runs it; `gh` is one that writes down its calls."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slo_bench import Experiment
from slo_bench.reports.compare.output import escaped

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".github" / "action" / "gate.sh"
LOAD = {"systems": ["vllm"], "rates": [3.0], "seeds": 2, "requests": (120,), "records": "csv"}
GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$CALLS"
for word in "$@"; do
    case $word in body=@*) cp "${word#body=@}" "$CALLS.body" ;; esac
done
case "$*" in *--jq*) printf '%s' "$EARLIER" ;; *) exit "$REFUSED" ;; esac
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    Experiment(**LOAD).run(folder / "base", jobs=1)
    Experiment(**LOAD, host_s=(0.004,)).run(folder / "slow", jobs=1)
    Experiment(**{**LOAD, "workload": ("azure-conv",)}).run(folder / "other", jobs=1)
    Experiment(**LOAD, failures="0@5s..6s").run(folder / "failing", jobs=1)
    return folder


@pytest.fixture
def action(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    launcher = (
        f'#!/bin/sh\nexec {sys.executable} -c "from slo_bench.cli.main import main; main()" "$@"\n'
    )
    for name, text in (("gh", GH), ("slo-bench", launcher)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)

    def call(**settings):
        calls = tmp_path / "calls"
        environ = {
            **os.environ,
            **{"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)},
            **{"GITHUB_REPOSITORY": "me/mine", "EARLIER": "", "REFUSED": "0"},
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            **{name.upper(): str(value) for name, value in settings.items()},
        }
        done = subprocess.run([SCRIPT], env=environ, capture_output=True, text=True, check=False)
        outputs = {
            name: path.read_text() if path.is_file() else ""
            for name, path in (
                ("calls", calls),
                ("body", tmp_path / "calls.body"),
                ("summary", tmp_path / "summary"),
                ("output", tmp_path / "output"),
            )
        }
        return done, outputs

    return call


@pytest.mark.slow
def test_action_passes_and_comments_for_equal_runs(action, runs):
    done, outputs = action(baseline=runs / "base", pull_request=7)
    assert done.returncode == 0, done.stderr
    assert "verdict=passed" in outputs["output"]
    assert outputs["body"].startswith("<!-- slo-bench gate -->\n### slo-bench gate")
    assert "✅ Passed" in outputs["summary"]
    table = [line for line in outputs["body"].splitlines() if line.startswith("| ")]
    assert len(table) > 3
    assert all("not distinguishable" in line for line in table[1:])
    assert "api repos/me/mine/issues/7/comments --field body=@" in outputs["calls"]


@pytest.mark.slow
def test_action_fails_and_updates_the_comment_for_a_regression(action, runs):
    settings = {"baseline": runs / "base", "candidate": runs / "slow", "metric": "tpot_p50"}
    done, outputs = action(**settings, pull_request=7, earlier=99)
    assert done.returncode == 1
    assert "verdict=failed" in outputs["output"]
    assert "--method PATCH repos/me/mine/issues/comments/99" in outputs["calls"]
    assert re.search(r"tpot\\_p50 \|.*\[?.* \| \*\*worse, beyond 5 %\*\* \|", outputs["body"])
    done, outputs = action(**settings, max_regression="90%", comment="false")
    assert done.returncode == 0


@pytest.mark.slow
def test_action_reports_runs_that_are_not_comparable(action, runs):
    done, outputs = action(baseline=runs / "base", candidate=runs / "other", pull_request=7)
    assert done.returncode == 2
    assert "verdict=not comparable" in outputs["output"]
    assert "Not comparable" in outputs["body"]


@pytest.mark.slow
def test_action_judges_runs_whose_difference_is_allowed(action, runs):
    settings = {"baseline": runs / "base", "candidate": runs / "failing", "comment": "false"}
    done, _ = action(**settings)
    assert done.returncode == 2
    done, _ = action(**settings, allow_different="failures,warmup_share")
    assert done.returncode in (0, 1)


@pytest.mark.slow
def test_action_passes_with_a_warning_if_it_may_not_comment(action, runs):
    settings = {"baseline": runs / "base", "candidate": runs / "base", "pull_request": 7}
    done, _ = action(**settings, refused=1)
    assert done.returncode == 0
    assert "::warning::slo-bench: no comment" in done.stdout


def test_action_escapes_names_in_its_comment():
    assert escaped("a|b<img>\n@all") == r"a\|b\<img\> \@all"


def test_the_action_gives_every_setting_to_the_script():
    text = (ROOT / "action.yml").read_text("utf-8")
    passed_names = set(re.findall(r"^        ([A-Z_]+): \$\{\{", text, re.MULTILINE))
    read = set(re.findall(r"\$\{([A-Z_]+):", SCRIPT.read_text("utf-8")))
    ours = {name for name in read if not name.startswith("GITHUB_")}
    assert ours <= passed_names
    inputs = re.search(r"^inputs:\n(.*?)^outputs:", text, re.MULTILINE | re.DOTALL)[1]
    names = set(re.findall(r"^  ([a-z-]+):$", inputs, re.MULTILINE))
    assert names == set(re.findall(r"inputs\.([a-z-]+)", text))
