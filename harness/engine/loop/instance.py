"""What the cluster sees of an instance, whatever executes it."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ....predictors.roofline import StepTime
from ....workloads.errors import SloBenchError
from ...core.device import Device, SplitStepTime
from ...core.kv_cache_manager import BlockLedger
from ...core.policy import Policy
from ...core.release import Release
from ...core.state import RequestState
from ...core.view import Predictions
from .measures import Measures
from .view import LoopView, Waiting


class EngineStuckError(SloBenchError):
    """Requests wait, nothing runs and nothing will change."""


class Instance(Protocol):
    """A model placed on devices, with its queue and its clock."""

    index: int
    now_s: float
    ledger: BlockLedger
    measures: Measures
    stages: tuple[Device, ...]
    inbox: deque[RequestState]  # by visible_s
    outbox: list[Release]
    finished: list[RequestState]
    stalled: list[RequestState]
    view: LoopView
    chunks: list[tuple[int, int]]  # of prompts, in the last iteration
    hands_over: bool  # who has been prefilled decodes elsewhere
    tells_ends: bool  # `Why.FINISH` of every request, not only of those that somebody waits for
    tells_begun: bool  # `Why.BEGUN`

    @property
    def idle(self) -> bool:
        """Is nothing here (arrivals still in the inbox aside)?"""
        ...

    @property
    def n_requests(self) -> int:
        """Who waits, runs, or is on the way here."""
        ...

    def gives_back_s(self) -> float:
        """No request is given back or told of before this, whatever is not sent here by then."""
        ...

    def ready_s(self) -> float:
        """When it would act next; infinite if never."""
        ...

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        """Act until the clock reaches the horizon or nothing is left to do.

        Everything that arrives before the horizon must be in the inbox. With `stop_on_release`
        it returns as soon as the outbox holds something.
        """
        ...


class Iterating(Instance, Protocol):
    """An instance that asks its policy for every iteration."""

    policy: Policy
    predictions: Predictions
    policy_state: Any

    @property
    def waiting(self) -> Waiting:
        """Requests that wait for prefill."""
        ...

    def reconsider(self) -> None:
        """Something changed beside this instance: the policy is asked again."""
        ...


class Movable(Instance, Protocol):
    """An instance whose requests can go elsewhere between two iterations."""

    parked: dict[RequestState, None]  # on their way; they hold their blocks until `let_go_of`

    def reconsider(self) -> None:
        """Something changed beside this instance: the policy is asked again."""
        ...

    def compute_by(self, step_time: StepTime) -> None:
        """Its steps take so long from now on; all of its model is on its own GPUs."""
        ...

    def lend(self, step_time: SplitStepTime, device: Device) -> None:
        """Its steps take so long from now on, and `device` computes a part of them."""
        ...

    def take_out(self, r: RequestState) -> None:
        """`r` leaves: parked if it has KV on the GPU, else as somebody who waits."""
        ...

    def let_go_of(self, r: RequestState) -> None:
        """The KV of a parked request is elsewhere now: its blocks are free."""
        ...

    def lose_all(self) -> list[RequestState]:
        """The instance fails: all who are here, to be prefilled again, and nothing stays."""
        ...
