"""A run of MLflow for each cell, below one for the whole run folder, which has the report."""

from __future__ import annotations

from pathlib import Path

from ...workloads.errors import SloBenchError
from .cells_export import exported_run, needed


def export(folder: Path, destination: str | None) -> str:
    """Log to the tracking server `destination`; by default that of MLFLOW_TRACKING_URI."""
    run = exported_run(folder)
    mlflow = needed("mlflow", "MLflow")
    try:
        if destination is not None:
            mlflow.set_tracking_uri(destination)
        mlflow.set_experiment("slo-bench")
        with mlflow.start_run(run_name=run.name):
            mlflow.set_tags({"slo_bench": str(run.results.environment.get("slo_bench", ""))})
            mlflow.log_artifact(str(run.report()))
            for name in ("experiment.toml", "environment.json", "cells.csv"):
                mlflow.log_artifact(str(run.results.path / name))
            for cell in run.cells:
                with mlflow.start_run(run_name=cell.name, nested=True):
                    mlflow.log_params(cell.parameters)
                    mlflow.log_metrics(cell.metrics)
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise SloBenchError(f"MLflow: {str(error).splitlines()[0]}") from None
    return f"{len(run.cells)} cells to MLflow at {mlflow.get_tracking_uri()}, experiment slo-bench"
