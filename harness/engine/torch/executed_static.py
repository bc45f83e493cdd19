"""Static batches executed: prompts padded to the longest, all decode until the longest is done."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ...core.device import StageDevice
from ...core.policy import StaticPolicy
from ...core.state import RequestState
from ...core.view import Predictions
from ..loop.measures import Measures
from ..simulator.static import StaticInstance
from .batch import Piece
from .clock import Clock
from .execution import Opens
from .runner import Runner
from .sequence import Sequence
from .torch_kv_cache_manager import TorchKVCacheManager


class StaticExecution:
    """A `StepTime` that carries out what a `PagedStaticInstance` runs: it took what it took."""

    def __init__(
        self, runner: Runner, kv_manager: TorchKVCacheManager, clock: Clock, opens: Opens
    ) -> None:
        self._runner = runner
        self._kv_manager = kv_manager
        self._clock = clock
        self._opens = opens
        self.now_s = 0.0  # of the instance, when a computation begins
        self.running: Seq[RequestState] = ()
        self.sequences: dict[RequestState, Sequence] = {}

    def begins(self, batch: Seq[RequestState]) -> None:
        """These run next, from their prompts on."""
        self.running = batch
        for r in batch:
            self.sequences[r] = self._opens(r)
            self.sequences[r].blocks = self._kv_manager.table(r)

    def leaves(self, r: RequestState) -> Sequence | None:
        """`r` runs no more; its blocks are free."""
        self._kv_manager.release(r)
        return self.sequences.pop(r, None)

    def step_s(self, seqs: int, kv_tokens: int, chunks: Seq[tuple[int, int]]) -> float:
        """Compute all prompts, each padded to the longest, and return the seconds."""
        self._clock.wait_until(self.now_s)
        longest = chunks[0][1]
        pieces = []
        for r in self.running:
            self._kv_manager.allocate_slots(r, longest)
            tokens = len(self.sequences[r].tokens)
            pieces.append(Piece(self.sequences[r], 0, tokens, padding=longest - tokens))
        self._take(self._runner.run([], pieces))
        return self._clock.now_s() - self.now_s

    def span_s(self, seqs: int, kv_tokens: int, steps: int) -> float:
        """Compute that many tokens of each member, padded ones included, and return the seconds."""
        for _ in range(steps):
            sequences = [self.sequences[r] for r in self.running]
            for r, sequence in zip(self.running, sequences, strict=True):
                self._kv_manager.allocate_slots(r, len(sequence.tokens))
            self._take(self._runner.run(sequences, []))
        return self._clock.now_s() - self.now_s

    def steps_within(self, seqs: int, kv_tokens: int, duration_s: float) -> int:
        """Not available: a real machine cannot predict its steps."""
        raise NotImplementedError

    def _take(self, tokens: Seq[int]) -> None:
        for r, token in zip(self.running, tokens, strict=True):
            self.sequences[r].tokens.append(token)


class PagedStaticInstance(StaticInstance):
    """One instance with static batching. `ended` is called with every finished request and its
    tokens.
    """

    kv_manager: TorchKVCacheManager

    def __init__(
        self,
        policy: StaticPolicy,
        kv_manager: TorchKVCacheManager,
        predictions: Predictions,
        execution: StaticExecution,
        measures: Measures,
    ) -> None:
        device = (StageDevice("instance 0"),)
        super().__init__(policy, kv_manager, predictions, execution, device, measures)
        self._execution = execution
        self.ended: Callable[[RequestState, Sequence], None] | None = None

    def _run_batch(self, batch: list[RequestState]) -> None:
        self._execution.now_s = self.now_s
        self._execution.begins(batch)
        super()._run_batch(batch)
        for r in batch:
            sequence = self._execution.leaves(r)
            if sequence is not None and r in self.decoding and self.ended is not None:
                del sequence.tokens[r.prompt_tokens + r.output_tokens :]
                self.ended(r, sequence)

    def _decode(self, running: list[RequestState], prompt: int, emitted: int, upto: int) -> None:
        self._execution.now_s = self.now_s
        self._execution.running = running
        super()._decode(running, prompt, emitted, upto)

    def _make_room(
        self, running: list[RequestState], prompt: int, emitted: int
    ) -> tuple[list[RequestState], list[RequestState]]:
        stay, outgrown = super()._make_room(running, prompt, emitted)
        for r in running:
            if r in outgrown:
                self._execution.leaves(r)
            elif r not in stay:  # answered: padded no more, its tokens stay until the batch ends
                self.kv_manager.release(r)
        return stay, outgrown
