"""An instance from a model and what is asked of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...core.learned_predictions import Guess
from ...core.policy import AnyPolicy, Policy, StaticPolicy, overrides
from ..loop.measures import Measures
from .cache import KvCache, Swapper
from .clock import Clock
from .decoder import Decoder, fingerprint, unit_shape
from .distributed import Spread, SpreadSwapper
from .errors import DoesNotFitError
from .execution import Execution, Opens
from .instance import PagedInstance
from .kv_cache_manager import PagedLedger
from .kv_store_manager import PagedStoreLedger, SharedUnits
from .load import check_room, free_bytes, kv_bytes
from .runner import Runner
from .static import PagedStaticInstance, StaticExecution
from .tiers import TierFolder, Tiers
from .workers import Workers

_GIB = 1 << 30
_CPU_KV_BYTES = _GIB  # where nothing is said


@dataclass(frozen=True)
class Room:
    """The KV blocks of an instance. `prefix_block_tokens`: of a hash of the workload; 0: no cache
    of prefixes. `store`: the tiers, fastest first, where prefixes are kept for all processes that
    name the same; none: on the device alone.
    """

    blocks: int
    block_tokens: int = 16
    host_blocks: int = 0
    prefix_block_tokens: int = 0
    store: tuple[TierFolder, ...] = ()


def kv_blocks(decoder: Decoder, block_tokens: int, memory_share: float = 0.9) -> int:
    """Blocks that fit: on a GPU into a share of its memory, beside the weights; 1 GiB on a CPU.

    Raises:
        DoesNotFitError: none does.
    """
    each = kv_bytes(decoder.config, decoder.dtype, block_tokens)
    free = free_bytes(decoder.device)
    if decoder.device.type == "cpu":
        room = min(_CPU_KV_BYTES, round(memory_share * free))
    else:
        total = torch.cuda.get_device_properties(decoder.device).total_memory
        room = free - round((1 - memory_share) * total)
    if room < each:
        raise DoesNotFitError(
            f"no KV block ({each / _GIB:.3f} GiB) fits beside the weights: {decoder.device} has "
            f"{free / _GIB:.2f} GiB free"
        )
    return room // each


def swaps(policy: AnyPolicy) -> bool:
    """May it ask for a swap?"""
    return isinstance(policy, Policy) and overrides(policy, "preempt_by")


class Engine:
    """A model with its KV cache, on which one instance after another may run.

    With `workers`, its layers and heads may move to them (`decoder` is then a `Spread`).

    Raises:
        DoesNotFitError: the device, or the host, has no room for so many blocks.
    """

    def __init__(self, decoder: Decoder, room: Room, workers: Workers | None = None) -> None:
        self.room = room
        each = kv_bytes(decoder.config, decoder.dtype, room.block_tokens)
        cpu = torch.device("cpu")
        check_room(each * room.blocks, decoder.device, f"{room.blocks} KV blocks")
        check_room(each * room.host_blocks, cpu, f"{room.host_blocks} host KV blocks")
        made = (decoder.config, room.blocks, room.block_tokens, decoder.dtype, decoder.device)
        self.cache = KvCache(*made)
        self.swapper: Swapper | None = None
        host = None
        if room.host_blocks:
            pinned = decoder.device.type == "cuda"
            host = KvCache(
                decoder.config,
                room.host_blocks,
                room.block_tokens,
                decoder.dtype,
                cpu,
                pinned=pinned,
            )
            self.swapper = Swapper(self.cache, host)
        self.spread = None
        if workers is not None:
            decoder = self.spread = Spread(decoder, self.cache, workers, host)
            if host is not None:
                self.swapper = SpreadSwapper(self.spread, self.cache, host, workers)
        self.decoder = decoder
        self.runner = Runner(decoder, self.cache)

    def instance(
        self,
        policy: AnyPolicy,
        opens: Opens,
        clock: Clock,
        *,
        predictions: Guess | None = None,
        sample_s: float = float("inf"),
    ) -> PagedInstance | PagedStaticInstance:
        """An empty instance. There must be no other that is in use."""
        ledger = self._ledger()
        predictions = predictions or Guess()
        measures = Measures(sample_s)
        if isinstance(policy, StaticPolicy):
            executes = StaticExecution(self.runner, ledger, clock, opens)
            return PagedStaticInstance(policy, ledger, predictions, executes, measures)
        execution = Execution(self.runner, ledger, self.swapper, clock, predictions, opens)
        if self.spread is not None:
            self.spread.in_use = execution.in_use
        return PagedInstance(policy, ledger, predictions, execution, measures)

    def _ledger(self) -> PagedLedger:
        room = self.room
        held = (room.blocks, room.block_tokens, room.host_blocks, room.prefix_block_tokens)
        if not (room.store and room.prefix_block_tokens):
            return PagedLedger(*held)
        unit_tokens = math.lcm(room.prefix_block_tokens, room.block_tokens)
        shape = unit_shape(self.decoder, unit_tokens // room.block_tokens, room.block_tokens)
        tiers = Tiers(room.store, shape, fingerprint(self.decoder))
        return PagedStoreLedger(SharedUnits(tiers), *held)
