"""Fidelity: replays the log of a real engine in the simulator and computes the errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ....predictors.operators.assembly import OPERATORS
from ....predictors.operators.front_end import FrontEnd
from ....predictors.operators.server_version import ServerVersion
from ....predictors.placement import Placement
from ....predictors.profiles.build_model import GRAPH_TOKENS, with_peer_link
from ....predictors.profiles.formulas import is_whole, profiled_step_time
from ....predictors.profiles.importers import recognise
from ....predictors.profiles.profile_format import Profile
from ....predictors.profiles.step_time_table import Host
from ....predictors.specs import GIB, GpuSpec, ModelSpec, gpu, model
from ....predictors.step_time import DEFAULT_HOST_S, StepTimeModel
from ....workloads.arrays import Floats, Ints
from ....workloads.errors import SloBenchError, UnknownNameError
from ....workloads.prefixes import BLOCK_SIZE
from ....workloads.workload import Workload
from ...core.policy import Policy
from ...core.policy import overrides as overrides_hook
from ...core.records.request_records import Outcome, Records, Result, time_per_output_token_s
from ...engine.loop.traced_instance import EngineTrace
from ...engine.simulator.simulate import simulate
from ...policies.systems import DEFAULT_SYSTEM, System, system
from ...results.engine_logs import EngineSettings, RealLog
from ...results.request_blocks import HASH_IDS, RequestBlocks
from ...results.request_figures import summarise
from ...servers.server_kinds import DEFAULT_SERVER, server_kind, server_kinds

NO_BLOCKS = "the log has no number of KV blocks"  # how a note of a replay begins
METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99", "mape")
# vLLM's defaults, for settings that a log lacks.
_DEFAULTS = EngineSettings(
    max_num_seqs=256, max_num_batched_tokens=2048, block_size=16, prefix_caching=True, eager=False
)
TOLERANCE = 0.05  # of an error, where the machine itself is steadier than that


@dataclass(frozen=True)
class ErrorRow:
    """One statistic of a metric, measured and simulated.

    `error` = simulated / real - 1; for `mape` it is the mean of |error| over requests, without the
    two times. `spread`: the relative difference between largest and smallest value of repeated
    measurements. `replayed`: the error if every step has its logged duration. NaN: unknown.
    """

    metric: str
    statistic: str
    real_s: float
    simulated_s: float
    error: float
    spread: float = math.nan
    replayed: float = math.nan

    def beside(self, real_s: float) -> ErrorRow:
        """Return the row with another measured value."""
        error = self.simulated_s / real_s - 1 if real_s else math.nan
        return dataclasses.replace(self, real_s=real_s, error=error)

    @property
    def within(self) -> bool | None:
        """Whether the error is at most `TOLERANCE`; None if unknown, or undecidable."""
        if math.isnan(self.spread) or math.isnan(self.error) or self.undecidable:
            return None
        return abs(self.error) <= TOLERANCE

    @property
    def undecidable(self) -> bool:
        """Whether measured values differ by more than `TOLERANCE` from run to run, and the error is
        not beyond that.
        """
        return self.spread > TOLERANCE and abs(self.error) <= self.spread


@dataclass(frozen=True)
class AskedRequests:
    """All requests of a level as policies knew them: SLOs, priorities, predicted lengths, and those
    requests that a log leaves out because they did not finish.

    `order`: the row of each request in the level's records; the workload is in order of sending.
    `zero_s`: the workload's time zero on the log's clock.
    """

    workload: Workload
    order: Ints
    zero_s: float = 0.0
    predicted_output_tokens: Ints | None = None
    output_tokens_p90: Ints | None = None
    num_cpu_blocks: int | None = None


@dataclass(frozen=True)
class Validation:
    """A log and its simulation, request by request."""

    log: RealLog
    engine: str
    settings: EngineSettings  # as simulated, nothing left open
    host: Host
    step_time: str  # where the step times come from
    real: dict[str, Floats]  # seconds by metric; NaN: a request without (one token has no TPOT)
    simulated: dict[str, Floats]
    preemptions: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    notes: tuple[str, ...]
    client_s: float = 0.0  # between client and engine, added to every simulated first token

    def rows(self) -> list[ErrorRow]:
        """Rows of the error table."""
        return [
            row
            for metric in METRICS
            for row in _rows(metric, self.real[metric], self.simulated[metric])
        ]


def validate(
    log: RealLog,
    profile: Profile,
    engine: str = DEFAULT_SYSTEM,
    *,
    parameters: Mapping[str, bool | int | float | str] | None = None,
    overrides: EngineSettings | None = None,
    host_s: float = 0.0,
    client_s: float = 0.0,
    asked_requests: AskedRequests | None = None,
    swap_s_per_token: float | None = None,
) -> Validation:
    """Replay `log` on the system named `engine`, with the profile's step times.

    Args:
        log: requests of a real engine.
        profile: step times of its model on its GPU.
        engine: the system that models the engine.
        parameters: of that system; settings in the log take precedence.
        overrides: settings that take precedence over those in the log.
        host_s: seconds that the host adds to a step that is launched kernel by kernel. Nothing is
            added to step times that were fitted to whole steps.
        client_s: seconds between client and engine, which the simulation lacks; added to the first
            and last tokens.
        asked_requests: what policies knew of the requests; by default their lengths alone.
        swap_s_per_token: time of a swap; by default that of the GPU's link in the catalogue.

    Raises:
        SloBenchError: a system, model or GPU is unknown, or the system cannot serve the log.
    """
    replayed = replay_of(
        log,
        profile,
        engine,
        parameters=parameters,
        overrides=overrides,
        host_s=host_s,
        known_prefixes=asked_requests is not None,
        swap_s_per_token=swap_s_per_token,
    )
    records = simulated_again(replayed, asked_requests).records
    if asked_requests is not None:
        records = _records_of(log, records, asked_requests)
    simulated = as_measured(log, records, client_s, may_end=asked_requests is not None)
    return Validation(
        log=log,
        engine=replayed.system.name,
        settings=replayed.settings,
        host=replayed.host,
        step_time=replayed.step_time.provenance,
        real=latencies_of(log),
        simulated=simulated,
        preemptions=int((records.preemptions_recompute + records.preemptions_swap).sum()),
        cached_tokens=int(np.maximum(records.cached_tokens, 0).sum()),
        notes=replayed.notes,
        client_s=client_s,
    )


def simulated_again(
    replayed: Replay, asked_requests: AskedRequests | None = None, trace: EngineTrace | None = None
) -> Result:
    """Simulate a replay: the requests of its log, or those `asked_requests`."""
    workload, placement = replayed.workload, replayed.placement
    predicted = longest = None
    if asked_requests is not None:
        workload = _with_own_blocks(asked_requests.workload, replayed.settings)
        predicted = asked_requests.predicted_output_tokens
        longest = asked_requests.output_tokens_p90
        if asked_requests.num_cpu_blocks is not None:
            placement = dataclasses.replace(
                placement, fixed_num_cpu_blocks=asked_requests.num_cpu_blocks
            )
    return simulate(
        workload,
        replayed.system,
        placement,
        replayed.step_time.model,
        instances=replayed.settings.instances or 1,
        router=replayed.settings.router,
        overlong_requests="error" if asked_requests is None else "reject",
        predicted_output_tokens=predicted,
        output_tokens_p90=longest,
        trace=trace,
        front_end=replayed.front_end,
    )


def _with_own_blocks(workload: Workload, settings: EngineSettings) -> Workload:
    """The workload with the blocks that requests find again after a preemption, where it has no
    prefixes.
    """
    if not settings.prefix_caching:
        return dataclasses.replace(workload, prefix_blocks=None)
    if workload.prefix_blocks is not None:
        return workload
    size = settings.block_size or BLOCK_SIZE
    tokens = workload.prompt_tokens + workload.output_tokens
    return dataclasses.replace(
        workload, prefix_blocks=RequestBlocks(tokens // size), prefix_block_size=size
    )


def _records_of(log: RealLog, records: Records, asked_requests: AskedRequests) -> Records:
    """The records of the log's requests, in its order and on its clock."""
    place = np.empty(len(asked_requests.order), dtype=np.int64)
    place[asked_requests.order] = np.arange(len(asked_requests.order))
    rows = place[log.rows]
    columns = {f.name: getattr(records, f.name)[rows] for f in dataclasses.fields(records)}
    for name in ("first_token_s", "finish_s"):
        columns[name] = columns[name] + asked_requests.zero_s
    return Records(**columns)


@dataclass(frozen=True)
class Replay:
    """What a log is simulated with."""

    workload: Workload
    system: System
    placement: Placement
    settings: EngineSettings  # nothing left open
    host: Host
    step_time: StepTimeModel
    notes: tuple[str, ...]
    front_end: FrontEnd | None = None

    def with_blocks(self, num_gpu_blocks: int) -> Replay:
        """With so many KV blocks, as the engine counts them."""
        settings = dataclasses.replace(self.settings, num_gpu_blocks=num_gpu_blocks)
        return dataclasses.replace(
            self, placement=_with_own_room(self.placement, settings), settings=settings
        )


def replay_of(
    log: RealLog,
    profile: Profile,
    engine: str,
    *,
    parameters: Mapping[str, bool | int | float | str] | None = None,
    overrides: EngineSettings | None = None,
    host_s: float = 0.0,
    known_prefixes: bool = False,
    swap_s_per_token: float | None = None,
) -> Replay:
    """What `validate` simulates `log` with; arguments and errors are its own.

    `known_prefixes`: the requests are simulated with prefixes from elsewhere.
    """
    notes = list(log.notes)
    served = system(engine).with_parameters(**(parameters or {}))
    settings = merged(merged(_DEFAULTS, log.engine), overrides or EngineSettings())
    ahead = settings.async_scheduling
    if ahead is None:
        ahead = ServerVersion(version=settings.version or "").schedules_ahead
    settings = dataclasses.replace(settings, async_scheduling=ahead)
    profile = with_log_link(profile, log)
    placement, settings = _placed(profile, settings, notes)
    served = _configured(served, settings)
    if log.engine.prefix_caching is not None:  # whatever the system has in simulations
        served = dataclasses.replace(served, prefix_cache=log.engine.prefix_caching)
    host = Host() if is_whole(profile) else _host(settings, host_s)
    operators = profile.best == OPERATORS  # which have host times of their own
    step_time = profiled_step_time(profile, None if operators else host, placement=placement)
    if profile.calibration is not None and log.digest in profile.calibration.digests:
        notes.append("the profile was calibrated on this log, so its errors say nothing of others")
    if settings.prefix_caching and log.shared_blocks is None and not known_prefixes:
        notes.append(_prefixes_unknown(log))
    if swap_s_per_token is not None:
        block_s = max(1e-9, swap_s_per_token * placement.block_size)
        bytes_per_s = placement.block_bytes_per_gpu / block_s
        hardware = dataclasses.replace(placement.gpu, host_link=f"{bytes_per_s / 1e9:.9f}gb/s@0us")
        placement = dataclasses.replace(placement, gpu=hardware)
    elif isinstance(served.policy, Policy) and overrides_hook(served.policy, "preemption_mode"):
        notes.append("the time of swapping is the catalogue's, not measured")
    workload = _workload(log, settings)
    passed = profile.front_end if log.of_client else None
    return Replay(workload, served, placement, settings, host, step_time, tuple(notes), passed)


def with_log_link(profile: Profile, log: RealLog) -> Profile:
    """With the link between the log's GPUs, where only the log tells it."""
    if "peer" in profile.links:
        return profile
    return with_peer_link(profile, log.engine.peer_link)


def _prefixes_unknown(log: RealLog) -> str:
    cached = f"{log.cached_tokens:,} prompt tokens" if log.cached_tokens else "an unknown number"
    return (
        f"which prompts share a prefix is unknown ({cached} came from the prefix cache), so the "
        "simulation assumes none: with 8 % of the prompt tokens shared, E2E came out 0.8 to 2 % "
        f"too long; put the blocks of the prompts into {HASH_IDS} beside the log"
    )


def merged(base: EngineSettings, winner: EngineSettings) -> EngineSettings:
    """The settings of both; those of `winner` count first."""
    overrides = {k: v for k, v in dataclasses.asdict(winner).items() if v is not None}
    return dataclasses.replace(base, **overrides)


def _placed(
    profile: Profile, settings: EngineSettings, notes: list[str]
) -> tuple[Placement, EngineSettings]:
    """The placement of the log, that of the profile where the log has none; adds a note where they
    differ.
    """
    tp = settings.tp or profile.tp
    if tp != profile.tp:
        notes.append(
            f"the log is of tp {tp}, the profile of tp {profile.tp}: its step times are not those "
            "of the log"
        )
    if (settings.dp or 1) > 1:
        notes.append(
            f"the log's {settings.dp} data-parallel ranks are simulated as instances: experts that "
            "they share, and steps that they take together, are not"
        )
        instances = (settings.instances or 1) * (settings.dp or 1)
        settings = dataclasses.replace(settings, instances=instances)
    if settings.model and profile.model not in (settings.model, catalogue_name(settings.model)):
        notes.append(f"the log is of {settings.model}, the profile of {profile.model}")
    whole = is_whole(profile)
    placement = Placement(
        _shape(profile.model, settings.context_tokens) if whole else model(profile.model),
        _hardware(profile.gpu) if whole else gpu(profile.gpu),
        tp=tp,
        weight_dtype=profile.weight_dtype,
        kv_dtype=profile.kv_dtype,
        block_size=settings.block_size or 16,
        batched_tokens=settings.max_num_batched_tokens or 2048,
        sampled_sequences=settings.max_num_seqs or 256,
    )
    calibration = profile.calibration
    if settings.num_gpu_blocks is None and calibration is not None and calibration.num_gpu_blocks:
        blocks = calibration.num_gpu_blocks
        settings = dataclasses.replace(settings, num_gpu_blocks=blocks)
        notes.append(
            f"the log has no number of KV blocks; {blocks:,} is that of the run which the profile "
            "was calibrated on"
        )
    if settings.num_gpu_blocks is None:
        if _ANY in (placement.gpu.origin, placement.model.origin):
            raise SloBenchError(
                f"{NO_BLOCKS}, and model or GPU are not in the catalogue, so it cannot be "
                "estimated; give it with --num-gpu-blocks"
            )
        estimated = placement.num_gpu_blocks
        if estimated < 2:
            placement.check()
        notes.append(f"{NO_BLOCKS}; {estimated:,} is an estimate (--num-gpu-blocks)")
        settings = dataclasses.replace(settings, num_gpu_blocks=estimated)
    return _with_own_room(placement, settings), settings


def _with_own_room(placement: Placement, settings: EngineSettings) -> Placement:
    kind = server_kinds().get(settings.server or "") or server_kind(DEFAULT_SERVER)
    usable = max(1, (settings.num_gpu_blocks or 2) - kind.placeholder_blocks)
    return dataclasses.replace(placement, fixed_num_gpu_blocks=usable)


# With measured step times and known KV blocks, model and GPU change nothing else.
_ANY = "stand-in"
_ANY_GPU = GpuSpec(
    name="any",
    memory_bytes=GIB,
    bandwidth_bytes_per_s=1e12,
    flops_16bit=1e15,
    flops_8bit=0.0,
    flops_4bit=0.0,
    host_link="pcie4-x16",
    peer_link="pcie4-x16",
    power_w=1.0,
    price_per_hour_usd=0.0,
    origin=_ANY,
)


def _hardware(name: str) -> GpuSpec:
    with suppress(UnknownNameError):
        return gpu(name)
    return _ANY_GPU


def _shape(name: str, context_tokens: int | None) -> ModelSpec:
    try:
        return model(name)
    except UnknownNameError:
        return ModelSpec(
            name=name,
            family="llama",
            layers=1,
            hidden=1,
            heads=1,
            kv_heads=1,
            head_dim=1,
            intermediate=1,
            vocab=1,
            context_tokens=context_tokens or 0,
            tied_embeddings=False,
            origin=_ANY,
        )


def catalogue_name(served: str) -> str:
    """The catalogue's name of a served model, which `run --profile` knows; else its own name."""
    with suppress(SloBenchError):
        return recognise("models", served)
    return served


def _configured(served: System, settings: EngineSettings) -> System:
    """Set the parameters of the system that the engine's settings determine."""
    names = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "async_scheduling": settings.async_scheduling,
    }
    for kind in server_kinds().values():  # a server's own words for the first two
        names |= {parameter: names[limit] for limit, (parameter, _) in kind.limits.items()}
    return served.with_parameters(**served.known(names))


def _host(settings: EngineSettings, host_s: float) -> Host:
    """Host times per step; asynchronous scheduling hides all of them but kernel launches."""
    if not (math.isfinite(host_s) and host_s >= 0):
        raise SloBenchError(f"host_s must be a time from 0 on but is {host_s}")
    graphs = 0 if settings.eager else min(2 * (settings.max_num_seqs or 256), GRAPH_TOKENS)
    return Host(
        step_s=0.0 if settings.async_scheduling else DEFAULT_HOST_S,
        launch_s=host_s,
        graph_tokens=graphs,
    )


def _workload(log: RealLog, settings: EngineSettings) -> Workload:
    block_size = settings.block_size or BLOCK_SIZE
    return Workload(
        log.arrival_s,
        log.prompt_tokens,
        log.output_tokens,
        prefix_blocks=log.blocks(block_size) if settings.prefix_caching else None,
        prefix_block_size=block_size if log.shared_blocks is None else BLOCK_SIZE,
        name=log.name,
    )


def as_measured(
    log: RealLog, records: Records, client_s: float = 0.0, *, may_end: bool = False
) -> dict[str, Floats]:
    """Simulated seconds by metric; `may_end`: a policy may send requests away (NaN)."""
    lost = int((records.outcome != Outcome.FINISHED).sum())
    if lost and not may_end:
        raise SloBenchError(f"{lost} of {len(log)} requests did not finish in the simulation")
    first_s, finish_s = records.first_token_s + client_s, records.finish_s + client_s
    return latencies(log.begin_s, first_s, finish_s, log.output_tokens)


def latencies(begin_s: Floats, first_s: Floats, last_s: Floats, tokens: Ints) -> dict[str, Floats]:
    """Seconds of each request by metric."""
    return {
        "ttft": first_s - begin_s,
        "tpot": time_per_output_token_s(first_s, last_s, tokens),
        "e2e": last_s - begin_s,
    }


def latencies_of(log: RealLog) -> dict[str, Floats]:
    """Measured seconds of each request by metric."""
    return latencies(log.begin_s, log.first_s, log.last_s, log.output_tokens)


def statistics(seconds: Floats) -> dict[str, float]:
    """Mean and quantiles of a metric, by name."""
    return {name: value for name, value in summarise(seconds).items() if name in STATISTICS}


def _rows(metric: str, real: Floats, simulated: Floats) -> list[ErrorRow]:
    simulated_statistics = statistics(simulated)
    rows = []
    for statistic, real_s in statistics(real).items():
        row = ErrorRow(metric, statistic, real_s, simulated_statistics[statistic], math.nan)
        rows.append(row.beside(real_s))
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(simulated / real - 1)
    finite = errors[np.isfinite(errors)]
    mape = float(finite.mean()) if len(finite) else math.nan
    return [*rows, ErrorRow(metric, STATISTICS[-1], math.nan, math.nan, mape)]
