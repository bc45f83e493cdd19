"""Metrics of vLLM and SGLang in Prometheus' text format.

Names are those of vLLM 0.19 to 0.32 (`vllm/v1/metrics/loggers.py`) and SGLang 0.5
(`sglang/srt/observability/metrics_collector.py`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...workloads.errors import SloBenchError

# `prometheus_client` reads every sample: 26 ms in place of 0.6 ms for 720 lines, which a gateway
# would spend every second and server while it passes on tokens.
_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
ENGINES = ("vllm", "sglang")

# Of each figure the names that servers have for it, without the engine; the first that is there.
GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
}
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")
COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
    "cached_tokens": ("prefix_cache_hits_total", "cached_tokens_total"),
    "preemptions": ("num_preemptions_total", "num_retracted_requests_total"),
}
# Of the prefix cache, with the engine: tokens found, and looked up (again while a request waits for
# memory). The first name that is there.
CACHED_TOKENS = (
    *(f"{engine}:{name}" for engine in ENGINES for name in COUNTERS["cached_tokens"]),
    "vllm:gpu_prefix_cache_hits_total",
)
LOOKED_UP_TOKENS = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill": ("request_prefill_time_seconds",),
    "prompt_length": ("request_prompt_tokens", "prompt_tokens_histogram"),
    "output_length": ("request_generation_tokens", "generation_tokens_histogram"),
}


def samples(text: str) -> list[tuple[str, str, str]]:
    """The samples of vLLM and SGLang in Prometheus' text format: name, labels, value."""
    return list(_SAMPLE.findall(text))


def labels_of(text: str) -> dict[str, str]:
    """The labels of a sample by name."""
    return dict(_LABEL.findall(text))


def kv_size(labels: Mapping[str, str]) -> tuple[int, int] | None:
    """Tokens of the KV cache and of a block by vLLM's `cache_config_info`; None: unknown."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and size.isdecimal()):
        return None
    return int(blocks) * int(size), int(size)


def totals(text: str) -> dict[str, float]:
    """The samples by name, those with several labels added up."""
    sums: dict[str, float] = {}
    for name, _, value in samples(text):
        with contextlib.suppress(ValueError):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@dataclass(frozen=True)
class HistogramCounts:
    """A histogram since the server's start: `buckets` are (upper bound, observations up to it)."""

    total: float
    count: float
    buckets: tuple[tuple[float, float], ...] = ()

    def __sub__(self, before: HistogramCounts) -> HistogramCounts:
        counts_before = dict(before.buckets)
        buckets = tuple((le, n - counts_before.get(le, 0.0)) for le, n in self.buckets)
        return HistogramCounts(self.total - before.total, self.count - before.count, buckets)


@dataclass(frozen=True)
class MetricsSnapshot:
    """What a server's metrics said at one time.

    Attributes:
        time_s: when they were read.
        engine: of `ENGINES`.
        model: the name under which it is served.
        figures: gauges and counters by the names of `GAUGES` and `COUNTERS`; what the server does
            not tell is absent.
        histograms: by the names of `HISTOGRAMS`.
        kv_usage: share of the KV cache in use; None: unknown.
        kv_tokens: tokens that the KV cache holds; 0: unknown.
        block_size: tokens of a KV block; 0: unknown.
    """

    time_s: float
    engine: str
    model: str
    figures: Mapping[str, float]
    histograms: Mapping[str, HistogramCounts]
    kv_usage: float | None
    kv_tokens: int
    block_size: int


def snapshot(
    metric_samples: Iterable[tuple[str, Mapping[str, str], float]],
    time_s: float,
    only: Mapping[str, str],
) -> MetricsSnapshot | None:
    """One server's snapshot of samples (name, labels, value); None: they have no metrics of one.

    Figures of an engine's data-parallel ranks are added; `kv_usage` is their mean.

    Raises:
        SloBenchError: the samples are of several servers or models.
    """
    chosen = [
        (name, labels, value)
        for name, labels, value in metric_samples
        if all(labels.get(label) == required for label, required in only.items())
        and labels.get("tp_rank", "0") == labels.get("pp_rank", "0") == "0"  # each says the same
    ]
    running = [(name, labels) for name, labels, _ in chosen if _bare(name) in GAUGES["running"]]
    used = [labels for _, labels in running]
    if not used:
        return None
    for label in ("instance", "job", "model_name"):
        values = sorted({labels[label] for labels in used if label in labels})
        if len(values) > 1:
            shown = ", ".join(values[:5])
            raise SloBenchError(
                f"these are metrics of several servers; choose one with --only {label}=…: {shown}"
            )
    sums: dict[str, float] = {}
    shares: dict[str, list[float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    kv_tokens = block_size = 0
    for name, labels, value in chosen:
        bare = _bare(name)
        if "le" in labels:
            bucket_counts = buckets.setdefault(bare.removesuffix("_bucket"), {})
            bound = _number(labels["le"], f"bound of {name}")
            bucket_counts[bound] = bucket_counts.get(bound, 0.0) + value
        elif bare in KV_USAGE:
            shares.setdefault(bare, []).append(value)
        elif bare == "cache_config_info":
            kv_tokens, block_size = kv_size(labels) or (kv_tokens, block_size)
        else:
            sums[bare] = sums.get(bare, 0.0) + value
    if not kv_tokens and math.isfinite(sums.get("max_total_num_tokens", math.nan)):
        kv_tokens = int(sums["max_total_num_tokens"])
        block_size = int(sums.get("page_size", 1))
    figures = {
        name: sums[metric]
        for name, names in (GAUGES | COUNTERS).items()
        for metric in names
        if metric in sums
    }
    histograms = {}
    for name, names in HISTOGRAMS.items():
        for metric in names:
            if f"{metric}_count" in sums and name not in histograms:
                histograms[name] = HistogramCounts(
                    sums.get(f"{metric}_sum", math.nan),
                    sums[f"{metric}_count"],
                    tuple(sorted(buckets.get(metric, {}).items())),
                )
    usage = next((shares[metric] for metric in KV_USAGE if metric in shares), None)
    return MetricsSnapshot(
        time_s=time_s,
        engine=running[0][0].partition(":")[0],
        model=next((labels["model_name"] for labels in used if "model_name" in labels), ""),
        figures=figures,
        histograms=histograms,
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_tokens=kv_tokens,
        block_size=block_size,
    )


def _bare(name: str) -> str:
    return name.partition(":")[2]


def read_text(text: str, time_s: float, only: Mapping[str, str]) -> MetricsSnapshot | None:
    """One server's snapshot of Prometheus' text format; None: it has no metrics of vLLM or SGLang.

    Raises:
        SloBenchError: a value is no number, or the metrics are of several models.
    """
    metric_samples = []
    for name, labels, value in samples(text):
        metric_samples.append((name, labels_of(labels), _number(value, f"value of {name}")))
    return snapshot(metric_samples, time_s, only)


def _number(text: str, description: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SloBenchError(f"the {description} is no number but {text!r:.40}") from None
