"""Predicts a case: the simulator with the step times of its model and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....predictors.bands import kind_of, regime_of
from ....predictors.operators.assembly import default_step_time
from ....predictors.operators.front_end import front_end
from ....predictors.operators.server_version import ServerVersion
from ....predictors.placement import Placement
from ....predictors.server_memory import placed_memory
from ....predictors.specs import GIB, gpu, model
from ....predictors.step_time import StepTimeModel, step_time
from ....workloads.arrays import Floats, Ints
from ....workloads.errors import SloBenchError
from ....workloads.prefixes import BLOCK_SIZE, SessionBlocks
from ....workloads.workload import Workload
from ...core.records.request_records import Outcome
from ...engine.simulator.simulate import simulate
from ...policies.systems import STEP_LIMITS, System, system
from ..replay.log_replay import METRICS, latencies
from .clients import Client, Server, client_of, server_of
from .highest_rate import highest_rate
from .measurement import Case, ClosedLoop, HighestRate
from .readers import closed_figures, figures

ENGINES = ("vllm", "sglang", "trtllm")
# TensorRT-LLM schedules as vLLM does: running requests first, chunked prefill in one budget.
_SYSTEMS = {"trtllm": "vllm"}
# Of one logit at the sampler's peak: itself in 16 and 32 bits (6), sorted with its index (12), and
# as much again while sorting. Of vLLM before 0.10, whose memory was not measured.
_SAMPLER_BYTES = 30
_DRAWS = 8  # of the servers that a service sends requests to; their latencies count together


@dataclass(frozen=True)
class Prediction:
    """Predicted figures, the regime that the simulation was in, and the kind of step times."""

    figures: dict[str, float]
    regime: str
    step_time: str | None  # of `predictors.bands.STEP_TIMES`


def predict(
    case: Case,
    without: tuple[str, ...] = (),
    step_time_model: StepTimeModel | None = None,
    *,
    analytic: bool = False,
) -> Prediction:
    """Simulate a case, without the kernel tables of the GPUs `without`, or with `step_time_model`.

    `analytic`: with the step times of `--profile roofline`, a fit or an estimate.

    Raises:
        SloBenchError: the engine is unknown, the model does not fit, or a request is too long.
    """
    if case.engine not in ENGINES:
        raise SloBenchError(f"engine {case.engine!r} is not simulated")
    served, placement = _system(case), placed_as_measured(case)
    if case.num_gpu_blocks is None:
        placement.check()
    if step_time_model is None:
        step_time_model = step_time(placement) if analytic else step_times(case, placement, without)
    load, client = case.load, client_of(case.harness, case.engine, case.version)
    # Without a harness the times are the engine's own.
    outside = bool(case.harness) or isinstance(load, ClosedLoop)
    passed = front_end(measured_server(case)) if outside else None
    kind = kind_of(step_time_model)

    def served_in(workload: Workload) -> dict[str, Floats]:
        """Seconds by metric, a value a request."""
        result = simulate(
            workload,
            served,
            placement,
            step_time_model.model,
            instances=case.instances,
            router="random",  # those that were measured stood behind a Kubernetes service
            overlong_requests="error",
            front_end=passed,
        )
        records, tokens = result.records, workload.output_tokens
        if (records.outcome != Outcome.FINISHED).any():
            raise SloBenchError("the simulation left requests unfinished")
        return latencies(records.arrival_s, records.first_token_s, records.finish_s, tokens)

    def regime(statistics: Mapping[str, float], running: float) -> str:
        """The regime with so many requests `running` on an instance."""
        means = {f"{name}_s": statistics.get(f"{name}_mean", 0.0) for name in METRICS}
        return regime_of(
            placement,
            step_time_model.model,
            clients=load.concurrency if isinstance(load, ClosedLoop) else None,
            running=running,
            prompt_tokens=float(np.mean(load.prompt_tokens)),
            output_tokens=float(np.mean(load.output_tokens)),
            **means,
        )

    if isinstance(load, ClosedLoop):
        seconds = served_in(_closed_loop(load, client))
        warm = client.warm_up_each * load.concurrency
        tpot_s = float(np.nanmean(seconds["tpot"][warm:]))
        ttft_s = float(seconds["ttft"][warm:].mean())
        ttft_s += _server(case).unseen_s(load.concurrency, tpot_s)
        means = closed_figures(load, ttft_s, tpot_s)
        return Prediction(means, regime(means, load.concurrency), kind)
    if isinstance(load, HighestRate):
        rate_rps, at_rate = highest_rate(load, served_in)
        running = rate_rps * (at_rate["e2e_mean"] - at_rate["ttft_mean"]) / case.instances
        return Prediction({"max_rate": rate_rps}, regime(at_rate, running), kind)
    seconds_by_draw = [
        served_in(
            Workload(
                load.arrival_s + begin_s,  # other arrivals draw other servers
                load.prompt_tokens,
                load.output_tokens,
                prefix_blocks=load.prefix_blocks,
                prefix_block_size=BLOCK_SIZE,
                name="measured",
            )
        )
        for begin_s in range(_DRAWS if case.instances > 1 else 1)
    ]
    of_answered = {
        name: np.concatenate([seconds[name][load.answered] for seconds in seconds_by_draw])
        for name in METRICS
    }
    statistics = figures(of_answered)
    served_s = int(load.answered.sum()) * (statistics["e2e_mean"] - statistics["ttft_mean"])
    running = served_s / max(load.span_s, statistics["e2e_mean"]) / case.instances
    return Prediction(statistics, regime(statistics, running), kind)


def placed_as_measured(case: Case) -> Placement:
    """What was measured, with the memory of its server and version."""
    blocks, device = case.num_gpu_blocks, gpu(case.gpu)
    if case.peer_link is not None:
        device = replace(device, peer_link=case.peer_link)
    return Placement(
        model(case.model),
        device,
        tp=case.tp,
        pp=case.pp,
        ep=case.ep,
        dp=case.dp,
        weight_dtype=case.weight_dtype,
        kv_dtype=case.kv_dtype,
        memory_share=case.memory_share,
        batched_tokens=token_budget(case),
        fixed_num_gpu_blocks=None if blocks is None else max(1, blocks - 1),  # one holds nothing
        **_memory(case),
    )


def token_budget(case: Case) -> int:
    """Tokens of an iteration: as told, else the default of vLLM's server.

    8,192 on GPUs with 70 GiB or more, 2,048 on smaller ones and on A100; SGLang and TensorRT-LLM:
    8,192.
    """
    if case.token_budget is not None:
        return case.token_budget
    return 2048 if _small(case) and case.engine == "vllm" else 8192


def max_num_seqs(case: Case) -> int:
    """Sequences of an iteration: as told, else vLLM's defaults, 1,024 on large GPUs, else 256."""
    return case.max_num_seqs or (256 if _small(case) else 1024)


def _small(case: Case) -> bool:
    """Whether vLLM's server has the defaults of small GPUs, as it has on A100."""
    return gpu(case.gpu).memory_bytes < 70 * GIB or case.gpu.startswith("a100")


def _memory(case: Case) -> dict[str, Any]:
    """What the server that was measured takes of each GPU, as fields of a `Placement`."""
    measured = placed_memory(measured_server(case))
    if case.engine != "vllm":
        return measured
    sequences = max_num_seqs(case)
    if not measured:
        return {"beside_bytes": sequences * model(case.model).vocab * _SAMPLER_BYTES}
    return {"sampled_sequences": sequences, **measured}


def measured_server(case: Case) -> ServerVersion:
    """The server that was measured."""
    return ServerVersion(case.engine, case.version, case.async_scheduling)


def step_times(case: Case, placement: Placement, without: tuple[str, ...] = ()) -> StepTimeModel:
    """Those of `default_step_time` for the server that was measured."""
    kernel = _server(case).experts_kernel
    return default_step_time(
        placement, measured_server(case), without=without, experts_kernel=kernel
    )


def _server(case: Case) -> Server:
    run = case.harness, case.engine, case.version
    return server_of(*run, case.gpu, case.model, case.weight_dtype, case.tp)


def _system(case: Case) -> System:
    served = system(_SYSTEMS.get(case.engine, case.engine))
    limits = {"batched_tokens": token_budget(case), "sampled_sequences": max_num_seqs(case)}
    names = {name: limits[limit] for limit, names in STEP_LIMITS.items() for name in names}
    names["async_scheduling"] = measured_server(case).schedules_ahead
    return served.with_parameters(**served.known(names))


def _closed_loop(load: ClosedLoop, client: Client) -> Workload:
    n = (client.warm_up_each + client.requests_each) * load.concurrency
    draw = np.random.default_rng(0)
    order = np.arange(n)

    def lengths(longest: int) -> Ints:
        return draw.integers(max(1, round(client.shortest * longest)), longest + 1, n)

    prompt_tokens = lengths(load.prompt_tokens)
    shared = None
    if client.prompts:
        shared = SessionBlocks.of(order % client.prompts, prompt_tokens, 0, BLOCK_SIZE)
    return Workload(
        np.minimum(order, load.concurrency - 1) * client.stagger_s,
        prompt_tokens,
        lengths(load.output_tokens),
        follows=np.where(order < load.concurrency, -1, order - load.concurrency),
        prefix_blocks=shared,
        name="measured",
    )
