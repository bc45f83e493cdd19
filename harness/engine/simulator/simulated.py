"""The iteration loop on a virtual clock: a step-time model says how long an iteration takes.

Spans of decode steps in which nothing can change are leapt over in one go. A leap ends where
stepping would next do something else: an arrival, a finish, a request that leaves, the horizon,
or KV blocks running out. The result equals that of stepping; the tests' reference
(`tests/reference/plain.py`) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ....predictors.profiles.step_time_table import TableStepTime
from ....predictors.roofline import (
    LengthAwareStepTime,
    LinearStepTime,
    growing_steps_within,
    has_decode_line,
    wants_lengths,
)
from ....predictors.step_time import StepTime
from ...core.compiled import mypyc_attr
from ...core.device import Away, SplitStepTime, StageDevice, free_after, occupy
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.module_moves import Module
from ...core.policy import Policy
from ...core.predictions import Learner
from ...core.view import Predictions
from ..loop.batch_state import INF
from ..loop.engine_instance import EngineStuckError, Movable
from ..loop.loop import Loop
from ..loop.measures import Measures

_ROUNDING: Final = 1 - 1e-9  # a sum of many steps, against the same steps in a row


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedInstance(Loop):
    """One instance with continuous batching in simulated time."""

    __slots__ = (
        "_alone",
        "_aware",
        "_away",
        "_base_s",
        "_began_s",
        "_direct",
        "_line_begin",
        "_line_end",
        "_line_seqs",
        "_line_tail_s",
        "_line_unsplit",
        "_linear",
        "_plain",
        "_span_of",
        "_step_of",
        "_tail_entered",
        "_tail_s",
        "_tail_seqs",
        "_token_s",
        "_within_of",
        "learner",
        "stages",
        "step_time",
    )

    def __init__(
        self,
        policy: Policy,
        kv_manager: KVBlocks,
        predictions: Predictions,
        step_time: StepTime,
        stages: tuple[StageDevice, ...],
        measures: Measures,
        index: int = 0,
        *,
        alone: bool = True,
    ) -> None:
        super().__init__(policy, kv_manager, predictions, measures, index)
        self.stages = stages
        self.learner: Learner | None = None
        self._alone = alone  # no other instance computes on these devices
        self._began_s = 0.0  # when the last iteration began
        self._away: Away | None = None
        self.compute_by(step_time)

    def compute_by(self, step_time: StepTime) -> None:
        """Its steps take so long from now on."""
        self._away = None
        self.step_time = step_time
        self._step_of = step_time.step_s
        self._span_of = step_time.span_s
        self._within_of = step_time.steps_within
        # Steps of as many requests grow by the same time each: their spans are worked out here.
        self._linear: TableStepTime | LinearStepTime | None = (
            step_time if has_decode_line(step_time) else None
        )
        # Tables are asked for steps without a detour: a direct call in the compiled core.
        self._direct = step_time if isinstance(step_time, TableStepTime) else None
        self._plain = self._linear is not None and type(self) is SimulatedInstance
        self._line_seqs = -1  # that the line is for, from `_line_begin` to `_line_end` KV tokens
        self._base_s = self._token_s = self._line_begin = self._line_end = 0.0
        self._line_unsplit = False
        self._line_tail_s = self._tail_s = 0.0
        self._tail_entered = self._tail_seqs = 0  # that it is for
        self._aware: TableStepTime | LengthAwareStepTime | None = None
        if wants_lengths(step_time):
            self._aware, self._direct = step_time, None
            self.begins = sorted(r.tick0 - r.kv_tokens for r in self.decoding)
            aware = _WithLengths(self, step_time)
            self._step_of, self._span_of = aware.step_s, aware.span_s
            self._within_of = aware.steps_within

    def bring_home(self, step_time: StepTime, pause_s: float) -> None:
        self.compute_by(step_time)
        self.stages[0].owed_s += pause_s

    def offload(
        self,
        module: Module,
        units: int,
        helper: Movable,
        step_time: SplitStepTime,
        pause_s: float,
    ) -> None:
        self.compute_by(step_time)
        self._away = Away(step_time, helper.stages[0])
        self.stages[0].owed_s += pause_s

    def ready_s(self) -> float:
        if self.decoding or self.prefilling or self.waiting.live or self.swapped or self.stalled:
            return self.now_s
        return max(self.now_s, self.inbox[0].visible_s) if self.inbox else INF

    def next_lookup_s(self) -> float:
        ready_s = self.ready_s()
        if self.blocked_till_s <= ready_s:
            return max(ready_s, self.decode_only_until_s())
        arrival_s = self.inbox[0].visible_s if self.inbox else INF
        return max(ready_s, min(self.blocked_till_s, arrival_s))

    def decode_only_until_s(self) -> float:
        """Lower bound of the next arrival, end or change of phase here, apart from requests sent
        before then. An iteration in progress counts as over: until then all steps only decode.
        Below any time if one that has arrived may be released at once.
        """
        return self.bounds()[1]

    def owes(self) -> bool:
        """Whether its next decode step is longer by what its GPUs computed for other instances."""
        if self._alone or self.inbox or not self.decoding:
            return False
        stages = self.stages
        if len(stages) == 1:
            return stages[0].owed_s != 0
        return any(stage.owed_s for stage in stages)

    def has_free(self, blocks: int, time_s: float) -> bool:
        """Whether so many blocks are free at `time_s`, `decode_only_until_s` at the latest."""
        free, seqs = self.kv_manager.free, len(self.decoding)
        if blocks > free:
            return False
        if time_s <= self.now_s or not seqs:
            return True
        steps = self.ends[0][0] - self.tick
        at_most = seqs * (steps // self.kv_manager.block_size + 1)
        return blocks <= free - at_most or blocks <= self.ahead(time_s)[0]

    def ahead(self, time_s: float) -> tuple[int, int]:
        """Free blocks and KV tokens of decoding requests at `time_s`, `decode_only_until_s` at the
        latest.
        """
        seqs = len(self.decoding)
        if time_s <= self.now_s or not seqs:
            return self.kv_manager.free, self.kv_sum
        kv_sum, within_s, steps = self.kv_sum, time_s - self.now_s, 0
        if self._linear is not None:
            first_s, growth_s = self._first_s(seqs), self._token_s * seqs
            if growth_s >= 0:
                steps = growing_steps_within(first_s, growth_s, within_s)
        if not steps or kv_sum + (steps - 1) * seqs >= self._line_end:
            steps = self._within_of(seqs, kv_sum, within_s)
        return self.kv_manager.free - self._growth(steps), kv_sum + steps * seqs

    def earliest_release_s(self) -> float:
        """Lower bound of the next release or report of a request; see `Instance`."""
        return self.bounds()[0]

    def bounds(self) -> tuple[float, float, int]:
        """`earliest_release_s`, `decode_only_until_s` and `n_requests`: they depend on the same
        state.
        """
        now_s, inbox = self.now_s, self.inbox
        tells = self.reports_all_ends or self.prefill_only or self.reports_empty_queue
        blocked = self.blocked_till_s > now_s
        seqs = len(self.decoding)
        busy = len(self.prefilling) + self.waiting.live
        if self.swapped or self.stalled:
            busy += len(self.swapped) + len(self.stalled)
        n_requests = seqs + busy
        earliest_s, decode_only_s = INF, now_s
        if inbox:
            n_requests += len(inbox)
            earliest_s, decode_only_s = self.bounds_with(inbox[0].visible_s, INF, seqs + busy)
            if earliest_s <= now_s:
                return now_s, decode_only_s, n_requests
        elif busy and tells and not blocked:
            return now_s, now_s, n_requests
        if self.timeouts:
            earliest_s = min(earliest_s, max(now_s, self.next_timeout_s()))
        if blocked and self.blocked_till_s < earliest_s:
            earliest_s = self.blocked_till_s
        if busy:
            return now_s if tells and not blocked else earliest_s, decode_only_s, n_requests
        if not seqs:
            return earliest_s, decode_only_s if inbox else INF, n_requests
        # Only decodes.
        ends = self.reports_all_ends and not blocked
        # A learner sees single iterations; reading the state more often would add some.
        predictable = not (
            inbox
            or self.pending_free
            or self.learner is not None
            or (not self._alone and self.owes())
        )
        if not (ends or predictable):
            return earliest_s, decode_only_s, n_requests
        steps, kv_sum = self.ends[0][0] - self.tick, self.kv_sum
        room = self.kv_manager.free - self._lim.decode_headroom_blocks
        lasts = seqs * (steps // (self._mask + 1) + 1) <= room or self._growth(steps) <= room
        first_s = -1.0 if self._linear is None else self._first_s(seqs)
        if kv_sum + (steps - 1) * seqs < self._line_end:
            growth_s = self._token_s * seqs
            span_s = steps * first_s + growth_s * (steps * (steps - 1) * 0.5)
            but_last_s = span_s - first_s - growth_s * (steps - 1)
        else:
            span_s = self._span_of(seqs, kv_sum, steps)
            but_last_s = self._span_of(seqs, kv_sum, steps - 1) if steps > 1 else 0.0
        if predictable and steps > 1 and (lasts or self._growth(steps - 1) <= room):
            decode_only_s = now_s + but_last_s * _ROUNDING
        if ends:
            if not lasts:  # preempted requests lengthen steps no more
                return now_s, decode_only_s, n_requests
            ends_s = now_s + span_s * _ROUNDING
            if ends_s < earliest_s:
                earliest_s = ends_s
        return earliest_s, decode_only_s, n_requests

    def bounds_with(
        self, visible_s: float, earliest_release_s: float, others: int
    ) -> tuple[float, float]:
        """The first two of `bounds` with a request on its way that is seen at `visible_s`, the
        first; without it there are `others`, and `earliest_release_s`.
        """
        now_s = self.now_s
        seen_s = visible_s if visible_s > now_s else now_s
        answers = self._calls_admit or self._calls_timeout
        if answers or self.blocked_till_s > now_s:
            decode_only_s = -1.0
        else:
            decode_only_s = now_s if others else seen_s
        if seen_s < earliest_release_s and (
            self.reports_all_ends or self.prefill_only or self.reports_empty_queue or answers
        ):
            earliest_release_s = seen_s
        return earliest_release_s, decode_only_s

    def tail_s(self) -> float:
        """Seconds that decode steps take longer because requests are unequal, until one joins or
        leaves.
        """
        begins = self.begins
        if not begins or self._aware is None:
            return 0.0
        seqs = len(begins)
        if self._tail_entered != self._entered or self._tail_seqs != seqs:
            self._tail_entered, self._tail_seqs = self._entered, seqs
            self._tail_s = self._aware.tail_s(begins, self.tick * seqs - self.kv_sum)
        return self._tail_s

    def _first_s(self, seqs: int) -> float:
        """Seconds of the next decode step of `seqs` requests, where steps are linear."""
        kv_sum = self.kv_sum
        if seqs != self._line_seqs or not self._line_begin <= kv_sum < self._line_end:
            assert self._linear is not None
            self._line_seqs = seqs
            line = self._linear.decode_line(seqs, kv_sum)
            self._base_s, self._token_s, self._line_begin, self._line_end, unsplit = line
            self._line_unsplit = unsplit
            self._line_tail_s = 0.0
        if self._line_unsplit:
            self._line_tail_s = self.tail_s()
        return self._base_s + self._token_s * kv_sum + self._line_tail_s

    def run(self, horizon_s: float, stop_on_release: bool) -> None:
        self.blocked_till_s = 0.0
        measures, inbox, timeouts = self.measures, self.inbox, self.timeouts
        outbox, decoding, kv_manager = self.outbox, self.decoding, self.kv_manager
        ahead, may_start_at_timeout = self._lim.async_scheduling, self._may_start_at_timeout
        while True:
            if inbox and inbox[0].visible_s <= self.now_s:
                self.deliver(self._began_s if ahead else self.now_s)
            if ahead and not decoding and self.idle:
                # Nothing was scheduled ahead: ended requests are gone before the next iteration;
                # all arrivals until now enter together. Past the horizon they are not known,
                # nor while an end must be reported: an answer may cause the next request.
                self.free_finished()
                if self.now_s < horizon_s and not (stop_on_release and outbox):
                    self.deliver(self.now_s)
            if timeouts and timeouts[0][0] <= self.now_s and not may_start_at_timeout:
                self.expire_timeouts()
            if self.now_s >= horizon_s or (stop_on_release and outbox):
                return
            if decoding:
                if self._plain and not self.prefilling and self._decode(horizon_s):
                    continue
            elif not (self.prefilling or self.waiting.live or self.swapped or self.stalled):
                if not inbox or inbox[0].visible_s >= horizon_s:
                    return
                measures.idle(self.now_s, inbox[0].visible_s)
                self.now_s = inbox[0].visible_s
                continue
            runs = self.schedule()
            if may_start_at_timeout and timeouts and timeouts[0][0] <= self.now_s:
                self.expire_timeouts()
            if not runs:
                if self.idle:
                    continue
                if self.pending_free:
                    self.free_finished()
                elif not self._pass_time(horizon_s):
                    return
                self._began_s = self.now_s
                continue
            chunks, seqs = self.chunks, self.decode_seqs
            if self._direct is not None:
                duration_s = self._direct.step_s(seqs, self.decode_kv_tokens, chunks)
            elif self._away is None:
                duration_s = self._step_of(seqs, self.decode_kv_tokens, chunks)
            else:
                duration_s = self._away.step_s(seqs, self.decode_kv_tokens, chunks)
            if self.learner is not None:
                self.learner.learn(seqs, self.decode_kv_tokens, chunks, duration_s)
            if self.swap_s or (chunks and self._lim.store_s_per_token):
                duration_s += self._lim.exposed_swap_s(duration_s, self.swap_s, chunks)
                self.swap_s = 0.0
            self._began_s = began_s = self.now_s
            if self._alone:
                self.now_s = began_s + duration_s
            else:
                self.now_s = occupy(self.stages, self.now_s, duration_s)
                measures.waited_s += self.now_s - self._began_s - duration_s
            measures.steps += 1
            used = kv_manager.total - kv_manager.free
            measures.kv_block_s += used * duration_s
            if used > measures.kv_peak:
                measures.kv_peak = used
            if not (self.complete() or chunks or self._must_refill):
                self._leap(horizon_s, duration_s)
            if self.now_s >= measures.next_sample_s:
                self._sample()

    def _sample(self) -> None:
        measures, kv_manager = self.measures, self.kv_manager
        running = len(self.decoding) + len(self.prefilling)
        waiting = self.waiting.live + len(self.swapped) + len(self.stalled)
        kv_blocks = kv_manager.total - kv_manager.free - kv_manager.activation_blocks
        tokens = measures.prefill_tokens - self.prefill_pending + measures.decode_tokens
        tokens += self.tick * len(self.decoding) - self._ticks0
        measures.sample((self.now_s, waiting, running, kv_blocks), tokens)

    def _pass_time(self, horizon_s: float) -> bool:
        """Nothing can run now: let the clock go on. False if the horizon comes first."""
        self._must_refill = True
        if self.swap_s:
            self.now_s += self.swap_s
            self.swap_s = 0.0
            return True
        arrival_s = self.inbox[0].visible_s if self.inbox else INF
        next_s = min(arrival_s, self.next_timeout_s(), self.overtaken_s)
        if next_s >= horizon_s:
            if horizon_s == INF:
                raise EngineStuckError(
                    f"instance {self.index} is stuck at {self.now_s:.3f} s: "
                    f"{self.waiting.live} requests wait, {self.kv_manager.free} of "
                    f"{self.kv_manager.total} KV blocks are free and nothing runs; the policy "
                    f"{type(self.policy).__name__} admits none"
                )
            self.blocked_till_s = next_s
            self._wait(horizon_s)
            return False
        self._wait(next_s)
        return True

    def _wait(self, until_s: float) -> None:
        """Its requests wait, and its GPUs compute nothing for them."""
        self.measures.waited_s += max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)

    def _decode(self, horizon_s: float) -> bool:
        """If nothing is to be decided before the next decode step: that step, as `schedule` and
        `complete` would have it, and those like it, as `_leap` would. Else False.
        """
        if self.pending_free or self.swap_s or self.now_s >= self.overtaken_s:
            return False
        if self.timeouts and self.timeouts[0][0] <= self.now_s:
            return False
        if self._must_refill:
            if self.waiting.live or self.swapped or self.stalled:
                return False
            if self._dynamic_limits:
                self._lim = self._limits()
        kv_manager, measures, ends = self.kv_manager, self.measures, self.ends
        headroom_blocks = self._lim.decode_headroom_blocks
        seqs, kv_sum, tick = len(self.decoding), self.kv_sum, self.tick
        free = kv_manager.free - self.residues[tick & self._mask]
        if free < headroom_blocks:
            return False
        self._must_refill = False
        if self.chunks:
            self.chunks = []
        step_s = self._first_s(seqs)
        if self.learner is not None:
            self.learner.learn(seqs, kv_sum, (), step_s)
        self._began_s = began_s = self.now_s
        alone = self._alone
        if alone:
            now_s = began_s + step_s
        else:
            now_s = occupy(self.stages, began_s, step_s)
            measures.waited_s += now_s - began_s - step_s
        self.tick = tick = tick + 1
        self.kv_sum = kv_sum = kv_sum + seqs
        used = kv_manager.total - free
        kv_block_s = measures.kv_block_s + used * step_s
        measures.decode_step(now_s, seqs)
        until_s = measures.next_sample_s
        if horizon_s < until_s:
            until_s = horizon_s
        if self.overtaken_s < until_s:
            until_s = self.overtaken_s
        if self.inbox and self.inbox[0].visible_s < until_s:
            until_s = self.inbox[0].visible_s
        if self.timeouts and self.timeouts[0][0] < until_s:
            until_s = self.timeouts[0][0]
        steps = ends[0][0] - tick if now_s < until_s else 0
        if steps > 0:
            token_s = self._token_s
            if kv_sum < self._line_end:
                first_s = self._base_s + token_s * kv_sum + self._line_tail_s
            else:
                first_s, token_s = self._first_s(seqs), self._token_s
            growth_s = token_s * seqs
            even = kv_sum + (steps - 1) * seqs < self._line_end and growth_s >= 0
            if even:
                span_s = steps * first_s + growth_s * (steps * (steps - 1) * 0.5)
            else:
                span_s = self._span_of(seqs, kv_sum, steps)
            if now_s + span_s >= until_s:
                if even:
                    within = growing_steps_within(first_s, growth_s, until_s - now_s)
                else:
                    within = self._within_of(seqs, kv_sum, until_s - now_s)
                if within < steps:
                    steps = within
                    if even:
                        span_s = steps * first_s + growth_s * (steps * (steps - 1) * 0.5)
                    elif steps > 0:
                        span_s = self._span_of(seqs, kv_sum, steps)
            blocks = self._growth(steps)
            if blocks > free - headroom_blocks:
                kv_manager.free = free
                steps = self._steps_before_pressure(steps)
                blocks = self._growth(steps)
                if steps > 0:
                    span_s = self._span_of(seqs, kv_sum, steps)
            if steps > 0:
                now_s += span_s
                self.tick = tick = tick + steps
                self.kv_sum = kv_sum + steps * seqs
                free -= blocks
                measures.decode_span(now_s, seqs, steps, span_s, step_s)
                kv_block_s += (used + 0.5 * blocks) * span_s
                used += blocks
                if not alone:
                    before_s = self._span_of(seqs, kv_sum, steps - 1) if steps > 1 else 0.0
                    free_after(self.stages, now_s, span_s - before_s)
        self.now_s = now_s
        kv_manager.free = free
        if kv_manager.idle_blocks > free:
            kv_manager.evict()
        measures.steps += steps + 1
        measures.kv_block_s = kv_block_s
        if used > measures.kv_peak:
            measures.kv_peak = used
        if ends[0][0] <= tick:
            self.finish_due()
        if now_s >= measures.next_sample_s:
            self._sample()
        return True

    def _leap(self, horizon_s: float, step_s: float) -> None:
        """Go over decode steps like the last one, which took `step_s`, to the next moment at which
        anything else could happen.
        """
        seqs, kv_sum, span_of = self.decode_seqs, self.kv_sum, self._span_of
        kv_manager, measures = self.kv_manager, self.measures
        steps = self.ends[0][0] - self.tick
        until_s = min(horizon_s, measures.next_sample_s, self.overtaken_s)
        if self.inbox and self.inbox[0].visible_s < until_s:
            until_s = self.inbox[0].visible_s
        if self.timeouts and self.timeouts[0][0] < until_s:
            until_s = self.timeouts[0][0]
        # Steps seldom become shorter: this tells the usual end before anything is summed up.
        span_s = steps * step_s
        if self.now_s + span_s < until_s:
            span_s = span_of(seqs, kv_sum, steps)
        if self.now_s + span_s >= until_s:
            within = self._within_of(seqs, kv_sum, until_s - self.now_s)
            if within < steps:
                steps = within
                if steps <= 0:
                    return
            span_s = span_of(seqs, kv_sum, steps)
        blocks = self._growth(steps)
        if blocks > kv_manager.free - self._lim.decode_headroom_blocks:
            steps = self._steps_before_pressure(steps)
            if steps <= 0:
                return
            blocks = self._growth(steps)
            span_s = span_of(seqs, kv_sum, steps)
        if self._away is not None:
            self._away.span(seqs, kv_sum, steps)
        self.now_s += span_s
        self.tick += steps
        self.kv_sum = kv_sum + steps * seqs
        used = kv_manager.total - kv_manager.free
        kv_manager.free -= blocks
        if kv_manager.idle_blocks > kv_manager.free:
            kv_manager.evict()
        measures.decode_span(self.now_s, seqs, steps, span_s, step_s)
        measures.steps += steps
        measures.kv_block_s += (used + 0.5 * blocks) * span_s
        if used + blocks > measures.kv_peak:
            measures.kv_peak = used + blocks
        if not self._alone:
            last_s = span_s - span_of(seqs, kv_sum, steps - 1) if steps > 1 else span_s
            free_after(self.stages, self.now_s, last_s)
        if self.ends[0][0] <= self.tick:
            self.finish_due()

    def _growth(self, steps: int) -> int:
        """Blocks that `steps` decode steps take."""
        mask, residues = self._mask, self.residues
        rest = steps & mask
        blocks = (steps - rest) // (mask + 1) * len(self.decoding)
        if rest:
            begin = self.tick & mask
            end = begin + rest
            blocks += sum(residues[begin:end])
            if end > mask + 1:
                blocks += sum(residues[: end - mask - 1])
        return blocks

    def _steps_before_pressure(self, max_steps: int) -> int:
        """Number of steps, up to `max_steps`, that the free blocks suffice for."""
        room = self.kv_manager.free - self._lim.decode_headroom_blocks
        bs = self.kv_manager.block_size
        steps = max(0, min(max_steps, (room // max(1, len(self.decoding)) - 1) * bs))
        blocks = self._growth(steps)
        while steps < max_steps:
            blocks += self.residues[(self.tick + steps) & (bs - 1)]
            if blocks > room:
                break
            steps += 1
        return steps


class _WithLengths:
    """A step-time model that is told how unequal the decoding requests of an instance are."""

    def __init__(self, instance: SimulatedInstance, step_time: LengthAwareStepTime) -> None:
        self._instance = instance
        self._step_time: TableStepTime | LengthAwareStepTime = step_time

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        tail_s = self._instance.tail_s() if decode_seqs else 0.0
        return self._step_time.step_s(decode_seqs, decode_kv_tokens, chunks, tail_s)

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        return self._step_time.span_s(decode_seqs, decode_kv_tokens, steps, self._instance.tail_s())

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        return self._step_time.steps_within(
            decode_seqs, decode_kv_tokens, duration_s, self._instance.tail_s()
        )
