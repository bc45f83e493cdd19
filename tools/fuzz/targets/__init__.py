"""Every reader of what somebody else wrote, with good files to begin from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from slo_bench.workloads.errors import SloBenchError

from . import http, options, predictors, profiles, run_folders, tables, traces, tuning
from .target import Target

ALLOWED = (SloBenchError,)


def every_target(folder: Path) -> list[Target]:
    """All of them; `folder` is for their files."""
    all_targets = [
        *traces.targets(folder),
        *options.targets(),
        *tables.targets(folder),
        *tuning.targets(folder),
        *profiles.targets(folder),
        *predictors.targets(folder),
        *run_folders.targets(folder),
        *http.targets(),
    ]
    if find_spec("torch") is not None:
        from . import models

        all_targets += models.targets(folder)
    return all_targets


__all__ = ["ALLOWED", "Target", "every_target"]
