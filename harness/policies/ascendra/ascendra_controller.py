"""Ascendra: low-priority instances for throughput, high-priority ones for requests about to be
late.

Source: Ikram and Li, "Ascendra: Dynamic Request Prioritization for Efficient LLM Serving" (see
docs/papers.md), §4 (controller), §5.3 (offload), §6.1 (tickets), §6.2 (elastic batches), §8.7
(subgroups).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ....predictors.placement import Placement
from ....predictors.refitted import RefittedModel
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import (
    DROP,
    ClusterPolicy,
    ClusterView,
    OnServers,
    Role,
    RouteOutcome,
    ServerRole,
    least_loaded,
)
from ...core.decisions import ReleaseReason
from ...core.instance import Instance
from ...core.policy import AnyPolicy, parameter
from ...core.state import Release, RequestState
from .high_priority import AscendraHp
from .low_priority import AscendraLp

LP, HP = "lp", "hp"


@dataclass
class ControllerGroup:
    """One controller's instances that are up, and the next LP instance in turn."""

    lp: list[Instance]
    hp: list[Instance]
    turn: int = 0


@dataclass
class ControllerGroups:
    """All groups, and the next one in turn."""

    all: list[ControllerGroup] = dataclasses.field(default_factory=list)
    turn: int = 0
    up: Sequence[Instance] = ()  # those that `all` was made from


@dataclass(frozen=True)
class Ascendra(ClusterPolicy):
    """Groups of `n_lp` LP and `n_hp` HP instances, each a controller's; groups take turns.

    A request goes to an HP instance that has no prompt to compute (its standing ticket; the request
    itself is the one outstanding), else to the LP instances in turn. Offloaded requests go to the
    HP instance with the shortest queue. `tickets`, `offload` and `elastic` switch a mechanism off;
    `value` and `overdue` are those of the LP policy, and HP instances drop if LP instances do.

    Where the text is silent: an HP batch holds at most `hp_batch_tokens` of prompts, which is also
    the worst batch that the offload rule assumes; `hp_batch` is the batch of HP instances that are
    not elastic. A ticket is issued between two iterations: it is valid while decodes run, not while
    prompts do. Requests lost in a failure begin again at the LP instance with the fewest requests.
    `performance_model`: each instance refits the paper's regression to its own batches (`refitted`,
    see `predictors.refitted`), or knows the true times of a step (`given`).
    """

    n_lp: int = parameter(2, 1, 64)
    n_hp: int = parameter(1, 1, 64)
    tickets: bool = parameter(True)
    offload: bool = parameter(True)
    elastic: bool = parameter(True)
    hp_batch: int = parameter(128, 1, 8192, log=True)
    hp_batch_tokens: int = parameter(4096, 16, 131072, log=True)
    performance_model: str = parameter("refitted", choices=("refitted", "given"))

    @property
    def least_instances(self) -> int:
        return self.n_lp + self.n_hp

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        assert isinstance(policy, AscendraLp)
        each = self.least_instances
        if instances % each:
            near = max(1, round(instances / each)) * each
            raise SloBenchError(
                f"ascendra is made of groups of {self.n_lp} LP and {self.n_hp} HP instances, and "
                f"{instances} cannot be shared out to them; use {near} instances, or another n_lp "
                "or n_hp"
            )
        return self.roles(policy, instances // each)

    def roles(self, policy: AscendraLp, groups: int = 1) -> Sequence[Role]:
        """The instances of `groups` groups; `policy` is that of LP instances."""
        lp = policy
        if self.offload:
            lp = dataclasses.replace(policy, worst_batch_tokens=self.hp_batch_tokens)
        hp = AscendraHp(
            max_num_batched_tokens=self.hp_batch_tokens,
            max_num_seqs=self.hp_batch,
            elastic=self.elastic,
            watermark=policy.watermark,
            overdue=policy.overdue,
        )
        learner = RefittedModel if self.performance_model == "refitted" else None
        return (
            Role(LP, lp, groups * self.n_lp, learner=learner),
            Role(HP, hp, groups * self.n_hp, learner=learner),
        )

    def on_servers(self, policy: AnyPolicy) -> OnServers:
        assert isinstance(policy, AscendraLp)
        refusals = {"sglang": "offload from LP to HP instances is carried out before vLLM alone"}
        if self.performance_model == "given":
            refusals[""] = (
                "a server learns how long its steps take, and is not told: set "
                "performance_model=refitted"
            )
        return OnServers(
            tuple(ServerRole(r.name, r.instances, r.policy) for r in self.roles(policy)),
            ("n_lp", "n_hp"),
            refusals=refusals,
        )

    def mechanisms(self) -> dict[str, str]:
        descriptions = {}
        if self.tickets:
            text = "requests that took the ticket of an HP instance without prompts"
            descriptions["tickets"] = text
        if self.offload:
            descriptions["offloads"] = "requests that an LP instance gave to an HP instance"
        return descriptions

    def new_state(self) -> ControllerGroups:
        return ControllerGroups()

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        groups = self._groups(cluster)
        group = groups.all[groups.turn]
        groups.turn = (groups.turn + 1) % len(groups.all)
        if self.tickets:
            for instance in group.hp:
                if not instance.prefills(cluster.now_s):
                    cluster.counters.add("tickets", r)
                    return instance
        if not group.lp:
            return self._anywhere(cluster)
        group.turn += 1
        return group.lp[(group.turn - 1) % len(group.lp)]

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        if release.reason is ReleaseReason.FAIL:
            return self._anywhere(cluster)
        groups = self._groups(cluster)
        lp = cluster.instances[release.request.instance]
        hps = groups.all[lp.number // self.n_lp].hp or cluster.role(HP)
        if not hps:
            return DROP
        cluster.counters.add("offloads", release.request)
        return min(hps, key=lambda instance: (instance.queue, instance.index))

    def _anywhere(self, cluster: ClusterView) -> Instance | RouteOutcome:
        candidates = cluster.role(LP) or cluster.role(HP)
        return least_loaded(candidates) if candidates else DROP

    def _groups(self, cluster: ClusterView) -> ControllerGroups:
        groups: ControllerGroups = cluster.state
        if groups.up is not cluster.up:
            groups.up = cluster.up
            turns = [group.turn for group in groups.all]
            number = (cluster.instances[-1].number + 1) // self.least_instances
            groups.all = [ControllerGroup([], [], turn) for turn in turns or [0] * number]
            for instance in cluster.role(LP):
                groups.all[instance.number // self.n_lp].lp.append(instance)
            for instance in cluster.role(HP):
                groups.all[(instance.number - number * self.n_lp) // self.n_hp].hp.append(instance)
        return groups
