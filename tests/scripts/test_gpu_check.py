"""The checklist for GPUs: its commands can be read, and its lines say pass, fail or skip."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded(path: str):
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


gpu_check = loaded("scripts/gpu_check.py")


@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check.name)
def test_gpu_check_commands_parse(check):
    parse = loaded("tests/cli/test_command_tree.py").parse
    for command in check.commands:
        program, *words = shlex.split(command.format(models="models"))
        if program == "slo-bench":
            assert parse(words)
        else:
            assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))
    assert set(check.needs) <= set(gpu_check.REQUIREMENTS)


def test_every_gpu_check_is_on_its_page():
    page = (ROOT / "docs" / "gpu-checklist.md").read_text(encoding="utf-8")
    for check in gpu_check.CHECKS:
        assert f"| `{check.name}` |" in page


@pytest.mark.slow
def test_gpu_check_prints_the_outcome_of_each_check(tmp_path, monkeypatch, capsys):
    commands = {"good": "slo-bench list systems", "bad": "slo-bench list nothing", "none": ""}
    checks = [
        gpu_check.Check(name, f"what {name} is", ("never",) * (name == "none"), (command,))
        for name, command in commands.items()
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(gpu_check, "REQUIREMENTS", {"never": (lambda: False, "a wonder")})
    monkeypatch.setattr(gpu_check, "make_models", lambda folder, small_model: folder)
    assert gpu_check.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["pass", "good"],
        ["fail", "bad"],
        ["skip", "none"],
    ]
    assert "exit code 2" in lines[1]
    assert lines[2].endswith("needs a wonder")
    assert json.loads((tmp_path / "summary.json").read_text())["good"]["result"] == "pass"
    assert gpu_check.main([str(tmp_path), "--only", "good,none"]) == 0


def test_gpu_check_reads_validity_from_cells_csv(tmp_path):
    (tmp_path / "run").mkdir()
    table = tmp_path / "run" / "cells.csv"
    table.write_text("cell,valid,finished,preemptions_swap\na,True,3,0\nb,True,3,\n")
    assert gpu_check.valid(tmp_path) is None
    assert "above 0 in no cell" in gpu_check.positive("preemptions_swap")(tmp_path)
    table.write_text("cell,valid,finished,invalid_because\na,False,3,late\n")
    assert gpu_check.valid(tmp_path) == "a is invalid: late"
