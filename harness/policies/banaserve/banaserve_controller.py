"""BanaServe: prefill and decode apart, one KV store for all, layers and heads that move.

Source: BanaServe (docs/papers.md), Algorithms 4-1 and 4-2, §4.3 and §4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from ....predictors.placement import Placement
from ....predictors.specs import LinkSpec
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import (
    HOLD,
    INF,
    Action,
    ClusterView,
    OnServers,
    Role,
    RouteOutcome,
)
from ...core.counters import STORE_HITS
from ...core.decisions import UNLIMITED
from ...core.instance import Instance, Links
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.module_moves import ModuleMove
from ...core.network import Link, LinkPath
from ...core.policy import AnyPolicy, parameter
from ...core.records.request_records import TimeseriesRow
from ...core.state import Release, RequestState
from ..load_aware import LoadAware
from ..routers import PrefixAware
from ..shared.disaggregated import DECODE, PREFILL, DisaggregatedPolicy
from ..shared.instance_load import decode_load, decode_use, queued_tokens
from ..shared.kv_store_parameters import SharedStoreLedgers
from ..shared.kv_transfer import KvNetwork, ReservedBlocks
from ..vllm_layerwise import with_store
from .module_balancing import Balancer, Thresholds
from .modules import Modules, ShiftModules
from .objective import ObjectiveWeights
from .placement_search import Budgets, PlacementSearch
from .prediction import Demand, Load

_SWITCHES = ("layer_moves", "head_moves")
_OF_MOVES = ("rise", "fall", "large_gap", "efficiency", "control_every_s", *_SWITCHES)


@dataclass
class BanaServeState(ReservedBlocks):
    """What the orchestrator remembers between two looks."""

    balancer: Balancer = field(default_factory=lambda: Balancer(Thresholds()))
    router: PrefixAware = field(default_factory=PrefixAware)
    modules: Modules = field(default_factory=Modules)
    compute: dict[int, float] = field(default_factory=dict)  # compute of each model, smoothed
    prefilled: dict[int, int] = field(default_factory=dict)  # prompt tokens computed until then
    looked_s: float = 0.0  # the last look
    held: dict[RequestState, int] = field(default_factory=dict)  # KV tokens without room to decode
    loads: list[tuple[float, int, float]] = field(default_factory=list)  # time, instance, U
    came: dict[int, int] = field(default_factory=dict)  # prompt tokens, of each instance, till then
    coming_per_s: dict[int, float] = field(default_factory=dict)  # the rate of these, smoothed
    requests: int = 0
    prompt_tokens: int = 0
    ttft_slo_s: float = 0.0  # summed over the requests
    tpot_slo_s: float = 0.0

    def saw(self, r: RequestState, instance: Instance) -> None:
        """`r` has been sent to a prefill instance."""
        self.came[instance.index] = self.came.get(instance.index, 0) + r.prompt_tokens
        self.requests += 1
        self.prompt_tokens += r.prompt_tokens
        self.ttft_slo_s += r.slo.ttft_s
        self.tpot_slo_s += r.slo.tpot_s


class StoreReads(KvNetwork):
    """KV that decode instances read from host memory; modules move over the network `over`.

    A prefill instance has written the KV while it computed (`vllm_layerwise`).
    """

    def __init__(self, over: LinkSpec, host: LinkSpec) -> None:
        super().__init__(over)
        self._host = host
        self._reads: dict[int, LinkPath] = {}

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        path = self._reads.get(target.number)
        if path is None:
            path = self._reads[target.number] = LinkPath([Link(self._host)])
        on_a_link = kv_tokens * target.placement.kv_bytes_per_token // target.placement.gpus
        return path.send(on_a_link, now_s)


@dataclass(frozen=True)
class BanaServe(DisaggregatedPolicy):
    """Requests go by load alone, since every instance finds every prefix; modules follow the load.

    `store`: one KV store in host memory (`store_cpu_gib` an instance) and on disks
    (`store_ssd_gib` an instance); without it each instance has the prefixes on its own GPU.
    `handover`: decode instances read the KV of a prompt from the store (Fig. 4-4), each GPU over
    its host link, or get it from the prefill instance over the network, as without a store.
    `load_aware`: Algorithm 4-2; without it prefill instances are chosen by their prefixes, as
    SGLang's router does. `layer_moves` and `head_moves`: what Algorithm 4-1 may move, every
    `control_every_s` seconds. An instance offloads modules to one other and helps one other
    (see `modules`).

    `moves_by`: Algorithm 4-1, by gaps between loads, or the search for the best predicted objective
    within the SLOs of the requests (Eq. 4-25 and 4-27), over the next `horizon_s` seconds and with
    answers of `answer_tokens` (see `prediction`, `search`); `alpha`, `beta` and `gamma` are the
    weights of Eq. 4-15. At most `most_share` of the layers or heads of an instance are elsewhere.
    `realloc_s`: T_mem_realloc of Eq. 4-24, for each layer or head that moves; the thesis has no
    figure. `benefit`, what a move of Algorithm 4-1 must bring for each second that it takes
    (`efficiency`): the gap between loads that it closes, as printed, or the seconds of latency that
    it saves the requests of the next `horizon_s` (lasting). The latter counts what every later step
    pays, the hops and the wait of the helper's own steps, and brings modules home as soon as that
    saves latency.

    Where the paper is silent: C of U = C/Cmax + M/Mmax is the share of the GPU's arithmetic (Eq.
    4-20 to 4-23). What moves is decided on what was measured since the last look and on the prompts
    that wait: `window_s` seconds of them count half a GPU, ever more of them a whole one; on its
    mean over looks, the last of which weighs `smoothing`. M counts KV that waits for room to
    decode. Dispatch sees the next `window_s` seconds. A request decodes where U is least among the
    instances that have room.
    """

    executed = True
    smoothing: ClassVar[float] = 0.3

    store: bool = parameter(True)
    store_cpu_gib: float = parameter(64.0, 0.0, 4096.0)
    store_ssd_gib: float = parameter(512.0, 0.0, 65536.0)
    handover: str = parameter("store", choices=("store", "network"))
    load_aware: bool = parameter(True)
    layer_moves: bool = parameter(True)
    head_moves: bool = parameter(True)
    moves_by: str = parameter("loads", choices=("loads", "objective"))
    benefit: str = parameter("lasting", choices=("lasting", "printed"))
    most_share: float = parameter(0.5, 0.0, 1.0)
    realloc_s: float = parameter(0.0, 0.0, 10.0, environment=True)
    horizon_s: float = parameter(10.0, 0.1, 600.0, log=True)
    answer_tokens: int = parameter(200, 1, 65536, log=True)
    alpha: float = parameter(1.0, 0.0, 1000.0)
    beta: float = parameter(1.0, 0.0, 1000.0)
    gamma: float = parameter(1.0, 0.0, 1000.0)
    window_s: float = parameter(1.0, 0.01, 60.0)
    load_threshold: float = parameter(1.2, 0.0, 2.0)  # delta_L
    rise: float = parameter(0.4, 0.0, 2.0)  # delta up
    fall: float = parameter(0.2, 0.0, 2.0)  # delta down
    large_gap: float = parameter(0.5, 0.0, 2.0)
    efficiency: float = parameter(1.0, 0.0, 100.0)  # rho, of a second
    control_every_s: float = parameter(1.0, 0.01, 3600.0)

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        if self.store:
            policy = with_store(policy, placement)
        prefill, decode = super().layout(policy, placement, instances)
        if not self._moves:
            return prefill, decode
        # Named devices can be shared.
        return tuple(
            replace(role, devices=tuple(f"{role.name} {k}" for k in range(role.instances)))
            for role in (prefill, decode)
        )

    def links(self, instances: Sequence[Instance]) -> Links:
        over, host = self.over(instances[0].placement), instances[0].placement.host_link
        return StoreReads(over, host) if self._through_store else KvNetwork(over)

    @property
    def _through_store(self) -> bool:
        return self.store and self.handover == "store"

    @property
    def _moves(self) -> bool:
        return self.layer_moves or self.head_moves

    def kv_managers(self, placement: Placement, instances: int) -> Callable[..., KVCacheManager]:
        if not self.store:
            return KVCacheManager
        return SharedStoreLedgers(
            placement, instances, self.store_cpu_gib * instances, self.store_ssd_gib * instances
        )

    def new_state(self) -> BanaServeState:
        return BanaServeState(balancer=self.planner(UNLIMITED), modules=self.no_modules())

    def no_modules(self) -> Modules:
        """A record of modules, none of which has moved."""
        return Modules(most_share=self.most_share, realloc_s=self.realloc_s)

    def mechanisms(self) -> dict[str, str]:
        descriptions = super().mechanisms()
        if self.load_aware:
            descriptions["queue_routes"] = "requests sent to the shortest queue (Algorithm 4-2)"
        if self.store:
            descriptions[STORE_HITS] = "requests with prefix KV from the store"
        for module, moves in (("layer", self.layer_moves), ("head", self.head_moves)):
            if moves:
                descriptions[f"{module}_moves"] = f"transfers of {module}s to another instance"
        if self._moves:
            descriptions["returns"] = "transfers of offloaded modules back to their instance"
        return descriptions

    def on_servers(self, policy: AnyPolicy) -> OnServers | None:
        """Algorithm 4-2 before prefill servers, and the least load before decode servers."""
        moved = [name for name in ("store", "layer_moves", "head_moves") if getattr(self, name)]
        refusal = ""
        if moved:
            off = ", ".join(f"{name}=false" for name in moved)
            refusal = (
                "a running server cannot compute a part of another's model, nor read the prefixes "
                f"of another: with {off} it is routing by load before a split"
            )
        elif not self.load_aware:
            refusal = "without load_aware its router compares prefixes: that is distserve"
        elif (self.window_s, self.load_threshold) != (BanaServe.window_s, BanaServe.load_threshold):
            refusal = (
                "the router load-aware has a window and a threshold of its own: leave these out"
            )
        settled = "store", "layer_moves", "head_moves", "load_aware", "window_s", "load_threshold"
        return self.split_servers(refusal, settled)

    def planner(self, moves: int = 1) -> Balancer:
        """Algorithm 4-1 with these thresholds, at most `moves` moves a cycle."""
        thresholds = Thresholds(self.rise, self.fall, self.large_gap, self.efficiency, moves)
        return Balancer(thresholds)

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        instances = cluster.role(PREFILL)
        if not instances:
            return HOLD
        state: BanaServeState = cluster.state
        if self.load_aware:
            router = LoadAware(self.window_s, self.load_threshold)
            chosen = router.route(r, instances)
            if router.past_threshold:
                cluster.counters.add("queue_routes", r)
        else:
            chosen = state.router.route(r, instances)
        state.saw(r, chosen)
        return chosen

    def decode_instance(
        self, r: RequestState, source: Instance, cluster: ClusterView
    ) -> Instance | RouteOutcome:
        state: BanaServeState = cluster.state
        uses = [
            (decode_load(instance, state.blocks(instance)), instance.index, instance)
            for instance in cluster.role(DECODE)
        ]
        instance = self.handed(r, [instance for _, _, instance in sorted(uses)], cluster)
        if instance is None:
            state.held[r] = r.kv_tokens
            return HOLD
        state.held.pop(r, None)
        return instance

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        state: BanaServeState = cluster.state
        state.held.pop(release.request, None)
        return super().on_returned(release, cluster)

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s if self._moves else INF

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        """Algorithm 4-1 or the search of Eq. 4-27, on what is measured now."""
        state: BanaServeState = cluster.state
        modules = state.modules
        since_s, state.looked_s = cluster.now_s - state.looked_s, cluster.now_s
        for instance in cluster.up:
            compute = self._compute(instance, since_s, state)
            before = state.compute.get(instance.index, compute)
            state.compute[instance.index] = before + self.smoothing * (compute - before)
        measured = modules.loads(cluster.up, state.compute, sum(state.held.values()))
        state.loads += [(cluster.now_s, index, load.total) for index, load in measured.items()]
        over = self.over(cluster.instances[0].placement)
        search = PlacementSearch(modules, cluster.up, over)
        load = self._load(cluster, since_s)
        if self.moves_by == "objective":
            moves = () if load is None else self._best_moves(search, load, state)
            return [ShiftModules(move, modules) for move in moves]
        offers = modules.offers(
            cluster.up, measured, over, layers=self.layer_moves, heads=self.head_moves
        )
        totals = {index: use.total for index, use in measured.items()}
        if self.benefit == "printed" or load is None:
            planned = state.balancer.plan(totals, offers)
            return [ShiftModules(move, modules) for move in planned]
        saved_s = partial(search.saved_s, load=load)
        home = [
            move
            for move in modules.returns(measured, over)
            if state.balancer.pays(move, saved_s(move))
        ]
        for move in home:  # whose two instances take part in no other move of this cycle
            totals[move.source], totals[move.target] = move.source_load, move.target_load
        planned = [*home, *state.balancer.plan(totals, offers, saved_s)]
        return [ShiftModules(move, modules) for move in planned]

    def _load(self, cluster: ClusterView, since_s: float) -> Load | None:
        """The prompts that have come since the last look, what waits and what decodes now; None
        before the first request.
        """
        state: BanaServeState = cluster.state
        if not state.requests:
            return None
        demands = {i.index: self._demand(i, since_s, state) for i in cluster.up}
        placement = cluster.instances[0].placement
        prompt_tokens = state.prompt_tokens / state.requests
        kv_bytes = prompt_tokens * placement.kv_bytes_per_token / placement.gpus
        link = placement.host_link if self._through_store else self.over(placement)
        return Load(
            demands,
            prompt_tokens,
            self.answer_tokens,
            link.transfer_s(kv_bytes),
            sum(state.held.values()),
            self.horizon_s,
            ObjectiveWeights(self.alpha, self.beta, self.gamma),
        )

    def _best_moves(
        self, search: PlacementSearch, load: Load, state: BanaServeState
    ) -> Sequence[ModuleMove]:
        """Eq. 4-27."""
        budgets = Budgets(
            state.ttft_slo_s / state.requests, state.tpot_slo_s / state.requests, self.efficiency
        )
        return search.plan(load, budgets, layers=self.layer_moves, heads=self.head_moves)

    def _demand(self, instance: Instance, since_s: float, state: BanaServeState) -> Demand:
        came = state.came.pop(instance.index, 0) / since_s
        before = state.coming_per_s.get(instance.index, came)
        newest = self.smoothing
        if self.moves_by == "loads":  # what lasts: as long back as it looks ahead
            newest = min(newest, since_s / self.horizon_s)
        state.coming_per_s[instance.index] = before + newest * (came - before)
        return Demand(
            state.coming_per_s[instance.index],
            queued_tokens(instance),
            instance.snapshot.n_decoding,
            instance.decode_kv_tokens,
            instance.free_blocks * instance.kv_manager.block_size,
        )

    def _compute(self, instance: Instance, since_s: float, state: BanaServeState) -> float:
        """Arithmetic that the instance's model took in the last `since_s` seconds, wherever its
        modules are, in shares of a GPU, and up to one more for the prompts that wait.
        """
        tokens, each_s = instance.prefilled_tokens, instance.sizes.s_per_token
        computed = tokens - state.prefilled.get(instance.index, 0)
        state.prefilled[instance.index] = tokens
        waiting = queued_tokens(instance) * each_s / self.window_s
        return computed * each_s / since_s + waiting / (1 + waiting) + decode_use(instance)

    def extra_records(
        self, state: BanaServeState, instances: Sequence[Instance]
    ) -> Sequence[TimeseriesRow]:
        """Loads as the orchestrator saw them, and every move when it ended."""
        names = {instance.index: instance.name for instance in instances}
        loads = [
            TimeseriesRow(now_s, "load", names[index], total) for now_s, index, total in state.loads
        ]
        moves = [
            TimeseriesRow(
                shifted.end_s,
                shifted.move.module.value,
                f"{names[shifted.move.source]} to {names[shifted.move.target]}",
                shifted.move.units,
            )
            for shifted in state.modules.history
        ]
        return [*loads, *moves]


def moving_rule(parameters: Mapping[str, float]) -> BanaServe:
    """BanaServe's thresholds, some of them changed; `layer_moves` and `head_moves` 0 forbid those.

    Raises:
        SloBenchError: it has no such parameter, or not that value.
    """
    unknown = set(parameters) - set(_OF_MOVES)
    if unknown:
        raise SloBenchError(
            f"server.moving: what moves is decided by {', '.join(_OF_MOVES)}, not by {min(unknown)}"
        )
    allowed = {name: bool(parameters[name]) for name in _SWITCHES if name in parameters}
    rule: BanaServe = BanaServe().with_parameters(**{**parameters, **allowed})
    return rule
