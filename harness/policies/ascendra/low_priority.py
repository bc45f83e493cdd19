"""Ascendra's low-priority instance: prompts out of order, by value, within three budgets.

Source: Ascendra (see docs/papers.md), Algorithm 1 (out-of-order scheduling), §5.2 (value
functions), §5.3 (offload), §5.4 (decodes first), §6.3 (dropping under overload).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ...core.counters import OVERTAKES
from ...core.decisions import Limits, ReleaseReason, Timeout
from ...core.policy import Key, Policy, Queue, parameter
from ...core.queues.room_queue import RoomQueue
from ...core.state import RequestState
from ...core.view import View
from ..edf import due_s
from ..shared.timeouts import DROPPING, OVERDUE, when_overdue


@dataclass(frozen=True)
class AscendraLp(Policy):
    """Algorithm 1 on one instance: all decodes, then prompts of most value while budgets last.

    `value` is the paper's function, the largest value first: `edf` (its default) the nearest moment
    that the SLO names, `sjf` the fewest tokens to prefill, `ljf` the most, `fcfs` the first
    arrival. The budgets: `step_budget_s` is C, the time that an iteration may take as predicted;
    0 (the default): the TBT SLO of its Table 2, of requests that differ the tightest in the batch,
    or among the waiting ones where the batch is empty. `token_budget` is N, decodes included; M are
    the free KV blocks above `watermark`. `max_num_seqs` is §6.2's batch of an LP instance.

    Where the text is silent or wrong:

    - `misfit`: the `break` of Algorithm 1 has lost its indentation. `skip` passes over requests
      that do not fit in memory, `stop` ends the selection there. Skipping can starve long prompts.
      Blocks that decodes take in this very step count as free in this decision.
    - Line 7 wants whole prompts within C and N. Prompts are split here, as in Sarathi-Serve on
      which the paper builds: C and N bound the chunk, and no prompt is too long for them.
    - A prompt that is begun goes on before others are, also before those of more value.
    - C treats a chunk as if its prompt began with it, and finds the longest that fits on the
      straight line between the predicted times of none and of N tokens, which lies above a time
      that bends upwards. If no request decodes, one block always passes, so that work goes on under
      any budget.
    - `overdue = "drop"` is §6.3: a request that has not begun when its TTFT bound has passed is
      dropped.

    The engine predicts step times by the paper's regression model or by the true one.

    `worst_batch_tokens`, the largest batch of a high-priority instance, is set by the controller;
    0: there is none. A request then leaves for one when its slack, the time left until its TTFT,
    falls below `threshold` × (that batch, which it may have to wait for, + its own prefill, alone).
    The batch that is formed at that moment may still take it: Fig. 1 executes D and offloads C.
    """

    queue_order = "dynamic"
    dynamic_limits: ClassVar[bool] = True
    may_start_at_timeout: ClassVar[bool] = True

    value: str = parameter("edf", choices=("edf", "sjf", "ljf", "fcfs"))
    misfit: str = parameter("skip", choices=("skip", "stop"))
    step_budget_s: float = parameter(0.0, 0.0, 60.0)
    token_budget: int = parameter(2048, 16, 131072, log=True)
    max_num_seqs: int = parameter(128, 1, 8192, log=True)
    watermark: float = parameter(0.01, 0.0, 0.5)  # share of blocks left free after an entry
    overdue: str = parameter("keep", choices=("keep", "drop"))
    threshold: float = parameter(1.0, 0.0, 20.0)
    worst_batch_tokens: int = 0

    def new_state(self) -> dict[int, Limits]:
        return {}  # by tokens: made once, read often

    def mechanisms(self) -> dict[str, str]:
        descriptions = {OVERTAKES: "requests that began before older ones of their instance"}
        return descriptions | (DROPPING if self.overdue == "drop" else {})

    def limits(self, view: View) -> Limits:
        tokens = self.token_budget
        if view.n_waiting or view.n_prefilling:
            tokens = self._batch_tokens(view)
        limits_by_tokens: dict[int, Limits] = view.policy_state
        if tokens not in limits_by_tokens:
            watermark_blocks = self._watermark_blocks(view)
            limits_by_tokens[tokens] = Limits(
                tokens, self.max_num_seqs, watermark_blocks=watermark_blocks
            )
        return limits_by_tokens[tokens]

    def _watermark_blocks(self, view: View) -> int:
        return int(self.watermark * view.total_blocks)

    def _batch_tokens(self, view: View) -> int:
        """Tokens of the decodes and the longest chunk with them within C and N."""
        seqs, kv_tokens, step_s = view.n_decoding, view.decode_kv_tokens, view.predict.step_s
        chunk_tokens = self.token_budget - seqs
        if chunk_tokens <= 0:
            return seqs
        budget_s = self.step_budget_s or _tightest_tpot_s(view)
        over_s = step_s(seqs, kv_tokens, ((0, chunk_tokens),)) - budget_s
        if over_s > 0:
            spare_s = max(0.0, budget_s - step_s(seqs, kv_tokens, ()))
            chunk_tokens = int(chunk_tokens * spare_s / (spare_s + over_s) + 1e-6)
        return seqs + chunk_tokens if seqs else max(chunk_tokens, view.block_size)

    def queue_key(self, r: RequestState, view: View) -> Key:
        if self.misfit == "stop":
            return self._worth(r)
        blocks = -(-r.target_tokens // view.block_size)
        return (blocks > view.free_blocks - self._watermark_blocks(view), self._worth(r))

    def queue(self, view: View) -> Queue:
        if self.misfit == "stop":
            return RoomQueue(self._worth, lambda r: 0, lambda: 0)
        tokens, watermark = view.block_size, self._watermark_blocks(view)
        return RoomQueue(
            self._worth,
            lambda r: -(-r.target_tokens // tokens),
            lambda: view.free_blocks - watermark,
        )

    def _worth(self, r: RequestState) -> float:
        """The value, negated: smaller goes first."""
        if self.value == "edf":
            return due_s(r)
        if self.value == "fcfs":
            return r.arrival_s
        return r.target_tokens if self.value == "sjf" else -r.target_tokens

    @property
    def drop_rule(self) -> str:
        return "" if self.overdue == "keep" else OVERDUE

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        late_s = r.arrival_s + r.slo.ttft_s
        if late_s < math.inf and self.worst_batch_tokens:
            step_s = view.predict.step_s
            worst_s = step_s(0, 0, ((0, self.worst_batch_tokens),))
            own_s = step_s(0, 0, ((0, r.prompt_tokens),))
            return Timeout(late_s - self.threshold * (worst_s + own_s), ReleaseReason.OFFLOAD)
        return None if self.overdue == "keep" else when_overdue(r)


def _tightest_tpot_s(view: View) -> float:
    """The smallest TPOT SLO in the batch, or of the waiting requests if the batch is empty."""
    served = view.running() if view.n_running else view.waiting()
    return min([r.slo.tpot_s for r in served], default=math.inf)
