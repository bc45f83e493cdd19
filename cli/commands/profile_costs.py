"""`slo-bench profile fit --like adaptivellm`: what preempting costs, learned from a profile."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.parsing import plain_fields
from ..options.parameters import option

if TYPE_CHECKING:
    from ...predictors.costs.fit import CostFit, CostFitQuality
    from ...predictors.profiles.profile import Profile

LIKE = ("adaptivellm",)


@dataclass(frozen=True)
class CostFitOptions:
    """Options of a fit of preemption costs as in a paper."""

    like: Annotated[
        str | None,
        option(
            "PAPER",
            "adaptivellm: fit the paper's regressors of swap and recompute costs; --out is a "
            "grid that the system adaptivellm loads (cost_grid).",
        ),
    ] = None
    extra_profile: Annotated[
        list[Path] | None, option("FILE", "With --like: also fit to this profile. May be repeated.")
    ] = None
    tp: Annotated[
        int | None,
        option("N", "With --like: costs on N GPUs, instead of the profile's number.", min=1),
    ] = None
    degrees: Annotated[
        str | None, option("N,…", "With --like: degrees of the polynomials (1,2), up to 10.")
    ] = None


def fit_costs_like(
    asked: CostFitOptions,
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
    from ...predictors.costs.fit import fit_costs
    from ...predictors.costs.regressors import DEGREES, settings
    from ...predictors.profiles.profile import read_profile

    if asked.like not in LIKE:
        raise UnknownNameError("paper in --like", str(asked.like), LIKE)
    if out is None and not dry_run:
        raise SloBenchError("--like adaptivellm needs --out FILE for the grid (or --dry-run)")
    if out is not None and out.suffix == ".toml":
        raise SloBenchError(f"--out {out}: the grid is no profile; name it FILE.npz")
    tried = settings(DEGREES if asked.degrees is None else _degrees(asked.degrees))
    read = read_profile(profile)
    beside = [read_profile(one) for one in asked.extra_profile or []]
    found = fit_costs(read, beside, tp=asked.tp, tried=tried, seed=seed)
    if out is not None and not dry_run:
        found.grid.write(out)
    if as_json:
        typer.echo(json.dumps(_plain(found), allow_nan=False))
        return
    from ..output.console import terminal

    console = terminal()
    console.print(_table(found, read))
    for line in _lines(found):
        console.print(line, highlight=False)
    if out is not None and not dry_run:
        typer.echo(str(out))


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise SloBenchError(f"--degrees {text!r} must be whole numbers, such as 1,2,3") from None


def _table(found: CostFit, profile: Profile) -> Any:
    from ..output.console import RULED, text_table

    title = f"{profile.label}: step times, {found.rows:,} rows, mean error held out"
    numbers = ("random %", "whole %", "beyond %", "train s", "call µs")
    rows = []
    for q in sorted(found.qualities, key=lambda q: q.held_out_percent):
        of, errors = q.setting, (q.random_percent, q.whole_percent, q.beyond_percent)
        shown = (f"{v:.2f}" if math.isfinite(v) else "–" for v in errors)
        times = f"{q.train_s:.2f}", f"{1e6 * q.call_s:,.0f}"
        kept = "kept" if q is found.best else ""
        rows.append((of.regressor, of.target, of.scale, of.degree, *shown, *times, kept))
    heads = ("regressor", "learns", "of", "degree", *numbers, "")
    whole: dict[str, Any] = {"numbers": numbers, "unbroken": ("regressor", "learns", "call µs", "")}
    return text_table(heads, rows, title=title, **whole, **RULED, padding=(0, 1, 0, 0))


def _lines(found: CostFit) -> list[str]:
    """Return text lines with the accuracy of the grid and of the swap costs."""
    grid, swap = found.grid_quality, found.swap
    shape = " x ".join(str(n) for n in found.grid.step_s.shape)
    error = f", {_percent(swap.held_out_percent)} off on copies held out" if swap.measured else ""

    def speed(one: Any) -> str:
        return f"{1e6 * one.latency_s:.0f} µs + {1e6 * one.s_per_token:.2f} µs a token"

    return [
        "random: a fifth of the rows kept out; whole: whole batch sizes and lengths kept out; "
        "beyond: the outer half of the range. Learns: seconds as published, or their ratio to what "
        "the operators would take; of raw features as published, or of their logarithms.",
        f"grid of the best, {shape} (tokens x sequences x KV tokens each): "
        f"{_percent(grid.random_percent)} at random, {_percent(grid.whole_percent)} on whole "
        f"sizes, {1e6 * grid.call_s:.1f} µs a lookup",
        f"swap: out {speed(swap.out)}, in {speed(swap.into)}{error} ({swap.source})",
    ]


def _percent(value: float) -> str:
    return f"{value:.2f} %" if math.isfinite(value) else "–"


def _plain(found: CostFit) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "regressors": [_quality(q, found) for q in found.qualities],
        "grid": {"shape": list(found.grid.step_s.shape), **plain_fields(found.grid_quality)},
        "swap": plain_fields(found.swap),
    }


def _quality(q: CostFitQuality, found: CostFit) -> dict[str, Any]:
    values = plain_fields(q)
    return {**values.pop("setting"), **values, "best": q is found.best}
