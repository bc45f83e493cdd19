"""Several instances of one model, each in a process of its own, under one cluster policy.

The cluster of `engine.cluster` decides, with the same policy objects as in the simulator, on the
state of the instances; steps, hand-overs of KV and moves of modules are executed. Each instance has
a clock of its own: every iteration is executed alone and measured, and instances that would compute
at the same time are side by side on the clock of the run (`clock.TurnClock`). So any number of
instances can be executed on a few cores, and none disturbs another.

This process embeds tokens, computes logits and schedules for all; layers and their KV are in the
worker of the instance (`distributed.Spread`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from ....predictors.placement import Placement
from ....predictors.specs import GpuSpec, ModelSpec
from ....predictors.specs import model as model_spec
from ....workloads.errors import SloBenchError
from ...core.device import StageDevice
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.kv.kv_store_manager import StoreKVCacheManager
from ...core.policy import Policy
from ...core.predictions import Guess
from ...core.state import RequestState
from ...core.view import Predictions
from ...policies.shared.kv_transfer import KvNetwork
from ..cluster.cluster import Cluster
from ..cluster.lazy_instance import LazyInstance
from ..loop.engine_instance import Iterating
from ..loop.measures import Measures
from ..simulator.simulated import SimulatedInstance
from .batch import Piece
from .build_engine import Engine, KvCacheConfig
from .clock import TurnClock
from .decoder import Decoder
from .execution import Opens, PagedInstance
from .sequence import Sequence as Tokens
from .torch_workers import Workers

_ECHO_BYTES = 1 << 22
_PROMPTS = (16, 16, 64, 256)  # the first of a kind sets things up
_BATCHES = (1, 1, 2, 3, 4)
_LEAST_S = 1e-6


class LearnedStepTime:
    """A `StepTime` by what instances have measured while their models were whole."""

    def __init__(self, predictions: Guess) -> None:
        self._predictions = predictions

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return max(_LEAST_S, self._predictions.step_s(decode_seqs, decode_kv_tokens, chunks))

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """The prediction is linear in the KV, so that the step in the middle is the mean."""
        middle = decode_kv_tokens + decode_seqs * (steps - 1) // 2
        return steps * self.step_s(decode_seqs, middle, ())

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        if duration_s <= 0:
            return 0
        steps = 1
        while self.span_s(decode_seqs, decode_kv_tokens, steps) < duration_s:
            steps += max(1, steps // 8)
        return steps


class _StoppedNetwork:
    """Carries nothing: what moves is moved by the instances, which wait for it. `spec`: what
    policies estimate moves by.
    """

    def __init__(self, network: KvNetwork) -> None:
        self.spec = network.network.spec

    def send(self, source: int, target: int, moved_bytes: int, now_s: float) -> float:
        """A transfer takes no time."""
        return now_s


class ExecutedCluster(Cluster):
    """A cluster of `PagedInstance`s: KV goes from one process to another, and takes the time that
    this takes; a process sends, and receives, one request at a time.
    """

    def __init__(self, instances: Sequence[LazyInstance], *others: Any, **settings: Any) -> None:
        super().__init__(instances, *others, **settings)
        if isinstance(self.links, KvNetwork):
            stopped = _StoppedNetwork(self.links)
            self.links = KvNetwork(stopped.spec, stopped)
        self._sends_until_s: dict[int, float] = {}
        self._receives_until_s: dict[int, float] = {}

    def _carried_s(
        self,
        r: RequestState,
        source: LazyInstance,
        target: LazyInstance,
        begin_s: float,
        copied_tokens: int,
    ) -> float:
        sender, receiver = source.engine, target.engine
        assert isinstance(sender, PagedInstance)
        assert isinstance(receiver, PagedInstance)
        began_s = max(
            begin_s,
            self._sends_until_s.get(source.index, 0.0),
            self._receives_until_s.get(target.index, 0.0),
        )
        ends_s = began_s + sender.hand_over(r, receiver)
        self._sends_until_s[source.index] = self._receives_until_s[target.index] = ends_s
        return ends_s


@dataclass
class InstanceProcesses:
    """The engines of one run, one in each worker.

    Args:
        decoder: the model.
        folder: its folder.
        room: KV blocks of each instance; `store` is for instances with a store.
        workers: the processes; an instance for each.
        opens: makes the sequence of a request.
        predictions: of output lengths; learns how long steps take.
        cpu_time: measure the CPU time of all processes that take part in a step, not real time.
    """

    decoder: Decoder
    folder: Path
    room: KvCacheConfig
    workers: Workers
    opens: Opens
    predictions: Guess
    cpu_time: bool = False
    instances: list[PagedInstance] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers.forget()
        self.step_time = LearnedStepTime(self.predictions)
        self._prime()
        self.placement = self._placement()

    def elapsed_s(self) -> float:
        """Seconds of CPU time of all processes, or of real time."""
        if self.cpu_time:
            return time.thread_time() + sum(self.workers.busy_s.values())
        return time.perf_counter()

    def make(
        self,
        policy: Policy,
        kv_manager: KVCacheManager,
        predictions: Predictions,
        step_time: LearnedStepTime,
        stages: tuple[StageDevice, ...],
        measures: Measures,
        index: int = 0,
    ) -> Iterating:
        """An instance in worker `index` + 1, with the blocks of `kv_manager`; see `simulate`. One
        without devices executes nothing: its limits are looked at.
        """
        if not stages:
            empty = SimulatedInstance(
                policy, kv_manager, predictions, step_time, stages, measures, index
            )
            return cast("Iterating", empty)
        has_store = isinstance(kv_manager, StoreKVCacheManager)
        if has_store and not self.room.store:
            raise SloBenchError(
                "the system keeps prefixes in a store of all instances: name its folders in "
                'server.kv_store, as ["/dev/shm/kv=2"] (--kv-store), or turn its parameter off '
                "(as --set banaserve.store=false)"
            )
        room = replace(
            self.room,
            blocks=kv_manager.total,
            num_cpu_blocks=kv_manager.host_total,
            store=self.room.store if has_store else (),
        )
        engine = Engine(self.decoder, room, self.workers, self.workers.ranks[index])
        instance = engine.instance(
            policy,
            self.opens,
            TurnClock(self.elapsed_s),
            predictions=self.predictions,
            sample_s=measures.sample_s,
            stages=stages,
            index=index,
        )
        assert isinstance(instance, PagedInstance)
        self.instances.append(instance)
        return instance

    def flush(self) -> None:
        """Return when all that goes to a store is there."""
        for instance in self.instances:
            instance.kv_manager.flush()

    # ---------------------------------------------------------------- before the run

    def _prime(self) -> None:
        """Every worker takes a few steps: what torch sets up only once is no step of the run, and
        policies know how long steps take.
        """
        room = replace(self.room, store=(), spare_blocks=0, num_cpu_blocks=0)
        most_tokens = min(self.decoder.config.context, room.blocks * room.block_size // 4) - 8
        for rank in self.workers.ranks:
            engine = Engine(self.decoder, room, self.workers, rank)
            free = iter(range(room.blocks))
            sequences: list[Tokens] = []
            for size in _PROMPTS:
                tokens = max(1, min(size, most_tokens))
                blocks = [next(free) for _ in range(-(-(tokens + 8) // room.block_size))]
                sequence = Tokens([1] * tokens, blocks=blocks)
                self._measure(engine, [], [Piece(sequence, 0, tokens)])
                sequences.append(sequence)
            for count in _BATCHES:
                self._measure(engine, sequences[:count], [])
        self.workers.forget()

    def _measure(self, engine: Engine, decodes: list[Tokens], pieces: list[Piece]) -> None:
        kv_tokens = sum(len(sequence.tokens) for sequence in decodes)
        begin_s = self.elapsed_s()
        output_tokens = engine.runner.run(decodes, pieces)
        took_s = self.elapsed_s() - begin_s
        chunks = [(piece.before, piece.tokens) for piece in pieces]
        self.predictions.learn(len(decodes), kv_tokens, chunks, took_s)
        for sequence, token in zip(
            [*decodes, *(p.sequence for p in pieces)], output_tokens, strict=True
        ):
            sequence.tokens.append(token)

    def _placement(self) -> Placement:
        """What policies know of an instance: its bytes, and what it costs to send some."""
        room = self.room
        spec: ModelSpec = model_spec(self.folder)
        block_bytes = self.decoder.block_bytes(room.block_size)
        link, dtype = self._link(), self.decoder.dtype_name
        card = GpuSpec(
            name=str(self.decoder.device),
            memory_bytes=spec.weight_bytes(dtype) + room.blocks * block_bytes,
            bandwidth_bytes_per_s=math.nan,
            flops_16bit=math.nan,
            flops_8bit=0.0,
            flops_4bit=0.0,
            host_link=link,
            peer_link=link,
            power_w=math.nan,
            price_per_hour_usd=math.nan,
        )
        return Placement(
            spec,
            card,
            weight_dtype=dtype,
            kv_dtype=dtype,
            memory_share=1.0,
            block_size=room.block_size,
            fixed_num_gpu_blocks=room.blocks,
            fixed_num_cpu_blocks=room.num_cpu_blocks,
        )

    def _link(self) -> str:
        """The way of a message from one worker through this process to another: as long as that of
        a tensor to a worker and back.
        """
        small_s = self.workers.echo_s(torch.zeros(1))
        large_s = self.workers.echo_s(torch.zeros(_ECHO_BYTES // 4))
        bytes_per_s = _ECHO_BYTES / max(1e-9, large_s - small_s)
        return f"{bytes_per_s / 1e9:.6f}gb/s@{small_s * 1e6:.3f}us"


def spare_blocks(folder: Path, decoder: Decoder, room: KvCacheConfig) -> int:
    """Blocks that fit where half of the model of an instance was."""
    spec = model_spec(folder)
    weight_bytes = spec.layers * spec.layer_weight_bytes(decoder.dtype_name)
    return room.blocks + weight_bytes // decoder.block_bytes(room.block_size)
