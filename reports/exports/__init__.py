"""Runs for other people's tools: MLflow, Weights & Biases, OpenTelemetry, Grafana and MLPerf.

Each format is a function from a run and a destination to a sentence on what was written where.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ...workloads.errors import UnknownNameError

FORMATS = ("mlflow", "wandb", "otel", "grafana", "mlperf")


def export(folder: Path, to: str, destination: str | None = None) -> str:
    """Export a run folder.

    Args:
        folder: the run.
        to: one of `FORMATS`.
        destination: where to; by default where the tool's own environment variables say, or a file
            in the run folder.

    Returns:
        What was written where.

    Raises:
        SloBenchError: a package is missing, or the destination cannot be written.
    """
    if to not in FORMATS:
        raise UnknownNameError("export format", to, FORMATS)
    write: Callable[[Path, str | None], str] = import_module(f".{to}", __package__).export
    return write(folder, destination)
