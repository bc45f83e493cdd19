"""The swap connector in vLLM's own environment: what it copies, reports and gives back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slo_bench.harness.servers.launch.environments import environment, home
from slo_bench.harness.servers.launch.server_process import plugin_folder
from slo_bench.workloads.errors import SloBenchError

pytestmark = pytest.mark.backends

WORKER = Path(__file__).with_name("connector_worker.py")


def test_connector_restores_swapped_blocks_and_reports_each_swap():
    try:
        vllm = environment("vllm")
    except SloBenchError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [vllm.python, WORKER],
        env={**os.environ, "PYTHONPATH": str(plugin_folder(home()))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, holds in checks.items() if not holds] == []
    assert len(checks) == 11
