"""The speed of swaps beside a plain copy, on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "swap_speed.py"


def test_swap_speed_prints_each_size_and_fails_below_the_share(capsys):
    spec = importlib.util.spec_from_file_location("swap_speed", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = ["--layers", "2", "--block-kib", "1"]
    assert script.main(words) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "cpu: 2 layers, 0.00195312 MiB a block"
    assert [int(line.split()[0]) for line in lines] == list(script.COUNTS)
    assert script.main([*words, "--at-least", "1e6"]) == 1
