"""Figures of the first pages are those of docs/accuracy.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_errors_beside_aiconfigurator_are_those_of_the_accuracy_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    accuracy = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    row = r"\| {} \| {} \| (\d+) \| ([\d.]+)% / [\d.]+% \| ([\d.]+)% / [\d.]+% \|"
    dense = re.search(row.format("dense", "tpot_mean"), accuracy)
    group = re.search(row.format("vllm, h200-141g, llama-3.1-8b", "ttft_mean"), accuracy)
    assert dense is not None
    assert group is not None
    rows, theirs, ours = dense.groups()
    (line,) = [
        line for line in text.splitlines() if "#beside-aiconfigurator" in line and rows in line
    ]
    assert f"{ours} %" in line
    assert f"{theirs} %" in line
    (line,) = [
        line for line in text.splitlines() if "Llama-3.1-8B" in line and "AIConfigurator" in line
    ]
    for error in group.groups()[1:]:
        assert f"{float(error):.0f} %" in line
