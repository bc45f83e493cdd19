"""A few faults at socket calls; socket_faults.py strikes each of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reference.examples import examples

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or shutil.which("cc") is None or sys.platform != "linux",
    reason="needs fork, a C compiler and Linux",
)
SCRIPT = Path(__file__).parents[3] / "tools" / "fuzz" / "socket_faults.py"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["client", "gateway"])
def test_socket_faults_leave_each_request_answered_or_failed_by_name(side, tmp_path):
    moments = str(examples(12))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--side", side, "--moments", moments, "--seed", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{side}: {moments} faults" in done.stdout
