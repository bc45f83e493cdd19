"""`slo-bench validate`: a real engine's log replayed through the simulator, and the errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import typer

from ...workloads.errors import SloBenchError, UnknownNameError
from ..options.declared import PEER_LINK, HtmlOrJson
from ..options.from_schema import with_options
from ..options.parameters import CELL, argument, flag, option, option_group
from ..output.progress import phase

EXAMPLES = (
    "slo-bench validate real_vllm/requests.jsonl --profile rtx-pro-6000.toml",
    "slo-bench validate requests.jsonl --profile rtx-4090.toml --num-gpu-blocks 1900 --html "
    "errors.html",
    "slo-bench validate runs/measured --cell vllm-2 --profile a100.toml --json",
    "slo-bench validate runs/measured",
)
_ENGINE = "Engine (default: from the log's meta.json, else vLLM's own)"
_engine = partial(option, panel=_ENGINE)
_engine_flag = partial(flag, panel=_ENGINE)


@option_group
class Engine:
    """Settings of the engine that the log or vLLM's defaults leave open."""

    num_gpu_blocks: int | None = _engine(
        "N", "Number of KV blocks, as counted by the engine.", min=1
    )
    block_size: int | None = _engine("N", "Tokens in a KV block.", min=1)
    max_num_seqs: int | None = _engine("N", "Maximum number of sequences in a batch.", min=1)
    max_num_batched_tokens: int | None = _engine(
        "N", "Maximum number of tokens in an iteration.", min=1
    )
    prefix_caching: bool | None = _engine_flag(
        "Simulate prefix caching.", "--prefix-caching/--no-prefix-caching", default=None
    )
    async_scheduling: bool | None = _engine_flag(
        "Simulate asynchronous scheduling: an iteration is planned before the previous one has "
        "ended.",
        "--async-scheduling/--no-async-scheduling",
        default=None,
    )


@option_group
class _Output(HtmlOrJson):
    as_json: bool = flag("Print only the error table, as JSON.", "--json")


@with_options
def validate(
    *,
    log: Path = argument(
        "LOG",
        "JSONL file with one request per line (with its meta.json in the same folder, if any), a "
        "run folder, or a request file of a run folder.",
    ),
    overrides: Engine,
    profile: Path | None = option(
        "FILE",
        "Profile with step times (see `slo-bench profile import`). Not needed for a run folder "
        "made with --validate: step times are fitted to the steps that its servers logged.",
    ),
    engine: str | None = option(
        "S", "System that simulates the engine. Default: the run folder's, else vllm."
    ),
    cell: str | None = option("C", "Cell of the run folder.", *CELL),
    host_ms: float | None = option(
        "MS",
        "Host time in milliseconds added to an iteration without a CUDA graph. Default: 0.",
        min=0,
    ),
    peer_link: str | None = PEER_LINK,
    output: _Output,
) -> None:
    """Replay a real engine's log in the simulator and print the simulation errors."""
    if profile is None:
        options = (engine, host_ms, peer_link, output.html, *vars(overrides).values())
        if any(value is not None for value in options):
            raise SloBenchError("with no --profile FILE only --cell and --json can be given")
        _of_run(log, cell, output.as_json)
        return
    from ...harness.policies.systems import DEFAULT_SYSTEM
    from ...harness.results.engine_logs import EngineSettings, read_log
    from ...harness.validation.replay.log_replay import validate as replay
    from ...predictors.profiles.build_model import with_peer_link
    from ...predictors.profiles.profile_format import read_profile
    from ...reports.pages import validation as shown

    engine_log = read_log(log, cell)
    with phase("replaying the log"):
        validation = replay(
            engine_log,
            with_peer_link(read_profile(profile), peer_link),
            engine or engine_log.engine.system or DEFAULT_SYSTEM,
            overrides=EngineSettings(**vars(overrides)),
            host_s=(host_ms or 0.0) / 1e3,
        )
    output.show(validation, shown.write_validation, shown.validation_json, shown.validation_text)


def _of_run(folder: Path, cell: str | None, as_json: bool) -> None:
    """Validate a run folder that contains its servers' step logs."""
    from ...harness.validation.replay.replayed_decisions import compare_decisions
    from ...harness.validation.replay.run_replay import validate_run
    from ...reports.pages.validation import levels_text
    from ..output.console import print_result

    if not folder.is_dir():
        raise SloBenchError(f"{folder} is no run folder with step logs; give --profile FILE")
    with phase("simulating the levels"):
        levels = validate_run(folder)
    with phase("comparing decisions with the simulator's"):
        compare_decisions(folder)
    if cell is not None:
        cell_names = [level.cell for level in levels]
        if cell not in cell_names:
            raise UnknownNameError("cell", cell, cell_names)
        levels = [level for level in levels if level.cell == cell]
    if as_json:
        rows = [row for level in levels for row in level.rows()]
        typer.echo(json.dumps(rows, allow_nan=False))
    else:
        print_result(levels_text(levels))
