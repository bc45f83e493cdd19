"""Counts of decisions that a policy made inside a server.

A policy is asked whenever a batch is formed, but its answer makes a difference only where there is
a choice: several requests wait, or several could be preempted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Columns of `cells.csv` with their meaning; in the order in which reports show them.
DECISIONS: Mapping[str, str] = {
    "decisions_order": "requests that entered the batch while others waited",
    "decisions_overtaking": "of these, requests that left an earlier one waiting",
    "decisions_victim": "victims chosen among several requests",
    "decisions_other_victim": "of these, other requests than the latest",
    "decisions_release": "requests rejected, dropped or offloaded",
}


@dataclass
class DecisionCounts:
    """Decisions so far. Requests are given by their numbers in order of arrival."""

    order: int = 0
    overtaking: int = 0
    victim: int = 0
    other_victim: int = 0
    release: int = 0

    def enter(self, entered: Collection[int], waiting: Collection[int]) -> None:
        """Requests entered the batch; `waiting` stayed behind."""
        self.order += min(len(entered), len(entered) + len(waiting) - 1) if entered else 0
        if waiting:
            earliest = min(waiting)
            self.overtaking += sum(seq > earliest for seq in entered)

    def preempt(self, victim: int, others: Collection[int]) -> None:
        """A request was preempted; `others` could have been."""
        if others:
            self.victim += 1
            self.other_victim += victim < max(others)

    def totals(self) -> dict[str, int]:
        """Number of decisions by column of cells.csv."""
        return {name: getattr(self, name.removeprefix("decisions_")) for name in DECISIONS}
