"""Servers of several models that a system wakes up, orders and evicts during a cell.

servers/<system>.log             the gateway: which model comes up where, and after how long
servers/<system>-<model>[.N].log output of a model's server, on GPU N where that is not the first
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ....workloads.errors import SloBenchError
from ....workloads.models import shape_of
from ....workloads.workload import Workload
from ...core.counters import COUNT
from ...engine.simulator.simulate_models import pages_of_gpu, served_models
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.load_progress import Progress
from ...results.metrics import Hardware
from ...servers.gateway.running_gateway import mechanism_counts, model_counts
from ...servers.launch.model_servers import ModelServers
from ...servers.launch.serve_settings import Serve
from ..config.tables import ClientSchema
from ..execution.cell_specs import CellSpec, configured
from ..execution.cells import models_of, workload_of
from .attached import Attached, with_tokenizer_of
from .measuring import CellMeasurement


@dataclass(frozen=True, kw_only=True)
class LaunchedModels(Attached):
    """Models behind a gateway, which starts and stops their servers."""

    gateway: str  # its address

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Measure a cell, with what the system decided over its models meanwhile."""
        before = mechanism_counts(self.gateway)
        client_spec = replace(spec, router=None)
        measured = super().measure_cell(client_spec, workload, folder, progress)
        after = mechanism_counts(self.gateway)
        starts = model_counts(self.gateway, "activations_total")
        requested = {workload.model_names[index] for index in set(workload.model_index.tolist())}
        unplaced = sum(not starts[name] for name in requested)
        counts = {COUNT + name: n - before.get(name, 0) for name, n in after.items()}
        return replace(
            measured,
            result=replace(measured.result, models_unplaced=unplaced),
            figures={**measured.figures, **counts},
        )


def model_servers(spec: CellSpec, common: Serve, log: Path) -> ModelServers:
    """The servers of a cell of a system for several models. GPUs have the memory of `spec`'s, also
    where servers run on CPUs.

    Raises:
        SloBenchError: a model does not fit on one GPU, or cannot be served.
    """
    sharing = configured(spec.system, spec.parameters).sharing
    assert sharing is not None
    workload = workload_of(spec)
    models = models_of(
        spec.placement, spec.workload, spec.instances, sharing.max_num_batched_tokens
    )
    for name, model in models.items():
        if model.placement.tp > 1:
            raise SloBenchError(
                f"{name} takes more than half of a GPU: with servers a model stands on one GPU; "
                "give more memory (gpu, memory_share) or simulate it"
            )
    folders = {name: shape_of(name) for name in workload.model_names}
    return ModelServers(
        served_models(workload, models, spec.instances),
        folders,
        sharing,
        replace(common, system=None, parameters={}, served_name=None),
        spec.instances,
        pages_of_gpu(models),
        log,
    )


@contextlib.contextmanager
def started_models(
    servers: ModelServers, client: ClientSchema, device: str
) -> Iterator[LaunchedModels]:
    """Start the models that stand from the start, and the gateway that starts the others."""
    servers.log.parent.mkdir(parents=True, exist_ok=True)
    first = next(iter(servers.folders.values()))
    with servers.started() as url:
        yield LaunchedModels(
            [Endpoint.parse(url)],
            with_tokenizer_of(first, client),
            model=servers.models[0].name,
            gpu="cpu" if device == "cpu" else "unknown",
            hardware=Hardware(
                gpus=0 if device == "cpu" else servers.gpus,
                parameters=math.nan,
                peak_flops=math.nan,
            ),
            gateway=url,
        )
