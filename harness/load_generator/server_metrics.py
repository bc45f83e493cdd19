"""Metrics of servers in Prometheus' text format, by the names that a server has for them."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...workloads.errors import SloBenchError

Names = tuple[str, ...]
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# Names that servers have for the same figure, without their prefix; the first that is there counts:
# those of vLLM 0.6 to 0.32 (`vllm/v1/metrics/loggers.py`; `gpu_…` until 0.11, of V0 also
# `time_per_output_token_seconds`) and of SGLang 0.4 and 0.5
# (`sglang/srt/observability/metrics_collector.py`). All of them are read without `_total` too.
NAMES: Mapping[str, Names] = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
    # Tokens of prompts in the prefix cache; looked up again while a request waits for memory.
    "cached_tokens": (
        "prefix_cache_hits_total",
        "gpu_prefix_cache_hits_total",
        "cached_tokens_total",
    ),
    "looked_up_tokens": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "ended": ("request_success_total", "num_requests_total"),  # requests that ended
    "preemptions": ("num_preemptions_total", "num_retracted_requests_total"),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),  # share
    "kv_tokens": ("max_total_num_tokens",),  # that the KV cache holds
    "page_size": ("page_size",),  # tokens of a KV block
    "expired": ("nixl_num_kv_expired_reqs_total",),  # prompts whose KV nobody fetched in time
}
# The same of histograms: of seconds, and of tokens.
HISTOGRAMS: Mapping[str, Names] = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill": ("request_prefill_time_seconds",),
    "prompt_length": ("request_prompt_tokens", "prompt_tokens_histogram"),
    "output_length": ("request_generation_tokens", "generation_tokens_histogram"),
}


@dataclass(frozen=True, kw_only=True)
class MetricNames:
    """Names of a server's metrics, without the `prefix` that all of them have and no metric of
    another server has. A colon at its end may be an underscore (Prometheus and routers rename it),
    and Ray writes `ray_` before it.

    Attributes:
        names: of each figure of `NAMES`.
        histograms: likewise.
        kv_cache: its labels tell `num_gpu_blocks`, `block_size` and `enable_prefix_caching`.
        computed_tokens: prompt tokens that were not found in a cache, and a label that they have.
        speculation: begin of the names of what speculation counts.
    """

    prefix: str
    names: Mapping[str, Names] = field(default_factory=lambda: NAMES)
    histograms: Mapping[str, Names] = field(default_factory=lambda: HISTOGRAMS)
    kv_cache: str = "cache_config_info"
    computed_tokens: Names = ("prompt_tokens_by_source_total", 'source="local_compute"')
    speculation: str = "spec_decode_num_"

    def of(self, figure: str) -> Names:
        """Names of a figure; none where the server does not tell it."""
        names = self.names.get(figure, ())
        return names + tuple(n.removesuffix("_total") for n in names if n.endswith("_total"))

    @property
    def pattern(self) -> str:
        """A regular expression of the prefix, as Prometheus and Python read it."""
        begin, colon, _ = self.prefix.partition(":")
        return f"(?:ray_)?{re.escape(begin)}{'[:_]' if colon else ''}"

    def bare(self, name: str) -> str | None:
        """A metric's name without the prefix; None: it is no metric of the server."""
        match = re.match(self.pattern, name)
        return name[match.end() :] if match else None

    def first(self, figure: str, sums: Mapping[str, float]) -> float | None:
        """A figure in sums of samples by name; None: it is not there."""
        return next((sums[name] for name in self.of(figure) if name in sums), None)

    def samples(self, text: str) -> list[tuple[str, str, str]]:
        """The server's samples in Prometheus' text format: name without the prefix, labels, value.
        One that is no finite number says nothing.

        `prometheus_client` reads every sample: 26 ms in place of 0.6 ms for 720 lines, which a
        gateway would spend every second and server while it passes on tokens.
        """
        return _sample(self.pattern).findall(text)

    def totals(self, text: str) -> dict[str, float]:
        """The samples by name, those with several labels added up."""
        sums: dict[str, float] = {}
        for name, _, value in self.samples(text):
            with contextlib.suppress(ValueError):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


MetricsByServer = Mapping[str, MetricNames]


@functools.cache
def _sample(prefix_pattern: str) -> re.Pattern[str]:
    labels = r'(?:\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?'  # an exemplar has some of its own
    return re.compile(rf"^{prefix_pattern}(\w+){labels}[ \t]+(?!NaN|[+-]?Inf)(\S+)", re.MULTILINE)


def names_in(text: str, by_server: MetricsByServer) -> MetricNames | None:
    """The names of the server whose metrics these are; None: of none of these servers."""
    matches = (names for names in by_server.values() if _sample(names.pattern).search(text))
    return next(matches, None)


def labels_of(text: str) -> dict[str, str]:
    """The labels of a sample by name."""
    return dict(_LABEL.findall(text))


def kv_size(labels: Mapping[str, str]) -> tuple[int, int] | None:
    """Tokens of the KV cache and of a block, by labels of `MetricNames.kv_cache`; None: unknown."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and size.isdecimal()):
        return None
    return int(blocks) * int(size), int(size)


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
        engine: the server, as `MetricsByServer` names it.
        model: the name under which it is served.
        figures: gauges and counters of `MetricNames`; what the server does not tell is absent.
        histograms: likewise.
        kv_usage: share of the KV cache in use; None: unknown.
        kv_tokens: tokens that the KV cache holds; 0: unknown.
        block_size: tokens of a KV block; 0: unknown.
        ranks: data-parallel engines whose figures are added.
    """

    time_s: float
    engine: str
    model: str
    figures: Mapping[str, float]
    histograms: Mapping[str, HistogramCounts]
    kv_usage: float | None
    kv_tokens: int
    block_size: int
    ranks: int = 1


def snapshot(
    metric_samples: Iterable[tuple[str, Mapping[str, str], float]],
    time_s: float,
    only: Mapping[str, str],
    by_server: MetricsByServer,
) -> MetricsSnapshot | None:
    """One server's snapshot of samples (name, labels, value); None: they have no metrics of one.

    Figures and KV tokens of an engine's data-parallel ranks are added; `kv_usage` is their mean.

    Raises:
        SloBenchError: the samples are of several servers or models.
    """
    chosen = [
        (engine, bare_name, labels, value)
        for name, labels, value in metric_samples
        for engine, names in by_server.items()
        if (bare_name := names.bare(name))
        and all(labels.get(label) == required for label, required in only.items())
        and labels.get("tp_rank", "0") == labels.get("pp_rank", "0") == "0"  # each says the same
    ]
    used = [
        (engine, labels)
        for engine, name, labels, _ in chosen
        if name in by_server[engine].of("running")
    ]
    if not used:
        return None
    for label in ("instance", "job", "model_name"):
        values = sorted({labels[label] for _, labels in used if label in labels})
        if len(values) > 1:
            shown = ", ".join(values[:5])
            raise SloBenchError(
                f"these are metrics of several servers; choose one with --only {label}=…: {shown}"
            )
    engine = used[0][0]
    names = by_server[engine]
    sums: dict[str, float] = {}
    shares: dict[str, list[float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    kv_tokens = block_size = ranks = 0
    loads = (*names.of("running"), *names.of("waiting"))
    summed = {name for _, name, labels, _ in chosen if labels.get("priority") == ""}
    for _, name, labels, value in chosen:
        if not math.isfinite(value):
            continue
        if "le" in labels:
            bucket_counts = buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = _number(labels["le"], f"bound of {names.prefix}{name}")
            bucket_counts[bound] = bucket_counts.get(bound, 0.0) + value
        elif name in names.of("kv_usage"):
            shares.setdefault(name, []).append(value)
        elif name == names.kv_cache:
            rank_tokens, block_size = kv_size(labels) or (0, block_size)
            kv_tokens += rank_tokens
        elif name in names.of("page_size"):
            sums[name] = value  # the same of all ranks
        elif name in loads and labels.get("priority") and name in summed:
            continue  # SGLang says a queue's length in all, and beside it by priority
        else:
            ranks += name in names.of("running")
            sums[name] = sums.get(name, 0.0) + value
    figures = {
        figure: total for figure in names.names if (total := names.first(figure, sums)) is not None
    }
    if not kv_tokens and math.isfinite(figures.get("kv_tokens", math.nan)):
        kv_tokens, block_size = int(figures["kv_tokens"]), int(figures.get("page_size", 1))
    histograms = {}
    for histogram, metrics in names.histograms.items():
        for metric in metrics:
            if f"{metric}_count" in sums and histogram not in histograms:
                histograms[histogram] = HistogramCounts(
                    sums.get(f"{metric}_sum", math.nan),
                    sums[f"{metric}_count"],
                    tuple(sorted(buckets.get(metric, {}).items())),
                )
    usage = next((shares[metric] for metric in names.of("kv_usage") if metric in shares), None)
    return MetricsSnapshot(
        time_s=time_s,
        engine=engine,
        model=next((labels["model_name"] for _, labels in used if "model_name" in labels), ""),
        figures=figures,
        histograms=histograms,
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_tokens=kv_tokens,
        block_size=block_size,
        ranks=max(1, ranks),
    )


def read_text(
    text: str, time_s: float, only: Mapping[str, str], by_server: MetricsByServer
) -> MetricsSnapshot | None:
    """One server's snapshot of Prometheus' text format; None: it has none of these servers.

    Raises:
        SloBenchError: a value is no number, or the metrics are of several models.
    """
    names = names_in(text, by_server)
    if names is None:
        return None
    metric_samples = []
    for bare_name, labels, value in names.samples(text):
        name = names.prefix + bare_name
        metric_samples.append((name, labels_of(labels), _number(value, f"value of {name}")))
    return snapshot(metric_samples, time_s, only, by_server)


def _number(text: str, description: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SloBenchError(f"the {description} is no number but {text!r:.40}") from None
