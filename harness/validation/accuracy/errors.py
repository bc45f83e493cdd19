"""Errors of predictions: a row a measurement, kept as they come, and their summaries."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.specs import model
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.parsing import parse_json
from .measurement import Measurement, Skipped
from .predict import predict
from .readers import read_folder


@dataclass(frozen=True)
class Judged:
    """A measurement beside its prediction; `reason` says why there is none.

    `measured` and `predicted` hold seconds by metric (throughput: tokens/s).
    """

    key: str
    set: str
    row: str
    mode: str
    engine: str
    gpu: str
    model: str
    regime: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    reason: str = ""

    @property
    def model_class(self) -> str:
        """Size of a dense model."""
        billions = model(self.model).parameters / 1e9
        return "dense, up to 15B" if billions <= 15 else "dense, above 15B"

    def errors(self) -> dict[str, float]:
        """Predicted / measured - 1 by metric."""
        return {
            name: self.predicted[name] / value - 1
            for name, value in self.measured.items()
            if name in self.predicted and value > 0
        }


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of one metric over `n` measurements; all are shares.

    `bias` is the median of signed errors. `in_band`: how often the measurement lay in the predicted
    band; None: predictions have no band.
    """

    set: str
    engine: str
    gpu: str
    model: str
    mode: str
    metric: str
    n: int
    median_error: float
    p90_error: float
    bias: float
    in_band: float | None = None


def judge(
    folder: Path,
    out: Path | None = None,
    *,
    resume: bool = False,
    without: tuple[str, ...] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Judged], Counter[tuple[str, str]]]:
    """Predict every measurement in `folder`; also how many rows were skipped, by set and reason.

    Kernel tables of the GPUs `without` are not used. With `out` each row is appended to that file (JSON lines) when it is known, and `resume` takes
    the rows that it holds from it.

    Raises:
        SloBenchError: nothing to read, or `out` exists and is not resumed.
        FileFormatError: a file is damaged.
    """
    known = _known(out, resume)
    skipped: Counter[tuple[str, str]] = Counter()
    found: list[Measurement] = []
    for each in read_folder(folder):
        if isinstance(each, Skipped):
            skipped[each.set, each.reason] += 1
        else:
            found.append(each)
    judged = []
    for number, measurement in enumerate(found, start=1):
        row = known.get(_key(measurement, without))
        if row is None:
            row = judge_one(measurement, without)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
        if row.reason:
            skipped[row.set, row.reason] += 1
        else:
            judged.append(row)
        progress(number, len(found))
    return judged, skipped


def _key(measurement: Measurement, without: tuple[str, ...]) -> str:
    return "-".join((measurement.key, *without))


def judge_one(measurement: Measurement, without: tuple[str, ...] = ()) -> Judged:
    """Predict one measurement. The prediction is given the case alone, not what was measured."""
    case = measurement.case
    predicted: Mapping[str, float] = {}
    regime = reason = ""
    try:
        made = predict(case, without)
        predicted, regime = made.figures, made.regime
    except SloBenchError as error:
        reason = str(error)
    return Judged(
        _key(measurement, without),
        measurement.set,
        measurement.row,
        measurement.mode,
        case.engine,
        case.gpu,
        case.model,
        regime,
        {name: float(value) for name, value in measurement.measured.items()},
        {name: value for name, value in predicted.items() if math.isfinite(value)},
        reason,
    )


def _known(out: Path | None, resume: bool) -> dict[str, Judged]:
    if out is None or not out.exists():
        return {}
    if not resume:
        raise SloBenchError(f"{out} exists; continue it with --resume, or name another file")
    known = {}
    lines = out.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = Judged(**parse_json(line))
        except (ValueError, TypeError):
            if number == len(lines):  # killed while it was written
                out.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")
                break
            raise FileFormatError(out, number, "is no result of `slo-bench accuracy`") from None
        known[row.key] = row
    return known


def summaries(
    judged: Iterable[Judged], key: Callable[[Judged], tuple[str, str, str, str, str]] | None = None
) -> list[ErrorSummary]:
    """Summaries by (set, engine, gpu, model, mode) and metric, or by another such key."""
    key = key or (lambda row: (row.set, row.engine, row.gpu, row.model, row.mode))
    groups: dict[tuple[tuple[str, str, str, str, str], str], list[float]] = {}
    for row in judged:
        for metric, error in row.errors().items():
            groups.setdefault((key(row), metric), []).append(error)
    return [
        ErrorSummary(*group, metric, len(errors), *_figures(errors))
        for (group, metric), errors in sorted(groups.items())
    ]


def _figures(errors: Sequence[float]) -> tuple[float, float, float]:
    signed = np.array(errors)
    size = np.abs(signed)
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(signed))


def rows(found: Iterable[ErrorSummary]) -> list[dict[str, Any]]:
    """Plain values, as `--json` prints them."""
    return [asdict(each) for each in found]
