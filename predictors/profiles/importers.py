"""The importers: one a file, each reads one project's measurements into a `Profile`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...workloads.errors import UnknownNameError
from .names import recognise
from .profile import Profile


@dataclass(frozen=True)
class ImportOptions:
    """What the user names, for files that hold or are about several; None: find out."""

    model: str | None = None
    gpu: str | None = None
    tp: int | None = None

    def model_name(self, found: str | None) -> str:
        """Name of the model: as given, else that of the file's name for it."""
        return self.model or recognise("models", found or "")

    def gpu_name(self, found: str | None) -> str:
        """The GPU's name, in the same way."""
        return self.gpu or recognise("gpus", found or "")


# Module of a source, and the meaning of its path. Each has `read(path, asked) -> Profile`.
IMPORTERS = {
    "llmservingsim": "a folder with dense.csv, per_sequence.csv and attention.csv",
    "vidur": "GPU__ORG__MODEL__linear.csv, or Vidur's own mlp.csv",
    "aiconfigurator": "a folder with the Parquet files of one system and backend (needs --model)",
    "distserve": "a profiler JSON of fitted coefficients",
    "splitwise": "perf_model.csv",
}


def import_profile(source: str, path: Path, asked: ImportOptions) -> Profile:
    """Read the measurements of `source` at `path`.

    Raises:
        UnknownNameError: no importer has that name.
        SloBenchError: the files are missing, malformed, or hold several models or GPUs and the
            options choose none.
    """
    if source not in IMPORTERS:
        raise UnknownNameError("source of profiles", source, IMPORTERS)
    module = importlib.import_module(f".from_{source}", __package__)
    read: Callable[[Path, ImportOptions], Profile] = module.read
    return read(path, asked)
