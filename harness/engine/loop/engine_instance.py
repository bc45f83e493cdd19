"""What the cluster sees of an instance, whatever executes it."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ....predictors.roofline import StepTime
from ....workloads.errors import SloBenchError
from ...core.counters import Counters
from ...core.device import SplitStepTime, StageDevice
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.module_moves import Module
from ...core.policy import Policy
from ...core.state import Release, RequestState
from ...core.view import Predictions
from .loop_view import LoopView, Waiting
from .measures import Measures


class EngineStuckError(SloBenchError):
    """Requests wait, nothing runs and nothing will change."""


class EngineInstance(Protocol):
    """A model placed on devices, with its queue and its clock."""

    index: int
    now_s: float
    measures: Measures
    stages: tuple[StageDevice, ...]
    inbox: deque[RequestState]  # by visible_s
    outbox: list[Release]
    finished: list[RequestState]
    stalled: list[RequestState]
    view: LoopView
    counters: Counters
    chunks: list[tuple[int, int]]  # of prompts, in the last iteration
    prefill_only: bool  # prefilled requests decode on another instance
    reports_all_ends: (
        bool  # `ReleaseReason.FINISH` of every request, not only with `notify_on_finish`
    )
    reports_empty_queue: bool  # `ReleaseReason.BEGUN`

    @property
    def kv_manager(self) -> KVBlocks:
        """Counts its blocks of KV."""

    @property
    def idle(self) -> bool:
        """Is nothing here (arrivals still in the inbox aside)?"""

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are in transit to it."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens that requests which wait for prefill must have computed."""

    def earliest_release_s(self) -> float:
        """Lower bound of the next release or report, apart from requests that are still sent to it
        before then.
        """

    def ready_s(self) -> float:
        """When it would act next; infinite if never."""

    def next_lookup_s(self) -> float:
        """Lower bound of the begin of its next iteration that may look into a KV store, apart from
        requests that are still sent to it before then.
        """

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        """Act until the clock reaches the horizon or nothing is left to do.

        Everything that arrives before the horizon must be in the inbox. With `stop_on_release`
        it returns as soon as the outbox holds something.
        """


class Iterating(EngineInstance, Protocol):
    """An instance that asks its policy for every iteration."""

    policy: Policy
    predictions: Predictions
    policy_state: Any

    @property
    def waiting(self) -> Waiting:
        """Requests that wait for prefill, in no particular order."""

    def reconsider(self) -> None:
        """Make the policy decide again after a change outside this instance."""


class Movable(EngineInstance, Protocol):
    """An instance with requests that can move to others between two iterations."""

    in_transfer: dict[
        RequestState, None
    ]  # on their way; they hold their blocks until `free_transferred`

    def reconsider(self) -> None:
        """Make the policy decide again after a change outside this instance."""

    def bring_home(self, step_time: StepTime, pause_s: float) -> None:
        """All of its model is on its own GPUs from now on, where steps take `step_time`; see
        `core.instance.Instance`.
        """

    def offload(
        self,
        module: Module,
        units: int,
        helper: Movable,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        """`helper` computes a part of its model from now on; see `core.instance.Instance`."""

    def take_out(self, r: RequestState) -> None:
        """Remove `r`: in transit if it has KV on the GPU, else as a waiting request."""

    def free_transferred(self, r: RequestState) -> None:
        """Free the blocks of a request whose KV has arrived at its target."""

    def fail_instance(self) -> list[RequestState]:
        """Fail the instance: return all its requests, which need prefill again, and free
        everything.
        """
