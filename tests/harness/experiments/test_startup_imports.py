"""What starts often imports little: processes that simulate, and the command line itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SIMULATES = (
    "slo_bench.tuner.capacity.capacity_cells, slo_bench.harness.experiments.execution.workers"
)
_EXPERIMENT = "slo_bench.harness.experiments.experiment"


def loaded_by(statement: str, **environment: str) -> set[str]:
    """All modules of a process after a statement."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return set(shown.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (_SIMULATES, {"asyncio", "pydantic", "pandas", "pyarrow", "httptools", "rich"}),
        (_EXPERIMENT, {"asyncio", "pandas", "pyarrow", "httptools", "rich"}),
        ("slo_bench.cli.main", {"numpy", "pydantic", "asyncio"}),
    ],
)
def test_modules_do_not_import_what_they_do_not_need(modules, without):
    assert loaded_by(f"import {modules}").isdisjoint(without)


THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS")
IMPORT = (
    f"import os\nfor name in {THREADS}: os.environ.pop(name, None)\nbefore = dict(os.environ)\n"
    "from slo_bench.cli.one_thread import import_numpy\nimport_numpy()\n"
)


def test_import_leaves_the_environment_unchanged():
    assert "numpy" in loaded_by(f"{IMPORT}assert dict(os.environ) == before")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_import_gives_numpy_one_thread():
    assert "numpy" in loaded_by(f"{IMPORT}assert len(os.listdir('/proc/self/task')) == 1")


@pytest.mark.parametrize("name", THREADS)
def test_import_keeps_a_given_number_of_threads(name):
    statement = (
        "import os\nbefore = dict(os.environ)\nfrom slo_bench.cli import one_thread\n"
        "one_thread.import_numpy()\nassert dict(os.environ) == before\n"
        "import sys\nassert 'numpy' not in sys.modules  # whoever needs it imports it"
    )
    loaded_by(statement, **{name: "3"})
