"""Predicts a case: the simulator with the step times of its model and GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....predictors.operators.assembly import operator_step_time
from ....predictors.operators.kernels import has_tables
from ....predictors.placement import Placement
from ....predictors.roofline import StepTime
from ....predictors.specs import GIB, gpu, model
from ....predictors.step_time import StepTimeModel, coefficients_of, step_time
from ....workloads.errors import SloBenchError
from ....workloads.prefixes import BLOCK_SIZE
from ....workloads.workload import Workload
from ...core.records import Outcome
from ...engine.simulator.simulate import simulate
from ...policies.systems import System, system
from ..log_replay import ASYNCHRONOUS_FROM, latencies, version_of
from .clients import client_of
from .measurement import Case, ClosedLoop
from .readers import closed_figures, figures

ENGINES = ("vllm", "sglang", "trtllm")
# TensorRT-LLM schedules as vLLM does: running requests first, chunked prefill in one budget.
_SYSTEMS = {"trtllm": "vllm"}


@dataclass(frozen=True)
class Prediction:
    """Predicted figures, and the regime that the simulation was in."""

    figures: dict[str, float]
    regime: str
    provenance: str


def predict(case: Case, without: tuple[str, ...] = ()) -> Prediction:
    """Simulate a case, without the kernel tables of the GPUs `without`.

    Raises:
        SloBenchError: the engine is unknown, the model does not fit, or a request is too long.
    """
    if case.engine not in ENGINES:
        raise SloBenchError(f"engine {case.engine!r} is not simulated")
    served = _system(case)
    placement = Placement(
        model(case.model),
        gpu(case.gpu),
        tp=case.tp,
        pp=case.pp,
        ep=case.ep,
        weight_dtype=case.weight_dtype,
        kv_dtype=case.kv_dtype,
        memory_share=case.memory_share,
        batched_tokens=token_budget(case),
    )
    placement.check()
    known = step_times(case, placement, without)
    workload = _workload(case)
    result = simulate(
        workload,
        served,
        placement,
        known.model,
        instances=case.instances,
        overlong_requests="error",
    )
    records = result.records
    if (records.outcome != Outcome.FINISHED).any():
        raise SloBenchError("the simulation left requests unfinished")
    seconds = latencies(
        records.arrival_s, records.first_token_s, records.finish_s, workload.output_tokens
    )
    if isinstance(case.load, ClosedLoop):
        load = case.load
        ttft_s = (
            float(seconds["ttft"].mean())
            + client_of(case.harness, case.engine, case.version).delay_s
        )
        means = closed_figures(load, ttft_s, float(np.nanmean(seconds["tpot"])))
        regime = _regime(case, means, placement, known.model)
        return Prediction(means, regime, known.provenance)
    kept = {name: found[case.load.answered] for name, found in seconds.items()}
    found = figures(kept)
    return Prediction(found, _regime(case, found, placement, known.model), known.provenance)


def token_budget(case: Case) -> int:
    """Tokens of an iteration: as told, else the default of vLLM's server.

    8,192 on GPUs with 70 GiB or more, 2,048 on smaller ones and on A100; SGLang and TensorRT-LLM:
    8,192.
    """
    if case.token_budget is not None:
        return case.token_budget
    small = gpu(case.gpu).memory_bytes < 70 * GIB or case.gpu.startswith("a100")
    return 2048 if small and case.engine == "vllm" else 8192


def schedules_ahead(case: Case) -> bool:
    """Whether vLLM schedules the next step during the present one, as told or by its version."""
    if case.engine != "vllm" or case.async_scheduling is not None:
        return case.engine == "vllm" and bool(case.async_scheduling)
    return version_of(case.version) >= ASYNCHRONOUS_FROM


def step_times(case: Case, placement: Placement, without: tuple[str, ...] = ()) -> StepTimeModel:
    """A fit of the model on the GPU where the GPU has no kernel tables, else operators."""
    tables = has_tables(placement.gpu.name) or not placement.model.is_plain
    if not tables and coefficients_of(placement).fitted:
        return step_time(placement)
    engine = "vllm-async" if schedules_ahead(case) else case.engine
    return operator_step_time(placement, engine, without=without)


def _system(case: Case) -> System:
    served = system(_SYSTEMS.get(case.engine, case.engine))
    budget, seqs = token_budget(case), case.max_num_seqs or 1024
    names = {
        "max_num_batched_tokens": budget,
        "chunked_prefill_tokens": budget,
        "max_num_seqs": seqs,
        "max_running_requests": seqs,
        "async_scheduling": schedules_ahead(case),
    }
    known = served.parameters()
    return served.with_parameters(**{name: v for name, v in names.items() if name in known})


def _workload(case: Case) -> Workload:
    load = case.load
    if not isinstance(load, ClosedLoop):
        return Workload(
            load.arrival_s,
            load.prompt_tokens,
            load.output_tokens,
            prefix_blocks=load.prefix_blocks,
            prefix_block_size=BLOCK_SIZE,
            name="measured",
        )
    client = client_of(case.harness, case.engine, case.version)
    n = client.requests_each * load.concurrency
    draw = np.random.default_rng(0)
    order = np.arange(n)

    def lengths(most: int) -> NDArray[np.int64]:
        return draw.integers(max(1, round(client.shortest * most)), most + 1, n)

    return Workload(
        np.minimum(order, load.concurrency - 1) * client.stagger_s,
        lengths(load.prompt_tokens),
        lengths(load.output_tokens),
        follows=np.where(order < load.concurrency, -1, order - load.concurrency),
        think_s=draw.exponential(client.delay_s, n),
        name="measured",
    )


def _regime(case: Case, found: dict[str, float], placement: Placement, step_time: StepTime) -> str:
    """What bounds the server, by the prediction and the inputs.

    KV-bound: not all requests that are in the system fit. Overloaded: an open loop whose requests
    wait longer than they are served. Prefill-bound: steps take 1.5 times what decoding alone would.
    """
    load = case.load
    tpot_s = found.get("tpot_mean", 0.0)
    prompt, output = float(np.mean(load.prompt_tokens)), float(np.mean(load.output_tokens))
    if isinstance(load, ClosedLoop):
        running = load.concurrency
        if running * (prompt + output) > placement.kv_tokens:
            return "kv-bound"
    else:
        if found["ttft_mean"] > 0.5 * found["e2e_mean"]:
            return "overloaded"
        served_s = len(load.arrival_s) * (found["e2e_mean"] - found["ttft_mean"])
        running = max(1, round(served_s / max(load.arrival_s[-1], found["e2e_mean"])))
        running = -(-running // case.instances)
    alone_s = step_time.step_s(running, round(running * (prompt + output / 2)), ())
    return "prefill-bound" if tpot_s > 1.5 * alone_s else "decode-bound"
