"""A run of Weights & Biases for each cell, in one group; the first has the report as artefact."""

from __future__ import annotations

from pathlib import Path

from ...workloads.errors import SloBenchError
from .cells_export import exported_run, needed


def export(folder: Path, destination: str | None) -> str:
    """Log to the project `destination`, by default slo-bench; WANDB_MODE=offline keeps it here."""
    run = exported_run(folder)
    wandb = needed("wandb", "Weights & Biases")
    project = destination or "slo-bench"
    try:
        for number, cell in enumerate(run.cells):
            logged = wandb.init(
                project=project,
                name=cell.name,
                group=run.name,
                config=cell.parameters,
                dir=str(folder),
                reinit="finish_previous",
            )
            logged.log(cell.metrics)
            if number == 0:
                report = wandb.Artifact(f"{run.name}-report", type="report")
                report.add_file(str(run.report()))
                report.add_file(str(run.results.path / "experiment.toml"))
                logged.log_artifact(report)
            logged.finish()
    except (wandb.Error, OSError, ValueError) as error:
        raise SloBenchError(f"Weights & Biases: {str(error).splitlines()[0]}") from None
    return f"{len(run.cells)} cells to Weights & Biases, project {project}, group {run.name}"
