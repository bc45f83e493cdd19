"""The report of a folder, whichever command wrote it."""

from __future__ import annotations

from pathlib import Path

from ...harness.results.run_folder import TUNED
from .run_page import write_report
from .tuning import rewrite_tuning


def write_folder(folder: Path, out: Path) -> Path:
    """Write the report of a run folder, or of a folder of `slo-bench tune`, and return `out`.

    Raises:
        SloBenchError: the folder is incomplete or malformed, or `out` cannot be written.
    """
    if (folder / TUNED).is_file():
        rewrite_tuning(folder, out)
        return out
    return write_report([folder], out)
