"""Metrics of a cell from the records of its requests.

All latencies count from the scheduled arrival. A request meets its SLO if it finished within every
bound that it has; rejected, dropped, cancelled, failed and unfinished requests miss it. Attainment
= met / all that arrived after the warm-up, goodput = met / the window of arrivals (`rate_window`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...workloads.call_parser import number, parse_values
from ...workloads.errors import SloBenchError
from ...workloads.request import RequestType
from ...workloads.workload import Workload
from ..core.counters import COUNT
from ..core.records.judging import Judged
from ..core.records.request_records import Outcome, Records, Result
from ..policies.paper_columns import COLUMNS
from .energy import Energy, unit_costs
from .mechanisms import counts_of
from .stationarity import LEAST_REQUESTS, batches_of, horizon_s, left_s, stationary

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

NOT_A_NUMBER = float("nan")
_MOST_NAMES = 32  # models or adapters with columns of their own


@dataclass(frozen=True)
class LatencySummary:
    """Mean and quantiles of one latency in seconds; NaN where nothing was measured."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    def columns(self, name: str, statistics: Sequence[str]) -> dict[str, float]:
        """`statistics` (p50, p90, p99, mean) as columns of a row."""
        return {
            f"{name}_{statistic}_s": getattr(self, f"{statistic}_s") for statistic in statistics
        }


def summarise(seconds: Floats) -> LatencySummary:
    """Quantiles by linear interpolation, as numpy's and pandas' default, NaN left out."""
    finite_s = seconds[np.isfinite(seconds)]
    if not len(finite_s):
        return LatencySummary(NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER)
    p50, p90, p99 = np.quantile(finite_s, (0.5, 0.9, 0.99))
    return LatencySummary(float(finite_s.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True)
class Hardware:
    """Hardware of a cell, for utilisation and cost."""

    gpus: int
    parameters: float  # of the model, whole
    peak_flops: float  # of one GPU, per second, dense at the precision computed in
    usd_per_gpu_hour: float | None = None
    energy: Energy | None = None  # None: the power of the GPUs is not known


@dataclass(frozen=True)
class RateWindow:
    """The window of arrivals and the drain of one run, in seconds.

    Attributes:
        arrivals_s: from the first counted arrival, or from the end of the warm-up, to the last
            arrival.
        drain_s: from the last arrival to the last finish of a counted request; 0 where nothing
            finishes later.
        offered: whether requests are offered at a rate. In a closed loop they are not: each
            arrives when another ends.
    """

    arrivals_s: float
    drain_s: float
    offered: bool = True

    @property
    def makespan_s(self) -> float:
        """Window of arrivals and drain: throughput divides by it."""
        return self.arrivals_s + self.drain_s

    @property
    def goodput_s(self) -> float:
        """Goodput divides by it: the window of arrivals, so that a long drain of a few requests
        does not lower it; the makespan where no rate is offered (closed loop, all at once).
        """
        return self.arrivals_s if self.offered and self.arrivals_s > 0 else self.makespan_s


def counted_requests(arrival_s: Floats, warmup_s: float) -> Mask:
    """Requests that do not arrive during the warm-up; one that never arrived (NaN) counts."""
    counted: Mask = ~(arrival_s < warmup_s)
    return counted


def rate_window(
    arrival_s: Floats, finish_s: Floats, warmup_s: float = 0.0, *, offered: bool = True
) -> RateWindow:
    """The window of a run; NaN stands for an arrival or a finish that never came.

    Args:
        arrival_s: arrival of each request, in seconds from the start of the run.
        finish_s: its last token.
        warmup_s: requests that arrive earlier do not count.
        offered: see `RateWindow`.
    """
    counted = counted_requests(arrival_s, warmup_s)
    arrivals_s, ends_s = arrival_s[counted], finish_s[counted]
    arrivals_s, ends_s = arrivals_s[np.isfinite(arrivals_s)], ends_s[np.isfinite(ends_s)]
    if not len(arrivals_s):
        return RateWindow(0.0, 0.0, offered)
    begin_s = warmup_s if warmup_s > 0 else float(arrivals_s.min())
    last_s = float(arrivals_s.max())
    drain_s = max(0.0, float(ends_s.max(initial=last_s)) - last_s)
    return RateWindow(last_s - begin_s, drain_s, offered)


def per_second(count: float, seconds: float) -> float:
    """A rate; NaN over no time."""
    return count / seconds if seconds > 0 else float("nan")


def measured_window(records: Records, warmup_s: float) -> Mask:
    """The requests that count: all, or those that arrive from `warmup_s` on.

    A follow-up that never arrived, because what it waits for was never answered, counts (missed).

    Raises:
        SloBenchError: the warm-up leaves nothing to measure.
    """
    counted = counted_requests(records.arrival_s, warmup_s)
    if not counted.any():
        check_counted(0, warmup_s, float(np.nanmax(records.arrival_s)))
    return counted


def check_counted(counted: int, warmup_s: float, last_s: float) -> None:
    """Raise SloBenchError if no request counts, of those that arrive until `last_s`."""
    if not counted:
        raise SloBenchError(
            f"warmup_s = {warmup_s:g} leaves no request to measure: "
            f"the last one arrives after {last_s:g} s; give more requests, "
            "a longer duration or a shorter warm-up"
        )


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
class RequestFigures:
    """What the figures of a cell need of its requests.

    Attributes:
        requests: those that count (`measured_window`); so for all of these but the last four.
        met: those that met their SLO.
        window: arrivals and drain.
        ttft: of the requests that have it, and so `tpot` and `e2e`.
        weighted_turnaround: see `weighted_turnaround`.
        output_tokens: their sum.
        outcomes: number of requests by outcome.
        missed: finished requests that missed each bound.
        stationary: whether the figures would be the same in a longer run.
        columns: further columns of some workloads and systems.
        prompt_tokens: of all generation requests that began.
        cached_tokens: of all requests that began.
        preemptions: by swapping and by recomputation, of all requests.
        counts: acts of each mechanism, in the whole run.
        quantile_error: largest relative error of quantiles; 0: they are exact.
    """

    requests: int
    met: int
    window: RateWindow
    ttft: LatencySummary
    tpot: LatencySummary
    e2e: LatencySummary
    weighted_turnaround: float
    output_tokens: int
    outcomes: Mapping[Outcome, int]
    missed: Mapping[str, int]
    stationary: bool | None
    columns: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int
    cached_tokens: int
    preemptions: tuple[int, int]
    counts: Mapping[str, int]
    quantile_error: float = 0.0


def request_figures(
    workload: Workload,
    result: Result,
    *,
    judged: Judged,
    warmup_s: float = 0.0,
    objective: CollocationObjective = CollocationObjective(),
) -> RequestFigures:
    """The figures of all requests of a cell, from their records."""
    records = result.records
    counted = measured_window(records, warmup_s)
    finished = counted & (records.outcome == Outcome.FINISHED)
    window = rate_window(
        records.arrival_s, records.finish_s, warmup_s, offered=workload.concurrency is None
    )
    ttft, tpot, e2e = (
        summarise(np.where(counted, seconds, np.nan))
        for seconds in (records.ttft_s, records.tpot_s, records.e2e_s)
    )
    began = ~np.isnan(records.first_scheduled_s)
    generates = workload.request_type == RequestType.GENERATE
    return RequestFigures(
        requests=int(counted.sum()),
        met=int((counted & judged.met).sum()),
        window=window,
        ttft=ttft,
        tpot=tpot,
        e2e=e2e,
        weighted_turnaround=weighted_turnaround(records, finished),
        output_tokens=int(records.output_tokens[counted].sum()),
        outcomes={kind: int((counted & (records.outcome == kind)).sum()) for kind in Outcome},
        missed={name: int((counted & missed).sum()) for name, missed in judged.late.items()},
        stationary=_stationary(workload, records, judged, warmup_s),
        columns={
            **_by_kind(workload, records, counted, judged.met, window, objective),
            **_by_class(workload, records, counted, judged.met),
            **_by_session(workload, records, counted),
            **_waits_by_role(result, counted),
        },
        prompt_tokens=int(workload.prompt_tokens[began & generates].sum()),
        cached_tokens=int(records.cached_tokens[began].sum()),
        preemptions=(
            int(records.preemptions_swap.sum()),
            int(records.preemptions_recompute.sum()),
        ),
        counts=counts_of(result),
    )


def cell_metrics(
    requests: RequestFigures, result: Result, hardware: Hardware, *, warmup_s: float = 0.0
) -> dict[str, float | int | bool | None]:
    """The figures of one cell, in the order of the columns of `cells.csv`.

    Goodput divides by the window of arrivals, so that it is attainment times offered rate; finished
    requests and output tokens divide by the makespan, which includes the drain (`rate_window`).
    Utilisation, KV use, gaps and preemptions are those of the whole run:
    mfu = 2 · parameters · tokens computed / (peak FLOP/s · GPUs · time), model FLOPs utilisation,
    where padding and prompt tokens found in a cache do not count as computed;
    gpu_utilisation = share of the time for which GPUs compute, averaged over them (host time of
    their iterations counted), as a GPU's own counter of utilisation has it;
    kv_cache_usage_mean = share of the KV blocks in use, averaged over time;
    padding_waste = padded tokens / all tokens computed (only static batches are padded);
    gpu_power_mean_w is predicted, where `hardware` knows the GPUs' power.
    Columns that papers define are in `policies.columns`.
    """
    totals, window, met = result.totals, requests.window, requests.met
    finished = requests.outcomes[Outcome.FINISHED]
    all_tokens = totals.prefill_tokens + totals.decode_tokens
    computed = all_tokens - totals.padded_tokens
    scales = totals.gpu_paid_s > 0 and totals.makespan_s > 0  # instances start and stop
    gpus = totals.gpu_paid_s / totals.makespan_s if scales else hardware.gpus
    able_flops = hardware.peak_flops * gpus * totals.makespan_s
    utilisation = NOT_A_NUMBER
    if able_flops > 0:
        utilisation = 2 * hardware.parameters * computed / able_flops
    unfinished = (Outcome.UNFINISHED, Outcome.FAILED, Outcome.CANCELLED)
    row: dict[str, float | int | bool | None] = {
        "requests": requests.requests,
        "attainment": met / requests.requests,
        "goodput_rps": per_second(met, window.goodput_s),
        **requests.ttft.columns("ttft", ("p50", "p90", "p99", "mean")),
        **requests.tpot.columns("tpot", ("p50", "p90", "p99", "mean")),
        "itl_p99_s": result.gaps.quantile_s(0.99),
        "itl_mean_s": result.gaps.mean_s(),
        **requests.e2e.columns("e2e", ("p50", "p99", "mean")),
        "weighted_turnaround": requests.weighted_turnaround,
        "arrival_window_s": window.arrivals_s,
        "drain_s": window.drain_s,
        "makespan_s": window.makespan_s,
        "throughput_rps": per_second(finished, window.makespan_s),
        "output_tokens_per_s": per_second(requests.output_tokens, window.makespan_s),
        "mfu": utilisation,
        "gpu_utilisation": totals.gpu_busy_s / (gpus * totals.makespan_s)
        if gpus and totals.makespan_s > 0
        else NOT_A_NUMBER,
        "kv_cache_usage_mean": totals.kv_cache_usage_mean,
        "prefix_hit_rate": requests.cached_tokens / requests.prompt_tokens
        if requests.prompt_tokens
        else 0.0,
        "preemptions_swap": requests.preemptions[0],
        "preemptions_recompute": requests.preemptions[1],
        "kv_cache_usage_peak": totals.kv_cache_usage_peak,
        "iterations": totals.steps,
        "padded_tokens": totals.padded_tokens,
        "padding_waste": totals.padded_tokens / all_tokens if all_tokens else 0.0,
        "valid": True,  # a simulated client is never late
        "stationary": requests.stationary,
        "cost_usd_per_hour": NOT_A_NUMBER
        if hardware.usd_per_gpu_hour is None
        else hardware.usd_per_gpu_hour * gpus,
    }
    power_w = NOT_A_NUMBER
    if hardware.energy is not None:
        operations = 2 * hardware.parameters * computed
        power_w = hardware.energy.mean_w(totals, operations, hardware.peak_flops)
    row |= {"gpu_power_mean_w": power_w, "gpu_energy_j": power_w * totals.makespan_s}
    row |= unit_costs(row)
    row |= {name: column_of(row) for name, column_of in COLUMNS.items()}
    row |= {
        "finished": finished,
        "rejected": requests.outcomes[Outcome.REJECTED],
        "overlong": result.overlong,
        "dropped": requests.outcomes[Outcome.DROPPED],
        "unfinished": sum(requests.outcomes[kind] for kind in unfinished),
        **{f"missed_{name}": missed for name, missed in requests.missed.items()},
    }
    if warmup_s > 0:
        row["warmup_s"] = warmup_s
    if requests.quantile_error:
        row["quantile_error"] = requests.quantile_error
    if scales:
        row["gpu_paid_s"] = totals.gpu_paid_s
    row.update(_prediction_error(result))
    row.update(requests.columns)
    row.update(_usage_by_role(result))
    row.update({COUNT + name: count for name, count in requests.counts.items()})
    return row


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
    records: Records,
    counted: Mask,
    met: Mask,
    window: RateWindow,
    objective: CollocationObjective,
) -> dict[str, float]:
    """Generation and embedding apart, and what both are worth together; {} without embeddings."""
    embeds = counted & (workload.request_type == RequestType.EMBED)
    if not embeds.any():
        return {}
    generates = counted & ~embeds
    latency = summarise(np.where(embeds, records.e2e_s, np.nan))
    by_priority = [
        float(met[generates & high].mean())
        for high in (workload.priority > 0, workload.priority <= 0)
        if (generates & high).any()
    ]
    llm = float(met[generates].mean()) if generates.any() else NOT_A_NUMBER
    embed = float(met[embeds].mean())
    last_s = float(np.nanmax(records.arrival_s[counted]))
    ends_s = records.finish_s[records.outcome == Outcome.FINISHED]
    inside = (ends_s > last_s - window.arrivals_s) & (ends_s <= last_s)
    throughput = float(inside.sum() / counted.sum())
    value = objective.alpha * (llm if generates.any() else 0.0)
    value += objective.beta * embed + objective.gamma * throughput
    return {
        "llm_attainment": llm,
        "embed_attainment": embed,
        **latency.columns("embed", ("p50", "p99")),
        "priority_spread": max(by_priority) - min(by_priority) if by_priority else 0.0,
        "objective": value,
    }


def _stationary(
    workload: Workload, records: Records, judged: Judged, warmup_s: float
) -> bool | None:
    """Whether the figures would be the same in a longer run; None where the run cannot tell."""
    if int((records.arrival_s >= warmup_s).sum()) < LEAST_REQUESTS:
        return None
    return stationary(
        batches_of(
            arrival_s=records.arrival_s,
            end_s=left_s(records),
            first_token_s=records.first_token_s,
            met=judged.met,
            horizon_s=horizon_s(workload),
            warmup_s=warmup_s,
        )
    )


def weighted_turnaround(records: Records, selected: Mask) -> float:
    """Mean of (finish - arrival) / (finish - first scheduled) of the `selected` requests; NaN if
    there are none.

    1 if no request waits; a request that waits as long as it is served counts 2. `selected`
    has finished requests only.
    """
    turnaround_s = records.e2e_s[selected]
    processing_s = (records.finish_s - records.first_scheduled_s)[selected]
    served = processing_s > 0
    if not served.any():
        return NOT_A_NUMBER
    return float((turnaround_s[served] / processing_s[served]).mean())


def _waits_by_role(result: Result, counted: Mask) -> dict[str, float]:
    """Mean wait of the requests that instances of each role served, from the time when they had
    come there until their first batch; {} where instances have no roles.
    """
    # The last: no instance.
    roles = np.array([instance.role for instance in result.instances] + [""])
    if not roles.any():
        return {}
    records = result.records
    wait_s = np.where(counted, records.first_scheduled_s - records.queued_s, np.nan)
    of_role = roles[records.instance]
    waits = {role: wait_s[of_role == role] for role in dict.fromkeys(roles[roles != ""])}
    return {
        f"wait_mean_s_{role}": float(np.nanmean(each))
        for role, each in waits.items()
        if np.isfinite(each).any()
    }


def _usage_by_role(result: Result) -> dict[str, float]:
    """Mean use of compute and memory by the GPUs of each role, and of compute by the busiest and
    the idlest instance; {} where there are not several instances, or it is not known.
    """
    measured = [instance for instance in result.instances if np.isfinite(instance.compute_usage)]
    if len(measured) < 2:
        return {}
    compute = [instance.compute_usage for instance in measured]
    usage = {"compute_usage_max": max(compute), "compute_usage_min": min(compute)}
    for role in dict.fromkeys(instance.role for instance in measured if instance.role):
        members = [instance for instance in measured if instance.role == role]
        usage[f"compute_usage_mean_{role}"] = float(
            np.mean([instance.compute_usage for instance in members])
        )
        usage[f"memory_usage_mean_{role}"] = float(
            np.mean([instance.memory_usage for instance in members])
        )
    return usage


def _by_class(workload: Workload, records: Records, counted: Mask, met: Mask) -> dict[str, float]:
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
            called = name or "none"
            shares[f"attainment_{called}"] = float(met[members].mean())
            for metric, seconds in (("ttft", records.ttft_s), ("tpot", records.tpot_s)):
                latencies[f"{metric}_p99_s_{called}"] = summarise(seconds[members]).p99_s
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
    return summarise(np.where(whole, last_s - first_s, np.nan)).columns("session", ("p50", "p99"))
