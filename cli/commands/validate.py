"""`slo-bench validate`: a real engine's log replayed through the simulator, and the errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...workloads.errors import SloBenchError, UnknownNameError

EXAMPLES = (
    "slo-bench validate real_vllm/requests.jsonl --profile rtx-pro-6000.toml",
    "slo-bench validate requests.jsonl --profile rtx-4090.toml --num-gpu-blocks 1900 --html "
    "errors.html",
    "slo-bench validate runs/measured --cell vllm-2 --profile a100.toml --json",
    "slo-bench validate runs/measured",
)
_ENGINE = "Engine (default: as the log's meta.json says, else vLLM's own)"


def validate(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="A JSONL file with a request a line (a meta.json beside it is read), a run "
            "folder, or a request file of one.",
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Step times; see `slo-bench profile import`. Only a run folder made with "
            "--validate does without: they are fitted to the steps that its servers logged.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="The system that stands for the engine. Default: the run folder's, else vllm.",
        ),
    ] = None,
    cell: Annotated[
        str | None, typer.Option("--cell", "-c", metavar="C", help="Which cell of a run folder.")
    ] = None,
    num_gpu_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="As the engine counts them.", rich_help_panel=_ENGINE
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of a block.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most sequences at once.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most tokens of a step.", rich_help_panel=_ENGINE),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Whether prompts are looked up in a prefix cache.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Whether a step is decided before the one before it has ended.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    host_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=0,
            help="What the host adds to a step without a CUDA graph. Default: 6.5.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page, too.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the error table as JSON, and nothing else.")
    ] = False,
) -> None:
    """Replay a real engine's log in the simulator and print how far off it is."""
    from ..output.console import terminal

    if profile is None:
        asked = (engine, num_gpu_blocks, block_size, max_num_seqs, max_num_batched_tokens)
        more = (prefix_caching, async_scheduling, host_ms, html)
        if any(value is not None for value in (*asked, *more)):
            raise SloBenchError("with no --profile FILE only --cell and --json can be given")
        _of_run(log, cell, as_json)
        return
    from ...harness.results.engine_logs import EngineSettings, read_log
    from ...harness.validation.log_replay import validate as replay
    from ...predictors.profiles.profile import read_profile
    from ...reports.pages import validation as shown

    found_log = read_log(log, cell)
    found = replay(
        found_log,
        read_profile(profile),
        engine or found_log.engine.system or "vllm",
        overrides=EngineSettings(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            async_scheduling=async_scheduling,
        ),
        host_s=None if host_ms is None else host_ms / 1e3,
    )
    if html is not None:
        shown.write_validation(found, html)
    if as_json:
        typer.echo(json.dumps(shown.validation_json(found), allow_nan=False))
        return
    console = terminal()
    console.print(shown.validation_text(found))
    if html is not None:
        console.print(str(html), markup=False, highlight=False, soft_wrap=True)


def _of_run(folder: Path, cell: str | None, as_json: bool) -> None:
    """A run folder whose servers logged their steps."""
    from ...harness.validation.run_replay import validate_run
    from ..output.validated_run import levels_shown

    if not folder.is_dir():
        raise SloBenchError(f"{folder} is no run folder with step logs; give --profile FILE")
    levels = validate_run(folder)
    if cell is not None:
        known = [level.cell for level in levels]
        if cell not in known:
            raise UnknownNameError("cell", cell, known)
        levels = [level for level in levels if level.cell == cell]
    if as_json:
        rows = [row for level in levels for row in level.rows()]
        typer.echo(json.dumps(rows, allow_nan=False))
    else:
        levels_shown(levels)
