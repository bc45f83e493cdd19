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
_ENGINE = "Engine (default: from the log's meta.json, else vLLM's own)"


def validate(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="JSONL file with one request per line (with its meta.json in the same folder, if "
            "any), a run folder, or a request file of a run folder.",
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Profile with step times (see `slo-bench profile import`). Not needed for a run "
            "folder made with --validate: step times are fitted to the steps that its servers "
            "logged.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="System that simulates the engine. Default: the run folder's, else vllm.",
        ),
    ] = None,
    cell: Annotated[
        str | None, typer.Option("--cell", "-c", metavar="C", help="Cell of the run folder.")
    ] = None,
    num_gpu_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of KV blocks, as counted by the engine.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens in a KV block.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of sequences in a batch.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of tokens in an iteration.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Simulate prefix caching.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Simulate asynchronous scheduling: an iteration is planned before the previous "
            "one has ended.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    host_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=0,
            help="Host time in milliseconds added to an iteration without a CUDA graph. Default: "
            "6.5.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the error table, as JSON.")
    ] = False,
) -> None:
    """Replay a real engine's log in the simulator and print the simulation errors."""
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
    """Validate a run folder that contains its servers' step logs."""
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
