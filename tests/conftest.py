"""For all tests: properties without deadlines; and what tests of real servers need."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from slo_bench.harness.backends.environments import Environment, environment
from slo_bench.workloads.errors import SloBenchError

# No property is judged by how long an example takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MAKE_MODEL = Path(__file__).parent / "backends" / "make_tiny_model.py"


@pytest.fixture(scope="session")
def installed() -> Callable[[str], Environment]:
    """The environment of a server; skips where there is none, fails where there must be one."""

    def find(backend: str) -> Environment:
        try:
            return environment(backend)
        except SloBenchError as error:
            if os.environ.get("SLO_BENCH_REQUIRE_BACKENDS") == "1":
                pytest.fail(str(error))
            pytest.skip(str(error))

    return find


@pytest.fixture(scope="session")
def tiny_model(
    installed: Callable[[str], Environment], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with a tiny Llama, made from a seed by the server's own Python."""

    @functools.cache
    def make(backend: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / f"tiny-{backend}"
        subprocess.run(
            [installed(backend).python, MAKE_MODEL, folder],
            check=True,
            timeout=300,
            capture_output=True,
        )
        return folder

    return make
