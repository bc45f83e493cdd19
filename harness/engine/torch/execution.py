"""The iteration loop on a real model, in real time: swaps, chunks of prompts, decodes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ...core.policy import Policy
from ...core.predictions import LearnedPredictions
from ...core.state import Phase, RequestState
from ..loop.measures import Measures
from ..loop.timed import Ran, RecordedStepTime, TimedInstance
from .batch import Piece
from .cache import InUse, Swapper
from .clock import WallClock
from .kv_cache_manager import TorchKVCacheManager
from .runner import Runner
from .sequence import Sequence

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
    """

    def __init__(
        self,
        runner: Runner,
        kv_manager: TorchKVCacheManager,
        swapper: Swapper | None,
        clock: WallClock,
        predictions: LearnedPredictions,
        opens: Opens,
    ) -> None:
        super().__init__(predictions)
        self.clock = clock
        self.sequences: dict[RequestState, Sequence] = {}
        self.given: list[tuple[RequestState, int]] = []  # tokens of the last iteration
        self._runner = runner
        self._kv_manager = kv_manager
        self._swapper = swapper
        self._opens = opens
        self._host_free = list(range(kv_manager.host_total))[::-1]  # the lowest first, side by side
        self._coming: list[RequestState] = []
        self._swapped_blocks = 0
        self._swap_s = 0.0
        self._moving_s = 0.0
        self._loop: TimedInstance | None = None
        self.between: Callable[[], None] | None = None  # called before every iteration

    def serves(self, loop: TimedInstance) -> None:
        """The instance whose iterations are executed."""
        self._loop = loop

    def sequence(self, r: RequestState) -> Sequence:
        """The sequence of `r`, made on first use."""
        found = self.sequences.get(r)
        if found is None:
            found = self.sequences[r] = self._opens(r)
        found.blocks = self._kv_manager.table(r)
        return found

    def next(self, seqs: int, kv_tokens: int, chunks: Seq[tuple[int, int]]) -> Ran:
        loop, kv_manager = self._loop, self._kv_manager
        assert loop is not None
        self.clock.wait_until(loop.now_s)
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
            self.given = list(zip(deciding, output_tokens, strict=True))
            for r, token in self.given:
                self.sequences[r].tokens.append(token)
        return self._ran_since(loop.now_s)

    def _ran_since(self, begin_s: float) -> Ran:
        took_s = self.clock.now_s() - begin_s
        ran = Ran(took_s, self._swapped_blocks, self._swap_s, self._moving_s)
        self._swapped_blocks, self._swap_s, self._moving_s = 0, 0.0, 0.0
        return ran

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
        if r in self.sequences and self.sequences[r].num_cpu_blocks:
            self._coming.append(r)

    def _swap_in(self) -> None:
        for r in self._coming:
            assert self._swapper is not None
            begin_s = self.clock.now_s()
            sequence = self.sequence(r)
            held = sequence.num_cpu_blocks
            self._kv_manager.allocate_slots(r, len(held) * self._kv_manager.block_size)
            self._swapper.into(held, sequence.blocks)
            self._forget_host(sequence)
            self._swapped(len(held), begin_s)
        self._coming.clear()

    def _swapped(self, blocks: int, begin_s: float) -> None:
        self._swapped_blocks += blocks
        self._swap_s += self.clock.now_s() - begin_s

    def _forget_host(self, sequence: Sequence) -> None:
        self._host_free += reversed(sequence.num_cpu_blocks)
        sequence.num_cpu_blocks = []

    def closes(self, r: RequestState) -> Sequence | None:
        """`r` is gone: its sequence, if it ever entered."""
        sequence = self.sequences.pop(r, None)
        if sequence is not None:
            self._forget_host(sequence)
        return sequence


class PagedInstance(TimedInstance):
    """One instance with continuous batching. `ended` is called with every finished request and its
    tokens, `gave` with every token at the end of its iteration. Where a stop token may end an
    output, its length is unknown before: until then the scheduler assumes the maximum.
    """

    __slots__ = ("_execution", "ended", "gave")

    def __init__(
        self,
        policy: Policy,
        kv_manager: TorchKVCacheManager,
        predictions: LearnedPredictions,
        execution: Execution,
        measures: Measures,
        index: int = 0,
    ) -> None:
        super().__init__(policy, kv_manager, predictions, execution, (), measures, index)
        self._execution = execution
        self.ended: Callable[[RequestState, Sequence], None] | None = None
        self.gave: Callable[[RequestState, int], None] | None = None
        execution.serves(self)

    def complete(self) -> bool:
        given, self._execution.given = self._execution.given, []
        if self.gave is not None:
            for r, token in given:
                self.gave(r, token)
        ended = super().complete()
        sequences = self._execution.sequences
        for r, token in given:
            if r.phase is Phase.DECODE and token in sequences[r].ends:
                self._stop_decode(r)
                r.output_tokens = r.emitted_tokens
                self._finish(r)
                ended = True
        return ended

    def _preempt(self) -> None:
        there = len(self.swapped)
        super()._preempt()
        if len(self.swapped) > there:
            assert isinstance(self.kv_manager, TorchKVCacheManager)
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
