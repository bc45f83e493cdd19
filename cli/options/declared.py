"""The options of commands that run experiments and are no settings of one, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...harness.experiments.config.setting import COMPARED, RUN
from ...workloads.errors import SloBenchError
from .completion import listed

STORAGE = "Execution"

File = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", help="An experiment file.")]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="An experiment that comes with slo-bench (see `slo-bench list suites`). "
        "Without any option at all: quickstart.",
        autocompletion=listed("suites"),
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a setting (tp=2) or a system's parameter (sarathi.chunk_tokens=512; with one "
        "system chunk_tokens=512). May be repeated.",
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
        help="Of servers that we start: simulate every level as well, with step times fitted to "
        "the server's steps in the other levels, and print how far off that is. Every level is "
        "measured three times, to tell errors from a machine that is not steady. With --profile "
        "FILE by those step times; servers that run already need it. --json prints those rows.",
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
    typer.Option("--resume", help="Run only what --out lacks.", rich_help_panel=RUN),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help="Processes. Default: one per core.",
        rich_help_panel=RUN,
    ),
]
Executor = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Where cells are simulated, and from where servers that run already get their load: "
        "this machine, or all of a Ray cluster (extra slo-bench[ray]).",
        rich_help_panel=RUN,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="Of the Ray cluster. Default: one is started on this machine.",
        rich_help_panel=RUN,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.html.", rich_help_panel=RUN)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the rows of cells.csv as a JSON list, and nothing else.",
        rich_help_panel=RUN,
    ),
]


def resumed_in(out: Path | None, resume: bool) -> Path | None:
    """The folder to go on with, if that was asked.

    Raises:
        SloBenchError: no folder was named.
    """
    if resume and out is None:
        raise SloBenchError("--resume needs the folder to go on with: --out DIR")
    return out if resume else None
