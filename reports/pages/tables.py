"""The summary that the command line prints after a run: what each system carries, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ...harness.results.read import REASON_COLUMN
from ..figures.facets import abbreviated, by_facet, facets_of
from ..figures.labels import is_letter
from ..figures.levels import TARGETS, highest_rate, levels, offered, series_names, with_series
from ..figures.measures import AT_A_RATE, IN_SLO, Measure, load_text, measures
from ..figures.numbers import highest_text, origin, rate_text

MOST_LINES = 60
"""A table of every rate longer than this stays in the report: nobody reads it on a terminal."""

_LEAST_NAME = 12  # characters of a name before it goes on in the next line
_BETWEEN = 3  # characters between two columns

Line = Sequence[str | Text]


@dataclass(frozen=True)
class _Block:
    """Lines of one facet, those of a series together: its name is shown on the first."""

    facet: str
    lines: Sequence[Line]


def summary_table(cells: pd.DataFrame) -> RenderableType:
    """Highest rates per system and each system at each rate; where all have one rate, only that.

    Facets stand one below the other. Means are over the valid seeds; names are shown as they are,
    never read as markup.
    """
    cells = cells if "series" in cells.columns else with_series(cells)
    names = series_names(cells)
    parts: list[RenderableType] = []
    rows = levels(cells)
    if offered(cells) == "several rates":
        title = f"Highest tested rate, req/s ({origin(cells)})"
        heads = ["system", *(f"≥ {target:.0%} in SLO" for target in TARGETS)]
        parts.append(_grouped(title, heads, _highest(cells, names)))
        title = f"Mean over seeds ({origin(cells)})"
        heads = ["system", "req/s", *(measure.head for measure in AT_A_RATE)]
        if len(rows) <= MOST_LINES:
            parts += [Text(), _grouped(title, heads, _per_rate(cells, rows, names, AT_A_RATE))]
    else:
        shown = measures(cells)
        title = f"Mean over seeds, {load_text(cells)} ({origin(cells)})"
        heads = ["system", *(measure.head for measure in shown)]
        blocks = _per_rate(cells, rows, names, shown)
        lines = [_Block(b.facet, [(name, *line) for name, _, *line in b.lines]) for b in blocks]
        parts.append(_grouped(title, heads, lines))
    parts += [Text(note, style="dim") for note in _notes(cells, rows)]
    return Group(*parts)


def _highest(cells: pd.DataFrame, names: Sequence[str]) -> list[_Block]:
    blocks = []
    for facet, of_facet in by_facet(cells, facets_of(cells)).items():
        lines: list[Line] = []
        for name in names:
            of = of_facet[of_facet["series"] == name]
            if len(of):
                found = [highest_rate(of, target) for target in TARGETS]
                lines.append((name, *map(highest_text, found)))
        blocks.append(_Block(facet, lines))
    return blocks


def _per_rate(
    cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str], shown: Sequence[Measure]
) -> list[_Block]:
    blocks = []
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        lines: list[Line] = []
        for name in names:
            of = of_facet[of_facet["series"] == name]
            for place, (_, row) in enumerate(of.iterrows()):
                values = [_said(measure, float(row[measure.column])) for measure in shown]
                rate = rate_text(float(row["rate_rps"]))
                lines.append((name if place == 0 else "", rate, *values))
        blocks.append(_Block(facet, lines))
    return blocks


def _said(measure: Measure, value: float) -> Text:
    style = ""
    if measure is IN_SLO:
        style = "green" if value >= TARGETS[0] else "yellow" if value >= 0.5 else "red"
    return Text(measure.text(value), style=style)


def _grouped(title: str, heads: Sequence[str], blocks: Sequence[_Block]) -> RenderableType:
    """A table; for several facets one each under its name, with one head."""
    if len(blocks) == 1:
        return _table(heads, blocks[0].lines, title=title)
    return _Stack(title, heads, blocks)


@dataclass(frozen=True)
class _Stack:
    """Tables one below the other whose columns are as wide, in a terminal of any width."""

    title: str
    heads: Sequence[str]
    blocks: Sequence[_Block]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        yield _table(self.heads, (), title=self.title, widths=widths)
        for place, block in enumerate(self.blocks):
            if place:
                yield Text()
            yield Text(block.facet, style="bold")
            yield _table(self.heads, block.lines, widths=widths, show_header=False)

    def _widths(self, room: int) -> list[int]:
        """Of each column; names have what numbers leave them."""
        columns = zip(*(line for block in self.blocks for line in block.lines), strict=True)
        widths = [
            max(len(head), *(len(str(text)) for text in column))
            for head, column in zip(self.heads, columns, strict=True)
        ]
        left = room - sum(width + _BETWEEN for width in widths[1:]) - _BETWEEN
        widths[0] = min(widths[0], max(_LEAST_NAME, left))
        return widths


def _table(
    heads: Sequence[str],
    lines: Sequence[Line],
    *,
    title: str | None = None,
    widths: Sequence[int] = (),
    show_header: bool = True,
) -> Table:
    """The first column holds names, the others numbers; a named line begins a section."""
    table = Table(
        title=None if title is None else Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=show_header,
        show_edge=False,
    )
    for place, head in enumerate(heads):
        width = widths[place] if widths else None
        if place:
            table.add_column(head, justify="right", no_wrap=True, width=width)
        else:
            table.add_column(head, overflow="fold", width=width)
    sectioned = any(not line[0] for line in lines)
    for line in lines:
        if sectioned and line[0] and table.row_count:
            table.add_section()
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in line))
    return table


def _notes(cells: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    notes = []
    if offered(cells) == "several rates":
        series = cells.groupby(["facet", "series"])
        if any(highest_rate(of, TARGETS[0]).at_end for _, of in series):
            notes.append("≥: still in SLO at the highest rate tested; it may carry more.")
        if len(rows) > MOST_LINES:
            notes.append(f"Every system at every rate, {len(rows)} lines: cells.csv and report.")
    notes += [f"{name}: {text}" for name, text in abbreviated(cells).items() if _is_bare(name)]
    unfitted = cells[cells["step_time"] == "unfitted"]
    if len(unfitted):
        pairs = sorted(set(unfitted["model"] + " on " + unfitted["gpu"]))
        notes.append(f"unfitted: step times of {', '.join(pairs)} are an analytic estimate.")
    invalid = cells[~cells["valid"]]
    if len(invalid):
        count = f"{len(invalid)} of {len(cells)}"
        notes.append(f"{count} cells are invalid and left out: {reason(cells)}.")
    if "overlong" in cells and (overlong := int(cells["overlong"].fillna(0).sum())):
        notes.append(
            f"Too long for the context or the KV cache, and missed: {overlong:,} of "
            f"{int(cells['requests'].sum()):,} requests (overlong)."
        )
    return notes


def _is_bare(name: str) -> bool:
    """Whether a name ends in a letter, so that it says nothing unless it is explained."""
    return is_letter(name.rpartition(" ")[2])


def reason(cells: pd.DataFrame) -> str:
    """Why the first invalid cell is invalid."""
    invalid = cells[~cells["valid"]]
    if REASON_COLUMN in invalid.columns and len(invalid):
        return str(invalid[REASON_COLUMN].iloc[0])
    return "late client"
