"""One simulated cell of several models on shared GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ....predictors.placement import OVERHEAD_BYTES, Placement
from ....predictors.specs import GIB
from ....predictors.step_time import StepTime
from ....workloads.errors import SloBenchError
from ....workloads.request import RequestType
from ....workloads.workload import Workload
from ...core.counters import QUOTA_HITS
from ...core.counters import summed as summed_counts
from ...core.kv.pages import PAGE_BYTES
from ...core.multi_model_policy import ServedModel, SharingPolicy
from ...core.records.request_records import Result, Timeline, TimeseriesRow, Totals
from ..cluster.cluster_arrivals import Arrivals
from ..cluster.multi_model import SharedGpuCluster
from ..cluster.recorder import Recorder, acts_of, totals_of
from ..cluster.traced_models import TracedSharedGpuCluster
from ..loop.measures import Sample, gaps_of, summed
from ..loop.traced_instance import EngineTrace

_SAMPLES = 300


@dataclass(frozen=True)
class OneModel:
    """A model as it would stand alone, and how long its steps then take."""

    placement: Placement
    step_time: StepTime


def simulate_models(
    workload: Workload,
    policy: SharingPolicy,
    models: Mapping[str, OneModel],
    *,
    gpus: int,
    overlong_requests: str = "error",
    progress: Callable[[int, float], None] | None = None,
    trace: EngineTrace | None = None,
) -> Result:
    """Serve `workload`, whose rows name their models, with `policy` on `gpus` GPUs of one kind.

    Args:
        workload: open loop, of generation.
        policy: the system.
        models: by the names that the workload has for them; all on the same kind of GPU.
        gpus: how many.
        overlong_requests: `error` or `reject` for requests longer than a model's context, or than
            what a GPU holds beside the model alone.
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that models do.

    Raises:
        SloBenchError: a model of the workload is missing, needs more GPUs than there are, or the
            workload has followers, embeddings or requests that are too long.
    """
    hosted = served_models(workload, models, gpus)
    if workload.closed:
        raise SloBenchError(
            "several models on shared GPUs are simulated with open arrivals only; leave sessions "
            "and concurrency out"
        )
    if (workload.request_type != RequestType.GENERATE).any():
        raise SloBenchError("several models on shared GPUs serve no embedding requests")
    pages = pages_of_gpu(models)
    rejected = _too_long(workload, hosted, models, pages, overlong_requests)
    recorder = Recorder(len(workload), workload.arrival_s)
    recorder.rejected(rejected)
    kind = SharedGpuCluster if trace is None else partial(TracedSharedGpuCluster, trace=trace)
    cluster = kind(
        hosted,
        gpus,
        pages,
        policy,
        Arrivals(workload, skip=rejected),
        recorder,
        workload.model_index,
        sample_s=max(workload.span_s, 1.0) / _SAMPLES,
        progress=progress,
    )
    cluster.run(len(workload))
    everyone = [*cluster.retired, *cluster.model_instances]
    for model_instance in everyone:
        model_instance.instance.free_finished()
    if recorder.ended == len(workload):
        for model_instance in cluster.model_instances:
            assert not model_instance.kv_manager.used, (
                f"{model_instance.kv_manager.used} KV blocks were lost"
            )
    if QUOTA_HITS in cluster.counters:
        cluster.counters[QUOTA_HITS] = sum(t.quota_hits for t in everyone)
    timeline = _timeline(cluster, pages)
    return Result(
        recorder.records,
        gaps_of(t.instance.measures for t in everyone),
        timeline,
        _totals(cluster, pages, recorder.last_finish_s(), timeline),
        overlong=len(rejected),
        models_unplaced=len(set(workload.model_index.tolist()) - {t.model for t in everyone}),
        counts=summed_counts((cluster.counters, *(t.instance.counters for t in everyone))),
    )


def served_models(
    workload: Workload, models: Mapping[str, OneModel], gpus: int
) -> list[ServedModel]:
    """The models of a workload with the mean rates, lengths and SLOs of their requests.

    Raises:
        SloBenchError: one is missing, or needs more GPUs than there are.
    """
    hosted = []
    for index, name in enumerate(workload.model_names):
        if name not in models:
            names = ", ".join(models)
            raise SloBenchError(f"the workload asks for model {name!r}, which is none of {names}")
        model = models[name]
        if model.placement.gpus > gpus:
            raise SloBenchError(f"{name} needs {model.placement.gpus} GPUs but there are {gpus}")
        mine = workload.model_index == index
        requests = max(1, int(mine.sum()))
        slo_s = workload.ttft_slo_s[mine]
        finite = slo_s[np.isfinite(slo_s)]
        hosted.append(
            ServedModel(
                index,
                name,
                model.placement,
                model.step_time,
                rate_rps=float(mine.sum()) / max(workload.span_s, 1e-9),
                prompt_tokens=float(workload.prompt_tokens[mine].sum()) / requests,
                output_tokens=float(workload.output_tokens[mine].sum()) / requests,
                slo_s=float(finite.mean()) if len(finite) else math.inf,
            )
        )
    return hosted


def pages_of_gpu(models: Mapping[str, OneModel]) -> int:
    """Pages of each GPU for weights and KV of these models."""
    place = next(iter(models.values())).placement
    return (place.usable_bytes_per_gpu - OVERHEAD_BYTES) // PAGE_BYTES


def _too_long(
    workload: Workload,
    hosted: Sequence[ServedModel],
    models: Mapping[str, OneModel],
    pages: int,
    overlong_requests: str,
) -> NDArray[np.int64]:
    """Rows that no engine could ever hold."""
    limit = np.zeros(len(hosted), dtype=np.int64)
    for model in hosted:
        place = models[model.name].placement
        kv_bytes = (pages - model.weight_pages) * PAGE_BYTES
        kv_tokens = int(0.95 * kv_bytes) // place.block_bytes_per_gpu * place.block_size
        context = place.model.context_tokens
        limit[model.index] = min(kv_tokens, context) if context else kv_tokens
    tokens = workload.prompt_tokens + workload.output_tokens
    rows = np.flatnonzero(tokens > limit[workload.model_index])
    if len(rows) and overlong_requests == "error":
        row = int(rows[0])
        raise SloBenchError(
            f"{len(rows)} of {len(workload)} requests are too long: request {row} has "
            f"{tokens[row]} tokens, {limit[workload.model_index[row]]} fit "
            f"{workload.model_names[workload.model_index[row]]}; use --overlong-requests reject"
        )
    if overlong_requests == "truncate":
        raise SloBenchError(
            "several models on shared GPUs cut no requests; use --overlong-requests reject"
        )
    return rows


def _kv_pages(cluster: SharedGpuCluster) -> list[tuple[int, list[Sample]]]:
    """Samples of every model instance that ever was, in pages of one GPU."""
    kv_samples = []
    for model_instance in [*cluster.retired, *cluster.model_instances]:
        samples = [
            (
                time_s,
                waiting,
                running,
                model_instance.kv_manager.pages_for(blocks) * len(model_instance.gpus),
            )
            for time_s, waiting, running, blocks in model_instance.instance.measures.samples
        ]
        if samples:
            kv_samples.append(
                (model_instance.model, [*samples, (model_instance.instance.now_s, 0, 0, 0)])
            )
    return kv_samples


def _timeline(cluster: SharedGpuCluster, pages: int) -> Timeline:
    """Of all model instances together, and the KV of each model."""
    kv_samples = _kv_pages(cluster)
    if not kv_samples:
        nobody = np.zeros(1, dtype=np.int64)
        return Timeline(np.zeros(1), nobody, nobody, np.zeros(1))
    times, sums = summed([samples for _, samples in kv_samples])
    engines = (t.instance for t in [*cluster.retired, *cluster.model_instances])
    end_s = float(times[-1])
    acts = acts_of([cluster.counters, *(engine.counters for engine in engines)], end_s)
    rows = [*cluster.activations, *acts]
    for model in sorted({model for model, _ in kv_samples}):
        model_times, model_sums = summed(
            [samples for index, samples in kv_samples if index == model]
        )
        gib = model_sums[2] * (PAGE_BYTES / GIB)
        rows += [
            TimeseriesRow(time_s, "kv_gib", cluster.models[model].name, value)
            for time_s, value in zip(model_times.tolist(), gib.tolist(), strict=True)
        ]
    return Timeline(times, sums[0], sums[1], sums[2] / (pages * cluster.gpus), tuple(rows))


def _totals(cluster: SharedGpuCluster, pages: int, makespan_s: float, timeline: Timeline) -> Totals:
    everyone = [*cluster.retired, *cluster.model_instances]
    totals = totals_of([t.instance for t in everyone], makespan_s)
    page_s = sum(
        t.instance.measures.kv_block_s * t.kv_manager.pages_for(1024) / 1024 * len(t.gpus)
        for t in everyone
    )
    able_s = totals.makespan_s * pages * cluster.gpus
    return dataclasses.replace(
        totals,
        busy_s=sum(t.instance.now_s - t.started_s - t.instance.measures.idle_s for t in everyone),
        kv_cache_usage_peak=float(timeline.kv_cache_usage.max(initial=0.0)),
        kv_cache_usage_mean=page_s / able_s if able_s else 0.0,
    )
