"""`slo-bench profile run`: step times measured on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..workloads.errors import UnknownNameError

if TYPE_CHECKING:
    from ..predictors.profiles.profile import MeasuredLink

RUNS = (
    "slo-bench profile run --model path/to/model --out cpu.toml",
    "slo-bench profile run --model path/to/model --device cuda:0 --gpu h100-80g --out h100.toml",
)


def link_line(name: str, link: MeasuredLink) -> str:
    """What a link was measured to be, and how far off that is."""
    off = f", {link.held_out_percent:.1f} % off on copies held out"
    return (
        f"{name} link: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s + "
        f"{1e6 * link.latency_s:.0f} µs{off if math.isfinite(link.held_out_percent) else ''}"
    )


def profile_run(
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="PATH", help="A folder of Hugging Face's.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="NAME.toml, tables beside it.")
    ],
    device: Annotated[str, typer.Option(metavar="D", help="cpu, cuda or cuda:N.")] = "cpu",
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", "-g", metavar="G", help="The catalogue's name of the device."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="M", help="The catalogue's name of the model. Default: the folder's."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="B", help="What is measured: paged.")
    ] = "paged",
    max_seqs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most decoding sequences in a batch.")
    ] = 64,
    budget: Annotated[
        float, typer.Option(metavar="S", min=1, help="Seconds after which measuring ends.")
    ] = 540.0,
    moves: Annotated[
        bool,
        typer.Option(
            "--moves/--no-moves", help="Measure layers and heads that move to another process too."
        ),
    ] = True,
) -> None:
    """Measure steps and swaps of the paged engine over a grid of batches, and fit them.

    Interrupted or out of time, the same command goes on where it was. Of real servers, `run
    --validate` makes profiles from the logs of their steps.
    """
    from ..harness.engines.paged.errors import need_torch
    from ..harness.profiling import Asked, measure_profile
    from .progress import counted

    if backend != "paged":
        raise UnknownNameError("backend to profile", backend, ["paged"])
    need_torch()
    asked = Asked(model, out, device, gpu, name, max_seqs, budget, moves)
    with counted("measurements") as count:
        found = measure_profile(asked, count)
    profile = found.profile
    fitted = profile.fits[profile.best]
    typer.echo(
        f"{profile.label}: {len(profile.tables['steps'])} steps and "
        f"{len(profile.tables['transfers'])} copies; {profile.best} is "
        f"{fitted.held_out_percent:.1f} % off on held-out rows; putting a batch together takes "
        f"{1e6 * found.host_s:.0f} µs"
    )
    for name, link in profile.links.items():
        typer.echo(link_line(name, link))
    if found.left:
        typer.echo(f"{found.left} batches of the grid are left: the same command goes on", err=True)
    typer.echo(str(found.header))
