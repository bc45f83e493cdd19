"""The instance handle: what a cluster policy sees of an instance, and what it may change there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...predictors.placement import Placement
from ...predictors.step_time import StepTime
from .device import Device, SplitStepTime
from .kv_cache_manager import BlockLedger
from .state import RequestState
from .view import View


@dataclass(frozen=True, slots=True)
class Sizes:
    """Constants of an instance: compute time of a token where the GPU's arithmetic is the limit,
    and bytes on each GPU.
    """

    s_per_token: float
    weight_bytes: int
    block_bytes: int
    usable_bytes: int


class Site(Protocol):
    """An instance. `number` is that of the instance, `index` that of its lane.

    An engine may let instances lag behind its clock: it brings one up to the present when a
    property is read that depends on it.
    """

    @property
    def index(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def up(self) -> bool:
        """Does it accept requests?"""
        ...

    @property
    def name(self) -> str:
        """Its role and the number of the instance."""
        ...

    @property
    def placement(self) -> Placement: ...
    @property
    def step_time(self) -> StepTime:
        """Step times with all of the model on the instance's own GPUs."""
        ...

    @property
    def sizes(self) -> Sizes:
        """Constants that loads are computed from."""
        ...

    @property
    def ledger(self) -> BlockLedger:
        """Its KV blocks. Free blocks may lag: read `free_blocks`."""
        ...

    @property
    def devices(self) -> Sequence[Device]:
        """One device for each pipeline stage."""
        ...

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are on their way to it."""
        ...

    @property
    def inbox(self) -> Sequence[RequestState]:
        """Requests on their way to it."""
        ...

    @property
    def queue(self) -> int:
        """Requests that wait there or are on their way to it."""
        ...

    @property
    def roster(self) -> View:
        """Its queues and its batch. KV lengths and free blocks may lag."""
        ...

    @property
    def view(self) -> View:
        """Its state now. An iteration under way counts as over."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken (cached but unused ones included)."""
        ...

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""
        ...

    def lengths(self) -> tuple[int, int]:
        """`free_blocks` and `decode_kv_tokens`."""
        ...

    @property
    def ready_s(self) -> float:
        """When its next iteration may begin: now, or at the end of the one under way."""
        ...

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax, with the compute of the next `window_s` seconds."""
        ...

    def adds(self, r: RequestState, window_s: float) -> float:
        """What `r` adds to `use`."""
        ...

    def prefills(self, now_s: float) -> bool:
        """Does it compute prompts now, or has it any to compute?"""
        ...

    def resize(self, blocks: int) -> None:
        """It has so many KV blocks from now on."""
        ...

    def compute_by(self, step_time: StepTime) -> None:
        """Its steps take so long from now on, all of its model on its own GPUs."""
        ...

    def lend(self, step_time: SplitStepTime, device: Device) -> None:
        """Its steps take so long from now on, and `device` computes a part of them."""
        ...
