"""What a figure of a cell is, and how figures of requests are taken: exactly from the records of a
whole run, or block by block from a long one, by the same declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...workloads.request import RequestType
from ...workloads.workload import Workload
from ..core.records.judging import Judged
from ..core.records.quantile_sketch import QuantileSketch
from ..core.records.request_records import Records
from .rate_windows import RateWindow, WindowFold, per_second

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = Mask | Ints | slice
Value = float | int | bool | None

Statistic = Literal["count", "sum", "mean", "p50", "p90", "p99"]
Form = Literal["share", "s", "per_s", "number"]
SHARES: Mapping[Statistic, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""The statistics that are quantiles."""

_UNIT_ENDINGS = ("_rps", "_per_s", "_s")  # of the names of columns


@dataclass(frozen=True)
class Requests:
    """Requests that figures are taken of: a block, a whole run, or those of a result file.

    Attributes:
        records: what happened to each.
        judged: which met their SLO; None: no SLO is known.
        prompt_tokens: of each, 0 of those that embed texts.
        truncated: which were served with fewer tokens than drawn.
    """

    records: Records
    judged: Judged | None
    prompt_tokens: Ints | Floats
    truncated: Mask

    @classmethod
    def of(
        cls, served: Workload, records: Records, judged: Judged, drawn: Workload | None = None
    ) -> Requests:
        """The requests of a workload; `drawn` has the lengths before any was cut to fit."""
        drawn = served if drawn is None else drawn
        generates = served.request_type == RequestType.GENERATE
        shorter = served.prompt_tokens < drawn.prompt_tokens
        shorter |= served.output_tokens < drawn.output_tokens
        return cls(records, judged, np.where(generates, served.prompt_tokens, 0), shorter)

    @property
    def met(self) -> Mask | Floats:
        """Which met their SLO; all NaN where none is known."""
        return np.full(len(self.records), np.nan) if self.judged is None else self.judged.met

    def late(self, bound: str) -> Mask | Floats:
        """Which finished ones exceeded a bound (`ttft`); all NaN where no SLO is known."""
        return self.met if self.judged is None else self.judged.late[bound]


def met(requests: Requests) -> Mask | Floats:
    """Which requests met their SLO; all NaN where none is known."""
    return requests.met


OfRequests = Callable[[Requests], NDArray[Any]]
OfRun = Callable[[Any], Value | Mapping[str, Value]]


class Sums:
    """Number, sum and mean of values; those that are not finite are left out."""

    def __init__(self) -> None:
        self._count, self._sum = 0, 0.0

    def add(self, values: NDArray[Any]) -> None:
        """Add the values of a block."""
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)]
        self._count += len(values)
        # Of whole numbers the sum stays whole.
        self._sum = values.sum().item() + (self._sum or 0)

    def statistics(self) -> dict[Statistic, float]:
        """Sum and mean of nothing are NaN."""
        if not self._count:
            return {"count": 0, "sum": math.nan, "mean": math.nan}
        return {"count": self._count, "sum": self._sum, "mean": self._sum / self._count}


class Kept(Sums):
    """The same with exact quantiles, by linear interpolation as numpy's and pandas' default."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Floats] = []

    def add(self, values: NDArray[Any]) -> None:
        """Keep the values of a block."""
        finite = values[np.isfinite(values)]
        self._blocks.append(finite)
        super().add(finite)

    def statistics(self) -> dict[Statistic, float]:
        """Quantiles of nothing are NaN."""
        quantiles = [math.nan] * len(SHARES)
        if self._count:
            values = self._blocks[0] if len(self._blocks) == 1 else np.concatenate(self._blocks)
            quantiles = np.quantile(values, list(SHARES.values())).tolist()
        return super().statistics() | dict(zip(SHARES, quantiles, strict=True))


class Sketched:
    """The same in constant memory: quantiles are those of a `QuantileSketch`."""

    def __init__(self) -> None:
        self._sketch = QuantileSketch()

    def add(self, values: NDArray[Any]) -> None:
        """Add the values of a block."""
        self._sketch.add(values.astype(np.float64, copy=False))

    def statistics(self) -> dict[Statistic, float]:
        """Sum, mean and quantiles of nothing are NaN."""
        count, mean = len(self._sketch), self._sketch.mean()
        quantiles = self._sketch.quantiles(tuple(SHARES.values()))
        exact: dict[Statistic, float] = {"count": count, "sum": mean * count, "mean": mean}
        return exact | dict(zip(SHARES, quantiles, strict=True))


def summarise(values: Floats) -> dict[Statistic, float]:
    """All statistics of values, exact; NaN is left out."""
    kept = Kept()
    kept.add(values)
    return kept.statistics()


@dataclass(frozen=True)
class Figure:
    """One figure of a cell. Its declaration in `metrics.FIGURES` is all that a column of
    `cells.csv` needs to be computed, described, shown in the report, compared and tuned for.

    Attributes:
        name: its column; `wait_mean_s_ROLE` stands for one column of each role.
        unit: `s`, `share`, `req/s` …
        help: its meaning.
        of_run: its value in a run (`metrics.Run`), or the columns of it and those that follow; None
            where an earlier figure has them.
        higher_is_better: None where neither is: it is then no objective, and not compared.
        title: what tables and axes call it.
        is_column: whether cells have it; else only comparisons and other figures do.
    """

    name: str
    unit: str
    help: str
    of_run: OfRun | None = None
    higher_is_better: bool | None = field(default=None, kw_only=True)
    title: str = field(default="", kw_only=True)
    is_column: bool = field(default=True, kw_only=True)

    @property
    def short(self) -> str:
        """The name without its unit, as options of commands have it: `ttft_p99`."""
        ending = next((e for e in _UNIT_ENDINGS if self.name.endswith(e)), "")
        return self.name.removesuffix(ending)

    @property
    def label(self) -> str:
        """Title and unit: `goodput, req/s`."""
        title = self.title or self.short.replace("_", " ")
        return title if self.unit == "share" else f"{title}, {self.unit}"

    @property
    def form(self) -> Form:
        """What kind of number it is."""
        if self.unit in ("share", "s"):
            return "share" if self.unit == "share" else "s"
        return "per_s" if self.unit.endswith("/s") else "number"

    def columns(self, run: Any) -> Mapping[str, Value]:
        """Its columns in the row of a run."""
        value = self.of_run(run) if self.of_run is not None else {}
        return value if isinstance(value, Mapping) else {self.name: value}


@dataclass(frozen=True)
class RequestFigure(Figure):
    """A figure of the requests that count.

    Attributes:
        of_requests: a value of each request (NaN: has none), or a mask.
        statistic: what is taken of the values.
        per: the seconds of a `RateWindow` that it is divided by.
        whole_run: whether requests of the warm-up count, too.
    """

    of_run: None = field(default=None, init=False)
    of_requests: OfRequests
    statistic: Statistic = "sum"
    per: Literal["", "goodput_s", "makespan_s"] = field(default="", kw_only=True)
    whole_run: bool = field(default=False, kw_only=True)

    @property
    def needs_slo(self) -> bool:
        """Whether requests must have been judged."""
        return self.of_requests is met

    def seconds(self, window: RateWindow) -> float:
        """What it is divided by: 1 where it is no rate."""
        return float(getattr(window, self.per)) if self.per else 1.0

    def reduced(self, statistics: Mapping[Statistic, float], window: RateWindow) -> float:
        """The figure, from the statistics of its values."""
        value = statistics[self.statistic]
        return per_second(value, self.seconds(window)) if self.per else value

    def exact(self, requests: Requests, rows: Rows, window: RateWindow | None = None) -> float:
        """The figure of some rows; `window` is needed where it is a rate."""
        kept = Kept() if self.statistic in SHARES else Sums()
        kept.add(self.of_requests(requests)[rows])
        return self.reduced(kept.statistics(), window or RateWindow(math.nan, math.nan))

    def columns(self, run: Any) -> Mapping[str, Value]:
        """Its value, if it is a column."""
        return {self.name: run.values[self.name]} if self.is_column else {}


class FigureFold:
    """Takes requests in blocks, or all at once, and gives the figures of all."""

    def __init__(self, figures: Iterable[Figure], *, exact: bool) -> None:
        """`exact`: all values are kept for quantiles; else their sketch is."""
        self._figures = [figure for figure in figures if isinstance(figure, RequestFigure)]
        with_quantiles = {
            figure.of_requests for figure in self._figures if figure.statistic in SHARES
        }
        quantiles = Kept if exact else Sketched
        self._statistics: dict[tuple[OfRequests, bool], Sums | Sketched] = {
            (figure.of_requests, figure.whole_run): quantiles()
            if figure.of_requests in with_quantiles
            else Sums()
            for figure in self._figures
        }
        self._window = WindowFold()

    def add(self, requests: Requests, counted: Mask | slice) -> None:
        """Add a block, of which the rows `counted` count."""
        for (of_requests, whole_run), statistics in self._statistics.items():
            values = of_requests(requests)
            statistics.add(values if whole_run else values[counted])
        self._window.add(requests.records.arrival_s[counted], requests.records.finish_s[counted])

    def window(self, warmup_s: float = 0.0, *, offered: bool = True) -> RateWindow:
        """Arrivals and drain so far (`WindowFold.window`)."""
        return self._window.window(warmup_s, offered=offered)

    def values(self, window: RateWindow) -> dict[str, float]:
        """The figures so far, by name."""
        statistics = {key: values.statistics() for key, values in self._statistics.items()}
        return {
            figure.name: figure.reduced(statistics[figure.of_requests, figure.whole_run], window)
            for figure in self._figures
        }
