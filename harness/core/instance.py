"""The instance handle: what a cluster policy may read and change of an instance, and the links
between instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...predictors.placement import Placement
from ...predictors.step_time import StepTime
from .device import SplitStepTime, StageDevice
from .kv.kv_cache_manager import KVBlocks
from .module_moves import Module
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


class Instance(Protocol):
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
        """Whether the instance accepts requests."""

    @property
    def name(self) -> str:
        """Its role and the number of the instance."""

    @property
    def placement(self) -> Placement: ...
    @property
    def step_time(self) -> StepTime:
        """Step times with all of the model on the instance's own GPUs."""

    @property
    def sizes(self) -> Sizes:
        """Constants that loads are computed from."""

    @property
    def kv_manager(self) -> KVBlocks:
        """Its KV blocks. Free blocks may lag: read `free_blocks`."""

    @property
    def devices(self) -> Sequence[StageDevice]:
        """One device for each pipeline stage."""

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are on their way to it."""

    @property
    def inbox(self) -> Sequence[RequestState]:
        """Requests on their way to it."""

    @property
    def queue(self) -> int:
        """Requests that wait there or are on their way to it."""

    @property
    def snapshot(self) -> View:
        """Its queues and its batch. KV lengths and free blocks may lag."""

    @property
    def view(self) -> View:
        """Its state now. An iteration under way counts as over."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken (cached but unused ones included)."""

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far; an iteration under way counts as over."""

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests that wait there or are on their way."""

    def has_free(self, blocks: int) -> bool:
        """Whether `free_blocks` is at least `blocks`; cheaper than reading it."""

    def lengths(self) -> tuple[int, int]:
        """`free_blocks` and `decode_kv_tokens`, read together."""

    @property
    def ready_s(self) -> float:
        """Time at which its next iteration may begin: now, or the end of the current one."""

    def use(self, window_s: float) -> float:
        """U = C/Cmax + M/Mmax, with the compute of the next `window_s` seconds."""

    def adds(self, r: RequestState, window_s: float) -> float:
        """Share that `r` adds to `use`."""

    def prefills(self, now_s: float) -> bool:
        """Whether it computes prompts now or has prompts to compute."""

    def resize(self, blocks: int) -> None:
        """Set its number of KV blocks."""

    def bring_home(self, pause_s: float) -> None:
        """All of its model is on its own GPUs from now on, as at first; it waits `pause_s` for
        that.
        """

    def offload(
        self,
        module: Module,
        units: int,
        helper: Instance,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        """`helper` computes so many layers or KV heads of its model from now on; steps take
        `step_time`, and it waits `pause_s` for the change. Where steps are executed, the change is,
        too, and takes as long as it takes.
        """


class Links(Protocol):
    """Says when a transfer ends; books what it occupies."""

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        """Time at which `kv_tokens` tokens of KV are at `target` if they leave `source` now."""


class NoDelay:
    """Links without delay: KV arrives at once."""

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        """Time at which `kv_tokens` tokens of KV are at `target` if they leave `source` now."""
        return now_s
