"""What README and CONTRIBUTING show beside commands: a program, experiment, policy, pictures."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slo_bench import Experiment

ROOT = Path(__file__).resolve().parents[2]


def blocks(name, language):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def slo_bench(command, folder):
    arguments = shlex.split(command)
    assert arguments[0] == "slo-bench"
    return subprocess.run(
        [sys.executable, "-m", "slo_bench.cli.main", *arguments[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_readme_python_program_runs(tmp_path):
    (program,) = blocks("README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "attainment" in done.stdout
    assert "Length: 500" in done.stdout


def test_readme_experiment_file_runs():
    (text,) = blocks("README.md", "toml")
    cells = Experiment(**tomllib.loads(text)).plan().cells
    assert {(cell.placement.tp, cell.instances) for cell in cells} == {(2, 4), (4, 2)}


@pytest.mark.slow
def test_contributing_example_policy_runs(tmp_path):
    (policy,) = blocks("CONTRIBUTING.md", "python")
    (tmp_path / "short_prompts.py").write_text(policy, encoding="utf-8")
    command, checks = (block.strip() for block in blocks("CONTRIBUTING.md", "sh"))
    rows = json.loads(slo_bench(command + " --json --no-report", tmp_path).stdout)
    assert {row["system"] for row in rows} == {"short-prompts", "vllm"}
    # With no weight on the prompt it is first come, first served, as vLLM is; with some, not.
    p50 = {
        (row["system"], row["short-prompts.wait_s_per_token"]): row["ttft_p50_s"]
        for row in rows
        if row["rate_rps"] == 10
    }
    assert p50["short-prompts", 0] == p50["vllm", None]
    assert p50["short-prompts", 0.01] < p50["vllm", None]
    assert (ROOT / checks).is_file()


@pytest.mark.slow
def test_contributing_example_entry_point_is_found(tmp_path, monkeypatch):
    (policy,) = blocks("CONTRIBUTING.md", "python")
    (snippet,) = blocks("CONTRIBUTING.md", "toml")
    ((group, names),) = tomllib.loads(snippet)["project"]["entry-points"].items()
    package = tmp_path / "your_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "short_prompts.py").write_text(policy, encoding="utf-8")
    metadata = tmp_path / "your_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1\n")
    points = "\n".join(f"{name} = {where}" for name, where in names.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    run = Experiment(systems="short-prompts", rates=[2, 4], seeds=1, requests=20)
    rows = run.run(tmp_path / "out", jobs=2).rows()
    assert {row["system"] for row in rows} == {"short-prompts"}


def test_readme_pictures_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file()
