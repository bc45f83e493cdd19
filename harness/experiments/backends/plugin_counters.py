"""Counters of the plugins inside servers, over one cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...results.run_folder import Value

Totals = Mapping[str, int]


def growth(before: Sequence[Totals], after: Sequence[Totals]) -> Totals:
    """Growth of each counter, summed over all servers; empty without plugins."""
    grown: Counter[str] = Counter()
    for old, new in zip(before, after, strict=True):
        grown.update({name: count - old.get(name, 0) for name, count in new.items()})
    return grown


def figures(grown: Totals) -> Mapping[str, Value]:
    """Columns of `cells.csv`; empty without plugins."""
    if not grown:
        return {}
    return {
        "preemptions_swap": grown.get("preempted_swap"),
        "preemptions_recompute": grown.get("preempted_recompute"),
    }


def swap_problem(grown: Totals) -> str | None:
    """Differences between decided and executed swaps, as text; None if there are none."""
    wrong = [
        f"{grown.get(f'executed_{way}', 0)} swaps {way} were executed, but "
        f"{grown.get(f'decided_{way}', 0)} decided"
        for way in ("out", "in")
        if grown.get(f"executed_{way}", 0) != grown.get(f"decided_{way}", 0)
    ]
    return "; ".join(wrong) or None
