"""Bands of predictions, from how far earlier predictions were off: split conformal prediction.

`residuals.csv.gz` holds log(measured / predicted) of every metric of public measurements of GPUs
(written by `scripts/residuals.py`). A prediction is like earlier ones of its kind of step times:

- of the same engine, GPU and model, where at least `LEAST_ROWS` are known (in the same regime, if
  as many are): the quantiles of their residuals, as in split conformal prediction (Vovk et al.
  2005; Lei et al. 2018);
- else a new group of engine, GPU and model, like those with its kind of model (dense, mixture of
  experts). Residuals of one group resemble each other, so groups and not rows are exchangeable:
  every group weighs the same ("pooling CDFs" of Dunn, Wasserman and Ramdas 2022, Distribution-Free
  Prediction Sets for Two-Layer Hierarchical Models). Which way a new group is off the others do not
  tell: residuals count with either sign. Quantiles lie as far out as makes the band hold `LEVEL` of
  the rows of groups, of models and of GPUs left out in turn.

The regime is what bounds a server: KV cache, prompts, decoding, or more load than it can serve.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from ..workloads.arrays import Floats, Ints, Mask
from .model_spec import ModelSpec
from .placement import Placement
from .roofline import StepTime
from .step_time import StepTimeModel

LEVEL = 0.9
LEAST_ROWS = 19  # the fewest whose extremes hold 90 % of new ones
LEAST_GROUPS = 4
FILE = "residuals.csv.gz"
KERNELS, SCALED, FITTED, UNFITTED = "kernel tables", "scaled tables", "fitted", "unfitted"
STEP_TIMES = (KERNELS, SCALED, FITTED, UNFITTED)
METRICS = (
    *(
        f"{latency}_{statistic}"
        for latency in ("ttft", "tpot", "e2e")
        for statistic in ("mean", "p50", "p90")
    ),
    *("ttft_p99", "tpot_p99", "e2e_p99", "throughput"),
)
NAMES = ("id", "engine", "gpu", "model", "mode", "regime", "step_time", "kind")
DENSE, EXPERTS = "dense", "experts"
KINDS = (DENSE, EXPERTS)
_LEVELS = np.linspace(0.8, 1.0, 61)  # never narrower, since models and GPUs are few


def kind_of(step_times: StepTimeModel) -> str | None:
    """The kind of step times, of `STEP_TIMES`; None: a profile, of which no residuals are known."""
    if step_times.provenance.startswith("operators"):
        return KERNELS if step_times.fitted else SCALED
    if step_times.provenance.startswith("fitted"):
        return FITTED
    return None if step_times.fitted else UNFITTED


def model_kind(spec: ModelSpec) -> str:
    """The kind of model, of `KINDS`."""
    return EXPERTS if spec.experts else DENSE


@dataclass(frozen=True)
class Setting:
    """What a prediction's residual may depend on; `regime` as `regime_of` has it."""

    engine: str
    gpu: str
    model: str
    step_time: str
    regime: str
    kind: str = DENSE  # of `KINDS`


@dataclass(frozen=True)
class Spread:
    """Residuals (log of measured / predicted) that a prediction may have.

    `logs` [rows, metrics] weigh `weights` [rows]; `level` is the share between the two quantiles
    that make a band. `same_system`: they are of the same engine, GPU and model; `borrowed`: some
    are of kernel tables, since few of the prediction's kind of step times were measured.
    """

    logs: Floats
    weights: Floats
    level: float
    same_system: bool
    borrowed: bool = False

    def evenly(self, n: int) -> Ints:
        """`n` rows of one weight, evenly spaced in the order of the summed logs."""
        order = np.argsort(self.logs.sum(axis=1))
        below = np.cumsum(self.weights[order]) / self.weights.sum()
        rows: Ints = order[np.searchsorted(below, (np.arange(n) + 0.5) / n)]
        return rows

    def thinned(self, max_rows: int) -> Spread:
        """At most `max_rows` rows of one weight, evenly spaced."""
        if len(self.weights) <= max_rows:
            return self
        return replace(self.rows(self.evenly(max_rows)), weights=np.ones(max_rows))

    def rows(self, which: Ints) -> Spread:
        """Some of the rows."""
        return replace(self, logs=self.logs[which], weights=self.weights[which])

    def band(self, values: Floats) -> tuple[float, float]:
        """Quantiles of a figure that has `values` [rows], one for each row of residuals."""
        outside = (1 - self.level) / 2
        low, high = _quantiles(values, self.weights, np.array([outside, 1 - outside]))
        return float(low), float(high)

    def share(self, true: Mask) -> float:
        """The share of the residuals for which something is true."""
        return float(self.weights[true].sum() / self.weights.sum())

    def factors(self, index: int = 0) -> tuple[float, float]:
        """The band of a metric as factors of its prediction."""
        low, high = self.band(np.exp(self.logs[:, index]))
        return low, high


def residual_id(set_name: str, row: str) -> str:
    """What tells a measurement from others in the file of residuals."""
    return f"{zlib.crc32(f'{set_name}/{row}'.encode()):08x}"


class Residuals:
    """Residuals: `names` by column of `NAMES`, `logs` [rows, METRICS] (NaN: not measured).

    What was computed from them is kept, so they may not change.
    """

    def __init__(self, names: Mapping[str, NDArray[np.str_]], logs: Floats) -> None:
        self.names = names
        self.logs = logs
        self._levels: dict[tuple[str, str, tuple[str, ...]], float] = {}
        self._masks: dict[tuple[str, str], Mask] = {}
        self._numbers: dict[str, Ints] = {}
        self._spreads: dict[tuple[Setting, tuple[str, ...]], Spread | None] = {}

    def __len__(self) -> int:
        return len(self.logs)

    def kept(self, which: Mask) -> Residuals:
        """The residuals of the rows in a mask."""
        return Residuals(
            {name: column[which] for name, column in self.names.items()}, self.logs[which]
        )

    def having(self, name: str, value: str) -> Mask:
        """The rows with this value in a column of `NAMES`."""
        if (name, value) not in self._masks:
            self._masks[name, value] = self.names[name] == value
        return self._masks[name, value]

    @cached_property
    def groups(self) -> Ints:
        """The number of each row's group: engine, GPU, model and kind of load."""
        columns = [self.names[name] for name in ("engine", "gpu", "model", "mode")]
        joined = np.array(["|".join(row) for row in zip(*columns, strict=True)], dtype=np.str_)
        return np.unique(joined, return_inverse=True)[1]

    def spread(self, setting: Setting, metrics: Sequence[str], without: str = "") -> Spread | None:
        """Residuals that a prediction may have in `metrics` together; None: too few are known.

        A quantile that was not measured takes the residual of its mean. The measurement `without`
        (`residual_id`) is left out, since a band must not know what it is judged by.
        """
        if without:
            return self._spread(setting, metrics, without)
        key = setting, tuple(metrics)
        if key not in self._spreads:
            self._spreads[key] = self._spread(setting, metrics)
        return self._spreads[key]

    def _spread(self, setting: Setting, metrics: Sequence[str], without: str = "") -> Spread | None:
        """Compute what `spread` returns and caches."""
        exact = self.logs[:, [METRICS.index(metric) for metric in metrics]]
        means = self.logs[:, [METRICS.index(_mean_of(metric)) for metric in metrics]]
        logs = np.where(np.isfinite(exact), exact, means)
        comparable = np.isfinite(logs).all(axis=1) & self._alike(setting)
        others = comparable & (self.names["id"] != without) if without else comparable
        borrowed = bool((others & ~self.having("step_time", setting.step_time)).any())
        same = others.copy()
        for name in ("engine", "gpu", "model"):
            same &= self.having(name, getattr(setting, name))
        regime, measured = self.having("regime", setting.regime), np.isfinite(exact).all(axis=1)
        for rows in (same & regime & measured, same & regime, same & measured, same):
            if rows.sum() >= LEAST_ROWS:
                return Spread(logs[rows], np.ones(int(rows.sum())), LEVEL, True, borrowed)
        if _n_groups(self.groups[comparable]) < LEAST_GROUPS:
            return None
        level = self._level((setting.step_time, setting.kind, tuple(metrics)), logs, comparable)
        pooled = _regime_rows(self.groups, others, regime)
        weights = _group_weights(self.groups[pooled])
        return Spread(*_mirrored(logs[pooled], weights), level, False, borrowed)

    def _alike(self, setting: Setting) -> Mask:
        """Rows with these step times and this kind of model.

        Where they are of few groups, with kernel tables as well; where these are, of all models.
        """
        timed = self.having("step_time", setting.step_time)
        tabled = timed | self.having("step_time", KERNELS)
        kind = self.having("kind", setting.kind)
        for alike in (timed & kind, tabled & kind):
            if _n_groups(self.groups[alike]) >= LEAST_GROUPS:
                return alike
        return tabled

    def _level(
        self, key: tuple[str, str, tuple[str, ...]], logs: Floats, comparable: Mask
    ) -> float:
        """The least level whose bands hold `LEVEL` of the rows of what is left out in turn: a
        group, a model, a GPU. `key`: step times, kind of model and metrics.
        """
        if key not in self._levels:
            logs, groups = logs[comparable], self.groups[comparable]
            regimes = self._codes("regime")[comparable]
            enough = np.ones(len(_LEVELS), dtype=np.bool_)
            for parts in (groups, self._codes("model")[comparable], self._codes("gpu")[comparable]):
                each = np.flatnonzero(np.bincount(parts))
                if len(each) == 1:
                    continue
                inside = np.zeros(len(_LEVELS))
                for part in each:
                    inside += _inside(logs, groups, regimes, parts == part)
                enough &= inside >= LEVEL * len(logs) * logs.shape[1]
            self._levels[key] = float(_LEVELS[np.argmax(enough)]) if enough.any() else 1.0
        return self._levels[key]

    def _codes(self, name: str) -> Ints:
        """A column of `NAMES` as numbers, in the order of its values."""
        if name not in self._numbers:
            self._numbers[name] = np.unique(self.names[name], return_inverse=True)[1]
        return self._numbers[name]


def _inside(logs: Floats, groups: Ints, regimes: Ints, left_out: Mask) -> Floats:
    """How many residuals of the rows `left_out` the other groups' bands hold, by `_LEVELS`."""
    inside = np.zeros(len(_LEVELS))
    for number in np.flatnonzero(np.bincount(regimes[left_out])):
        regime = regimes == number
        rows = _regime_rows(groups, ~left_out, regime)
        weights = _group_weights(groups[rows])
        mine = logs[left_out & regime]
        for judged, others in zip(mine.T, logs[rows].T, strict=True):
            high = _quantiles(*_mirrored(others, weights), (1 + _LEVELS) / 2)
            inside += np.searchsorted(np.sort(np.abs(judged)), high, side="right")
    return inside


def _n_groups(groups: Ints) -> int:
    return int(np.count_nonzero(np.bincount(groups)))


def _regime_rows(groups: Ints, rows: Mask, regime: Mask) -> Mask:
    """The rows of one regime, where enough groups were in it; else all."""
    inside = rows & regime
    return inside if _n_groups(groups[inside]) >= LEAST_GROUPS else rows


def _group_weights(groups: Ints) -> Floats:
    """Weights that give every group the same, 1 a row in the mean."""
    n = np.bincount(groups)
    weights: Floats = len(groups) / np.count_nonzero(n) / n[groups]
    return weights


def _mirrored(logs: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Residuals and their negatives: which way a new group is off, those of others do not tell."""
    return np.concatenate([logs, -logs]), np.concatenate([weights, weights]) / 2


def _quantiles(values: Floats, weights: Floats, shares: Floats) -> Floats:
    """Weighted quantiles; with equal weights the i-th of n values is the quantile i / (n + 1)."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / (weights.sum() + 1.0)
    quantiles: Floats = np.interp(shares, below, values[order])
    return quantiles


def _mean_of(metric: str) -> str:
    return metric if metric == "throughput" else f"{metric.partition('_')[0]}_mean"


def read_residuals(text: str) -> Residuals:
    """Read the file of residuals, whose first lines (`#`) say where it comes from."""
    lines = (line for line in io.StringIO(text) if line.strip() and not line.startswith("#"))
    heads, *rows = csv.reader(lines)
    columns = (
        dict(zip(heads, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(heads, ())
    )
    names = {name: np.array(columns[name], dtype=np.str_) for name in NAMES}
    logs = np.array([[float(cell or "nan") for cell in columns[metric]] for metric in METRICS])
    return Residuals(names, logs.reshape(len(METRICS), -1).T.copy())


@lru_cache(maxsize=1)
def residuals() -> Residuals:
    """The residuals that the package ships."""
    return read_residuals(_shipped().decode())


@lru_cache(maxsize=1)
def residuals_id() -> str:
    """What tells the residuals that the package ships from those of before: their CRC-32."""
    return f"{zlib.crc32(_shipped()):08x}"


def _shipped() -> bytes:
    return gzip.decompress((files(__package__) / FILE).read_bytes())


def coverage(
    residuals: Residuals, step_time: str, metric: str, left_out: str, kind: str = DENSE
) -> float:
    """The share of measurements in bands that were made without their `left_out`.

    `left_out` is a column of `NAMES`: the measurement itself (`id`), all of its model, of its GPU.
    `kind`: of the measurements' models.
    """
    column = METRICS.index(metric)
    judged = residuals.having("step_time", step_time) & residuals.having("kind", kind)
    judged &= np.isfinite(residuals.logs[:, column])
    inside = []
    for value in np.unique(residuals.names[left_out][judged]):
        mine = residuals.names[left_out] == value
        others = residuals if left_out == "id" else residuals.kept(~mine)
        spreads: dict[Setting, Spread | None] = {}
        for row in np.flatnonzero(judged & mine):
            names = {name: str(labels[row]) for name, labels in residuals.names.items()}
            setting = Setting(*(names[name] for name in Setting.__dataclass_fields__))
            if setting not in spreads:
                spreads[setting] = others.spread(setting, (metric,), names["id"])
            spread = spreads[setting]
            if spread is not None:
                low, high = spread.factors()
                inside.append(low <= np.exp(residuals.logs[row, column]) <= high)
    return float(np.mean(inside)) if inside else float("nan")


KV_BOUND, OVERLOADED = "kv-bound", "overloaded"
PREFILL_BOUND, DECODE_BOUND = "prefill-bound", "decode-bound"
_WAITING = 0.5  # of the time in the system
_SLOWED = 1.5  # times the step that decodes alone


def regime_of(
    placement: Placement,
    step_time: StepTime,
    *,
    clients: int | None,
    running: float,
    prompt_tokens: float,
    output_tokens: float,
    ttft_s: float,
    tpot_s: float,
    e2e_s: float,
) -> str:
    """The regime of one instance, by its prediction and its inputs (means over requests).

    KV-bound: a closed loop with more `clients` than fit. Overloaded: an open loop (`clients` None)
    whose requests wait longer than they are served. Prefill-bound: steps take 1.5 times what
    decoding `running` requests alone would.
    """
    if clients is not None and clients * (prompt_tokens + output_tokens) > placement.kv_tokens:
        return KV_BOUND
    if clients is None and ttft_s > _WAITING * e2e_s:
        return OVERLOADED
    together = max(1, round(running))
    kv_tokens = round(together * (prompt_tokens + output_tokens / 2))
    alone_s = step_time.step_s(together, kv_tokens, ())
    return PREFILL_BOUND if tpot_s > _SLOWED * alone_s else DECODE_BOUND
