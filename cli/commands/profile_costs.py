"""`slo-bench profile fit --like adaptivellm`: what preempting costs, learned from a profile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.parsing import plain_fields
from ..options.parameters import option, option_group
from ..output.progress import counted

if TYPE_CHECKING:
    from ...predictors.costs.fit_costs import CostFit, CostFitQuality
    from ...predictors.profiles.profile_format import Profile
    from ...reports.terminal.screen import Screen

LIKE = ("adaptivellm",)


@option_group
class CostFitOptions:
    """Options of a fit of preemption costs as in a paper."""

    like: str | None = option(
        "PAPER",
        "adaptivellm: fit the paper's regressors of swap and recompute costs; --out is a grid "
        "that the system adaptivellm loads (cost_grid).",
    )
    extra_profile: list[Path] | None = option(
        "FILE", "With --like: also fit to this profile. May be repeated."
    )
    tp: int | None = option(
        "N", "With --like: costs on N GPUs, instead of the profile's number.", min=1
    )
    degrees: str | None = option("N,…", "With --like: degrees of the polynomials (1,2), up to 10.")


def fit_costs_like(
    options: CostFitOptions,
    profile: Path,
    *,
    out: Path | None,
    seed: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Fit the cost models, print their errors and write the grid.

    Raises:
        SloBenchError: the paper is unknown, --out is missing or wrong, or the profile has too
            little data.
    """
    from ...predictors.costs.fit_costs import fit_costs
    from ...predictors.costs.regressors import DEGREES, settings
    from ...predictors.profiles.profile_format import read_profile

    if options.like not in LIKE:
        raise UnknownNameError("paper in --like", str(options.like), LIKE)
    if out is None and not dry_run:
        raise SloBenchError("--like adaptivellm needs --out FILE for the grid (or --dry-run)")
    if out is not None and out.suffix == ".toml":
        raise SloBenchError(f"--out {out}: the grid is no profile; name it FILE.npz")
    tried = settings(DEGREES if options.degrees is None else _degrees(options.degrees))
    read = read_profile(profile)
    beside = [read_profile(path) for path in options.extra_profile or []]
    with counted("regressors") as progress:
        cost_fit = fit_costs(read, beside, tp=options.tp, tried=tried, seed=seed, progress=progress)
    if out is not None and not dry_run:
        cost_fit.grid.write(out)
    if as_json:
        typer.echo(json.dumps(_plain(cost_fit), allow_nan=False))
        return
    from ..output.console import print_result

    print_result(_screen(cost_fit, read))
    if out is not None and not dry_run:
        typer.echo(str(out))


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise SloBenchError(f"--degrees {text!r} must be whole numbers, such as 1,2,3") from None


def _screen(cost_fit: CostFit, profile: Profile) -> Screen:
    from ...reports.terminal.screen import Column, Group, Screen

    title = f"{profile.label}: step times, {cost_fit.rows:,} rows, mean error held out"
    numbers = ("random %", "whole %", "beyond %", "train s", "call µs")
    rows = []
    for q in sorted(cost_fit.qualities, key=lambda q: q.held_out_percent):
        setting, errors = q.setting, (q.random_percent, q.whole_percent, q.beyond_percent)
        shown = (f"{v:.2f}" if math.isfinite(v) else "–" for v in errors)
        times = f"{q.train_s:.2f}", f"{1e6 * q.call_s:,.0f}"
        kept = "kept" if q is cost_fit.best else ""
        rows.append(
            (
                *map(str, (setting.regressor, setting.target, setting.scale, setting.degree)),
                *(*shown, *times, kept),
            )
        )
    words = [Column(head, words=True) for head in ("regressor", "learns", "of", "degree")]
    columns = [*words, *map(Column, numbers), Column("", words=True)]
    return Screen([title], columns, [Group(rows)], *_notes_and_answer(cost_fit))


def _notes_and_answer(cost_fit: CostFit) -> tuple[list[str], list[str]]:
    """What the heads mean; then the accuracy of the grid and of the swap costs."""
    grid, swap = cost_fit.grid_quality, cost_fit.swap
    shape = " x ".join(str(n) for n in cost_fit.grid.step_s.shape)
    error = f", {_percent(swap.held_out_percent)} off on copies held out" if swap.measured else ""

    def speed(direction: Any) -> str:
        return f"{1e6 * direction.latency_s:.0f} µs + {1e6 * direction.s_per_token:.2f} µs a token"

    notes = [
        "random: a fifth of the rows kept out; whole: whole batch sizes and lengths kept out; "
        "beyond: the outer half of the range. Learns: seconds as published, or their ratio to what "
        "the operators would take; of raw features as published, or of their logarithms.",
    ]
    return notes, [
        f"grid of the best, {shape} (tokens x sequences x KV tokens each): "
        f"{_percent(grid.random_percent)} at random, {_percent(grid.whole_percent)} on whole "
        f"sizes, {1e6 * grid.call_s:.1f} µs a lookup",
        f"swap: out {speed(swap.out)}, in {speed(swap.into)}{error} ({swap.source})",
    ]


def _percent(value: float) -> str:
    return f"{value:.2f} %" if math.isfinite(value) else "–"


def _plain(cost_fit: CostFit) -> dict[str, Any]:
    return {
        "rows": cost_fit.rows,
        "regressors": [_quality(q, cost_fit) for q in cost_fit.qualities],
        "grid": {"shape": list(cost_fit.grid.step_s.shape), **plain_fields(cost_fit.grid_quality)},
        "swap": plain_fields(cost_fit.swap),
    }


def _quality(q: CostFitQuality, cost_fit: CostFit) -> dict[str, Any]:
    values = plain_fields(q)
    return {**values.pop("setting"), **values, "best": q is cost_fit.best}
