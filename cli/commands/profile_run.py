"""`slo-bench profile run`: step times measured on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from ...harness.servers.launch.backend_names import TORCH
from ...harness.servers.server_kinds import LAUNCHED
from ...workloads.errors import SloBenchError, UnknownNameError
from ..options.parameters import BACKEND, GPU, MODEL, OUT, flag, option

if TYPE_CHECKING:
    from ...predictors.profiles.profile_format import MeasuredLink, Profile

BACKENDS = (TORCH, *LAUNCHED)
NO_MODEL = (
    "--model is missing: a folder with config.json and safetensors, as `hf download NAME "
    "--local-dir DIR` makes it; `slo-bench model make DIR` makes a small one with random weights"
)
RUNS = (
    "slo-bench profile run --model models/tiny --out cpu.toml",
    "slo-bench profile run --model models/tiny --device cuda:0 --gpu h100-80g --out h100.toml",
    "slo-bench profile run --backend vllm --model models/tiny --out vllm.toml",
)


def link_line(name: str, link: MeasuredLink) -> str:
    """Return a text line with a link's measured speed and its error."""
    off = f", {link.held_out_percent:.1f} % off on copies held out"
    return (
        f"{name}: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s + "
        f"{1e6 * link.latency_s:.0f} µs{off if math.isfinite(link.held_out_percent) else ''}"
    )


def links_shown(profile: Profile) -> None:
    """Print a line for each link, and one for each direction of copies, which swaps cost."""
    from ...predictors.profiles.fit_profile import fit_directions

    for name, link in profile.links.items():
        typer.echo(link_line(f"{name} link", link))
    for direction, link in fit_directions(profile.tables).items():
        typer.echo(link_line(f"  {direction}", link))


def profile_run(
    out: Path = option(
        "FILE",
        "Profile file NAME.toml; its tables are written to the same folder.",
        *OUT,
        default=...,
    ),
    model: Path | None = option("PATH", "Model folder in the Hugging Face format.", *MODEL),
    device: str = option("D", "Device: cpu, cuda or cuda:N.", default="cpu"),
    gpu: str | None = option("G", "Catalogue name of the device.", *GPU),
    name: str | None = option("M", "Catalogue name of the model. Default: the folder's name."),
    dtype: Literal["float32", "bfloat16"] | None = option(
        "T",
        "With torch: data type of weights and KV: float32 or bfloat16. Default: float32 on a "
        "CPU, the checkpoint's on a GPU.",
    ),
    backend: str = option(
        "B",
        f"Engine to measure: {TORCH} (the built-in engine), or an installed server by its step "
        f"log: {', '.join(LAUNCHED)}; vllm==0.32.0 selects a version.",
        *BACKEND,
        default=TORCH,
    ),
    max_seqs: int = option(
        "N", "Maximum number of decoding sequences in a batch.", default=64, min=1
    ),
    budget: float = option("S", "Time limit of the measurement, in seconds.", default=540.0, min=1),
    moves: bool = flag(
        "Also measure the migration of layers and KV heads to another process.",
        "--moves/--no-moves",
        default=True,
    ),
) -> None:
    """Measure steps, swaps and moves of the torch engine over a grid of batches, and fit them.

    After an interruption or the time limit the same command continues. A real server is started
    and loaded at three rates, and its step log is fitted. vLLM is then started with few KV blocks,
    and its swaps and recomputations are timed. Module migrations are measured with torch alone.
    """
    from ...harness.engine.torch.profiling import ProfilingOptions, measure_profile
    from ..output.progress import counted

    kind = backend.partition("==")[0]
    if kind not in BACKENDS:
        raise UnknownNameError("backend to profile", backend, BACKENDS)
    if model is None:
        raise SloBenchError(NO_MODEL)
    if dtype is not None and kind != TORCH:
        raise SloBenchError("--dtype goes with --backend torch only")
    options = ProfilingOptions(model, out, device, gpu, name, max_seqs, budget, moves, dtype)
    if kind == TORCH:
        with counted("measurements") as count:
            measurement = measure_profile(options, count)
    else:
        from ...harness.experiments.backends.server_profile import measure_server

        with counted("levels") as count:
            measurement = measure_server(options, backend, out.with_name(f"{out.stem}.run"), count)
    profile = measurement.profile
    typer.echo(
        f"{profile.label}: "
        + " and ".join(f"{len(table)} {kind}" for kind, table in profile.tables.items())
        + f"; {profile.best} is {profile.fits[profile.best].held_out_percent:.1f} % off on "
        "held-out rows"
    )
    if math.isfinite(measurement.host_s):
        typer.echo(f"putting a batch together takes {1e6 * measurement.host_s:.0f} µs of each step")
    links_shown(profile)
    if measurement.recomputation is not None:
        steps, percent = measurement.recomputation
        typer.echo(f"recomputation: {percent:.1f} % off on {steps} steps that the fit has not seen")
    if measurement.steadiness:
        typer.echo(measurement.steadiness)
    if measurement.left:
        typer.echo(
            f"{measurement.left} batches of the grid are left: the same command goes on", err=True
        )
    typer.echo(str(measurement.header))
    if "transfers" in profile.tables:
        typer.echo(
            f"costs of preemption: slo-bench profile fit {measurement.header} --like adaptivellm "
            f"--out {measurement.header.with_suffix('.npz')}",
            err=True,
        )
