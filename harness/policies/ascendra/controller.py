"""Ascendra: low-priority instances for throughput, high-priority ones for who is about to be late.

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
    Instead,
    OnServers,
    Role,
    ServerRole,
    View,
)
from ...core.decisions import Why
from ...core.instance import Site
from ...core.policy import AnyPolicy, knob
from ...core.release import Release
from ...core.routing import least_loaded
from ...core.state import RequestState
from .high_priority import AscendraHp
from .low_priority import AscendraLp

LP, HP = "lp", "hp"


@dataclass
class Group:
    """One controller's instances that are up, and whose turn it is among the LP ones."""

    lp: list[Site]
    hp: list[Site]
    turn: int = 0


@dataclass
class Groups:
    """All groups, and whose turn it is."""

    all: list[Group] = dataclasses.field(default_factory=list)
    turn: int = 0
    up: Sequence[Site] = ()  # those that `all` was made from


@dataclass(frozen=True)
class Ascendra(ClusterPolicy):
    """Groups of `n_lp` LP and `n_hp` HP instances, each a controller's; groups take turns.

    A request goes to an HP instance that has no prompt to compute (its standing ticket; the request
    itself is the one outstanding), else to the LP instances in turn. Who is offloaded goes to the
    HP instance with the shortest queue. `tickets`, `offload` and `elastic` switch a mechanism off;
    `value` and `overdue` are those of the LP policy, and HP instances drop if LP instances do.

    Where the text is silent: an HP batch holds at most `hp_batch_tokens` of prompts, which is also
    the worst batch that offload reckons with; `hp_batch` is the batch of HP instances that are not
    elastic. A ticket is issued between two iterations: it stands while decodes run, and not while
    prompts do. Who is lost with an instance begins again at the LP instance with the fewest
    requests. `performance_model`: each instance refits the paper's regression to its own batches
    (`refitted`, see `predictors.refitted`), or knows the true times of a step (`given`).
    """

    n_lp: int = knob(2, 1, 64)
    n_hp: int = knob(1, 1, 64)
    tickets: bool = knob(True)
    offload: bool = knob(True)
    elastic: bool = knob(True)
    hp_batch: int = knob(128, 1, 8192, log=True)
    hp_batch_tokens: int = knob(4096, 16, 131072, log=True)
    performance_model: str = knob("refitted", choices=("refitted", "given"))

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
        """The instances of so many groups; `policy` is that of LP instances."""
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
        refusals = {"sglang": "its HP instances compute prompts whole, which SGLang does not"}
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

    def new_state(self) -> Groups:
        return Groups()

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        groups = self._groups(cluster)
        group = groups.all[groups.turn]
        groups.turn = (groups.turn + 1) % len(groups.all)
        if self.tickets:
            for site in group.hp:
                if not site.prefills(cluster.now_s):
                    return site
        if not group.lp:
            return self._anywhere(cluster)
        group.turn += 1
        return group.lp[(group.turn - 1) % len(group.lp)]

    def returned(self, release: Release, cluster: View) -> Site | Instead:
        if release.why is Why.FAIL:
            return self._anywhere(cluster)
        groups = self._groups(cluster)
        lp = cluster.sites[release.request.instance]
        hps = groups.all[lp.number // self.n_lp].hp or cluster.role(HP)
        if not hps:
            return DROP
        return min(hps, key=lambda site: (site.queue, site.index))

    def _anywhere(self, cluster: View) -> Site | Instead:
        there = cluster.role(LP) or cluster.role(HP)
        return least_loaded(there) if there else DROP

    def _groups(self, cluster: View) -> Groups:
        groups: Groups = cluster.state
        if groups.up is not cluster.up:
            groups.up = cluster.up
            turns = [group.turn for group in groups.all]
            number = (cluster.sites[-1].number + 1) // self.least_instances
            groups.all = [Group([], [], turn) for turn in turns or [0] * number]
            for site in cluster.role(LP):
                groups.all[site.number // self.n_lp].lp.append(site)
            for site in cluster.role(HP):
                groups.all[(site.number - number * self.n_lp) // self.n_hp].hp.append(site)
        return groups
