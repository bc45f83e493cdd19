"""`slo-bench watch`: the report of a run at a local address, while it runs elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ...workloads.errors import SloBenchError
from ..options.parameters import allow_host, argument, option

EXAMPLES = (
    "slo-bench watch runs/today",
    "slo-bench watch runs/today --port 8080",
)
_LOOK_EVERY_S = 0.5


def watch(
    folder: Path = argument(
        "DIR", "Folder of `run`, `capacity` or `tune`, which may still be running."
    ),
    port: int = option("N", "Port on this machine. 0: a free one.", default=0, min=0, max=65535),
    names: list[str] | None = allow_host(),
) -> None:
    """Serve the report of a folder on this machine; it follows the cells that finish.

    Ctrl-C ends it.
    """
    from ...reports.live import live_report

    if not folder.is_dir():
        raise SloBenchError(f"there is no folder {folder}")
    with live_report(folder, port=port, names=tuple(names or ())) as url:
        typer.echo(url)
        while True:
            time.sleep(_LOOK_EVERY_S)
