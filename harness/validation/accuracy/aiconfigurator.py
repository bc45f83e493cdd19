"""AIConfigurator's predictions of the same measurements, made by its own estimator.

`data/aiconfigurator.csv` is written by `scripts/aiconfigurator_predictions.py`; its column
`version` names AIConfigurator's release and its kernel database.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .prediction_errors import Judged
from .shipped import SHIPPED

FILE = SHIPPED / "aiconfigurator.csv"


@dataclass(frozen=True)
class Beside:
    """Errors on the `n` measurements that both predicted: medians and 90th percentiles (shares)."""

    n: int
    theirs: float
    theirs_p90: float
    ours: float
    ours_p90: float


@lru_cache(maxsize=1)
def predictions() -> Mapping[tuple[str, str], Mapping[str, float]]:
    """Seconds by metric of each (set, row); rows that it cannot predict are left out."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return {
            (row["set"], row["row"]): {
                name: float(row[f"{name}_s"]) for name in ("ttft_mean", "tpot_mean")
            }
            for row in csv.DictReader(file)
            if row["tpot_mean_s"]
        }


def beside(rows: Iterable[Judged], metric: str) -> Beside | None:
    """Both errors on the rows that AIConfigurator predicted; None: there are none."""
    predicted = predictions()
    pairs = [
        (abs(predicted[row.set, row.row][metric] / row.measured[metric] - 1), abs(error))
        for row in rows
        if (error := row.errors().get(metric)) is not None
        and metric in predicted.get((row.set, row.row), {})
    ]
    if not pairs:
        return None
    theirs, ours = np.array(pairs).T
    return Beside(
        len(pairs),
        float(np.median(theirs)),
        float(np.quantile(theirs, 0.9)),
        float(np.median(ours)),
        float(np.quantile(ours, 0.9)),
    )
