"""The summary that the command line prints after a run: what each system carries, and how."""

from __future__ import annotations

import math

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .levels import TARGETS, HighestRate, highest_rate, levels, series_names, with_series
from .read import REASON_COLUMN

__all__ = ["HighestRate", "highest_rate", "seconds_text", "summary_table"]


def summary_table(cells: pd.DataFrame) -> RenderableType:
    """Two tables of a cells frame: highest rates per system, and each system at each rate.

    Means are over the valid seeds; names are shown as they are, never read as markup.
    """
    cells = cells if "series" in cells.columns else with_series(cells)
    parts: list[RenderableType] = [_highest(cells), Text(), _per_rate(cells)]
    parts += [Text(note, style="dim") for note in _notes(cells)]
    return Group(*parts)


def origin(cells: pd.DataFrame) -> str:
    """`simulated`, `measured`, or both: where the numbers come from."""
    simulated = cells["backend"] == "simulated"
    if simulated.all():
        return "simulated"
    return "simulated and measured" if simulated.any() else "measured"


def _highest(cells: pd.DataFrame) -> Table:
    table = Table(
        title=Text(f"Highest tested rate, req/s ({origin(cells)})"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("system", overflow="fold")
    for target in TARGETS:
        table.add_column(f"≥ {target:.0%} in SLO", justify="right")
    for name in series_names(cells):
        rows = cells[cells["series"] == name]
        found = [highest_rate(rows, target) for target in TARGETS]
        table.add_row(Text(name), *(Text(highest_text(h)) for h in found))
    return table


def _per_rate(cells: pd.DataFrame) -> Table:
    table = Table(
        title=Text(f"Mean over seeds ({origin(cells)})"), title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("system", overflow="fold")
    for head in ("req/s", "in SLO", "goodput", "TTFT p99", "TPOT p99"):
        table.add_column(head, justify="right", no_wrap=True)
    rows = levels(cells)
    for name in series_names(cells):
        of_series = rows[rows["series"] == name]
        for place, (_, row) in enumerate(of_series.iterrows()):
            share = float(row["attainment"])
            table.add_row(
                Text(name if place == 0 else ""),
                rate_text(float(row["rate_rps"])),
                Text(percent_text(share), style=_style(share)),
                rate_text(float(row["goodput_rps"])),
                seconds_text(float(row["ttft_p99_s"])),
                seconds_text(float(row["tpot_p99_s"])),
                end_section=place == len(of_series) - 1,
            )
    return table


def _style(share: float) -> str:
    return "green" if share >= TARGETS[0] else "yellow" if share >= 0.5 else "red"


def _notes(cells: pd.DataFrame) -> list[str]:
    notes = []
    if any(highest_rate(rows, TARGETS[0]).at_end for _, rows in cells.groupby("series")):
        notes.append("≥: still in SLO at the highest rate tested; it may carry more.")
    unfitted = cells[cells["step_time"] == "unfitted"]
    if len(unfitted):
        pairs = sorted(set(unfitted["model"] + " on " + unfitted["gpu"]))
        notes.append(f"unfitted: step times of {', '.join(pairs)} are an analytic estimate.")
    invalid = cells[~cells["valid"]]
    if len(invalid):
        count = f"{len(invalid)} of {len(cells)}"
        notes.append(f"{count} cells are invalid and left out: {reason(cells)}.")
    if "oversize" in cells and (oversize := int(cells["oversize"].fillna(0).sum())):
        notes.append(
            f"Too long for the context or the KV cache, and missed: {oversize:,} of "
            f"{int(cells['requests'].sum()):,} requests (oversize)."
        )
    return notes


def reason(cells: pd.DataFrame) -> str:
    """Why the first invalid cell is invalid."""
    invalid = cells[~cells["valid"]]
    if REASON_COLUMN in invalid.columns and len(invalid):
        return str(invalid[REASON_COLUMN].iloc[0])
    return "late client"


def highest_text(found: HighestRate) -> str:
    """`6`, `≥ 6` where the highest rate tested still reaches the target, `< 1` where none does."""
    if found.rate_rps is None:
        return f"< {rate_text(found.lowest_rps)}"
    return f"≥ {rate_text(found.rate_rps)}" if found.at_end else rate_text(found.rate_rps)


def rate_text(rate_rps: float) -> str:
    """Three significant digits, no exponent."""
    if not math.isfinite(rate_rps):
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(rate_rps)))) if rate_rps else 0
    text = f"{rate_rps:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_text(share: float) -> str:
    """One decimal, cut off rather than rounded, so that 89.99 % never reads as 90 %."""
    if math.isnan(share):
        return "–"
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


def seconds_text(seconds: float) -> str:
    """`350 ms`, `1.25 s`, `210 s`."""
    if math.isnan(seconds):
        return "–"
    if math.isinf(seconds):
        return "∞"
    if seconds < 0.9995:
        return f"{rate_text(seconds * 1000)} ms"
    return f"{rate_text(seconds)} s"
