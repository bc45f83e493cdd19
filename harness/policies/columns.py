"""Columns of `cells.csv` that a paper defines over the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .banaserve.objective import of_run

COLUMNS: Mapping[str, Callable[[Mapping[str, float]], float]] = {"banaserve_objective": of_run}
