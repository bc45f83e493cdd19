"""An iteration of the loop, carried out on the model: swaps, chunks of prompts, decodes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ...core.learned_predictions import LearnedPredictions
from ...core.state import RequestState
from ..loop.timed import Ran, TimedInstance, Told
from .batch import Piece
from .cache import Swapper
from .clock import Clock
from .kv_cache_manager import PagedLedger
from .packed import InUse
from .runner import Runner
from .sequence import Sequence

Opens = Callable[[RequestState], Sequence]  # the prompt of a request that enters


class Execution(Told):
    """Carries out what a `TimedInstance` decides, and tells how long it took.

    Args:
        runner: the model and its KV cache.
        ledger: whose blocks are whose; as many as the cache has.
        swapper: to and from host memory; None: the ledger has no host blocks.
        clock: real time.
        predictions: learn from every iteration.
        opens: makes the sequence of a request when it first enters.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: PagedLedger,
        swapper: Swapper | None,
        clock: Clock,
        predictions: LearnedPredictions,
        opens: Opens,
    ) -> None:
        super().__init__(predictions)
        self.clock = clock
        self.sequences: dict[RequestState, Sequence] = {}
        self.given: list[tuple[RequestState, int]] = []  # tokens of the last iteration
        self._runner = runner
        self._ledger = ledger
        self._swapper = swapper
        self._opens = opens
        self._host_free = list(range(ledger.host_total))[::-1]  # the lowest first, side by side
        self._coming: list[RequestState] = []
        self._swapped_blocks = 0
        self._swap_s = 0.0
        self._moving_s = 0.0
        self._loop: TimedInstance | None = None
        self.between: Callable[[], None] | None = None  # called before every iteration

    def serves(self, loop: TimedInstance) -> None:
        """Whose iterations these are."""
        self._loop = loop

    def sequence(self, r: RequestState) -> Sequence:
        """That of `r`, made when it is first asked for."""
        found = self.sequences.get(r)
        if found is None:
            found = self.sequences[r] = self._opens(r)
        found.blocks = self._ledger.table(r)
        return found

    def next(self, seqs: int, kv_tokens: int, chunks: Seq[tuple[int, int]]) -> Ran:
        loop, ledger = self._loop, self._ledger
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
            ledger.reserve(r, len(sequence.tokens))
            decodes.append(sequence)
        pieces = []
        for r, (before, tokens) in zip(loop.prefilling, chunks, strict=False):
            ledger.reserve(r, before + tokens)
            piece = Piece(self.sequence(r), before, tokens)
            if piece.last:
                deciding.append(r)
            pieces.append(piece)
        if decodes or pieces:
            tokens_out = self._runner.run(decodes, pieces, ledger.traffic())
            ledger.settle()
            self.given = list(zip(deciding, tokens_out, strict=True))
            for r, token in self.given:
                self.sequences[r].tokens.append(token)
        return self._told(loop.now_s)

    def _told(self, begin_s: float) -> Ran:
        took_s = self.clock.now_s() - begin_s
        ran = Ran(took_s, self._swapped_blocks, self._swap_s, self._moving_s)
        self._swapped_blocks, self._swap_s, self._moving_s = 0, 0.0, 0.0
        return ran

    # ---------------------------------------------------------------- host memory

    def in_use(self) -> InUse:
        """Blocks that hold anything that will be read again."""
        free = set(self._host_free)
        return InUse(
            self._ledger.ids_in_use(),
            [n for n in range(self._ledger.host_total) if n not in free],
        )

    def swap_out(self, r: RequestState, blocks: Seq[int]) -> None:
        """The KV of `r`, which has just given up these blocks."""
        assert self._swapper is not None
        begin_s = self.clock.now_s()
        sequence = self.sequences[r]
        sequence.host_blocks = [self._host_free.pop() for _ in blocks]
        self._swapper.out(blocks, sequence.host_blocks)
        self._swapped(len(blocks), begin_s)

    def comes_back(self, r: RequestState) -> None:
        """`r` decodes from the next iteration on; its KV is brought in before that."""
        if r in self.sequences and self.sequences[r].host_blocks:
            self._coming.append(r)

    def _swap_in(self) -> None:
        for r in self._coming:
            assert self._swapper is not None
            begin_s = self.clock.now_s()
            sequence = self.sequence(r)
            held = sequence.host_blocks
            self._ledger.reserve(r, len(held) * self._ledger.block_tokens)
            self._swapper.into(held, sequence.blocks)
            self._forget_host(sequence)
            self._swapped(len(held), begin_s)
        self._coming.clear()

    def _swapped(self, blocks: int, begin_s: float) -> None:
        self._swapped_blocks += blocks
        self._swap_s += self.clock.now_s() - begin_s

    def _forget_host(self, sequence: Sequence) -> None:
        self._host_free += reversed(sequence.host_blocks)
        sequence.host_blocks = []

    def closes(self, r: RequestState) -> Sequence | None:
        """`r` is gone: its sequence, if it ever entered."""
        sequence = self.sequences.pop(r, None)
        if sequence is not None:
            self._forget_host(sequence)
        return sequence
