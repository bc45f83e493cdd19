"""FastServe: preemptive multi-level feedback queue with skip-join.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models"
(arXiv 2305.05920), §4.1 (skip-join MLFQ) and §4.2 (KV of preempted requests in host memory).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

from ..core.counters import OVERTAKES
from ..core.decisions import Limits, NextQueue, PreemptionMode
from ..core.policy import Key, parameter
from ..core.state import RequestState
from ..core.view import View
from .vllm_v0 import VllmV0

PREEMPTIONS_FOR_SHORTER = "preemptions_for_shorter"


@dataclass
class _State:
    preferred: set[int] = field(default_factory=set)  # ids for which others were preempted
    prefill_steps: dict[int, float] = field(default_factory=dict)  # by prompt tokens


@dataclass(frozen=True)
class FastServe(VllmV0):
    """FastServe: preemptive multi-level feedback queue with skip-join.

    A request's queue follows from the service that it has had, in decode iterations: the first
    queue is for up to `quantum_steps`, every further one for `ratio` times as many. A prompt counts
    for as many iterations as its prefill is predicted to take, so that a long one skips the first
    queues (skip-join). If the best waiting request finds no room, running requests of lower queues
    are preempted: swapped to host memory, or recomputed if that is full.

    Ours: a request moves up one queue for every `promote_s` seconds of waiting, where FastServe
    promotes to the first queue after a threshold; a preempted request returns when there is room,
    but preempts none; the last running request is not preempted; blocks move when a request is
    preempted, not ahead of it.
    """

    dynamic_limits: ClassVar[bool] = True

    quantum_steps: float = parameter(16.0, 1.0, 4096.0, log=True)
    ratio: float = parameter(2.0, 1.1, 16.0)
    promote_s: float = parameter(30.0, 0.01, 1e6, log=True)

    def new_state(self) -> _State:
        return _State()

    def mechanisms(self) -> dict[str, str]:
        return {
            PREEMPTIONS_FOR_SHORTER: "requests for which others of lower queues were preempted",
            OVERTAKES: "requests that began before older ones",
        }

    def level(self, r: RequestState, view: View) -> int:
        """Number of the queue of `r`; the first is 0."""
        prompt, prefill_steps = r.prompt_tokens, view.policy_state.prefill_steps
        if prompt not in prefill_steps:  # read for all waiting requests when the batch changes
            step_s = view.predict.step_s(1, prompt, ())
            first_s = view.predict.step_s(0, 0, ((0, prompt),))
            prefill_steps[prompt] = first_s / step_s if step_s > 0 else 1.0
        steps = prefill_steps[prompt] + view.emitted_tokens(r)
        if steps <= self.quantum_steps:
            return 0
        return math.ceil(math.log(steps / self.quantum_steps, self.ratio) - 1e-9)

    def place(self, r: RequestState, view: View) -> float:
        """Place in the order of service; the smallest goes first."""
        return r.arrival_s + self.promote_s * self.level(r, view)

    def queue_key(self, r: RequestState, view: View) -> Key:
        return self.place(r, view)

    def victim_key(self, r: RequestState, view: View) -> Key:
        return -self.place(r, view)

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        fits = view.held_blocks(r) <= view.host_free_blocks
        return PreemptionMode.SWAP if fits else PreemptionMode.RECOMPUTE

    def next_queue(self, view: View) -> NextQueue:
        swapped = view.admissible(NextQueue.SWAPPED) if view.n_swapped else []
        if not swapped:
            return NextQueue.WAITING
        waiting = view.admissible(NextQueue.WAITING) if view.n_waiting else []
        if waiting and self.place(waiting[0], view) < self.place(swapped[0], view):
            return NextQueue.WAITING
        return NextQueue.SWAPPED

    def limits(self, view: View) -> Limits:
        limits = super().limits(view)
        if not (view.n_waiting and view.n_running):
            return limits
        first = min(view.waiting(), key=lambda r: (self.place(r, view), r.seq))
        free = view.free_blocks
        lacking = -(-first.target_tokens // view.block_size) + limits.watermark_blocks - free
        full = view.n_running >= self.max_num_seqs
        if lacking <= 0 and not full:
            return limits
        victims = self._victims(first, max(1, lacking), view)
        if not victims:
            return limits
        if first.id not in view.policy_state.preferred:
            view.policy_state.preferred.add(first.id)
            view.counters.add(PREEMPTIONS_FOR_SHORTER, first)
        headroom = free + sum(map(view.held_blocks, victims[:-1])) + 1
        return dataclasses.replace(limits, decode_headroom_blocks=headroom)

    def _victims(self, first: RequestState, lacking: int, view: View) -> list[RequestState]:
        """Running requests of lower queues, the lowest first, that free so many blocks; empty if
        all of them do not.
        """
        place = self.place(first, view)
        below = [r for r in view.running() if self.place(r, view) > place]
        victims: list[RequestState] = []
        for r in sorted(below, key=lambda r: (-self.place(r, view), -r.seq)):
            victims.append(r)
            lacking -= view.held_blocks(r)
            if lacking <= 0:
                return victims
        return []
