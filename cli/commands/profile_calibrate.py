"""`slo-bench profile calibrate`: a profile's linear layers held to a real run of the machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..options.declared import PEER_LINK
from ..options.from_schema import with_options
from ..options.parameters import CELL, OUT, argument, flag, option
from ..output.console import print_result, text_table
from .validate import Engine

if TYPE_CHECKING:
    from ...harness.validation.calibration.calibrate import Calibrated
    from ...predictors.profiles.calibration import Calibration
    from ...reports.terminal.screen import Screen

CALIBRATES = (
    "slo-bench profile calibrate requests.jsonl --profile 4090.toml --out 4090-here.toml",
    "slo-bench profile calibrate runs/measured --profile 4090.toml --out 4090-here.toml --json",
    "slo-bench profile calibrate closed-loops.csv --profile h100.toml --out h100-here.toml",
)


@with_options
def profile_calibrate(
    *,
    log: Path = argument(
        "LOG",
        "A run of this machine: a request log (JSONL, with meta.json and hash_ids.jsonl in the "
        "same folder, if any), a run folder, or a closed-loop table (CSV).",
    ),
    overrides: Engine,
    profile: Path = option("FILE", "Profile with tables.", "--profile", default=...),
    out: Path = option("FILE", "Calibrated profile.", *OUT, default=...),
    engine: str | None = option("S", "System that simulates the engine."),
    cell: str | None = option("C", "Cell of the run folder. Default: all.", *CELL),
    peer_link: str | None = PEER_LINK,
    as_json: bool = flag("Print only the calibration, as JSON.", "--json"),
) -> None:
    """Learn factors on the profile's linear layers from a real run of the machine.

    Judge the result by another run: `slo-bench validate OTHER --profile OUT`.
    """
    from ...harness.policies.systems import DEFAULT_SYSTEM
    from ...harness.results.engine_logs import EngineSettings, measured_logs
    from ...harness.validation.calibration.calibrate import calibrate
    from ...predictors.profiles.build_model import with_peer_link
    from ...predictors.profiles.profile_format import read_profile, write_profile
    from ..output.progress import changing_line

    base_profile = with_peer_link(read_profile(profile), peer_link)
    with changing_line("reading") as shown:
        if _is_table(log):
            from ...harness.validation.calibration.calibrate_table import calibrate_table

            calibrated = calibrate_table(log, base_profile, progress=shown)
        else:
            logs = measured_logs(log, cell)
            calibrated = calibrate(
                logs,
                base_profile,
                engine or logs[0].engine.system or DEFAULT_SYSTEM,
                overrides=EngineSettings(**asdict(overrides)),
                progress=shown,
            )
    written = write_profile(calibrated.profile, out)
    if as_json:
        typer.echo(json.dumps(calibrated.calibration.plain(), allow_nan=False))
        return
    notes = (f"note: {note}" for note in calibrated.notes)
    print_result(_table(calibrated), *notes, *_lines(calibrated.calibration), written)


def _is_table(path: Path) -> bool:
    """A closed-loop table, and no request file of a run folder?"""
    return path.is_file() and path.suffix != ".jsonl" and path.parent.name != "requests"


def _table(calibrated: Calibrated) -> Screen:
    calibration = calibrated.calibration
    title = f"{calibrated.profile.label}: {', '.join(calibration.origin)}"
    heads = ("tokens of a step", "factor on linear layers")
    rows = [
        (f"{tokens:,.0f}", f"{factor:.3f}")
        for tokens, factor in zip(calibration.tokens, calibration.factors, strict=True)
    ]
    return text_table(heads, rows, numbers=heads, title=title)


def _lines(calibration: Calibration) -> Iterator[str]:
    """What it was learned from, and the errors on that before and after."""
    learned = f"{calibration.requests:,} requests" + (
        f", {calibration.steps:,} steps" if calibration.steps else ""
    )
    if math.isfinite(calibration.held_out_percent):
        learned += (
            f"; half of it is {calibration.held_out_percent:.1f} % off with factors of the other"
        )
    yield learned
    for metric, after in calibration.after_percent.items():
        before = calibration.before_percent[metric]
        yield f"{metric.upper()}, mean: {before:+.1f} % before, {after:+.1f} % after (in-sample)"
