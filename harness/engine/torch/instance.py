"""The iteration loop on a real model, in real time."""

from __future__ import annotations

from collections.abc import Callable

from ...core.learned_predictions import LearnedPredictions
from ...core.policy import Policy
from ...core.state import Phase, RequestState
from ..loop.measures import Measures
from ..loop.timed import TimedInstance
from .execution import Execution
from .kv_cache_manager import TorchKVCacheManager
from .sequence import Sequence


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
