"""BanaServe: prefill and decode apart, one KV store for all, layers and heads that move.

Source: BanaServe (docs/papers.md), Algorithms 4-1 and 4-2, §4.3 and §4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ....predictors.placement import Placement
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import HOLD, INF, Action, Instead, Role, View
from ...core.instance import Site
from ...core.kv_cache_manager import BlockLedger
from ...core.policy import AnyPolicy, knob
from ...core.records import Told
from ...core.state import RequestState
from ..load_aware import LoadAware
from ..routers import PrefixAware
from ..shared.disaggregated import DECODE, PREFILL, Apart, Promised, has_room
from ..shared.instance_load import compute_use, decode_load
from ..shared.kv_store_parameters import Shelf
from .module_balancing import Balancer, Thresholds
from .modules import Modules, ShiftModules

_OF_MOVES = (
    "rise",
    "fall",
    "large_gap",
    "efficiency",
    "review_every_s",
    "layer_moves",
    "head_moves",
)


@dataclass
class Known(Promised):
    """What the orchestrator remembers between two looks."""

    balancer: Balancer = field(default_factory=lambda: Balancer(Thresholds()))
    router: PrefixAware = field(default_factory=PrefixAware)
    modules: Modules = field(default_factory=Modules)
    asked: dict[int, float] = field(default_factory=dict)  # compute of each model, smoothed
    loads: list[tuple[float, int, float]] = field(default_factory=list)  # time, instance, U


@dataclass(frozen=True)
class BanaServe(Apart):
    """Requests go by load alone, since every instance finds every prefix; modules follow the load.

    `store`: one KV store in host memory (`store_cpu_gib` an instance) and on disks
    (`store_ssd_gib` an instance); without it each instance has the prefixes on its own GPU.
    `load_aware`: Algorithm 4-2; without it prefill instances are chosen by their prefixes, as
    SGLang's router does. `layer_moves` and `head_moves`: what Algorithm 4-1 may move, every
    `review_every_s` seconds. An instance lends modules to one other and hosts those of one other
    (see `modules`).

    Where the paper is silent: C of U = C/Cmax + M/Mmax is the share of the GPU's arithmetic (Eq.
    4-20 to 4-23) in the next `window_s` seconds; what moves is decided on its mean over looks, the
    last of which weighs `smoothing`. A request decodes where U is least among the instances that
    have room.
    """

    smoothing: ClassVar[float] = 0.3

    store: bool = knob(True)
    store_cpu_gib: float = knob(64.0, 0.0, 4096.0)
    store_ssd_gib: float = knob(512.0, 0.0, 65536.0)
    load_aware: bool = knob(True)
    layer_moves: bool = knob(True)
    head_moves: bool = knob(True)
    window_s: float = knob(1.0, 0.01, 60.0)
    load_threshold: float = knob(1.2, 0.0, 2.0)  # delta_L
    rise: float = knob(0.4, 0.0, 2.0)  # delta up
    fall: float = knob(0.2, 0.0, 2.0)  # delta down
    large_gap: float = knob(0.5, 0.0, 2.0)
    efficiency: float = knob(0.1, 0.0, 100.0)  # rho, of a second
    review_every_s: float = knob(1.0, 0.01, 3600.0)

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        prefill, decode = super().layout(policy, placement, instances)
        if not self._moves:
            return prefill, decode
        # Named devices can be shared.
        return tuple(
            Role(
                role.name,
                role.policy,
                role.instances,
                hands_over=role.hands_over,
                ledger=role.ledger,
                devices=tuple(f"{role.name} {k}" for k in range(role.instances)),
            )
            for role in (prefill, decode)
        )

    @property
    def _moves(self) -> bool:
        return self.layer_moves or self.head_moves

    def ledgers(self, placement: Placement, instances: int) -> Callable[..., BlockLedger]:
        if not self.store:
            return BlockLedger
        return Shelf(placement, self.store_cpu_gib * instances, self.store_ssd_gib * instances)

    def new_state(self) -> Known:
        return Known(balancer=self.planner())

    def planner(self) -> Balancer:
        """Algorithm 4-1 with these thresholds, one move a cycle."""
        thresholds = Thresholds(self.rise, self.fall, self.large_gap, self.efficiency, moves=1)
        return Balancer(thresholds)

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        sites = cluster.role(PREFILL)
        if not sites:
            return HOLD
        if not self.load_aware:
            known: Known = cluster.state
            return known.router.dispatch(r, sites)
        return LoadAware(self.window_s, self.load_threshold).dispatch(r, sites)

    def hand_over(self, r: RequestState, source: Site, cluster: View) -> Site | Instead:
        known: Known = cluster.state
        uses = {site: decode_load(site, known.blocks(site)) for site in cluster.role(DECODE)}
        for site in sorted(uses, key=lambda s: (uses[s], s.index)):
            if has_room(r.kv_tokens, site, known):
                return self.handed(r, site, cluster)
        return HOLD

    @property
    def review_s(self) -> float:
        return self.review_every_s if self._moves else INF

    def review(self, cluster: View) -> Sequence[Action]:
        """Algorithm 4-1, on loads as they are measured now."""
        known: Known = cluster.state
        modules = known.modules
        for site in cluster.up:
            asked = compute_use(site, self.window_s)
            before = known.asked.get(site.index, asked)
            known.asked[site.index] = before + self.smoothing * (asked - before)
        measured = modules.loads(cluster.up, known.asked)
        known.loads += [(cluster.now_s, index, load.total) for index, load in measured.items()]
        planned = known.balancer.plan(
            {index: load.total for index, load in measured.items()},
            modules.offers(
                cluster.up,
                measured,
                self.over(cluster.sites[0].placement),
                layers=self.layer_moves,
                heads=self.head_moves,
            ),
        )
        return [ShiftModules(move, modules) for move in planned]

    def told(self, state: Known, sites: Sequence[Site]) -> Sequence[Told]:
        """Loads as the orchestrator saw them, and every move when it ended."""
        names = {site.index: site.name for site in sites}
        loads = [Told(now_s, "load", names[index], total) for now_s, index, total in state.loads]
        moves = [
            Told(
                shifted.end_s,
                shifted.move.module.value,
                f"{names[shifted.move.source]} to {names[shifted.move.target]}",
                shifted.move.units,
            )
            for shifted in state.modules.history
        ]
        return [*loads, *moves]


def moving_rule(knobs: Mapping[str, float]) -> BanaServe:
    """BanaServe's thresholds, some of them changed; `layer_moves` and `head_moves` 0 forbid those.

    Raises:
        SloBenchError: it has no such knob, or not that value.
    """
    unknown = set(knobs) - set(_OF_MOVES)
    if unknown:
        raise SloBenchError(
            f"server.moving: what moves is decided by {', '.join(_OF_MOVES)}, not by {min(unknown)}"
        )
    allowed = {name: bool(knobs[name]) for name in ("layer_moves", "head_moves") if name in knobs}
    made: BanaServe = BanaServe().with_knobs(**{**knobs, **allowed})
    return made
