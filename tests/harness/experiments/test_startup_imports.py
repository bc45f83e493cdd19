"""What starts often imports little: processes that simulate, and the command line itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SIMULATES = "slo_bench.tuner.capacity.cells, slo_bench.harness.experiments.execution.local_pool"
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


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (_SIMULATES, {"asyncio", "pydantic", "pandas", "pyarrow", "httptools", "rich"}),
        (_EXPERIMENT, {"asyncio", "pandas", "pyarrow", "httptools", "rich"}),
        ("slo_bench.cli.main", {"numpy", "pydantic", "asyncio"}),
    ],
)
def test_imports_what_it_needs(modules, without):
    assert loaded_by(f"import {modules}").isdisjoint(without)


def test_numpy_has_one_thread_and_the_environment_is_as_it_was():
    statement = (
        "import os\nos.environ.pop('OPENBLAS_NUM_THREADS', None)\nbefore = dict(os.environ)\n"
        "from slo_bench.cli.one_thread import import_numpy\nimport_numpy()\n"
        "assert dict(os.environ) == before"
    )
    assert "numpy" in loaded_by(statement)


def test_a_number_of_threads_that_is_given_stays():
    statement = (
        "from slo_bench.cli.one_thread import import_numpy\nimport_numpy()\n"
        "import os\nassert os.environ['OPENBLAS_NUM_THREADS'] == '3'"
    )
    loaded_by(statement, OPENBLAS_NUM_THREADS="3")
