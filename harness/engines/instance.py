"""What the cluster sees of an instance, whatever executes it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ...workloads.errors import SloBenchError
from ..core.ledger import BlockLedger
from ..core.state import RequestState
from .device import Device
from .measures import Measures
from .release import Release
from .view import LoopView


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

    @property
    def idle(self) -> bool:
        """Is nothing here (arrivals still in the inbox aside)?"""
        ...

    @property
    def may_release(self) -> bool:
        """Could it give a request back before the next arrival?"""
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
