"""Hedged requests: a request whose first token is late is sent to a second instance as well.

Source: Dean and Barroso, "The Tail at Scale", CACM 2013: the second copy goes out when the first
has been outstanding for longer than a high quantile of latencies, and the slower is cancelled.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...predictors.placement import Placement
from ..core.cluster_policy import (
    HOLD,
    Action,
    ClusterControl,
    ClusterPolicy,
    ClusterView,
    Role,
    RouteOutcome,
    least_loaded,
)
from ..core.instance import Instance
from ..core.policy import AnyPolicy, parameter
from ..core.state import Phase, Release, RequestState
from .routers import RoundRobin


@dataclass
class Copy:
    """A request at an instance, whose first token has not been seen."""

    request: RequestState
    instance: Instance

    def answers(self, now_s: float) -> bool:
        """Whether its first token is out."""
        return self.request.first_token_s <= now_s


@dataclass
class FirstTokens:
    """Requests without a first token, in order of arrival, and the latest times to it."""

    router: RoundRobin = field(default_factory=RoundRobin)
    requests: int = 0  # so far
    stalls: int = 0
    awaited: dict[int, list[Copy]] = field(default_factory=dict)  # by request, one copy or two
    _lately_s: deque[float] = field(default_factory=deque)
    _sorted_s: list[float] = field(default_factory=list)

    def observe(self, ttft_s: float, window: int) -> None:
        """Keep this TTFT and `window` - 1 before it."""
        self._lately_s.append(ttft_s)
        insort(self._sorted_s, ttft_s)
        if len(self._lately_s) > window:
            del self._sorted_s[bisect_left(self._sorted_s, self._lately_s.popleft())]

    def quantile_s(self, quantile: float, least: int) -> float:
        """The TTFT that this share stays below; infinite with fewer than `least` of them."""
        n = len(self._sorted_s)
        return self._sorted_s[min(n - 1, int(quantile * n))] if n >= least else math.inf


@dataclass(frozen=True)
class Hedged(ClusterPolicy):
    """A request without its first token after the `quantile` of the last `window` TTFTs goes to the
    instance with the fewest requests as well, once (1: never), but no more than a share `budget` of
    all requests so far: past capacity all are late. The copy whose first token is out first
    answers; the other is cancelled, and its work is lost.

    `routing`: the first copy goes to the instances in turn (`round-robin`) or to that with the
    fewest requests (`least-loaded`). First tokens are looked for every `control_every_s`.

    `stall_s`: every `stall_every_s` one of the instances, each in turn, computes nothing for so
    long, as when its host is busy; routers see it by its requests alone.
    """

    quantile: float = parameter(0.95, 0.5, 1.0)
    budget: float = parameter(0.05, 0.0, 1.0)
    window: int = parameter(500, 20, 100_000, log=True)
    routing: str = parameter("least-loaded", choices=("least-loaded", "round-robin"))
    control_every_s: float = parameter(0.05, 0.001, 10.0)
    stall_s: float = parameter(0.0, 0.0, 600.0, environment=True)
    stall_every_s: float = parameter(30.0, 0.1, 86_400.0, environment=True)

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        devices = [f"device {k}" for k in range(instances)] if self.stall_s else []
        return (Role("", policy, instances, devices=tuple(devices)),)

    def mechanisms(self) -> dict[str, str]:
        stalls = {"stalls": "stalls of instances"} if self.stall_s else {}
        return {
            **stalls,
            "hedges": "requests sent to a second instance",
            "hedge_wins": "of them, answered by the second",
            "hedge_tokens": "tokens of prompts and answers computed by copies that were cancelled",
        }

    def new_state(self) -> FirstTokens:
        return FirstTokens()

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        if not cluster.up:
            return HOLD
        state: FirstTokens = cluster.state
        state.requests += 1
        chosen = self._chosen(r, cluster)
        state.awaited[r.id] = [Copy(r, chosen)]
        return chosen

    def _chosen(self, r: RequestState, cluster: ClusterView) -> Instance:
        state: FirstTokens = cluster.state
        if self.routing == "round-robin":
            return state.router.route(r, cluster.up)
        return least_loaded(cluster.up)

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        r, state = release.request, cluster.state
        if not cluster.up:
            return HOLD
        chosen = self._chosen(r, cluster)
        for copy in state.awaited.get(r.id, ()):
            if copy.request is r:
                copy.instance = chosen
        return chosen

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s if self.quantile < 1 or self.stall_s else math.inf

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        state: FirstTokens = cluster.state
        actions: list[Action] = []
        if self.stall_s and cluster.now_s >= (state.stalls + 1) * self.stall_every_s:
            stalled = cluster.instances[state.stalls % len(cluster.instances)]
            state.stalls += 1
            actions.append(Stall(stalled, self.stall_s))
        if state.awaited and self.quantile < 1:
            actions.append(Hedge(self, state))
        return actions


@dataclass(frozen=True)
class Stall:
    """`instance` computes nothing for `duration_s`."""

    instance: Instance
    duration_s: float

    def apply(self, cluster: ClusterControl) -> None:
        cluster.bring(self.instance)
        self.instance.devices[0].owed_s += self.duration_s
        cluster.reconsider(self.instance)
        cluster.counters.add("stalls")


@dataclass(frozen=True)
class Hedge:
    """Look for first tokens, cancel slower copies and send second ones."""

    policy: Hedged
    state: FirstTokens

    def apply(self, cluster: ClusterControl) -> None:
        state, now_s = self.state, cluster.now_s
        for instance in cluster.instances:
            cluster.bring(instance)
        for row, copies in list(state.awaited.items()):
            answering = [copy for copy in copies if copy.answers(now_s)]
            if answering:
                self._answered(copies, min(answering, key=_first_token), cluster)
                del state.awaited[row]
        late_s = state.quantile_s(self.policy.quantile, self.policy.window // 5)
        for copies in state.awaited.values():
            first = copies[0]
            if now_s - first.request.arrival_s <= late_s:
                return  # those that came later are not late either
            if cluster.counters["hedges"] + 1 > self.policy.budget * state.requests:
                return
            others = [i for i in cluster.up if i.index != first.instance.index]
            if len(copies) == 1 and others:
                second = least_loaded(others)
                copies.append(Copy(cluster.duplicate(first.request, second), second))
                cluster.counters.add("hedges", first.request)

    def _answered(self, copies: list[Copy], winner: Copy, cluster: ClusterControl) -> None:
        r = winner.request
        self.state.observe(r.first_token_s - r.arrival_s, self.policy.window)
        for copy in copies:
            if copy is not winner:
                if winner is not copies[0]:
                    cluster.counters.add("hedge_wins", r)
                cluster.counters["hedge_tokens"] += _computed_tokens(copy)
                cluster.cancel(copy.request, copy.instance)


def _first_token(copy: Copy) -> float:
    return copy.request.first_token_s


def _computed_tokens(copy: Copy) -> int:
    """Tokens of a copy that its instance has computed; not those found in a prefix cache."""
    r = copy.request
    if r.phase is Phase.WAITING:
        return 0
    if r.phase is Phase.DONE:
        return r.prompt_tokens + r.emitted_tokens
    return copy.instance.view.kv_tokens(r) - max(0, r.cached_tokens)
