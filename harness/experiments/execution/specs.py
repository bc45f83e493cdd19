"""What one cell runs, in plain values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....predictors.dtypes import AUTO
from ....predictors.step_time import DEFAULT_HOST_S
from ...results.metrics import DEFAULT_OBJECTIVE
from ...results.run_folder import Value


@dataclass(frozen=True)
class PlacementSpec:
    """Placement of one instance: model, GPU, parallelism, dtypes and memory, by name."""

    model: str
    gpu: str
    tp: int
    pp: int = 1
    ep: int = 1
    dp: int = 1
    expert_skew: float = 0.0
    weight_dtype: str = AUTO
    kv_dtype: str = "bf16"
    memory_share: float = 0.9
    block_size: int = 16
    host_memory_gib: float = 4.0
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    host_s: float | None = None
    prefill_overhead_s: float = 0.0
    host_link: str | None = None
    profile: str | None = None  # a file of measured step times, or `operators`
    speculation: str | None = None
    max_loras: int | None = None
    lora_rank: int = 16
    embedder: str | None = None  # the model beside it
    device_map: str | None = None  # by name or file: layers on devices, in place of gpu, tp and pp

    @property
    def gpus(self) -> int:
        """GPUs of an instance."""
        return self.dp * self.tp * self.pp

    @property
    def analytic_host_s(self) -> float:
        """Host time of an iteration where step times are estimated."""
        return DEFAULT_HOST_S if self.host_s is None else self.host_s


@dataclass(frozen=True)
class WorkloadSpec:
    """Where requests come from; see `workloads.source.load_source`."""

    workload: str
    arrivals: str = "poisson"
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    sessions: str | None = None
    models: str | None = None
    redraw_arrivals: bool = False
    trace_format: str | None = None


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

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CellSpec:
        """The inverse of `dataclasses.asdict`, for specs received from another process."""
        return cls(
            **{
                **plain,
                "placement": PlacementSpec(**plain["placement"]),
                "workload": WorkloadSpec(**plain["workload"]),
            }
        )
