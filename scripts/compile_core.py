"""Compile the simulator's inner loop: `python scripts/compile_core.py FOLDER`.

Writes the package to FOLDER/slo_bench: the sources, with an extension module beside each module of
`MODULES`. Needs a C compiler, mypy, numpy and setuptools; `SLO_BENCH_COMPILE=1 pip install .` gets
the last three itself and calls it by way of `scripts/build_hook.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("__init__.py", "policy.py", "py.typed")
FOLDERS = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
# What the simulator spends its time in. Policies stay source, since users and servers extend them.
# The loads by which policies decide across instances are on the list.
MODULES = (
    "harness/core/decisions.py",
    "harness/core/kv/kv_cache_manager.py",
    "harness/core/network.py",
    "harness/core/predictions.py",
    "harness/core/queues/wait_queue.py",
    "harness/core/state.py",
    "harness/engine/cluster/cluster_arrivals.py",
    "harness/engine/cluster/cluster.py",
    "harness/engine/cluster/kept_values.py",
    "harness/engine/cluster/lazy_instance.py",
    "harness/engine/cluster/recorder.py",
    "harness/engine/cluster/scheduling.py",
    "harness/engine/loop/batch_state.py",
    "harness/engine/loop/decode_counters.py",
    "harness/engine/loop/loop.py",
    "harness/engine/loop/measures.py",
    "harness/engine/loop/loop_view.py",
    "harness/engine/simulator/simulated.py",
    "harness/policies/load_aware.py",
    "harness/policies/shared/instance_load.py",
    "predictors/operators/front_end.py",
    "predictors/profiles/data_parallel.py",
    "predictors/profiles/step_time_table.py",
    "predictors/roofline.py",
    "predictors/speculation.py",
)
# Packages but numpy count as untyped whether they are installed or not: the same C code everywhere.
MYPY = """[mypy]
follow_imports = silent
[mypy-pandas.*,pydantic.*,scipy.*,sklearn.*,torch.*,transformers.*,httpx.*,typer.*]
follow_imports = skip
[mypy-*]
ignore_missing_imports = True
"""
# No product and sum in one instruction: results are the same numbers as those of the source.
BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
words = ["--config-file", "mypy.ini", *sys.argv[1:]]
modules = mypycify(words, group_name="slo_bench.harness.core.extension", debug_level="0")
for module in modules:
    if sys.platform != "win32":
        module.extra_compile_args.append("-ffp-contract=off")
sys.argv[1:] = ["build_ext", "--inplace"]
setup(name="slo_bench_core", packages=[], ext_modules=modules)
"""


def compile_core(folder: Path) -> list[Path]:
    """Write the compiled package to `folder`; the extension modules in it.

    Raises:
        RuntimeError: there is no compiler, or it refused the source.
    """
    package = folder / "slo_bench"
    junk = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, package / name, ignore=junk)
    for name in PARTS:
        shutil.copy2(ROOT / name, package)
    (folder / "mypy.ini").write_text(MYPY, encoding="utf-8")
    words = [sys.executable, "-c", BUILD, *(f"slo_bench/{module}" for module in MODULES)]
    done = subprocess.run(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    extensions = [path for end in ("so", "pyd") for path in sorted(package.rglob(f"*.{end}"))]
    if done.returncode or not extensions:
        raise RuntimeError(f"the core could not be compiled:\n{done.stdout[-3000:]}")
    for leftover in ("build", ".mypy_cache"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    return extensions


def main() -> None:
    """Compile into the folder that is named, which must not hold a package yet."""
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").partition("\n")[0])
    try:
        extensions = compile_core(Path(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"{len(extensions)} extension modules in {sys.argv[1]}")


if __name__ == "__main__":
    main()
