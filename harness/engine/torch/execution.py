"""The iteration loop on a real model, in real time: swaps, chunks of prompts, decodes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from ....predictors.step_time import StepTime
from ...core.device import Away, SplitStepTime, StageDevice
from ...core.module_moves import Module
from ...core.policy import Policy
from ...core.predictions import LearnedPredictions
from ...core.state import Phase, RequestState
from ..loop.engine_instance import Movable
from ..loop.measures import Measures
from ..loop.timed import Ran, RecordedStepTime, TimedInstance
from .batch import Piece
from .cache import InUse, Swapper
from .clock import Clock
from .distributed import CompletedMove, Spread
from .runner import Runner
from .sequence import Sequence
from .torch_kv_cache_manager import TorchKVCacheManager
from .torch_workers import HERE

Opens = Callable[[RequestState], Sequence]  # the prompt of a request that enters


class Execution(RecordedStepTime):
    """Executes the iterations that a `TimedInstance` decides and measures their time.

    Args:
        runner: the model and its KV cache.
        KV cache manager: the owner of each block; as many blocks as the cache has.
        swapper: to and from host memory; None: the KV cache manager has no host blocks.
        clock: real time.
        predictions: learn from every iteration.
        opens: makes the sequence of a request when it first enters.
        spread: the runner's model, if it is one over several processes.
    """

    def __init__(
        self,
        runner: Runner,
        kv_manager: TorchKVCacheManager,
        swapper: Swapper | None,
        clock: Clock,
        predictions: LearnedPredictions,
        opens: Opens,
        spread: Spread | None = None,
    ) -> None:
        super().__init__(predictions)
        self.spread = spread
        self.received: dict[RequestState, list[Tensor]] = {}  # KV of others, in host memory
        self.clock = clock
        self.sequences: dict[RequestState, Sequence] = {}
        self.emitted: list[tuple[RequestState, int]] = []  # tokens of the last iteration
        self._runner = runner
        self._kv_manager = kv_manager
        self._swapper = swapper
        self._opens = opens
        self._host_free = list(range(kv_manager.host_total))[::-1]  # the lowest first, side by side
        self._coming: list[RequestState] = []
        self._swapped_blocks = 0
        self._swap_s = 0.0
        self._moving_s = 0.0
        self.loop: TimedInstance | None = None  # the instance whose iterations are executed
        self.between: Callable[[], None] | None = None  # called before every iteration
        self.away_s = 0.0  # of the last iteration: another instance's process computed

    def sequence(self, r: RequestState) -> Sequence:
        """The sequence of `r`, made on first use."""
        sequence = self.sequences.get(r)
        if sequence is None:
            sequence = self.sequences[r] = self._opens(r)
        sequence.blocks = self._kv_manager.table(r)
        return sequence

    def next(self, seqs: int, kv_tokens: int, chunks: Seq[tuple[int, int]]) -> Ran:
        loop, kv_manager = self.loop, self._kv_manager
        assert loop is not None
        self.clock.wait_until(loop.now_s)
        away_s = self._away_s()
        if self.between is not None:
            begin_s = self.clock.now_s()
            self.between()
            self._moving_s = self.clock.now_s() - begin_s
        self._swap_in()
        deciding = list(loop.decoding) if seqs else []
        decodes = []
        for r in deciding:
            sequence = self.sequence(r)
            kv_manager.allocate_slots(r, len(sequence.tokens))
            decodes.append(sequence)
        pieces = []
        for r, (before, tokens) in zip(loop.prefilling, chunks, strict=False):
            kv_manager.allocate_slots(r, before + tokens)
            piece = Piece(self.sequence(r), before, tokens)
            if piece.last:
                deciding.append(r)
            pieces.append(piece)
        if decodes or pieces:
            output_tokens = self._runner.run(decodes, pieces, kv_manager.traffic())
            kv_manager.settle()
            self.emitted = list(zip(deciding, output_tokens, strict=True))
            for r, token in self.emitted:
                self.sequences[r].tokens.append(token)
        self.away_s = self._away_s() - away_s
        took_s = self.clock.now_s() - loop.now_s
        ran = Ran(took_s, self._swapped_blocks, self._swap_s, self._moving_s, self.away_s)
        self._swapped_blocks, self._swap_s, self._moving_s = 0, 0.0, 0.0
        return ran

    def _away_s(self) -> float:
        """CPU seconds that workers other than its own have computed so far, for anyone."""
        spread = self.spread
        if spread is None or spread.home == HERE:
            return 0.0
        busy_s = spread.workers.workers.busy_s
        return sum(busy_s.get(rank, 0.0) for rank in spread.busy() if rank != spread.home)

    # ---------------------------------------------------------------- host memory

    def in_use(self) -> InUse:
        """Blocks that hold anything that will be read again."""
        free = set(self._host_free)
        return InUse(
            self._kv_manager.ids_in_use(),
            [n for n in range(self._kv_manager.host_total) if n not in free],
        )

    def swap_out(self, r: RequestState, blocks: Seq[int]) -> None:
        """The KV of `r`, which has just given up these blocks."""
        assert self._swapper is not None
        begin_s = self.clock.now_s()
        sequence = self.sequences[r]
        sequence.num_cpu_blocks = [self._host_free.pop() for _ in blocks]
        self._swapper.out(blocks, sequence.num_cpu_blocks)
        self._swapped(len(blocks), begin_s)

    def comes_back(self, r: RequestState) -> None:
        """`r` decodes from the next iteration on; its KV is brought in before that."""
        if r in self.received or (r in self.sequences and self.sequences[r].num_cpu_blocks):
            self._coming.append(r)

    def _swap_in(self) -> None:
        for r in self._coming:
            begin_s = self.clock.now_s()
            sequence = self.sequence(r)
            kv, held = self.received.pop(r, None), sequence.num_cpu_blocks
            blocks = len(held) if kv is None else kv[0].shape[1]
            self._kv_manager.allocate_slots(r, blocks * self._kv_manager.block_size)
            if kv is not None:
                assert self.spread is not None
                self.spread.write_blocks(sequence.blocks, kv)
            else:
                assert self._swapper is not None
                self._swapper.into(held, sequence.blocks)
                self._forget_host(sequence)
            self._swapped(blocks, begin_s)
        self._coming.clear()

    def hand_over(self, r: RequestState, target: Execution) -> float:
        """Read the KV of `r` into host memory, from where `target` takes it when `r` enters there;
        the seconds that reading took.
        """
        assert self.spread is not None
        begin_s = self.clock.now_s()
        table = self._kv_manager.table(r)[: self._kv_manager.blocks(r.kv_tokens)]
        target.received[r] = self.spread.read_blocks(table)
        target.sequences[r] = self.sequences.pop(r)
        return self.clock.now_s() - begin_s

    def _swapped(self, blocks: int, begin_s: float) -> None:
        self._swapped_blocks += blocks
        self._swap_s += self.clock.now_s() - begin_s

    def _forget_host(self, sequence: Sequence) -> None:
        self._host_free += reversed(sequence.num_cpu_blocks)
        sequence.num_cpu_blocks = []

    def closes(self, r: RequestState) -> Sequence | None:
        """`r` is gone: its sequence, if it ever entered."""
        sequence = self.sequences.pop(r, None)
        self.received.pop(r, None)
        if sequence is not None:
            self._forget_host(sequence)
        return sequence


class ModulesMoved(NamedTuple):
    """Modules that went to the instance `helper`, or came back from it, at `time_s`."""

    time_s: float
    helper: int
    move: CompletedMove


class _MeasuredAway(Away):
    """Books what another instance's process really computed."""

    __slots__ = ("_execution",)

    def __init__(self, step_time: SplitStepTime, device: StageDevice, execution: Execution) -> None:
        super().__init__(step_time, device)
        self._execution = execution

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Seq[tuple[int, int]]
    ) -> float:
        step_s = self._execution.step_s(decode_seqs, decode_kv_tokens, chunks)
        self._device.owed_s += self._execution.away_s
        return step_s


class PagedInstance(TimedInstance):
    """One instance with continuous batching. `ended` is called with every finished request and its
    tokens, `gave` with every token at the end of its iteration. Where a stop token may end an
    output, its length is unknown before: until then the scheduler assumes the maximum.
    """

    __slots__ = ("_execution", "_helper", "ended", "gave", "moves")

    kv_manager: TorchKVCacheManager

    def __init__(
        self,
        policy: Policy,
        kv_manager: TorchKVCacheManager,
        predictions: LearnedPredictions,
        execution: Execution,
        measures: Measures,
        index: int = 0,
        stages: tuple[StageDevice, ...] = (),
    ) -> None:
        super().__init__(
            policy, kv_manager, predictions, execution, stages, measures, index, alone=not stages
        )
        self._execution = execution
        self._helper: PagedInstance | None = None
        self.moves: list[ModulesMoved] = []
        self.ended: Callable[[RequestState, Sequence], None] | None = None
        self.gave: Callable[[RequestState, int], None] | None = None
        execution.loop = self

    def complete(self) -> bool:
        emitted, self._execution.emitted = self._execution.emitted, []
        if self.gave is not None:
            for r, token in emitted:
                self.gave(r, token)
        ended = super().complete()
        sequences = self._execution.sequences
        for r, token in emitted:
            if r.phase is Phase.DECODE and token in sequences[r].ends:
                self._stop_decode(r)
                r.output_tokens = r.emitted_tokens
                self._finish(r)
                ended = True
        return ended

    # ---------------------------------------------------------------- other instances

    def hand_over(self, r: RequestState, target: PagedInstance) -> float:
        """`r`, which is in transfer from here, goes to `target` with its KV; see `Execution`."""
        return self._execution.hand_over(r, target._execution)

    def bring_home(self, step_time: StepTime, pause_s: float) -> None:
        self._moves(Module.LAYERS, 0)
        self._moves(Module.HEADS, 0)
        self._away = self._helper = None

    def offload(
        self,
        module: Module,
        units: int,
        helper: Movable,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        assert isinstance(helper, PagedInstance)
        self._helper = helper
        self._moves(module, units)
        self._away = _MeasuredAway(step_time, helper.stages[0], self._execution)

    def _moves(self, module: Module, units: int) -> None:
        """Have so many units at the helper; both wait for as long as that takes."""
        spread, clock, helper = self._execution.spread, self._execution.clock, self._helper
        if helper is None:
            return
        assert spread is not None
        target = helper._execution.spread
        assert target is not None
        begin_s, before = clock.now_s(), len(spread.moves)
        if module is Module.LAYERS:
            spread.offload_layers(units, target.home)
        else:
            spread.offload_heads(units, target.home)
        took_s = clock.now_s() - begin_s
        done = spread.moves[before:]
        self.moves += [ModulesMoved(self.now_s, helper.index, move) for move in done]
        for instance in (self, helper):
            instance.stages[0].owed_s += took_s

    def _preempt(self) -> None:
        there = len(self.swapped)
        super()._preempt()
        if len(self.swapped) > there:
            self._execution.swap_out(self.swapped[-1], self.kv_manager.last_released)

    def _start_decode(self, r: RequestState) -> None:
        super()._start_decode(r)
        self._execution.comes_back(r)

    def _finish(self, r: RequestState) -> None:
        super()._finish(r)
        sequence = self._execution.closes(r)
        if self.ended is not None and sequence is not None:
            self.ended(r, sequence)

    def cancel(self, r: RequestState) -> None:
        """Cancel `r`, between two iterations."""
        if r in self.inbox:
            self.inbox.remove(r)
        elif r.phase is not Phase.DONE:
            self.take_out(r)
            if r in self.in_transfer:
                self.free_transferred(r)
        self._execution.closes(r)
