"""Build an instance from a model and the settings of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ....predictors.specs import GIB
from ...core.device import StageDevice
from ...core.policy import AnyPolicy, Policy, StaticPolicy, overrides
from ...core.predictions import Guess
from ...core.state import RequestState
from ..loop.measures import Measures
from .cache import KvCache, Swapper
from .clock import Clock, RealClock
from .decoder import Decoder, fingerprint, unit_shape
from .distributed import Spread, SpreadSwapper
from .executed_static import PagedStaticInstance, StaticExecution
from .execution import Execution, Opens, PagedInstance
from .load_decoder import check_room, free_bytes
from .runner import Runner
from .sequence import Sequence
from .tiers import TierFolder, Tiers
from .torch_errors import DoesNotFitError, ModelError
from .torch_kv_cache_manager import PagedStoreKVCacheManager, SharedUnits, TorchKVCacheManager
from .torch_workers import HERE, Workers

_CPU_KV_BYTES = GIB  # where nothing is said


@dataclass(frozen=True)
class KvCacheConfig:
    """The KV blocks of an instance. `spare_blocks`: more, that it may get while others compute
    a part of its model. `prefix_block_size`: of a hash of the workload; 0: no cache of prefixes.
    `store`: the tiers, fastest first, where prefixes are kept for all processes that
    name the same; none: on the device alone.
    """

    blocks: int
    block_size: int = 16
    num_cpu_blocks: int = 0
    prefix_block_size: int = 0
    store: tuple[TierFolder, ...] = ()
    spare_blocks: int = 0


def num_gpu_blocks(decoder: Decoder, block_size: int, memory_share: float = 0.9) -> int:
    """Number of KV blocks that fit: on a GPU into a share of its memory less the weights; 1 GiB on
    a CPU.

    Raises:
        DoesNotFitError: no block fits.
    """
    each = decoder.block_bytes(block_size)
    free = free_bytes(decoder.device)
    if decoder.device.type == "cpu":
        room = min(_CPU_KV_BYTES, round(memory_share * free))
    else:
        total = torch.cuda.get_device_properties(decoder.device).total_memory
        room = free - round((1 - memory_share) * total)
    if room < each:
        raise DoesNotFitError(
            f"no KV block ({each / GIB:.3f} GiB) fits: {decoder.device} has "
            f"{free / GIB:.2f} GiB free after the weights"
        )
    return room // each


def swaps(policy: AnyPolicy) -> bool:
    """May it ask for a swap?"""
    return isinstance(policy, Policy) and overrides(policy, "preemption_mode")


def _no_request(r: RequestState) -> Sequence:
    raise AssertionError("no request arrives")


class Engine:
    """A model with its KV cache, used by one instance after another. With `workers`, its layers and
    heads may move to them (`decoder` is then a `Spread`); at first they are in the process `home`.

    Raises:
        DoesNotFitError: the device, or the host, has no memory for this number of blocks.
    """

    def __init__(
        self,
        decoder: Decoder,
        room: KvCacheConfig,
        workers: Workers | None = None,
        home: int = HERE,
    ) -> None:
        self.room = room
        each = decoder.block_bytes(room.block_size)
        cpu = torch.device("cpu")
        blocks = room.blocks + room.spare_blocks
        check_room(each * blocks, decoder.device, f"{blocks} KV blocks")
        check_room(each * room.num_cpu_blocks, cpu, f"{room.num_cpu_blocks} host KV blocks")
        config, size, dtype, device = decoder.config, room.block_size, decoder.dtype, decoder.device
        self.cache = KvCache(config, blocks, size, dtype, device)
        self.swapper: Swapper | None = None
        host = None
        if room.num_cpu_blocks:
            pinned = device.type == "cuda"
            host = KvCache(config, room.num_cpu_blocks, size, dtype, cpu, pinned=pinned)
            self.swapper = Swapper(self.cache, host)
        self.spread = None
        if workers is not None:
            decoder = self.spread = Spread(decoder, self.cache, workers, host, home)
            if host is not None:
                self.swapper = SpreadSwapper(self.spread, self.cache, host)
        self.decoder = decoder
        self.runner = Runner(decoder, self.cache)

    def place(self, layers: Seq[int]) -> None:
        """Put each pipeline stage of so many layers into a process of its own: the first, with the
        embeddings and the head, stays here.

        Raises:
            ModelError: the model has another number of layers.
        """
        assert self.spread is not None
        if sum(layers) != self.decoder.config.layers:
            raise ModelError(
                f"the device map has {sum(layers)} layers, but the model has "
                f"{self.decoder.config.layers}"
            )
        first = layers[0]
        for rank, count in enumerate(layers[1:], 1):
            self.spread.move_layers(range(first, first + count), rank)
            first += count

    def instance(
        self,
        policy: AnyPolicy,
        opens: Opens,
        clock: Clock,
        *,
        predictions: Guess | None = None,
        sample_s: float = float("inf"),
        stages: tuple[StageDevice, ...] = (),
        index: int = 0,
    ) -> PagedInstance | PagedStaticInstance:
        """An empty instance. There must be no other that is in use. `stages`: what computes for it
        and for other instances; none: nothing does.
        """
        kv_manager = self._kv_manager()
        predictions = predictions or Guess()
        measures = Measures(sample_s)
        if isinstance(policy, StaticPolicy):
            executes = StaticExecution(self.runner, kv_manager, clock, opens)
            return PagedStaticInstance(policy, kv_manager, predictions, executes, measures)
        execution = Execution(
            self.runner, kv_manager, self.swapper, clock, predictions, opens, self.spread
        )
        if self.spread is not None:
            self.spread.in_use = execution.in_use
        return PagedInstance(policy, kv_manager, predictions, execution, measures, index, stages)

    def most_tokens(self, policy: AnyPolicy) -> int:
        """Longest prompt and answer together that an instance can hold. There must be no instance
        that is in use.
        """
        spare = 0
        if isinstance(policy, Policy):
            limits = policy.limits(self.instance(policy, _no_request, RealClock()).view)
            spare = limits.watermark_blocks + limits.decode_headroom_blocks
        tokens = (self.room.blocks - spare) * self.room.block_size
        return min(tokens, self.decoder.config.context)

    def _kv_manager(self) -> TorchKVCacheManager:
        room = self.room
        held = (
            room.blocks,
            room.block_size,
            room.num_cpu_blocks,
            room.prefix_block_size,
            room.spare_blocks,
        )
        if not (room.store and room.prefix_block_size):
            return TorchKVCacheManager(*held)
        unit_tokens = math.lcm(room.prefix_block_size, room.block_size)
        shape = unit_shape(self.decoder, unit_tokens // room.block_size, room.block_size)
        tiers = Tiers(room.store, shape, fingerprint(self.decoder))
        return PagedStoreKVCacheManager(SharedUnits(tiers), *held)
