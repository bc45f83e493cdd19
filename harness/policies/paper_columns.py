"""Columns of `cells.csv` that a paper defines over the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .banaserve.objective import of_run

COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {"banaserve_objective": of_run}
