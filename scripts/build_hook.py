"""Hook of the wheel's build: with `SLO_BENCH_COMPILE=1` the wheel holds the compiled core."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SLO_BENCH_COMPILE"


class CompiledCore(BuildHookInterface):  # type: ignore[misc]
    """Adds extension modules beside their sources; without the variable it does nothing."""

    def dependencies(self) -> list[str]:
        """What the compiler needs where the wheel is built."""
        return ["mypy>=2.4", "numpy>=1.26", "setuptools>=77"] if self._is_requested() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; an editable install runs the sources and is left alone."""
        if version == "editable" or not self._is_requested():
            return
        compiler = runpy.run_path(str(Path(self.root) / "scripts" / "compile_core.py"))
        self._scratch = tempfile.TemporaryDirectory(prefix="slo-bench-")
        folder = Path(self._scratch.name)
        try:
            extensions = compiler["compile_core"](folder)
        except RuntimeError as error:
            sys.exit(f"{error}\n{VARIABLE} needs a C compiler; unset it to install without one")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in extensions:
            build_data["force_include"][str(path)] = str(path.relative_to(folder / "slo_bench"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder in which it was compiled."""
        if scratch := getattr(self, "_scratch", None):
            scratch.cleanup()

    def _is_requested(self) -> bool:
        setting = os.environ.get(VARIABLE, "")
        if setting not in ("", "0", "1"):
            sys.exit(f"{VARIABLE} must be 1 or 0 but is {setting!r}")
        return self.target_name == "wheel" and setting == "1"
