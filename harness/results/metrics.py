"""Figures of a cell: `FIGURES` declares each, in the order of the columns of `cells.csv`.

All latencies count from the scheduled arrival. A request meets its SLO if it finished within every
bound that it has; rejected, dropped, cancelled, failed and unfinished requests miss it. Attainment
= met / all that arrived after the warm-up, goodput = met / the window of arrivals (`RateWindow`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce

import numpy as np

from ...workloads.call_parser import number, parse_values
from ...workloads.errors import SloBenchError
from ...workloads.request import SLO_COLUMNS, RequestType
from ...workloads.workload import Workload
from ..core.counters import COUNT, FROM_RECORDS
from ..core.records.quantile_sketch import RELATIVE_ERROR
from ..core.records.request_records import Outcome, Records, Result, Totals
from ..policies.paper_columns import COLUMNS
from .energy import Energy, unit_costs
from .mechanisms import MechanismsFold
from .rate_windows import RateWindow, measured_window
from .request_figures import (
    Figure,
    FigureFold,
    Floats,
    Ints,
    Mask,
    RequestFigure,
    Requests,
    Statistic,
    Value,
    met,
    summarise,
)
from .stationarity import LEAST_REQUESTS, batches_of, horizon_s, left_s, stationary

NOT_A_NUMBER = float("nan")
_MOST_NAMES = 32  # models or adapters with columns of their own


@dataclass(frozen=True)
class Hardware:
    """Hardware of a cell, for utilisation and cost."""

    gpus: int
    parameters: float  # of the model, whole
    peak_flops: float  # of one GPU, per second, dense at the precision computed in
    usd_per_gpu_hour: float | None = None
    energy: Energy | None = None  # None: the power of the GPUs is not known


DEFAULT_OBJECTIVE = "alpha=1,beta=1,gamma=1"


@dataclass(frozen=True)
class CollocationObjective:
    """alpha · attainment of generation + beta · attainment of embedding + gamma · throughput.

    The paper (§2.2) gives throughput no unit. Here it is a share of the offered rate: requests that
    finish within the window of arrivals / requests that arrive in it.
    """

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0


def parse_objective(text: str) -> CollocationObjective:
    """Read `alpha=1,beta=1,gamma=0.5`; what is left out is 1.

    Raises:
        SloBenchError: another form, a weight below 0, or none above it.
    """
    positional, named = parse_values(text)
    strangers = set(named) - {"alpha", "beta", "gamma"}
    if positional or strangers:
        raise SloBenchError(f"cannot read objective {text!r}; write {DEFAULT_OBJECTIVE}")
    weights = {name: number(value, f"objective {name}") for name, value in named.items()}
    for name, weight in weights.items():
        if weight < 0:
            raise SloBenchError(f"objective {name} must not be negative but is {weight:g}")
    objective = CollocationObjective(**weights)
    if not (objective.alpha or objective.beta or objective.gamma):
        raise SloBenchError(f"objective {text!r} weighs nothing; write {DEFAULT_OBJECTIVE}")
    return objective


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the figures of a cell are taken of.

    Utilisation, KV use, gaps and preemptions are those of the whole run. Where instances start and
    stop, hardware counts for the time that it is paid.

    Attributes:
        values: every `RequestFigure`, by its name.
        window: arrivals and drain of the requests that count.
        stationary: whether the figures would be the same in a longer run.
        columns: further columns of some workloads and systems.
        counts: acts of each mechanism, in the whole run.
        quantile_error: largest relative error of quantiles; 0: they are exact.
        row: the columns so far.
    """

    values: Mapping[str, float]
    window: RateWindow
    stationary: bool | None
    columns: Mapping[str, float]
    counts: Mapping[str, int]
    quantile_error: float = 0.0
    result: Result
    hardware: Hardware
    warmup_s: float
    row: dict[str, Value] = field(default_factory=dict)

    @property
    def totals(self) -> Totals:
        """Sums over all instances."""
        return self.result.totals

    @property
    def tokens(self) -> int:
        """Tokens that passed through the model, padding included."""
        return self.totals.prefill_tokens + self.totals.decode_tokens

    @property
    def scales(self) -> bool:
        """Whether instances start and stop."""
        return self.totals.gpu_paid_s > 0 and self.totals.makespan_s > 0

    @property
    def gpus(self) -> float:
        """The GPUs, or their mean over time."""
        paid_s, makespan_s = self.totals.gpu_paid_s, self.totals.makespan_s
        return paid_s / makespan_s if self.scales else self.hardware.gpus

    @property
    def operations(self) -> float:
        """Floating-point operations of the tokens that were not padding."""
        return 2 * self.hardware.parameters * (self.tokens - self.totals.padded_tokens)


def cell_metrics(
    requests: Requests,
    workload: Workload,
    result: Result,
    hardware: Hardware,
    *,
    warmup_s: float = 0.0,
    objective: CollocationObjective = CollocationObjective(),
) -> dict[str, Value]:
    """The row of a cell, from the records of all its requests."""
    counted = measured_window(requests.records.arrival_s, warmup_s)
    fold = RunFold(exact=True, mechanisms=result.counts)
    fold.add(requests, counted)
    window = fold.window(warmup_s, offered=workload.concurrency is None)
    columns = {
        **_by_kind(workload, requests, counted, window, objective),
        **_by_class(workload, requests, counted),
        **_by_session(workload, requests.records, counted),
        **_after_start(workload, requests, counted),
    }
    met_slo = requests.met.astype(np.bool_)
    is_stationary = _stationary(workload, requests.records, met_slo, warmup_s)
    return fold.row(result, hardware, window, is_stationary, warmup_s, columns)


class RunFold(FigureFold):
    """Takes the requests of a run in blocks or all at once and gives its row."""

    def __init__(self, *, exact: bool, mechanisms: Collection[str] = FROM_RECORDS) -> None:
        """`mechanisms`: those whose acts will be asked for."""
        super().__init__(FIGURES.values(), exact=exact)
        self._quantile_error = 0.0 if exact else RELATIVE_ERROR
        self._mechanisms, self._waits = MechanismsFold(mechanisms), WaitsFold()

    def add(self, requests: Requests, counted: Mask | slice) -> None:
        """Add a block, of which the rows `counted` count."""
        super().add(requests, counted)
        self._mechanisms.add(requests.records)
        self._waits.add(requests.records, counted)

    def row(
        self,
        result: Result,
        hardware: Hardware,
        window: RateWindow,
        stationary: bool | None,
        warmup_s: float,
        columns: Mapping[str, float],
    ) -> dict[str, Value]:
        """The figures of the run, in the order of the columns of `cells.csv`.

        Args:
            result: of the run.
            hardware: that it ran on.
            window: of its requests.
            stationary: see `Run`.
            warmup_s: excluded time at the beginning.
            columns: further columns, of the requests.
        """
        run = Run(
            values=self.values(window),
            window=window,
            stationary=stationary,
            columns={**columns, **self._waits.by_role(result)},
            counts=self._mechanisms.counts(result),
            quantile_error=self._quantile_error,
            result=result,
            hardware=hardware,
            warmup_s=warmup_s,
        )
        for figure in FIGURES.values():
            run.row.update(figure.columns(run))
        return run.row


def _utilisation(run: Run) -> float:
    able_flops = run.hardware.peak_flops * run.gpus * run.totals.makespan_s
    return run.operations / able_flops if able_flops > 0 else NOT_A_NUMBER


def _gpu_utilisation(run: Run) -> float:
    totals = run.totals
    if not (run.gpus and totals.makespan_s > 0):
        return NOT_A_NUMBER
    return totals.gpu_busy_s / (run.gpus * totals.makespan_s)


def _prefix_hit_rate(run: Run) -> float:
    values = run.values
    prompt_tokens = values["begun_prompt_tokens"]
    return values["cached_prompt_tokens"] / prompt_tokens if prompt_tokens else 0.0


def _power_w(run: Run) -> float:
    energy, hardware = run.hardware.energy, run.hardware
    if energy is None:
        return NOT_A_NUMBER
    return energy.mean_w(run.totals, run.operations, hardware.peak_flops)


def _cost(run: Run) -> float:
    price = run.hardware.usd_per_gpu_hour
    return NOT_A_NUMBER if price is None else price * run.gpus


def _turnaround(requests: Requests) -> Floats:
    """(finish - arrival) / (finish - first scheduled): 1 without waiting, 2 of a request that waits
    as long as it is served; NaN of those that did not finish.
    """
    records = requests.records
    processing_s = records.finish_s - records.first_scheduled_s
    served = (records.outcome == Outcome.FINISHED) & (processing_s > 0)
    factors: Floats = np.full(len(records), np.nan)
    factors[served] = records.e2e_s[served] / processing_s[served]
    return factors


def _ended(*outcomes: Outcome) -> Callable[[Requests], Mask]:
    return lambda requests: reduce(
        np.logical_or, (requests.records.outcome == outcome for outcome in outcomes)
    )


def _cached(requests: Requests) -> Ints:
    """Of those that began, as `_begun`."""
    return np.where(np.isnan(requests.records.first_scheduled_s), 0, requests.records.cached_tokens)


def _begun(requests: Requests) -> Ints:
    return np.where(np.isnan(requests.records.first_scheduled_s), 0, requests.prompt_tokens)


def _timed_tpot_s(requests: Requests) -> Floats:
    """NaN where it is not known."""
    tpot_s = requests.records.tpot_s
    return np.where(np.isfinite(tpot_s), tpot_s, np.nan)


_FINISHED = _ended(Outcome.FINISHED)
_LATENCY_HELP: Mapping[Statistic, str] = {
    "p50": "median",
    "p90": "90th percentile",
    "p99": "99th percentile",
    "mean": "mean",
}


def _latency(
    metric: str,
    title: str,
    of_requests: Callable[[Requests], Floats],
    columns: tuple[Statistic, ...] = ("p50", "p90", "p99", "mean"),
) -> tuple[RequestFigure, ...]:
    """The figures of a latency; those that are no `columns` are only compared."""
    return tuple(
        RequestFigure(
            f"{metric}_{statistic}_s",
            "s",
            f"{metric.upper()}, {text}",
            of_requests,
            statistic,
            higher_is_better=False,
            title=f"{title} {statistic}",
            is_column=statistic in columns,
        )
        for statistic, text in _LATENCY_HELP.items()
    )


_OF_CELLS: tuple[Figure, ...] = (
    RequestFigure("requests", "requests", "requests in the measured window", met, "count"),
    RequestFigure("attainment", "share", "requests that met their SLO / all that arrived", met,
                  "mean", higher_is_better=True, title="share in SLO"),
    RequestFigure("goodput_rps", "req/s", "requests that met their SLO / window of arrivals", met,
                  per="goodput_s", higher_is_better=True),
    *_latency("ttft", "TTFT", lambda requests: requests.records.ttft_s),
    *_latency("tpot", "TPOT", _timed_tpot_s),
    Figure("itl_p99_s", "s", "ITL, 99th percentile", lambda run: run.result.gaps.quantile_s(0.99),
           higher_is_better=False, title="ITL p99"),
    Figure("itl_mean_s", "s", "ITL, mean", lambda run: run.result.gaps.mean_s(),
           higher_is_better=False, title="ITL mean"),
    *_latency("e2e", "end to end", lambda requests: requests.records.e2e_s, ("p50", "p99", "mean")),
    RequestFigure("weighted_turnaround", "factor", "mean of E2E latency / (finish − first "
                  "scheduled); 1 without queueing", _turnaround, "mean", higher_is_better=False),
    Figure("arrival_window_s", "s", "first arrival to last", lambda run: run.window.arrivals_s),
    Figure("drain_s", "s", "last arrival to last finish", lambda run: run.window.drain_s),
    Figure("makespan_s", "s", "window of arrivals and drain; empty if nothing finished",
           lambda run: run.window.makespan_s if run.values["finished"] else NOT_A_NUMBER,
           higher_is_better=False, title="makespan"),
    RequestFigure("throughput_rps", "req/s", "finished requests / makespan", _FINISHED,
                  per="makespan_s", higher_is_better=True),
    RequestFigure("output_tokens_per_s", "tokens/s", "output tokens / makespan",
                  lambda requests: requests.records.output_tokens, per="makespan_s",
                  higher_is_better=True),
    Figure("mfu", "share", "operations of computed tokens, without padding and cached prompt "
           "tokens / (peak FLOP/s · GPUs · time)", _utilisation),
    Figure("gpu_utilisation", "share", "time in which GPUs compute, host time of their iterations "
           "included, mean over GPUs", _gpu_utilisation),
    Figure("kv_cache_usage_mean", "share", "KV blocks in use, mean over time",
           lambda run: run.totals.kv_cache_usage_mean),
    Figure("prefix_hit_rate", "share", "prompt tokens found in the prefix cache", _prefix_hit_rate),
    RequestFigure("cached_prompt_tokens", "tokens", "found in the prefix cache", _cached,
                  whole_run=True, is_column=False),
    RequestFigure("begun_prompt_tokens", "tokens", "of generation requests that began", _begun,
                  whole_run=True, is_column=False),
    RequestFigure("preemptions_swap", "preemptions", "by swapping, whole run",
                  lambda requests: requests.records.preemptions_swap, whole_run=True),
    RequestFigure("preemptions_recompute", "preemptions", "by recomputation, whole run",
                  lambda requests: requests.records.preemptions_recompute, whole_run=True),
    Figure("kv_cache_usage_peak", "share", "KV blocks in use, maximum; adds the peaks of instances",
           lambda run: run.totals.kv_cache_usage_peak),
    Figure("iterations", "iterations", "engine steps, whole run", lambda run: run.totals.steps),
    Figure("padded_tokens", "tokens", "padding computed", lambda run: run.totals.padded_tokens),
    Figure("padding_waste", "share", "padded tokens / all tokens computed",
           lambda run: run.totals.padded_tokens / run.tokens if run.tokens else 0.0),
    # A simulated client is never late.
    Figure("valid", "True, False", "False for an invalid cell", lambda run: True),
    Figure("stationary", "True, False, empty", "False: figures depend on the length of the run; "
           "empty: it is too short to tell", lambda run: run.stationary),
    Figure("cost_usd_per_hour", "USD/h", "catalogue price of all GPUs", _cost),
    Figure("gpu_power_mean_w", "W", "mean power of all GPUs", _power_w),
    Figure("gpu_energy_j", "J", "energy of all GPUs",
           lambda run: _power_w(run) * run.totals.makespan_s),
    Figure("joules_per_output_token", "J", "mean power / output tokens a second",
           lambda run: unit_costs(run.row), higher_is_better=False),
    Figure("joules_per_slo_request", "J", "energy / requests in SLO", higher_is_better=False),
    Figure("usd_per_output_token", "USD", "price / output tokens", higher_is_better=False),
    Figure("usd_per_slo_request", "USD", "price / requests in SLO", higher_is_better=False),
    Figure("banaserve_objective", "", "objective of BanaServe, Eq. 4-15",
           lambda run: {name: column_of(run.row) for name, column_of in COLUMNS.items()}),
    RequestFigure("finished", "requests", "answered in full", _FINISHED),
    RequestFigure("rejected", "requests", "rejected on arrival", _ended(Outcome.REJECTED)),
    Figure("overlong", "requests", "rejected: prompt and answer exceed the context or the KV cache",
           lambda run: run.result.overlong),
    RequestFigure("overlong_truncated", "requests", "shortened to fit the context or the KV cache",
                  lambda requests: requests.truncated, whole_run=True),
    Figure("models_unplaced", "models", "with requests, and on no GPU in the whole run",
           lambda run: {} if run.result.models_unplaced is None else run.result.models_unplaced),
    RequestFigure("dropped", "requests", "dropped while waiting", _ended(Outcome.DROPPED)),
    RequestFigure("unfinished", "requests", "the others, failed and cancelled ones included",
                  _ended(Outcome.UNFINISHED, Outcome.FAILED, Outcome.CANCELLED)),
    *(RequestFigure(f"missed_{bound}", "requests", f"finished beyond their {bound} bound",
                    partial(Requests.late, bound=bound)) for bound in SLO_COLUMNS),
    Figure("warmup_s", "s", "excluded time at the beginning", lambda run: run.warmup_s or {}),
    Figure("quantile_error", "share", "largest relative error of quantiles without records",
           lambda run: run.quantile_error or {}),
    Figure("gpu_paid_s", "s", "GPU seconds from the start of each instance to its last request",
           lambda run: run.totals.gpu_paid_s if run.scales else {}),
    Figure("prediction_error", "share", "mean relative error of predicted step times",
           lambda run: _prediction_error(run.result)),
    Figure("llm_attainment", "share", "attainment of generation requests",
           lambda run: run.columns),  # those of the figures that follow, too
    Figure("embed_attainment", "share", "attainment of embedding requests"),
    Figure("embed_p50_s", "s", "latency of embedding requests, median"),
    Figure("embed_p99_s", "s", "latency of embedding requests, 99th percentile"),
    Figure("priority_spread", "share", "difference of attainment between priorities"),
    Figure("objective", "", "α · LLM attainment + β · embedding attainment + γ · throughput"),
    Figure("ttft_p99_s_CLASS", "s", "TTFT of a class, 99th percentile"),
    Figure("tpot_p99_s_CLASS", "s", "TPOT of a class, 99th percentile"),
    Figure("attainment_spread", "share", "largest attainment of a class − smallest"),
    Figure("attainment_CLASS", "share", "attainment of a class, model or adapter"),
    Figure("session_p50_s", "s", "first arrival to last answer of a session, median"),
    Figure("session_p99_s", "s", "first arrival to last answer of a session, 99th percentile"),
    Figure("started_together", "requests", "with which the clients of a closed loop begin"),
    Figure("attainment_after_start", "share", "attainment of the other requests"),
    Figure("ttft_p99_s_after_start", "s", "TTFT of the other requests, 99th percentile"),
    Figure("wait_mean_s_ROLE", "s", "mean wait for the first batch at instances of a role"),
    Figure("compute_usage_max", "share", "arithmetic in use of the busiest instance's GPUs",
           lambda run: _usage_by_role(run.result)),
    Figure("compute_usage_min", "share", "arithmetic in use of the idlest instance's GPUs"),
    Figure("compute_usage_mean_ROLE", "share", "arithmetic in use of a role's GPUs"),
    Figure("memory_usage_mean_ROLE", "share", "weights and KV in use of a role's GPUs"),
    Figure("gpu_utilisation_mean_ROLE", "share", "time in which a role's GPUs compute"),
    Figure("memory_reserved_mean_ROLE", "share", "weights and reserved KV of a role's GPUs"),
    Figure("count_NAME", "acts", "how often the mechanism of that name acted",
           lambda run: {COUNT + name: acts for name, acts in run.counts.items()}),
)  # fmt: skip

FIGURES: dict[str, Figure] = {figure.name: figure for figure in _OF_CELLS}
"""All figures of simulated cells, in the order of their columns."""


def objectives() -> dict[str, Figure]:
    """By their short names, the figures of which more or less is better."""
    figures = (figure for figure in FIGURES.values() if figure.higher_is_better is not None)
    return {figure.short: figure for figure in figures}


def figure_of(column: str) -> Figure | None:
    """The declaration of a column; None of those that only measured cells have."""
    if column in FIGURES:
        return FIGURES[column]
    families = (name for name in FIGURES if name.rpartition("_")[2].isupper())
    return next((FIGURES[f] for f in families if column.startswith(f.rpartition("_")[0])), None)


def _prediction_error(result: Result) -> dict[str, float]:
    """Of the instances that learn step times, weighted by their iterations; {} if none does."""
    learned = [instance for instance in result.instances if np.isfinite(instance.prediction_error)]
    if not learned:
        return {}
    errors = [instance.prediction_error for instance in learned]
    steps = [instance.steps for instance in learned]
    return {"prediction_error": float(np.average(errors, weights=steps))}


def _by_kind(
    workload: Workload,
    requests: Requests,
    counted: Mask,
    window: RateWindow,
    objective: CollocationObjective,
) -> dict[str, float]:
    """Generation and embedding apart, and what both are worth together; {} without embeddings."""
    records, in_slo = requests.records, requests.met
    embeds = counted & (workload.request_type == RequestType.EMBED)
    if not embeds.any():
        return {}
    generates = counted & ~embeds
    by_priority = [
        float(in_slo[generates & high].mean())
        for high in (workload.priority > 0, workload.priority <= 0)
        if (generates & high).any()
    ]
    llm = float(in_slo[generates].mean()) if generates.any() else NOT_A_NUMBER
    embed = float(in_slo[embeds].mean())
    last_s = float(np.nanmax(records.arrival_s[counted]))
    ends_s = records.finish_s[records.outcome == Outcome.FINISHED]
    inside = (ends_s > last_s - window.arrivals_s) & (ends_s <= last_s)
    throughput = float(inside.sum() / counted.sum())
    value = objective.alpha * (llm if generates.any() else 0.0)
    value += objective.beta * embed + objective.gamma * throughput
    return {
        "llm_attainment": llm,
        "embed_attainment": embed,
        **_quantiles("embed", records.e2e_s[embeds]),
        "priority_spread": max(by_priority) - min(by_priority) if by_priority else 0.0,
        "objective": value,
    }


def _quantiles(name: str, seconds: Floats) -> dict[str, float]:
    """Median and 99th percentile, as columns."""
    statistics = summarise(seconds)
    return {f"{name}_p50_s": statistics["p50"], f"{name}_p99_s": statistics["p99"]}


def _stationary(
    workload: Workload, records: Records, met_slo: Mask, warmup_s: float
) -> bool | None:
    """Whether the figures would be the same in a longer run; None where the run cannot tell."""
    if int((records.arrival_s >= warmup_s).sum()) < LEAST_REQUESTS:
        return None
    return stationary(
        batches_of(
            arrival_s=records.arrival_s,
            end_s=left_s(records),
            first_token_s=records.first_token_s,
            met=met_slo,
            horizon_s=horizon_s(workload),
            warmup_s=warmup_s,
        )
    )


class WaitsFold:
    """Mean wait of the requests that instances of each role served, from the time when they had
    come there until their first batch.
    """

    def __init__(self) -> None:
        self._wait_s, self._waits = np.zeros((2, 0))  # by instance

    def add(self, records: Records, counted: Mask | slice) -> None:
        """Add a block, of which the rows `counted` count."""
        waits_s = (records.first_scheduled_s - records.queued_s)[counted]
        instances = records.instance[counted]
        began = np.isfinite(waits_s) & (instances >= 0)
        instances = instances[began]
        self._wait_s = _added(self._wait_s, np.bincount(instances, weights=waits_s[began]))
        self._waits = _added(self._waits, np.bincount(instances))

    def by_role(self, result: Result) -> dict[str, float]:
        """A column of each role that served any; {} where instances have no roles."""
        columns: dict[str, float] = {}
        roles = np.array([instance.role for instance in result.instances])
        for role in dict.fromkeys(role for role in roles.tolist() if role):
            members = np.flatnonzero(roles[: len(self._waits)] == role)
            if waits := self._waits[members].sum():
                columns[f"wait_mean_s_{role}"] = float(self._wait_s[members].sum() / waits)
        return columns


def _after_start(workload: Workload, requests: Requests, counted: Mask) -> dict[str, float]:
    """Attainment and TTFT without the requests with which the clients of a closed loop begin at
    one moment: they wait for each other as no later ones do. Nothing where none of them counts.
    For a refused or failed request another one comes at once: they begin until each client waits.
    """
    records, clients = requests.records, workload.concurrency or 1
    if clients == 1:
        return {}
    order = np.argsort(records.arrival_s, kind="stable")
    waits = np.isin(records.outcome[order], (Outcome.REJECTED, Outcome.FAILED), invert=True)
    end = np.searchsorted(np.cumsum(waits), clients) + 1
    first, later = counted.copy(), counted.copy()
    first[order[end:]] = later[order[:end]] = False
    if not (first.any() and later.any()):
        return {}
    figures = {name: FIGURES[name] for name in ("attainment", "ttft_p99_s")}
    return {"started_together": int(first.sum())} | {
        f"{name}_after_start": figure.exact(requests, later)
        for name, figure in figures.items()
        if isinstance(figure, RequestFigure)
    }


def _added(sums: Floats, more: Floats | Ints) -> Floats:
    """The sum of two columns, of which one may be longer."""
    total = np.zeros(max(len(sums), len(more)))
    total[: len(sums)] = sums
    total[: len(more)] += more
    return total


def _usage_by_role(result: Result) -> dict[str, float]:
    """Mean use of compute, memory and time by the GPUs of each role, and of compute by the busiest
    and the idlest instance; {} where there are not several instances, or it is not known.
    """
    measured = [instance for instance in result.instances if np.isfinite(instance.compute_usage)]
    if len(measured) < 2:
        return {}
    compute = [instance.compute_usage for instance in measured]
    usage = {"compute_usage_max": max(compute), "compute_usage_min": min(compute)}
    for role in dict.fromkeys(instance.role for instance in measured if instance.role):
        members = [instance for instance in measured if instance.role == role]
        for name in ("compute_usage", "memory_usage", "gpu_utilisation", "memory_reserved"):
            values = [getattr(instance, name) for instance in members]
            usage[f"{name}_mean_{role}"] = float(np.mean(values))
    return usage


_OF_EACH_CLASS = ("ttft_p99_s", "tpot_p99_s", "attainment")


def _by_class(workload: Workload, requests: Requests, counted: Mask) -> dict[str, float]:
    """Attainment, TTFT and TPOT of every class with a request in the window, and largest attainment
    less smallest.

    Where there are no classes, of every model or adapter that requests name.
    """
    names, indexes = workload.class_names, workload.class_index
    if len(names) < 2:
        names, indexes = workload.model_names, workload.model_index
    if not 2 <= len(names) <= _MOST_NAMES:
        return {}
    shares: dict[str, float] = {}
    latencies: dict[str, float] = {}
    for index, name in enumerate(names):
        members = counted & (indexes == index)
        if members.any():
            for figure in map(FIGURES.__getitem__, _OF_EACH_CLASS):
                assert isinstance(figure, RequestFigure)
                columns = shares if figure.name == "attainment" else latencies
                columns[f"{figure.name}_{name or 'none'}"] = figure.exact(requests, members)
    spread = max(shares.values()) - min(shares.values())
    return {**latencies, **shares, "attainment_spread": spread}


def _by_session(workload: Workload, records: Records, counted: Mask) -> dict[str, float]:
    """Time from a session's first arrival to its last answer, over sessions of which every request
    is counted and finished; nothing where no request follows another.
    """
    if not (workload.follows >= 0).any():
        return {}
    done = counted & (records.outcome == Outcome.FINISHED)
    sessions, index = np.unique(workload.session, return_inverse=True)
    whole = (sessions >= 0) & (np.bincount(index, weights=~done, minlength=len(sessions)) == 0)
    first_s, last_s = np.full(len(sessions), np.inf), np.full(len(sessions), -np.inf)
    np.minimum.at(first_s, index[done], records.arrival_s[done])
    np.maximum.at(last_s, index[done], records.finish_s[done])
    return _quantiles("session", (last_s - first_s)[whole])
