"""Errors of predictions: a row a measurement, kept as they come, and their summaries."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.bands import EXPERTS, METRICS, Setting, model_kind, residual_id, residuals
from ....predictors.specs import model
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.parsing import parse_json
from .measurement import Case, Measurement, Skipped
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
    step_time: str = ""  # of `predictors.bands.STEP_TIMES`
    case: str = ""  # what was run, for people

    @property
    def model_class(self) -> str:
        """Size of a dense model, or that it is a mixture of experts."""
        if model_kind(model(self.model)) == EXPERTS:
            return "mixtures of experts"
        billions = model(self.model).parameters / 1e9
        return "dense, up to 15B" if billions <= 15 else "dense, above 15B"

    def errors(self) -> dict[str, float]:
        """Predicted / measured - 1 by metric."""
        return {
            name: self.predicted[name] / value - 1
            for name, value in self.measured.items()
            if name in self.predicted and value > 0
        }

    def band(self, metric: str) -> tuple[float, float] | None:
        """The predicted 90 % band, from residuals of other measurements; None: there is none."""
        kind = model_kind(model(self.model))
        setting = Setting(self.engine, self.gpu, self.model, self.step_time, self.regime, kind)
        excluded = residual_id(self.set, self.row)
        spread = residuals().spread(setting, (metric,), excluded) if metric in METRICS else None
        if spread is None or metric not in self.predicted:
            return None
        low, high = spread.factors()
        return low * self.predicted[metric], high * self.predicted[metric]

    def in_band(self, metric: str) -> bool | None:
        """Whether the measurement lies in the predicted band; None: there is none."""
        band = self.band(metric)
        return None if band is None else band[0] <= self.measured[metric] <= band[1]


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of one metric over `n` measurements; all are shares.

    `bias` is the median of signed errors. `in_band`: how often the measurement lay in the predicted
    90 % band; None: predictions have no band.
    """

    set: str
    engine: str
    gpu: str
    model: str
    mode: str
    metric: str
    n: int
    median_error: float
    mean_error: float
    p90_error: float
    bias: float
    in_band: float | None = None


def judge(
    folder: Path,
    out: Path | None = None,
    *,
    resume: bool = False,
    without: tuple[str, ...] = (),
    analytic: bool = False,
    only: Callable[[Case], bool] = lambda case: True,
    begin: Callable[..., Future[Judged]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Judged], Counter[tuple[str, str]]]:
    """Predict every measurement in `folder`; also how many rows were skipped, by set and reason.

    Kernel tables of the GPUs `without` are not used, `analytic` uses none (`predict`);
    `only`: measurements of these cases alone. With `out` each row is appended to that file
    (JSON lines) when it is known, and `resume` takes the rows that it holds from it. `begin` hands
    a function and its arguments to another process; without it this one does all.

    Raises:
        SloBenchError: nothing to read, or `out` exists and is not resumed.
        FileFormatError: a file is damaged.
    """
    judged_before = _known(out, resume)
    skipped: Counter[tuple[str, str]] = Counter()
    measurements: list[Measurement] = []
    for entry in read_folder(folder):
        if isinstance(entry, Skipped):
            skipped[entry.set, entry.reason] += 1
        elif only(entry.case):
            measurements.append(entry)
    keys = [_key(measurement, without, analytic) for measurement in measurements]
    cases = {
        measurement.case.identity: measurement
        for key, measurement in zip(keys, measurements, strict=True)
        if key not in judged_before
    }
    begun = {
        case: begin(judge_one, measurement, without, analytic)
        for case, measurement in cases.items()
        if begin is not None
    }
    judged_cases: dict[str, Judged] = {}  # each is predicted once
    judged = []
    for number, (key, measurement) in enumerate(zip(keys, measurements, strict=True), start=1):
        row = judged_before.get(key)
        if row is None:
            case = measurement.case.identity
            if case not in judged_cases:
                future = begun.get(case)
                judged_cases[case] = (
                    future.result() if future else judge_one(measurement, without, analytic)
                )
            row = replace(judged_cases[case], **_measured(measurement, key))
            if out is not None:
                try:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
                except OSError as error:
                    raise SloBenchError(f"cannot write {out}: {error.strerror}") from None
        if row.reason:
            skipped[row.set, row.reason] += 1
        else:
            judged.append(row)
        progress(number, len(measurements))
    return judged, skipped


def _measured(measurement: Measurement, key: str) -> dict[str, Any]:
    """What differs between the results of measurements of one case."""
    measured = {name: float(value) for name, value in measurement.measured.items()}
    fields = {name: getattr(measurement, name) for name in ("set", "row", "mode")}
    return {"key": key, **fields, "measured": measured}


def _key(measurement: Measurement, without: tuple[str, ...], analytic: bool) -> str:
    return "-".join((measurement.key, *without, *(["analytic"] if analytic else [])))


def judge_one(
    measurement: Measurement, without: tuple[str, ...] = (), analytic: bool = False
) -> Judged:
    """Predict one measurement. The prediction is given the case alone, not what was measured."""
    case = measurement.case
    predicted: Mapping[str, float] = {}
    regime = reason = kind = ""
    try:
        prediction = predict(case, without, analytic=analytic)
        predicted, regime, kind = prediction.figures, prediction.regime, prediction.step_time or ""
    except SloBenchError as error:
        reason = str(error)
    return Judged(
        **_measured(measurement, _key(measurement, without, analytic)),
        **{name: getattr(case, name) for name in ("engine", "gpu", "model")},
        regime=regime,
        predicted={name: value for name, value in predicted.items() if math.isfinite(value)},
        reason=reason,
        step_time=kind,
        case=str(case),
    )


def _known(out: Path | None, resume: bool) -> dict[str, Judged]:
    if out is None or not out.exists():
        return {}
    if not resume:
        raise SloBenchError(f"{out} exists; continue it with --resume, or name another file")
    rows_by_key = {}
    lines = out.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = Judged(**parse_json(line))
        except (ValueError, TypeError):
            if number == len(lines):  # killed while it was written
                out.write_text("".join(f"{complete}\n" for complete in lines[:-1]), "utf-8")
                break
            raise FileFormatError(out, number, "is no result of `slo-bench accuracy`") from None
        rows_by_key[row.key] = row
    return rows_by_key


def summaries(
    judged: Iterable[Judged], key: Callable[[Judged], tuple[str, str, str, str, str]] | None = None
) -> list[ErrorSummary]:
    """Summaries by (set, engine, gpu, model, mode) and metric, or by another such key."""
    key = key or (lambda row: (row.set, row.engine, row.gpu, row.model, row.mode))
    groups: dict[tuple[tuple[str, str, str, str, str], str], list[Judged]] = {}
    for row in judged:
        for metric in row.errors():
            groups.setdefault((key(row), metric), []).append(row)
    return [
        ErrorSummary(*group, metric, len(rows), *_figures(rows, metric))
        for (group, metric), rows in sorted(groups.items())
    ]


def _figures(
    rows: Sequence[Judged], metric: str
) -> tuple[float, float, float, float, float | None]:
    signed = np.array([row.errors()[metric] for row in rows])
    size = np.abs(signed)
    inside = [within for row in rows if (within := row.in_band(metric)) is not None]
    return (
        float(np.median(size)),
        float(size.mean()),
        float(np.quantile(size, 0.9)),
        float(np.median(signed)),
        float(np.mean(inside)) if inside else None,
    )


def rows(error_summaries: Iterable[ErrorSummary]) -> list[dict[str, Any]]:
    """Plain values, as `--json` prints them."""
    return [asdict(summary) for summary in error_summaries]
