"""Ascendra: low-priority instances for throughput, high-priority ones for who is about to be late.

Source: Ikram and Li, "Ascendra: Dynamic Request Prioritization for Efficient LLM Serving" (see
docs/papers.md), §4 (controller), §5.3 (offload), §6.1 (tickets), §6.2 (elastic batches), §8.7
(subgroups).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ...predictors.refitted import RefittedModel
from ...workloads.errors import SloBenchError
from ..core.decisions import Why
from ..core.policy import AnyPolicy, knob
from ..core.state import RequestState
from ..engines.release import Release
from ..policies.ascendra import AscendraLp
from ..policies.ascendra_hp import AscendraHp
from .policy import DROP, ClusterPolicy, Instead, Role, View
from .routers import load
from .site import Site

LP, HP = "lp", "hp"


@dataclass
class Turns:
    """Whose turn it is: the next group, and in each group the next LP instance."""

    group: int = 0
    lp: dict[int, int] = dataclasses.field(default_factory=dict)


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
        groups = instances // each
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

    def new_state(self) -> Turns:
        return Turns()

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        groups = self._groups(cluster)
        turns: Turns = cluster.state
        group, turns.group = turns.group, (turns.group + 1) % groups
        lps, hps = self._lp(cluster, group), self._hp(cluster, group)
        if self.tickets:
            for site in hps:
                if not site.prefills(cluster.now_s):
                    return site
        if not lps:
            return self._anywhere(cluster)
        turn = turns.lp.get(group, 0)
        turns.lp[group] = turn + 1
        return lps[turn % len(lps)]

    def returned(self, release: Release, cluster: View) -> Site | Instead:
        if release.why is Why.FAIL:
            return self._anywhere(cluster)
        hps = self._hp(cluster, self._group(release.request.instance, cluster))
        hps = hps or cluster.role(HP)
        if not hps:
            return DROP
        return min(hps, key=lambda site: (site.view.n_waiting + len(site.inbox), site.index))

    def _anywhere(self, cluster: View) -> Site | Instead:
        there = cluster.role(LP) or cluster.role(HP)
        return min(there, key=lambda site: (load(site), site.index)) if there else DROP

    def _groups(self, cluster: View) -> int:
        return (cluster.sites[-1].number + 1) // self.least_instances

    def _group(self, index: int, cluster: View) -> int:
        return cluster.sites[index].number // self.n_lp

    def _lp(self, cluster: View, group: int) -> Sequence[Site]:
        return [s for s in cluster.role(LP) if s.number // self.n_lp == group]

    def _hp(self, cluster: View, group: int) -> Sequence[Site]:
        first = self._groups(cluster) * self.n_lp
        return [s for s in cluster.role(HP) if (s.number - first) // self.n_hp == group]
