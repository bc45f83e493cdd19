"""`slo-bench export`: a run for MLflow, Weights & Biases, OpenTelemetry, Grafana or MLPerf."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from ..options.parameters import argument, option
from ..output.progress import phase

EXAMPLES = (
    "slo-bench export runs/today --to mlflow",
    "slo-bench export runs/today --to mlflow --destination http://127.0.0.1:5000",
    "slo-bench export runs/today --to otel --destination http://127.0.0.1:4318",
    "slo-bench export runs/today --to grafana --destination dashboard.json",
)


def export(
    run_dir: Path = argument("RUN", "Run folder."),
    to: Literal["mlflow", "wandb", "otel", "grafana", "mlperf"] = option(
        "TOOL",
        "mlflow: a run for each cell, with the report. wandb: the same in Weights & Biases. "
        "otel: metrics and a span for each request, as OTLP/JSON. grafana: a dashboard for the "
        "metrics that --live and watch serve. mlperf: LoadGen's summary of each cell.",
        default=...,
    ),
    destination: str | None = option(
        "WHERE",
        "mlflow: tracking URI; wandb: project; otel: collector (http://…:4318) or file; grafana: "
        "file; mlperf: folder. Default: as the tool's environment variables say, or in the run "
        "folder.",
    ),
) -> None:
    """Hand a finished run on to another tool."""
    from ...reports.exports import export as written

    with phase(f"handing the run on to {to}"):
        place = written(run_dir, to, destination)
    typer.echo(place)
