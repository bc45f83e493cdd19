"""Simulate a cell, and write its row and details."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ....predictors.dtypes import weight_dtype
from ....predictors.output_length import bucket_accuracy, length_predictor, longest_tokens
from ....predictors.placement import Placement
from ....predictors.power import power_model
from ....predictors.roofline import StepTime
from ....workloads.arrays import Ints
from ....workloads.base import DrawnSource
from ....workloads.blocks import WorkloadBlocks
from ....workloads.errors import SloBenchError
from ....workloads.models import parse_models, shape_of
from ....workloads.request_bodies import check_simulated
from ....workloads.slo import parse_slo
from ....workloads.workload import Workload
from ...core.multi_model_policy import SharingPolicy
from ...core.records.judging import judge
from ...core.records.request_records import Result, mispredictions
from ...engine.cluster.failures import parse_failures
from ...engine.simulator.simulate import simulate, simulate_blocks
from ...policies.policy_faults import policy_errors
from ...results.cell_files import (
    Choice,
    Column,
    request_columns,
    write_details,
    write_mispredictions,
)
from ...results.energy import Energy
from ...results.metrics import (
    Hardware,
    cell_metrics,
    parse_objective,
)
from ...results.request_figures import Requests
from ...results.request_fold import RequestFold
from ...results.run_folder import Row
from .cell_bands import band_columns, sampled
from .cell_specs import (
    EXACT_REQUESTS,
    CellSpec,
    PlacementSpec,
    WorkloadSpec,
    configured,
    placed,
    source,
)

if TYPE_CHECKING:
    from ...engine.loop.traced_instance import EngineTrace
    from ...engine.simulator.simulate_models import OneModel

Progress = Callable[[int, float], None]  # requests ended, clock in seconds
MOST_TP = 8  # of a model that shares its GPUs
_LENGTHS_STREAM = 0x1E46  # apart from the streams that draw the workload


def workload_of(spec: CellSpec) -> Workload:
    """What arrives in a cell; the same for every system."""
    return _declared(spec, source(spec.workload).make(**_load(spec)))


def _load(spec: CellSpec) -> dict[str, Any]:
    """How much of its workload a cell offers."""
    names = ("rate_rps", "replay_speed", "requests", "duration_s", "seed")
    slo = parse_slo(spec.slo, spec.slo_scale)
    return {name: getattr(spec, name) for name in names} | {"slo": slo}


def _declared(spec: CellSpec, workload: Workload) -> Workload:
    if spec.max_output_tokens is None:
        return workload
    declared = np.maximum(workload.output_tokens, spec.max_output_tokens)
    return dataclasses.replace(workload, max_output_tokens=declared)


def in_blocks(spec: CellSpec) -> WorkloadBlocks | None:
    """The workload of a cell of more than `EXACT_REQUESTS` requests, in blocks; None for shorter
    cells, and where requests depend on each other or a policy on all of them: sessions, closed
    loops, shared prefixes, traces, mixes, several models, embeddings, drawn SLOs and deadlines,
    predicted lengths, adapters, and systems for several models.
    """
    by_time = math.inf if spec.duration_s is None else spec.duration_s * (spec.rate_rps or 0)
    if min(by_time, math.inf if spec.requests is None else spec.requests) <= EXACT_REQUESTS:
        return None
    shares = configured(spec.system, spec.parameters).sharing is not None
    if shares or spec.length_predictor != "oracle":
        return None
    if spec.placement.embedder is not None or spec.placement.max_loras is not None:
        return None
    origin = source(spec.workload)
    if not isinstance(origin, DrawnSource):
        return None
    blocks = origin.blocks(**_load(spec))
    if blocks is None or spec.max_output_tokens is None:
        return blocks
    draw = blocks.draw
    return dataclasses.replace(
        blocks, draw=lambda: (_declared(spec, workload) for workload in draw())
    )


def predicted_output_tokens(spec: CellSpec, workload: Workload) -> Ints | None:
    """Output lengths that policies see, the same for every system; None: the true lengths."""
    if spec.length_predictor == "oracle":
        return None
    rng = np.random.default_rng((spec.seed, _LENGTHS_STREAM))
    return length_predictor(spec.length_predictor).predict(workload, rng)


def output_tokens_p90(spec: CellSpec, workload: Workload) -> Ints | None:
    """Upper estimates of output lengths, for policies that reserve memory; None: the predicted
    lengths.
    """
    rng = np.random.default_rng((spec.seed, _LENGTHS_STREAM))
    return longest_tokens(length_predictor(spec.length_predictor), workload, rng)


def run_cell(
    spec: CellSpec, folder: Path, *, records: str = "csv", progress: Progress | None = None
) -> Row:
    """Simulate a cell, write its details into `folder` and return its row of `cells.csv`.

    Without records, requests of long cells are not kept in memory either; see `in_blocks`.

    Raises:
        SloBenchError: the cell cannot be simulated with these settings.
    """
    blocks = in_blocks(spec) if records == "none" else None
    if blocks is not None:
        return _summarised(spec, blocks, folder, progress)
    workload = workload_of(spec)
    predicted = predicted_output_tokens(spec, workload)
    result = simulated(spec, workload, predicted, progress=progress)
    if records != "none":
        queued = [
            misprediction for state in result.learned for misprediction in mispredictions(state)
        ]
        write_mispredictions(folder, spec.cell, queued)
    row = simulated_row(spec, workload, result, folder, records=records)
    if predicted is not None and spec.workload.models is None:
        row["length_bucket_accuracy"] = round(bucket_accuracy(predicted, workload.output_tokens), 9)
    return row


@policy_errors()
def simulated(
    spec: CellSpec,
    workload: Workload,
    predicted: Ints | None,
    *,
    step_time: StepTime | None = None,
    progress: Progress | None = None,
    trace: EngineTrace | None = None,
    timeline: bool = True,
) -> Result:
    """Simulate a cell.

    Args:
        spec: the cell.
        workload: as `workload_of` makes it.
        predicted: from `predicted_output_tokens`; unused where several models share GPUs.
        step_time: in place of the placement's own, for one model.
        progress: called now and then with (requests ended, clock in seconds).
        trace: is filled with everything that instances do.
        timeline: the state of one model is sampled over time, for the cell's details on disk.

    Raises:
        SloBenchError: the cell cannot be run as asked.
    """
    check_simulated(workload.bodies)
    chosen = configured(spec.system, spec.parameters)
    if chosen.sharing is not None:
        from ...engine.simulator.simulate_models import simulate_models

        return simulate_models(
            workload,
            chosen.sharing,
            _sharing_models(spec, chosen.sharing),
            gpus=spec.instances,
            overlong_requests=spec.overlong_requests,
            progress=progress,
            trace=trace,
        )
    place = spec.deployment
    return simulate(
        workload,
        chosen,
        place.placement,
        step_time or place.step_time.model,
        embedder=place.embedder,
        embed_instances=spec.embed_instances,
        predicted_output_tokens=predicted,
        output_tokens_p90=output_tokens_p90(spec, workload),
        lora=place.lora,
        progress=progress,
        trace=trace,
        timeline=timeline,
        **_instances(spec),
    )


def _instances(spec: CellSpec) -> dict[str, Any]:
    """How many instances a cell has, what routes to them, and when they run."""
    return {
        "instances": spec.instances,
        "router": spec.router,
        "overlong_requests": spec.overlong_requests,
        "failures": parse_failures(spec.failures) if spec.failures else (),
        "ready_s": spec.deployment.ready_s,
        "step_time_of": partial(_role_step_time, spec),
        "front_end": spec.deployment.front_end,
    }


@policy_errors()
def _summarised(
    spec: CellSpec, blocks: WorkloadBlocks, folder: Path, progress: Progress | None
) -> Row:
    """Row of a simulated cell whose requests are summarised, not kept."""
    place = spec.deployment
    fold = RequestFold(blocks, spec.warmup_s)
    result = simulate_blocks(
        blocks,
        configured(spec.system, spec.parameters),
        place.placement,
        place.step_time.model,
        fold.add,
        progress=progress,
        **_instances(spec),
    )
    hardware = _unlike(_hardware_of(place.placement, spec.instances), result)
    fitted = "fitted" if place.step_time.fitted else "unfitted"
    row = _row(spec, fold.row(result, hardware), fitted)
    write_details(folder, spec.cell, {}, result.timeline, records="none")
    return row | band_columns(spec, fold.sample(), row)


def _role_step_time(spec: CellSpec, role: Placement) -> StepTime:
    """Step times of a role with a placement of its own: those of the run where tp or the kind of
    GPU alone differ.
    """
    run, place = spec.deployment.placement, spec.placement
    if dataclasses.replace(role, tp=run.tp, gpu=run.gpu) == run:
        gpu_name = place.gpu if role.gpu == run.gpu else role.gpu.name
        return placed(place.replaced(tp=role.tp, gpu=gpu_name)).step_time.model
    return place.step_time(role).model


def simulated_row(
    spec: CellSpec, workload: Workload, result: Result, folder: Path, *, records: str
) -> Row:
    """Write the details of a simulated cell into `folder` and return its row of `cells.csv`."""
    hardware, fitted = _simulated_hardware(spec, workload, result)
    row = kept_cell(
        spec,
        workload,
        result,
        hardware,
        folder,
        records=records,
        step_time="fitted" if fitted else "unfitted",
        columns=_roles(result),
    )
    return row | band_columns(spec, sampled(workload, result, spec.warmup_s), row)


def simulated_figures(
    spec: CellSpec, workload: Workload, result: Result
) -> dict[str, float | int | bool | None]:
    """The figures of a simulated cell, not rounded; nothing is written."""
    drawn, workload = workload, _served(workload, result)
    hardware, _ = _simulated_hardware(spec, workload, result)
    requests = Requests.of(workload, result.records, judge(workload, result.records), drawn)
    return _figures(spec, workload, requests, result, hardware)


def _simulated_hardware(
    spec: CellSpec, workload: Workload, result: Result
) -> tuple[Hardware, bool]:
    """The hardware, and whether its step times are fitted to measurements."""
    sharing = configured(spec.system, spec.parameters).sharing
    if sharing is not None:
        return _shared_hardware(spec, workload, sharing), False
    place = spec.deployment
    hardware = _hardware_of(place.placement, spec.instances)
    return _unlike(hardware, result), place.step_time.fitted


def _unlike(hardware: Hardware, result: Result) -> Hardware:
    """The hardware with the means over the instances, where they stand on several kinds of GPU."""
    places = [instance.placement for instance in result.instances if instance.placement is not None]
    if len({place.gpu.name for place in places}) < 2:
        return hardware
    each = [_hardware_of(place, 1) for place in places]
    gpus = [kind.gpus for kind in each]
    prices = [kind.usd_per_gpu_hour for kind in each]
    known_prices = [price for price in prices if price is not None]
    return dataclasses.replace(
        hardware,
        gpus=sum(gpus),
        peak_flops=float(np.average([kind.peak_flops for kind in each], weights=gpus)),
        usd_per_gpu_hour=float(np.average(known_prices, weights=gpus))
        if len(known_prices) == len(prices)
        else None,
        energy=None,
    )


def models_of(
    spec: PlacementSpec, workload: WorkloadSpec, gpus: int, batched_tokens: int = 2048
) -> dict[str, OneModel]:
    """Every model that a workload names, on the fewest GPUs of which it leaves half to others.

    Raises:
        SloBenchError: one is unknown, fits nowhere, or needs more GPUs than there are.
    """
    from ...engine.simulator.simulate_models import OneModel

    assert workload.models is not None
    models_by_name = {}
    for name in parse_models(workload.models).names:
        shape = spec.replaced(model=shape_of(name), tp=None).settled
        while not _leaves_half(placed(shape).placement) and shape.tp < MOST_TP:
            shape = shape.replaced(tp=2 * shape.tp)
        if shape.tp > gpus:
            raise SloBenchError(f"{name} needs {shape.tp} GPUs of {spec.gpu} but there are {gpus}")
        deployment = placed(shape)
        place = dataclasses.replace(deployment.placement, batched_tokens=batched_tokens)
        models_by_name[name] = OneModel(place, deployment.step_time.model)
    return models_by_name


def _leaves_half(place: Placement) -> bool:
    return place.weight_bytes_per_gpu <= 0.5 * place.usable_bytes_per_gpu


def _sharing_models(spec: CellSpec, sharing: SharingPolicy) -> dict[str, OneModel]:
    """The models of a cell on `spec.instances` shared GPUs."""
    return models_of(spec.placement, spec.workload, spec.instances, sharing.max_num_batched_tokens)


def _shared_hardware(spec: CellSpec, workload: Workload, sharing: SharingPolicy) -> Hardware:
    """The GPUs of all models; parameters are a mean, weighted by each model's tokens."""
    models = _sharing_models(spec, sharing)
    tokens = workload.prompt_tokens + workload.output_tokens
    tokens_by_model = np.bincount(
        workload.model_index, weights=tokens, minlength=len(workload.model_names)
    )
    sizes = [models[name].placement.model.parameters for name in workload.model_names]
    hardware = _hardware_of(next(iter(models.values())).placement, 1)
    return dataclasses.replace(
        hardware,
        gpus=spec.instances,
        parameters=float(np.average(sizes, weights=tokens_by_model)),
        energy=None,
    )


def _roles(result: Result) -> dict[str, Column]:
    """What the instance of each request is there for, where they differ."""
    away_s = result.records.transfer_s
    moved: dict[str, Column] = {"transfer_s": away_s} if away_s.any() else {}
    names = [engine.role for engine in result.instances]
    if not any(names):
        return moved
    kinds = ["", *dict.fromkeys(names)]
    of_instance = np.array([*map(kinds.index, names), 0])  # the last: requests without an instance
    return {
        "role": Choice(of_instance[result.records.instance], kinds),
        "queued_s": result.records.queued_s,
        **moved,
    }


def kept_cell(
    spec: CellSpec,
    workload: Workload,
    result: Result,
    hardware: Hardware,
    folder: Path,
    *,
    records: str,
    step_time: str,
    columns: Mapping[str, Column] | None = None,
) -> Row:
    """Compute a cell's metrics, write its details into `folder` and return its row.

    `columns` are added to the per-request table; `step_time` is the origin of step times: "fitted",
    "unfitted" or "measured".
    """
    offered, workload = workload, _served(workload, result)
    judged = judge(workload, result.records)
    requests = Requests.of(workload, result.records, judged, offered)
    metrics = _figures(spec, workload, requests, result, hardware)
    row = _row(spec, metrics, step_time)
    if row["rate_rps"] is None:
        row["rate_rps"] = _arrival_rate_rps(result.records.arrival_s, workload.concurrency or 1)
    table = request_columns(workload, result.records, judged) | dict(columns or {})
    write_details(folder, spec.cell, table, result.timeline, records=records)
    return row


def _row(spec: CellSpec, metrics: Mapping[str, float | int | bool | None], step_time: str) -> Row:
    """The row of a cell, its figures rounded."""
    row: Row = dict(spec.columns)
    for name, value in metrics.items():
        # A nanosecond is beyond any model's truth; fewer digits are easier to read.
        row[name] = round(value, 9) if isinstance(value, float) else value
        if name == "valid":
            row["step_time"] = step_time
    return row


def _served(workload: Workload, result: Result) -> Workload:
    """The workload with the lengths that were served."""
    return workload if result.served is None else result.served


def _figures(
    spec: CellSpec, workload: Workload, requests: Requests, result: Result, hardware: Hardware
) -> dict[str, float | int | bool | None]:
    return cell_metrics(
        requests,
        workload,
        result,
        hardware,
        warmup_s=spec.warmup_s,
        objective=parse_objective(spec.objective),
    )


def _hardware_of(placement: Placement, instances: int) -> Hardware:
    """Hardware of all instances; values of one GPU are means over the pipeline stages."""
    bits = weight_dtype(placement.weight_dtype).compute_bits
    gpus = [stage.gpu for stage in placement.stages]
    power = power_model(placement.gpu) if len({gpu.name for gpu in gpus}) == 1 else None
    return Hardware(
        gpus=placement.gpus * instances,
        parameters=placement.model.parameters,
        peak_flops=fmean(gpu.flops(bits) for gpu in gpus),
        usd_per_gpu_hour=fmean(gpu.price_per_hour_usd for gpu in gpus) or None,
        energy=None
        if power is None
        else Energy(
            power,
            placement.weight_bytes_per_gpu * placement.gpus,
            placement.kv_tokens * placement.kv_bytes_per_token,
            placement.gpu.bandwidth_bytes_per_s,
        ),
    )


def _arrival_rate_rps(arrival_s: np.ndarray[Any, np.dtype[np.float64]], clients: int) -> float:
    """Arrivals a second after the first; in a closed loop after those with which clients begin."""
    arrived_s = arrival_s[np.isfinite(arrival_s)]
    span_s = float(arrived_s.max() - arrived_s.min()) if len(arrived_s) > clients else 0.0
    return round((len(arrived_s) - clients) / span_s, 9) if span_s > 0 else float("nan")
