"""The options of commands that run experiments and are no settings of one, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...harness.experiments.config.setting import COMPARED, RUN
from ...workloads.errors import SloBenchError
from .completion import listed

STORAGE = "Execution"

File = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", help="Experiment file.")]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Predefined experiment (see `slo-bench list suites`). Default without any option: "
        "quickstart.",
        autocompletion=listed("suites"),
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Value of a setting (tp=2) or of a system's parameter (sarathi.chunk_tokens=512; with "
        "one system chunk_tokens=512). May be repeated.",
        rich_help_panel=COMPARED,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=A,B,…",
        help="Run every combination with these values of a setting (tp=1,2) or of a system's "
        "parameter (sarathi.chunk_tokens=512,1024). May be repeated.",
        rich_help_panel=COMPARED,
    ),
]
Validate = Annotated[
    bool,
    typer.Option(
        "--validate",
        help="Validate the simulator against the measured server: simulate every level with step "
        "times fitted to the steps that the server logged at the other levels, and print the "
        "errors. Every level is measured three times, to separate simulation error from noise "
        "of the machine. With --profile FILE its step times are used instead; servers given "
        "by --base-url need it. --json prints the error rows.",
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Run folder, empty or new. Default: a new one under runs.",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Skip cells that are already finished in --out.", rich_help_panel=RUN
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help="Number of parallel processes. Default: one per core.",
        rich_help_panel=RUN,
    ),
]
Executor = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Where simulations run and from where load is sent to running servers: this machine, "
        "or all machines of a Ray cluster (needs slo-bench[ray]).",
        rich_help_panel=RUN,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="Address of the Ray cluster. Default: start one on this machine.",
        rich_help_panel=RUN,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Do not write report.html.", rich_help_panel=RUN)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print only the rows of cells.csv, as a JSON list.",
        rich_help_panel=RUN,
    ),
]


def resumed_in(out: Path | None, resume: bool) -> Path | None:
    """Return the folder to resume, or None without --resume.

    Raises:
        SloBenchError: no folder was named.
    """
    if resume and out is None:
        raise SloBenchError("--resume needs the folder to go on with: --out DIR")
    return out if resume else None
