"""BanaServe that moves modules for the load that it expects, not for the load that it measured.

Not in the thesis: its outlook names it. Prefill instances count with the prompts that the next
seconds will bring at the rate of the last ones; decode instances are measured as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....predictors.load_forecaster import LoadForecaster
from ...core.cluster_policy import Action, ClusterView, RouteOutcome
from ...core.decisions import UNLIMITED
from ...core.instance import Instance
from ...core.policy import AnyPolicy, parameter
from ...core.state import RequestState
from ..shared.disaggregated import PREFILL
from ..shared.instance_load import queued_tokens
from .banaserve_controller import BanaServe, BanaServeState


@dataclass
class ForecastState(BanaServeState):
    """The prompts that came lately, and what of them each prefill instance is expected to get."""

    arrivals: LoadForecaster = field(default_factory=lambda: LoadForecaster(10.0))
    tokens_per_s: float = 0.0  # of prompts, at each prefill instance


@dataclass(frozen=True)
class BanaServeForecast(BanaServe):
    """C of a prefill instance is the share of its arithmetic that the prompts of the next
    `horizon_s` take, at the mean rate of the last `history_s`, and up to one more for the prompts
    that will still wait at the end of the horizon.
    """

    history_s: float = parameter(10.0, 0.1, 600.0, log=True)

    def on_servers(self, policy: AnyPolicy) -> None:
        """Only its moves differ, and real servers have none."""

    def new_state(self) -> ForecastState:
        arrivals = LoadForecaster(self.history_s)
        return ForecastState(
            balancer=self.planner(UNLIMITED), modules=self.no_modules(), arrivals=arrivals
        )

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        state: ForecastState = cluster.state
        state.arrivals.saw(cluster.now_s, r.prompt_tokens)
        return super().route(r, cluster)

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        state: ForecastState = cluster.state
        tokens = state.arrivals.blocks_within(cluster.now_s, 1.0)
        state.tokens_per_s = tokens / max(1, len(cluster.role(PREFILL)))
        return super().control_step(cluster)

    def _compute(self, instance: Instance, since_s: float, state: BanaServeState) -> float:
        measured = super()._compute(instance, since_s, state)
        if instance.role != PREFILL:
            return measured
        assert isinstance(state, ForecastState)
        each_s = instance.sizes.s_per_token
        share = state.tokens_per_s * each_s
        left_s = max(0.0, queued_tokens(instance) * each_s + (share - 1) * self.horizon_s)
        return min(1.0, share) + left_s / (self.window_s + left_s)
