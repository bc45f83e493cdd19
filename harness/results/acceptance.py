"""Acceptance of speculative decoding, from a real server's counters, run folder or log.

vLLM counts drafts (proposals for one sequence in one step), proposed and accepted tokens, and
accepted tokens by position. The columns of a run keep the growth of these counts over a cell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ...predictors.speculation import OFF, Speculation, parse_speculation
from ...workloads.errors import FileFormatError
from ..load_generator.server_metrics import names_in
from ..servers.server_kinds import metrics_by_server
from .run_folder import Row, Value, read_rows

_DRAFTS, _PROPOSED, _ACCEPTED = "server_drafts", "server_draft_tokens", "server_accepted_tokens"
_STEPS, _RATE = "server_sequence_steps", "acceptance_rate"
_AT = "server_accepted_"  # followed by the position, from 1
_COLUMNS = {"drafts": _DRAFTS, "draft_tokens": _PROPOSED, "accepted_tokens": _ACCEPTED}
_POSITION = re.compile(r'position="(\d+)"')
_LOGGED = re.compile(
    r"SpecDecoding metrics: .*?Drafted: (\d+) tokens, Per-position acceptance rate: ([\d., ]+),"
)


def speculation_counts(metrics: str) -> Counter[str]:
    """Counts since the server's start by column, from the text of `/metrics`; empty without
    speculation.

    `server_sequence_steps` are the steps of all decoding sequences: output tokens without first and
    accepted ones. Tokens accepted behind the end of an answer make it a little too small.
    """
    counts: Counter[str] = Counter()
    names = names_in(metrics, metrics_by_server())
    if names is None:
        return counts
    columns = {f"{names.speculation}{count}_total": column for count, column in _COLUMNS.items()}
    outputs, first_tokens = names.of("output_tokens"), f"{names.histograms['ttft'][0]}_count"
    for name, labels, value in names.samples(metrics):
        position = _POSITION.search(labels)
        if name in columns:
            counts[columns[name]] += round(float(value))
        elif name == f"{names.speculation}accepted_tokens_per_pos_total" and position:
            counts[f"{_AT}{int(position[1]) + 1}"] += round(float(value))
        elif name in (*outputs, first_tokens):
            counts[_STEPS] += round(float(value)) * (-1 if name == first_tokens else 1)
    if _DRAFTS not in counts:
        return Counter()
    counts[_STEPS] -= counts[_ACCEPTED]
    return counts


def speculation_figures(before: Iterable[str], after: Iterable[str]) -> Mapping[str, Value]:
    """Columns of `cells.csv`: growth of the counts of all servers; empty without speculation.

    `acceptance_rate` is accepted tokens / proposed tokens.
    """
    grown: Counter[str] = Counter()
    for text in after:
        grown.update(speculation_counts(text))
    for text in before:
        grown.subtract(speculation_counts(text))
    if not grown:
        return {}
    proposed = grown[_PROPOSED]
    return {**grown, _RATE: grown[_ACCEPTED] / proposed if proposed else None}


def with_acceptance(speculation: Speculation) -> Speculation:
    """The same with the acceptance that its `source` holds: the run folder of a real server (the
    cells with its method where the run had several), a server's log, or the text of its `/metrics`.

    Raises:
        FileFormatError: the source cannot be read, or nothing was proposed in it.
    """
    if speculation.source is None:
        return speculation
    path = Path(speculation.source)
    table = path / "cells.csv"
    if path.is_dir():
        counts: Counter[str] = Counter()
        for row in _rows_of(speculation, table):
            counts.update({k: v for k, v in row.items() if isinstance(v, int) and _counted(k)})
        return _from_counts(speculation, table, counts)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if logged := _LOGGED.findall(text):
        return _from_log(speculation, path, logged)
    return _from_counts(speculation, path, speculation_counts(text))


def _rows_of(speculation: Speculation, table: Path) -> list[Row]:
    """All cells, or those with the method asked for where a run had several."""
    rows = read_rows(table)
    ran = [parse_speculation(str(row.get("speculation") or OFF)) for row in rows]
    methods = sorted({method_run.method for method_run in ran if method_run is not None})
    if len(methods) < 2:
        return rows
    if speculation.method not in methods:
        raise FileFormatError(
            table, None, f"has cells with {', '.join(methods)} but none with {speculation.method}"
        )
    return [
        row
        for row, method_run in zip(rows, ran, strict=True)
        if method_run is not None and method_run.method == speculation.method
    ]


def _counted(column: str) -> bool:
    return column in (_DRAFTS, _STEPS) or column.removeprefix(_AT).isdecimal()


def _from_counts(speculation: Speculation, path: Path, counts: Counter[str]) -> Speculation:
    reached = [counts[_DRAFTS]]
    while reached[-1] > 0 and f"{_AT}{len(reached)}" in counts:
        reached.append(counts[f"{_AT}{len(reached)}"])
    drafted = min(1.0, counts[_DRAFTS] / counts[_STEPS]) if counts[_STEPS] > 0 else 1.0
    return _settled(speculation, path, reached, drafted)


def _from_log(
    speculation: Speculation, path: Path, logged: Iterable[tuple[str, str]]
) -> Speculation:
    """Each line weighs as its proposed tokens; how many steps had proposals is not logged."""
    reached = [0.0]
    for proposed, rates in logged:
        shares = [float(rate) for rate in rates.split(",") if rate.strip()]
        reached += [0.0] * (len(shares) + 1 - len(reached))
        for position, share in enumerate((1.0, *shares)):
            reached[position] += int(proposed) * share
    return _settled(speculation, path, reached, 1.0)


def _settled(
    speculation: Speculation, path: Path, reached: list[int] | list[float], drafted: float
) -> Speculation:
    """With the drafts that reach each position, all of them first."""
    if len(reached) < 2 or not reached[0]:
        raise FileFormatError(
            path, None, "has no counts of speculation; run a real vLLM with speculation=ngram:4"
        )
    shares = [round(after / before, 4) for before, after in pairwise(reached) if before > 0]
    return replace(speculation, acceptance=tuple(shares), drafted=round(drafted, 4), source=None)
