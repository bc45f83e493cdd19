"""What happened to every request, as columns in the order of the workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ....predictors.placement import Placement
    from ....workloads.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Of more gaps than that, every `_SAMPLE_STEP`th tells a quantile to a share of all gaps.
_SORTED_GAPS, _SAMPLE_STEP, _SAMPLE_SHARE = 50_000, 50, 0.005


class Outcome(IntEnum):
    """How a request ended. Only `FINISHED` can meet an SLO; all others are misses."""

    UNFINISHED = 0
    FINISHED = 1
    REJECTED = 2
    DROPPED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass(frozen=True)
class Records:
    """Times are seconds on the workload's clock, NaN where the event never came.

    `arrival_s` is the scheduled arrival (for a follow-up in a session: previous answer + think
    time); `first_scheduled_s` is when the request first entered a batch, `queued_s` when it had
    come to that instance (later than it arrived if another gave it back); `output_tokens` counts
    tokens given back; `cached_tokens` prompt tokens found in the prefix cache at the first
    admission; `transfer_s` is the time between two instances, from the end of prefill (or the
    pause of a migration) until its KV had arrived; `untimed_tokens` output tokens that have no part
    in TPOT: the first, and of real servers those that came with it.
    """

    arrival_s: Floats
    queued_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    outcome: Ints
    output_tokens: Ints
    cached_tokens: Ints
    preemptions_swap: Ints
    preemptions_recompute: Ints
    instance: Ints  # -1: none
    transfer_s: Floats
    untimed_tokens: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def empty(cls, n: int) -> Records:
        """`n` requests to which nothing has happened yet."""
        columns = {}
        for f in fields(cls):
            if f.name.endswith("_s"):
                columns[f.name] = np.full(n, 0.0 if f.name == "transfer_s" else np.nan)
            else:
                columns[f.name] = np.full(n, -1 if f.name == "instance" else 0, dtype=np.int64)
        columns["untimed_tokens"] = np.broadcast_to(np.float64(1), n)  # the same of all: no memory
        return cls(**columns)

    @property
    def ttft_s(self) -> Floats:
        """Time to first token, from the scheduled arrival."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        """Time to last token, from the scheduled arrival."""
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time per output token of each request, in seconds (`time_per_output_token_s`)."""
        return time_per_output_token_s(
            self.first_token_s, self.finish_s, self.output_tokens, self.untimed_tokens
        )


def time_per_output_token_s(
    first_token_s: Floats,
    last_token_s: Floats,
    output_tokens: Ints | Floats,
    untimed_tokens: Ints | Floats | int = 1,
) -> Floats:
    """(last - first token) / (tokens - untimed ones), seconds of each request.

    NaN for a single token, and for tokens that came all at once, as those of a static batch: no
    time lies between them. Infinite for several tokens that are all untimed: their time is not
    known, and meets no bound.
    """
    gaps = output_tokens - untimed_tokens
    several = (gaps > 0) & (last_token_s > first_token_s)
    tpot_s = np.where(several, (last_token_s - first_token_s) / np.maximum(gaps, 1), np.nan)
    return np.where((gaps <= 0) & (output_tokens > 1) & np.isfinite(last_token_s), np.inf, tpot_s)


@dataclass(frozen=True)
class EndedBlock:
    """Consecutive requests, all of which have ended.

    Attributes:
        first_row: row of the first one in the whole workload.
        drawn: what was asked for.
        served: the same, with the lengths that were served.
        records: what happened to each.
    """

    first_row: int
    drawn: Workload
    served: Workload
    records: Records


@dataclass(frozen=True)
class Gaps:
    """Every inter-token gap of a cell, as weighted values: `gap_s[i]` occurred `count[i]` times."""

    gap_s: Floats
    count: Ints

    def quantile_s(self, q: float) -> float:
        """The smallest gap that at least a share `q` of all gaps do not exceed; NaN if none."""
        gap_s, count, rank, below = self.gap_s, self.count, q * self.count.sum(), 0
        if not len(gap_s):
            return float("nan")
        if len(gap_s) > _SORTED_GAPS:  # only those near it are sorted: a sample tells which
            sample = Gaps(gap_s[::_SAMPLE_STEP], count[::_SAMPLE_STEP])
            low_s, high_s = (sample.quantile_s(q + side * _SAMPLE_SHARE) for side in (-1, 1))
            near, fewer = (gap_s >= low_s) & (gap_s <= high_s), count[gap_s < low_s].sum()
            if fewer < rank <= fewer + count[near].sum():
                gap_s, count, below = gap_s[near], count[near], fewer
        order = np.argsort(gap_s)  # equal gaps in any order
        cumulative = below + np.cumsum(count[order])
        position = int(np.searchsorted(cumulative, rank, side="left"))
        return float(gap_s[order[min(position, len(order) - 1)]])

    def mean_s(self) -> float:
        """Mean over all gaps; NaN if none."""
        total = int(self.count.sum())
        return float((self.gap_s * self.count).sum() / total) if total else float("nan")


class TimeseriesRow(NamedTuple):
    """Sample or event of one instance or model.

    Metrics: `requests` (waiting and running), `waiting`, `kv_cache_usage` (share of KV blocks),
    `compute` (share of the GPUs' arithmetic), `acts` (of a mechanism, per second), `load`
    (C/Cmax + M/Mmax, 0 to 2), `kv_gib` (KV memory over all GPUs), `layers` or `heads` (offloaded to
    another instance from then on), `activation` (seconds until the model serves). Of predicted
    lengths: `lengths`, the share of outputs in the named bucket, and `taught`, the share of
    training samples that were accepted.
    """

    time_s: float
    metric: str
    entity: str
    value: float


@dataclass(frozen=True)
class Timeline:
    """State of all instances together, each sampled about every 1/300 of the arrival span (of more
    than 16 instances less often; in a closed loop 150 to 300 times in all).

    `timeseries`: samples of single instances or models, if there are several.
    """

    time_s: Floats
    waiting: Ints
    running: Ints
    kv_cache_usage: Floats  # KV blocks in use / all KV blocks
    timeseries: tuple[TimeseriesRow, ...] = ()


@dataclass(frozen=True)
class Totals:
    """Sums over one cell, all instances together."""

    makespan_s: float
    busy_s: float  # summed over instances
    steps: int
    prefill_tokens: int  # computed, recomputation included, cached left out
    decode_tokens: int
    padded_tokens: int  # computed for nothing in static batches
    kv_cache_usage_peak: float
    kv_cache_usage_mean: float
    gpu_busy_s: float = float("nan")  # seconds that GPUs computed, summed over them
    gpu_paid_s: float = float("nan")  # summed over GPUs; NaN: all of them all the time


@dataclass(frozen=True)
class InstanceTotals:
    """Sums over one cell of one instance, all its pipeline lanes together."""

    role: str  # empty where all are alike
    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prediction_error: float = float("nan")  # mean relative, of step times that are learned
    placement: Placement | None = None
    # Means over the run; NaN where they are not known.
    compute_usage: float = float("nan")  # of the GPUs' arithmetic (BanaServe, Eq. 4-23)
    kv_blocks_mean: float = float("nan")  # in use
    gpu_utilisation: float = float("nan")  # share of time in which the GPUs compute

    @property
    def memory_reserved(self) -> float:
        """Weights and all KV blocks, in use or not, as a share of the GPUs' memory."""
        if (place := self.placement) is None:
            return float("nan")
        kv_bytes = place.num_gpu_blocks * place.block_bytes_per_gpu
        return (place.weight_bytes_per_gpu + kv_bytes) / place.gpu.memory_bytes

    @property
    def memory_usage(self) -> float:
        """Weights and KV in use as a share of the GPUs' memory (BanaServe, Eq. 4-19 and 4-21)."""
        if (place := self.placement) is None:
            return float("nan")
        kv_bytes = self.kv_blocks_mean * place.block_bytes_per_gpu
        return (place.weight_bytes_per_gpu + kv_bytes) / place.gpu.memory_bytes


@dataclass(frozen=True)
class Result:
    """Result of one simulated or measured cell.

    `records` are empty where the requests were passed on in blocks.
    """

    records: Records
    gaps: Gaps
    timeline: Timeline
    totals: Totals
    learned: tuple[Any, ...] = ()  # what the policy of each instance learnt: its `new_state()`
    overlong: int = 0  # requests that were rejected because they could never fit
    models_unplaced: int | None = None  # with requests, and never on a GPU; None: one model alone
    served: Workload | None = None  # where requests were truncated: with their new lengths
    instances: tuple[InstanceTotals, ...] = ()  # as `Records.instance` counts them
    cluster: Any = None  # what the cluster policy learnt
    counts: Mapping[str, int] = field(default_factory=dict)  # acts of each mechanism


@dataclass(frozen=True, slots=True)
class Misprediction:
    """A request with an output length outside the predicted bucket, for online learning."""

    id: int  # its row in the workload
    prompt_tokens: int
    predicted_tokens: int
    output_tokens: int


def mispredictions(state: Any) -> Iterable[Misprediction]:
    """Those that a policy's state has queued as `mispredicted`, if it keeps any."""
    missed: Iterable[Misprediction] = getattr(state, "mispredicted", ())
    return missed
