"""Prism's queue on one instance: Moore-Hodgson order, so that most first tokens are in time.

Source: Prism (see docs/papers.md), Algorithm 2 and §6.3 (local scheduling).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...core.counters import OVERTAKES
from ...core.decisions import Limits, Timeout
from ...core.policy import Key, Queue, parameter
from ...core.state import RequestState
from ...core.view import View
from ..edf import due_s
from ..shared.moore_hodgson import InTimeQueue, PrefillJob, in_time
from ..shared.slack_victim import SpeedEstimate, keep_key
from ..shared.timeouts import DropsHopeless
from ..vllm import Vllm


@dataclass
class PrismState:
    """What one instance holds of its last plan, for engines that ask request by request."""

    pace: SpeedEstimate = field(default_factory=SpeedEstimate)
    planned_at: tuple[float, int] | None = None
    jobs: dict[int, PrefillJob] = field(default_factory=dict)  # by order of arrival, as the keys
    keys: dict[int, Key] = field(default_factory=dict)


@dataclass(frozen=True)
class PrismLocal(DropsHopeless, Vllm):
    """Algorithm 2: sorted by deadline a + s; where one would be late, the longest so far is left
    out.

    The work of a prefill is e = p / c: its tokens over the speed of chunked prefill, which is
    `max_num_batched_tokens` over the predicted time of a step that prefills so many. `caution`
    scales it: above 1 allows for decodes that share steps with the chunks, which c ignores; 0
    leaves out only requests whose deadline has passed. The clock starts where the prefills now in
    the batch will have ended. `buffer` is the memory that the paper keeps free on each engine; it
    gives no size.

    Where the text is silent:

    - A request that Algorithm 2 leaves out waits behind the others, by deadline (`late = "wait"`),
      and returns if there is time; `drop` drops it when even an empty server would be too late.
    - Requests that were preempted after their first token go first, in order of arrival: their TTFT
      is decided, and only progress helps.
    - Requests without an SLO go after all requests that can be in time.
    - `victim`: under KV pressure the `newest` request is preempted, as in the engine the paper
      builds on, or by `slack` first requests that miss their SLO anyway, then those that can best
      wait; never one with at most `nearly_done_tokens` to go while there are others. Not in the
      paper.

    Cached prefixes are ignored: e counts the whole prompt. Several models sharing a GPU, placement
    and eviction of models are not part of this.
    """

    queue_order = "dynamic"
    uses_predicted_lengths: ClassVar[bool] = True

    caution: float = parameter(1.0, 0.0, 10.0)
    buffer: float = parameter(0.01, 0.0, 0.5)  # share of blocks left free after an entry
    late: str = parameter("wait", choices=("wait", "drop"))
    victim: str = parameter("newest", choices=("newest", "slack"))
    nearly_done_tokens: int = parameter(8, 0, 4096)

    def new_state(self) -> PrismState:
        return PrismState()

    def mechanisms(self) -> dict[str, str]:
        descriptions = super().mechanisms() if self.late == "drop" else {}
        return descriptions | {OVERTAKES: "requests that began before older ones (Algorithm 2)"}

    def limits(self, view: View) -> Limits:
        watermark_blocks = int(self.buffer * view.total_blocks)
        return replace(super().limits(view), watermark_blocks=watermark_blocks)

    @staticmethod
    def _job(r: RequestState, emitted_tokens: int) -> PrefillJob:
        """What Algorithm 2 knows of `r`."""
        return PrefillJob(-math.inf if emitted_tokens else due_s(r), r.seq, r.target_tokens, r)

    def s_per_token(self, view: View) -> float:
        """1 / c, scaled by `caution`."""
        tokens = self.max_num_batched_tokens
        return self.caution * view.predict.step_s(0, 0, ((0, tokens),)) / tokens

    def queue(self, view: View) -> Queue:
        return InTimeQueue(
            view, lambda r: self._job(r, r.emitted_tokens), lambda: self.s_per_token(view)
        )

    def queue_key(self, r: RequestState, view: View) -> Key:
        state: PrismState = view.policy_state
        now = view.now_s, view.n_waiting
        if state.planned_at != now or r.seq not in state.keys:
            state.planned_at = now
            self._plan(r, view, state)
        return state.keys[r.seq]

    def _plan(self, r: RequestState, view: View, state: PrismState) -> None:
        """Keys of all waiting requests: begun, in time, others."""
        jobs = []
        for w in {*view.waiting(), r}:
            job = state.jobs.get(w.seq)
            if job is None or job.tokens != w.target_tokens or w.recomputes:
                job = self._job(w, view.emitted_tokens(w))
            jobs.append(job)
        jobs.sort()
        state.jobs = {job.seq: job for job in jobs}
        begin, end = bisect_right(jobs, (-math.inf, math.inf)), bisect_left(jobs, (math.inf,))
        rate = self.s_per_token(view)
        tokens = view.remaining_prefill_tokens + sum(job.tokens for job in jobs[:begin])
        on_time = in_time(jobs[begin:end], view.now_s + rate * tokens, rate)
        state.keys = {job.seq: (2, job.due_s) for job in jobs[begin:end]}
        state.keys.update({job.seq: (1, job.due_s) for job in on_time})
        state.keys.update({job.seq: (1, job.due_s) for job in jobs[end:]})
        state.keys.update({job.seq: (0, job.seq) for job in jobs[:begin]})

    def victim_key(self, r: RequestState, view: View) -> Key:
        if self.victim == "newest":
            return -r.arrival_s
        pace: SpeedEstimate = view.policy_state.pace
        pace.look(view, self.max_num_batched_tokens)
        return keep_key(r, view, pace, self.nearly_done_tokens)

    @property
    def drop_rule(self) -> str:
        return "" if self.late == "wait" else super().drop_rule

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        return None if self.late == "wait" else super().timeout(r, view)
