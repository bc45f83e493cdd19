"""Write `predictors/residuals.csv.gz`: how far predictions are from the package's measurements.

    python scripts/residuals.py FOLDER

Predicts the measurements with kernel tables, those of plain models with a fit or the estimate of
`run`, and those of each GPU with tables without these. FOLDER keeps the predictions
(`errors.jsonl`, `analytic.jsonl`, `without-GPU.jsonl`), which `scripts/accuracy_page.py` reads too;
those that it holds are not made again.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from slo_bench.harness.experiments.execution.workers import LocalPool
from slo_bench.harness.load_generator.machine import cores
from slo_bench.harness.validation.accuracy.prediction_errors import Judged, judge
from slo_bench.harness.validation.accuracy.shipped import SHIPPED
from slo_bench.predictors.bands import (
    FILE,
    FITTED,
    METRICS,
    NAMES,
    SCALED,
    UNFITTED,
    model_kind,
    residual_id,
)
from slo_bench.predictors.specs import model

OUT = Path(__file__).parents[1] / "predictors" / FILE
ORIGIN = (
    "# log(measured / predicted) of the measurements in harness/validation/accuracy/data, whose\n"
    "# origins and licences are in NOTICE there; written by scripts/residuals.py\n"
)


def predictions(folder: Path) -> Iterable[Judged]:
    """Every measurement by every kind of step times."""
    folder.mkdir(parents=True, exist_ok=True)
    with LocalPool(cores()) as pool:
        predict_all = partial(judge, SHIPPED, resume=True, begin=pool.begin)
        default_rows, _ = predict_all(folder / "errors.jsonl")
        yield from default_rows
        plain = partial(
            predict_all, only=lambda case: model(case.model).is_plain
        )  # others have no fit
        analytic, _ = plain(folder / "analytic.jsonl", analytic=True)
        yield from (row for row in analytic if row.step_time in (FITTED, UNFITTED))
        for gpu in sorted({row.gpu for row in default_rows}):
            there = partial(predict_all, only=lambda case, gpu=gpu: case.gpu == gpu)
            rows, _ = there(folder / f"without-{gpu}.jsonl", without=(gpu,))
            yield from (row for row in rows if row.step_time == SCALED)


def main(folder: Path) -> None:
    """Predict what FOLDER lacks and write the file."""
    text = io.StringIO()
    text.write(ORIGIN)
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*NAMES, *METRICS))
    for row in predictions(folder):
        kind = model_kind(model(row.model))
        names = (row.engine, row.gpu, row.model, row.mode, row.regime, row.step_time, kind)
        logs = {name: -math.log1p(error) for name, error in row.errors().items()}
        figures = [f"{logs[metric]:.4f}" if metric in logs else "" for metric in METRICS]
        table.writerow((residual_id(row.set, row.row), *names, *figures))
    OUT.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
