"""What one cell runs, in plain values that can be sent to another process; and what they name:
placements with their step times, workload sources and systems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ....predictors.device_map import read_device_map
from ....predictors.embedder import Embedder, embedder, own_weight_bytes
from ....predictors.lora import Lora
from ....predictors.model_spec import ModelSpec
from ....predictors.operators.assembly import (
    OPERATORS,
    ROOFLINE,
    default_step_time,
    draft_bytes,
    is_file,
    operator_step_time,
    simulated_server,
    speculative_step_time,
)
from ....predictors.operators.front_end import FrontEnd, front_end
from ....predictors.operators.server_version import ServerVersion
from ....predictors.placement import Placement, smallest_tp, uneven_kv_heads
from ....predictors.profiles.build_model import default_host, profiled_gpu
from ....predictors.profiles.profile_format import Profile, read_profile
from ....predictors.roofline import OperatorRoofline
from ....predictors.server_memory import placed_memory
from ....predictors.specs import GIB, gpu, link, model
from ....predictors.step_time import DEFAULT_HOST_S, StepTimeModel, step_time
from ....workloads.base import MixedSource, TaskSource, TraceSource, WorkloadSource
from ....workloads.errors import SloBenchError
from ....workloads.file_cache import file_cache
from ....workloads.source import load_source
from ...policies.systems import System, system
from ...results.metrics import DEFAULT_OBJECTIVE
from ...results.run_folder import Value

if TYPE_CHECKING:
    from ..config.schema import ExperimentSchema
    from ..config.setting import Part

# Of a cell without records: requests of longer cells are not kept, and quantiles have an error.
EXACT_REQUESTS = 1_000_000


class CellPart:
    """Settings of one value by name: those that the schema declares with this `Setting.part`.

    Frozen and hashable. Those left out have the schema's defaults. Values alone are sent to another
    process, which needs no schema to read them.
    """

    part: ClassVar[Part]

    def __init__(self, *first: Any, **settings: Any) -> None:
        """Take the first settings by place, in the schema's order.

        Raises:
            TypeError: there is no such setting.
        """
        defaults = defaults_of(self.part)
        named = dict(zip(defaults, first, strict=False)) | settings
        if not named.keys() <= defaults.keys():
            raise TypeError(f"no settings of a {self.part}: {named.keys() - defaults.keys()}")
        self.__dict__.update(defaults | named)

    @classmethod
    def of(cls, settings: Mapping[str, Any], **changes: Any) -> Self:
        """Those of all settings that belong here, with changes."""
        return cls(**{name: settings[name] for name in defaults_of(cls.part)} | changes)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `vars`."""
        part = object.__new__(cls)
        part.__dict__.update(plain)
        return part

    def replaced(self, **changes: Any) -> Self:
        """The same with other values."""
        return self.from_plain(vars(self) | changes)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(frozenset(vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in vars(self).items())})"

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def defaults_of(part: Part) -> dict[str, Any]:
    """The defaults of the settings of a part, by name, in the schema's order."""
    from ..config.schema import ExperimentSchema
    from ..config.setting import declared

    return {
        name: setting.first
        for name, setting in declared(ExperimentSchema).items()
        if setting.part == part and name in ExperimentSchema.model_fields
    }


class PlacementSpec(CellPart):
    """Placement of one instance: model, GPU, parallelism, dtypes and memory, by name."""

    part = "placement"

    @property
    def gpus(self) -> int:
        """Number of GPUs of an instance."""
        return int(self.dp * self.tp * self.pp)

    @property
    def analytic_host_s(self) -> float:
        """Host time of an iteration where step times are estimated by the roofline."""
        return DEFAULT_HOST_S if self.host_s is None else float(self.host_s)

    @property
    def server(self) -> ServerVersion:
        """The server that is simulated."""
        return simulated_server(self.profile, self.server_version)

    def step_time(self, placement: Placement) -> StepTimeModel:
        """The step times of a placement where no file has them.

        Raises:
            SloBenchError: they are not known of the model.
        """
        server = self.server
        if self.profile == ROOFLINE:
            if self.server_version is not None and self.host_s is None:
                raise SloBenchError(
                    f"roofline step times have {DEFAULT_HOST_S * 1e3:g} ms of host, not the host "
                    f"times of {server}: leave profile or server_version out, or set host_s"
                )
            return step_time(placement, self.analytic_host_s)
        if self.speculation is not None:
            return speculative_step_time(placement, self.speculation, server, self.host_s)
        named = self.profile is not None and self.profile.startswith(OPERATORS)
        return (operator_step_time if named else default_step_time)(
            placement, server, host_s=self.host_s
        )

    @property
    def settled(self) -> Self:
        """With the formats of the checkpoint and the fewest GPUs that it fits on, where open.

        Raises:
            SloBenchError: a name is unknown, or the model does not fit.
        """
        language = model(self.model)
        weights = language.dtype_of(self.weight_dtype)
        kv = language.kv_dtype_of(self.kv_dtype)
        tp = self.tp or smallest_tp(
            language, gpu(self.gpu), self.pp, weights, kv, self.memory_share, self.dp
        )
        return self.replaced(tp=tp, weight_dtype=weights, kv_dtype=kv)


class WorkloadSpec(CellPart):
    """Where requests come from; see `workloads.source.load_source`."""

    part = "source"

    @classmethod
    def first_of(cls, experiment: ExperimentSchema) -> Self:
        """The workload that the first value of each setting of an experiment makes."""
        values = {name: getattr(experiment, name) for name in defaults_of(cls.part)}
        return cls(**{n: v[0] if isinstance(v, tuple) else v for n, v in values.items()})


@dataclass(frozen=True)
class OperatingPoint:
    """One offered load: a rate, a speed of the trace's own arrivals, a share of the estimated
    capacity, or none of them (closed loop).
    """

    rate_rps: float | None = None
    replay_speed: float | None = None
    load_factor: float | None = None

    @property
    def label(self) -> str:
        """Name of the level in file names."""
        if self.load_factor is not None:
            return f"load-{self.load_factor:g}"
        if self.rate_rps is not None:
            return f"rate-{self.rate_rps:g}"
        return "closed" if self.replay_speed is None else f"speed-{self.replay_speed:g}"

    def columns(self, natural_rate_rps: float | None) -> dict[str, Value]:
        """Return the columns of the load; a rate that only the run can measure is None."""
        columns: dict[str, Value] = {"rate_rps": self.rate_rps, "replay_speed": self.replay_speed}
        if self.load_factor is not None:
            columns["load_factor"] = self.load_factor
        elif self.replay_speed is not None and natural_rate_rps is not None:
            columns["rate_rps"] = round(natural_rate_rps * self.replay_speed, 9)
        return columns


@dataclass(frozen=True)
class CellSpec:
    """What one cell runs. Plain values only, so that it can be sent to another process."""

    cell: str  # unique in the experiment, and a file name
    columns: Mapping[str, Value]  # what identifies the row, as in cells.csv
    system: str
    parameters: Mapping[str, bool | int | float | str]
    placement: PlacementSpec
    instances: int
    embed_instances: int  # of these
    router: str | None
    workload: WorkloadSpec
    rate_rps: float | None
    replay_speed: float | None
    requests: int | None
    duration_s: float | None
    warmup_s: float
    max_output_tokens: int | None
    slo: str | Mapping[str, Any]
    slo_scale: float
    seed: int
    overlong_requests: str
    length_predictor: str = "oracle"
    objective: str = DEFAULT_OBJECTIVE
    failures: str | None = None  # see `engine.cluster.failures`

    @property
    def deployment(self) -> Placed:
        """What the placement names, for steps of this system, looked up once in a process.

        Raises:
            SloBenchError: a name is unknown, or the model does not fit.
        """
        return placed_for(self.placement, configured(self.system, self.parameters))

    def plain(self) -> dict[str, Any]:
        """The spec as tables of plain values, to be sent to another process."""
        parts = {"placement": vars(self.placement), "workload": vars(self.workload)}
        return vars(self) | parts

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CellSpec:
        """The inverse of `plain`."""
        placement = PlacementSpec.from_plain(plain["placement"])
        workload = WorkloadSpec.from_plain(plain["workload"])
        return cls(**{**plain, "placement": placement, "workload": workload})


@dataclass(frozen=True)
class Placed:
    """A placement that fits, how long its steps take, and the embedder beside it."""

    placement: Placement
    step_time: StepTimeModel = field(repr=False)
    embedder: Embedder | None = None
    ready_s: float = 0.0  # it begins to serve
    lora: Lora | None = None  # the adapters' slots
    front_end: FrontEnd | None = None


def placed_for(spec: PlacementSpec, chosen: System) -> Placed:
    """`placed`, where the server is named with the memory that its steps take at this system's
    limits: it measures a step of the most tokens and sequences when it starts.
    """
    return placed(spec, **chosen.step_limits) if _memory_of(spec) else placed(spec)


@file_cache(maxsize=64)
def placed(spec: PlacementSpec, **step_limits: Any) -> Placed:
    """Look the names up and check that the model fits.

    Args:
        spec: the names.
        step_limits: fields of a `Placement`, see `System.step_limits`.

    Raises:
        SloBenchError: a name is unknown, or the model does not fit.
    """
    profile = read_profile(spec.profile) if is_file(spec.profile) else None
    language, embeds, card = model(spec.model), None, None
    if profile is not None and profile.gpu == spec.gpu:
        card = profiled_gpu(profile)
    if spec.device_map is not None:
        card = read_device_map(spec.device_map).stages[0].gpu
    if spec.embedder is not None:
        embeds = model(spec.embedder)
    card = card or gpu(spec.gpu)
    if spec.host_link is not None:
        card = dataclasses.replace(card, host_link=link(spec.host_link).name)
    measured_blocks = None if spec.num_gpu_blocks else _measured_blocks(profile, spec)
    names = {spec_field.name for spec_field in dataclasses.fields(Placement)}
    names -= {"model", "gpu", "server_version"}
    placement = Placement(
        language,
        card,
        **{name: value for name, value in vars(spec).items() if name in names},
        **_memory_of(spec),
        **step_limits,
        host_memory_bytes=round(spec.host_memory_gib * GIB),
        fixed_num_gpu_blocks=spec.num_gpu_blocks
        or measured_blocks
        or _own_blocks(profile, language, spec),
        fixed_num_cpu_blocks=spec.num_cpu_blocks,
        beside_bytes=own_weight_bytes(embeds, language, language.dtype_of(spec.weight_dtype))
        if embeds
        else 0,
    )
    lora = spec.max_loras and Lora(language, spec.max_loras, spec.lora_rank, spec.tp * spec.pp)
    if lora:
        beside_bytes = placement.beside_bytes + lora.slot_bytes
        placement = dataclasses.replace(placement, beside_bytes=beside_bytes)
    if spec.speculation is not None:
        beside_bytes = placement.beside_bytes + draft_bytes(placement, spec.speculation)
        placement = dataclasses.replace(placement, beside_bytes=beside_bytes)
    if spec.device_map is not None:
        return _mapped(spec, placement)
    if measured_blocks is None:
        placement.check()
    else:
        placement.check_tp()
    host_s = spec.analytic_host_s
    beside = embedder(embeds, placement, host_s=host_s) if embeds else None
    if spec.speculation is not None and (profile is not None or spec.profile == ROOFLINE):
        raise SloBenchError("speculation takes step times from operators; leave profile out")
    if profile is None:
        timed = spec.step_time(placement)
    else:
        timed = _profiled(spec.profile, profile, placement, spec.host_s)
    timed = _with_overhead(timed, spec.prefill_overhead_s)
    if lora:
        timed = lora.slower(timed, card)
    passed = None
    if spec.front_end == "server" and spec.profile != ROOFLINE:
        passed = front_end(spec.server) if profile is None else profile.front_end
    if passed is not None:
        timed = dataclasses.replace(timed, provenance=f"{timed.provenance}; {passed}")
    return Placed(placement, timed, beside, lora=lora or None, front_end=passed)


def _memory_of(spec: PlacementSpec) -> dict[str, Any]:
    """The server whose memory a placement has, where it is named and its memory is known."""
    return {} if spec.server_version is None else placed_memory(spec.server)


def _with_overhead(timed: StepTimeModel, prefill_s: float) -> StepTimeModel:
    """The same with a fixed time in each iteration that computes a prompt."""
    if not prefill_s:
        return timed
    if not isinstance(timed.model, OperatorRoofline):
        raise SloBenchError(
            f"prefill_overhead_s is for profile {ROOFLINE}; set that, or leave it out"
        )
    slower = dataclasses.replace(timed.model, prefill_s=timed.model.prefill_s + prefill_s)
    return dataclasses.replace(timed, model=slower)


def _own_blocks(profile: Profile | None, language: ModelSpec, spec: PlacementSpec) -> int | None:
    """KV blocks of the engine that was measured, where the catalogue does not know its device."""
    if profile is None or profile.device is None:
        return None
    block_bytes = language.kv_bytes_per_token(language.kv_dtype_of(spec.kv_dtype)) * spec.block_size
    return max(1, int(profile.device.kv_bytes / block_bytes))


def _measured_blocks(profile: Profile | None, spec: PlacementSpec) -> int | None:
    """KV blocks that the engine of a calibration counted, of which one holds nothing."""
    learned = None if profile is None else profile.calibration
    if learned is None or not (learned.num_gpu_blocks and learned.block_size):
        return None
    tokens = (learned.num_gpu_blocks - 1) * learned.block_size
    return max(1, tokens // int(spec.block_size))


def _mapped(spec: PlacementSpec, even: Placement) -> Placed:
    """The same model where a device map puts it."""
    assert spec.device_map is not None
    from ....predictors.staged import staged_step_time

    mapped = read_device_map(spec.device_map)
    if model(mapped.model) != even.model:
        raise SloBenchError(
            f"the device map {spec.device_map} is for {mapped.model}, but model is {spec.model}"
        )
    profile = None if spec.profile == ROOFLINE else spec.profile
    others = (profile, spec.embedder, spec.speculation, spec.max_loras)
    if any(other is not None for other in others):
        raise SloBenchError(
            "device_map goes with neither profile, embedder, speculation nor max_loras; leave "
            "them out"
        )
    placement = dataclasses.replace(even, split=mapped.stages, fixed_lanes=mapped.lanes)
    placement.check()
    timed = staged_step_time(placement, spec.analytic_host_s)
    return Placed(placement, timed, ready_s=mapped.ready_s)


def _profiled(
    file: str | None, profile: Profile, placement: Placement, host_s: float | None
) -> StepTimeModel:
    for name, here, there in (
        ("model", placement.model.name, profile.model),
        ("gpu", placement.gpu.name, profile.gpu),
        ("tp", placement.tp, profile.tp),
        ("weight_dtype", placement.weight_dtype, profile.weight_dtype),
        ("kv_dtype", placement.kv_dtype, profile.kv_dtype),
    ):
        if here != there:
            raise SloBenchError(
                f"the profile {file} is for {name} {there}, but {name} is {here}; use another "
                f"profile, or set {name} to {there}"
            )
    from ....predictors.profiles.formulas import profiled_step_time

    return profiled_step_time(profile, default_host(host_s), placement=placement)


@file_cache(maxsize=8)
def source(spec: WorkloadSpec) -> WorkloadSource:
    """The source, read once for all cells that use it.

    Raises:
        SloBenchError: a name is unknown or a file cannot be read.
    """
    return load_source(
        spec.workload,
        arrivals=spec.arrivals,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        sessions=spec.sessions,
        models=spec.models,
        format=spec.trace_format,
        columns=spec.trace_columns,
        redraw_arrivals=spec.redraw_arrivals,
    )


def deployment_notes(experiment: ExperimentSchema) -> list[str]:
    """What is simulated although servers refuse it."""
    notes = (
        uneven_kv_heads(model(name), tp)
        for variant in experiment.each_variant().values()
        for name in variant.model
        for tp in variant.tp
        if tp is not None
    )
    return list(dict.fromkeys(filter(None, notes)))


def file_notes(experiment: ExperimentSchema) -> list[str]:
    """What was taken for what, assumed and left out of each file that requests come from."""
    first = WorkloadSpec.first_of(experiment)
    sources = [source(first.replaced(workload=workload)) for workload in experiment.workload]
    mixes = [loaded for loaded in sources if isinstance(loaded, MixedSource)]
    parts = [*sources, *(member.source for mix in mixes for member in mix.members)]
    files = [part for part in parts if isinstance(part, TraceSource | TaskSource)]
    return [f"{loaded.name}: {note}" for loaded in files for note in loaded.notes]


def configured(name: str, parameters: Mapping[str, Any]) -> System:
    """A system with its parameters set."""
    return system(name).with_parameters(**parameters) if parameters else system(name)
