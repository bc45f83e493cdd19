"""What the steps of a policy's scheduler were and took: step log, predictions and tally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....core.decision_counts import DecisionCounts
from ....core.decisions import PreemptionMode
from ....core.predictions import LearnedPredictions
from ..contract import StepLog, Tally
from .steps import Composition


class StepRecorder:
    """Records the steps of `scheduler`, a `PolicyScheduler`, for the log and the predictions, and
    counts preemptions and swaps.
    """

    def __init__(self, scheduler: Any) -> None:
        self.log = StepLog()
        self.predictions = LearnedPredictions()
        self.preempted: list[dict[str, Any]] = []  # in this step
        self.ended: list[str] = []  # requests, since the last step
        self._scheduler = scheduler
        self.decisions = DecisionCounts()
        self._tally = Tally()
        self._victims = {PreemptionMode.SWAP: 0, PreemptionMode.RECOMPUTE: 0}
        self._executed_out = self._executed_in = 0  # swaps, by the workers' own count
        self._began: tuple[float, Composition] | None = None
        self.passes: dict[str, int] = {}  # of an embedder, by the names of `EMBED_PASSES`

    def preempts(self, request_id: str, how: PreemptionMode, kv_tokens: int) -> None:
        """A request is preempted."""
        self._victims[how] += 1
        self.preempted.append({"id": request_id, "by": how.value, "kv_tokens": kv_tokens})

    def begins(self, output: Any, entered: Sequence[str]) -> None:
        """A step begins: its composition and the requests that enter with it."""
        scheduler = self._scheduler
        found = Composition.of(output.num_scheduled_tokens, scheduler.requests)
        self._began = (type(scheduler).clock(), found)
        if self.log.wanted and (output.num_scheduled_tokens or self.preempted):
            self.log.write(
                "step",
                time_s=scheduler.now_s,
                **vars(found),
                waiting=len(scheduler.waiting.waiting),
                swapped=len(scheduler.waiting.swapped),
                free_blocks=scheduler.view.free_blocks,
                entered=entered,
                preempted=list(self.preempted),
                ended=list(self.ended),
            )
            self.ended.clear()

    def ran(self, model_runner_output: Any, now_s: float) -> float | None:
        """A step has ended: learn from its duration, which is returned in seconds; None: it had no
        tokens.
        """
        duration_s: float | None = None
        if self._began is not None:
            begin_s, found = self._began
            self._began = None
            if found.decode_seqs or found.chunks:
                duration_s = now_s - begin_s
                decodes = found.decode_seqs, found.decode_kv_tokens
                self.predictions.learn(*decodes, found.chunks, duration_s)
        self._note_moved(model_runner_output)
        return duration_s

    def _note_moved(self, model_runner_output: Any) -> None:
        """Take the workers' swap report out of the output, which vLLM need not log, and update the
        counters.
        """
        scheduler = self._scheduler
        report: Any = getattr(model_runner_output, "kv_connector_output", None)
        moved = getattr(report, "kv_connector_stats", None)
        if moved is not None and scheduler.num_cpu_blocks:
            report.kv_connector_stats = None
            self._executed_out += moved.swaps_out
            self._executed_in += moved.swaps_in
            self.predictions.learn_swap(moved.blocks, moved.duration_s)
            if moved.copies:
                self.log.write("swaps", copies=moved.copies)
        self.write_tally()

    def write_tally(self) -> None:
        """Write all counters for the process that started the server."""
        scheduler = self._scheduler
        self._tally.write(
            scheduler.counters,
            preempted_swap=self._victims[PreemptionMode.SWAP],
            preempted_recompute=self._victims[PreemptionMode.RECOMPUTE],
            decided_out=getattr(scheduler.connector, "swaps_out", 0),
            decided_in=getattr(scheduler.connector, "swaps_in", 0),
            executed_out=self._executed_out,
            executed_in=self._executed_in,
            policy_errors=scheduler.policy_errors.count,
            **self.decisions.totals(),
            **self.passes,
        )
