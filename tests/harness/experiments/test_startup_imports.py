"""What starts often imports little: processes that simulate, and the command line itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

_SIMULATES = (
    "slo_bench.tuner.capacity.capacity_cells, slo_bench.harness.experiments.execution.workers"
)
_EXPERIMENT = "slo_bench.harness.experiments.experiment"
# What only a trace, a real server, several models, a model's folder or a profile's file needs.
_OF_SOME_EXPERIMENTS = {
    "slo_bench.workloads.readers.formats",
    "slo_bench.harness.load_generator.load_progress",
    "slo_bench.harness.engine.simulator.simulate_models",
    "slo_bench.predictors.model_config",
    "slo_bench.predictors.profiles.formulas",
}


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
        (_EXPERIMENT, {"asyncio", "pandas", "pyarrow", "httptools", "rich", *_OF_SOME_EXPERIMENTS}),
        ("slo_bench.cli.main", {"numpy", "pydantic", "asyncio"}),
        # What the progress of a load imports, while its client should send and take times.
        ("slo_bench.reports.figures.figure", {"pandas", "pyarrow"}),
    ],
)
def test_modules_do_not_import_what_they_do_not_need(modules, without):
    assert loaded_by(f"import {modules}").isdisjoint(without)


# Third-party packages: what typer and rich need of any release, and what the schema needs.
_TYPER = {"typer", "annotated_doc", "click", "shellingham", "typing_extensions"}
# Of these rich takes the last three where they are installed.
_RICH = {"rich", "markdown_it", "mdurl", "pygments", "linkify_it", "uc_micro", "attr"}
_SCHEMA = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection", "tomli_w"}
_UNTIL_FIRST_CELL = """
from slo_bench.harness.experiments.execution import workers
def first_cell(*given, **named):
    sys.exit(77)
workers.run_cell = first_cell
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "before", "code", "allowed"),
    [
        ("--version", "", 0, _TYPER),
        ("--help", "", 0, _TYPER | _RICH),
        ("list systems", "", 0, _TYPER | _RICH),
        ("list suites", "", 0, _TYPER | _RICH),
        (
            "run --system vllm --rates 1 --requests 20 --seeds 1 --no-report",
            _UNTIL_FIRST_CELL,
            77,
            _TYPER | _RICH | _SCHEMA | {"numpy"},
        ),
    ],
)
def test_commands_import_only_listed_packages(tmp_path, monkeypatch, words, before, code, allowed):
    monkeypatch.chdir(tmp_path)
    loaded = loaded_by(
        f"import sys\n{before}\nsys.argv = ['slo-bench', *{words.split()}]\n"
        "from slo_bench.cli.entry import main\ntry:\n    main()\n"
        f"except SystemExit as ended:\n    assert (ended.code or 0) == {code}, ended.code\n"
        "print('', *(f'imported:{name}' for name in sys.modules))"
    )
    top = {name.partition(":")[2].partition(".")[0] for name in loaded if "imported:" in name}
    assert "slo_bench" in top
    packages = {*packages_distributions()} - {"slo_bench"} - loaded_by("pass")
    assert top & packages <= allowed


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
