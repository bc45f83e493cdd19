"""Instances on two kinds of GPU behind one router, which may know how long their steps take.

Not from a paper. Fewest requests is what routers without measurements do; it treats a slow GPU as
a fast one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ...predictors.specs import entries, gpu
from ...workloads.errors import SloBenchError
from ..core.cluster_policy import (
    HOLD,
    ClusterPolicy,
    ClusterView,
    Role,
    RouteOutcome,
    least_loaded,
)
from ..core.instance import Instance
from ..core.policy import AnyPolicy, parameter
from ..core.state import Release, RequestState
from .load_aware import LoadAware
from .shared.instance_load import ends_in_s

FIRST, SECOND = "first", "second"


@dataclass(frozen=True)
class MixedGpus(ClusterPolicy):
    """`second_instances` of all instances stand on GPUs of the kind `second_gpu`, the others on
    that of the run; the model is placed alike on both.

    `routing` chooses the instance with the fewest requests (`requests`), with the least measured
    load U = C/Cmax + M/Mmax (`load`, Algorithm 4-2 of BanaServe), or with the earliest predicted
    end (`step-times`): prompts that wait there and the request's own, then `answer_tokens` steps of
    the batch that it joins, all by the step times of that instance.
    """

    second_gpu: str = parameter("a100-80g", choices=tuple(entries("gpus")))
    second_instances: int = parameter(1, 0, 1024)
    routing: str = parameter("step-times", choices=("requests", "load", "step-times"))
    answer_tokens: int = parameter(200, 1, 65536, log=True)

    @property
    def least_instances(self) -> int:
        return self.second_instances + 1

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        first = instances - self.second_instances
        if first < 1:
            raise SloBenchError(
                f"mixed-gpus has second_instances = {self.second_instances} on {self.second_gpu}; "
                f"{instances} instances leave none on {placement.gpu.name}"
            )
        other = dataclasses.replace(placement, gpu=gpu(self.second_gpu))
        second = Role(SECOND, policy, self.second_instances, placement=other)
        return (Role(FIRST, policy, first), *([second] if self.second_instances else []))

    def new_state(self) -> LoadAware:
        return LoadAware()

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        if not cluster.up:
            return HOLD
        if self.routing == "requests":
            return least_loaded(cluster.up)
        if self.routing == "load":
            router: LoadAware = cluster.state
            return router.route(r, cluster.up)
        return min(cluster.up, key=lambda i: (ends_in_s(r, i, self.answer_tokens), i.index))

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        return self.route(release.request, cluster)
