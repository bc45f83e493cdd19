"""Decisions of policies inside servers, compared with a simulation: the files of a run folder.

    decisions.json           counts of every level, and how many requests were treated alike
    decisions/<cell>.csv.gz  what was decided about each request, in the server and simulated

`harness.validation.replay.replayed_decisions` makes the comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json
from ..core.records.decision_counts import DECISIONS
from .read_run import read_table

FOLDER = "decisions"
TABLE = "decisions.json"
PREEMPTIONS = ("preemptions_swap", "preemptions_recompute")
COUNTS = (*DECISIONS, *PREEMPTIONS)
AWAY = ("", "rejected", "dropped", "offloaded")  # how a request was sent away
SIDES = ("server", "simulated")
ASPECTS = ("overtook", "swaps", "recomputations", "away")  # in which requests may differ


def read_decisions(folder: Path) -> list[dict[str, Any]]:
    """The levels of `decisions.json`; empty where a run has none.

    Raises:
        FileFormatError: it cannot be read.
    """
    path = folder / TABLE
    if not path.is_file():
        return []
    try:
        levels = parse_json(path.read_text("utf-8"))
        names = {"cell", "requests", "server", "simulated", "alike", "differing", "note"}
        if not all(names <= set(level) for level in levels):
            raise ValueError("a level lacks some of " + ", ".join(sorted(names)))
    except (OSError, ValueError, TypeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    return list(levels)


def decisions_on(folder: Path, cell: str, request: int) -> dict[str, dict[str, int | str]]:
    """What was decided about one request, in the server and simulated; empty if it is not known.

    Raises:
        SloBenchError: the file of the cell cannot be read.
    """
    path = folder / FOLDER / f"{cell}.csv.gz"
    if not path.is_file():
        return {}
    table = read_table(path)
    rows = table[table["id"] == request]
    if rows.empty:
        return {}
    decision = rows.iloc[0]
    return {
        side: {
            name: (str(decision[f"{side}_{name}"]) if decision[f"{side}_{name}"] in AWAY else "")
            if name == "away"
            else int(decision[f"{side}_{name}"])
            for name in ("entered", *ASPECTS)
        }
        for side in SIDES
    }
