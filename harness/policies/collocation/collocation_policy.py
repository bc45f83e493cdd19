"""SLO-aware memory for a language model and an embedder on one GPU.

Source: "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services" (see docs/papers.md),
Algorithms 1 (admission), 2 (quota) and 3 (eviction), §3.1 (speculative reservation). A proposal
without published results; docs/papers.md lists its errata and what each changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import ClassVar

from ....predictors.load_forecaster import FORECASTERS, LoadForecaster
from ....workloads.errors import SloBenchError
from ...core.collocated_policy import PASSES_CUT, Beside, Collocated, EmbedView
from ...core.counters import RECOMPUTES, REJECTIONS
from ...core.decisions import Admission, Limits, ReleaseReason, Timeout
from ...core.policy import Key, parameter
from ...core.state import RequestState
from ...core.view import View
from ..edf import due_s
from ..shared.timeouts import OVERDUE
from ..vllm import Vllm

INF = math.inf
_MOST_LIMITS = 1024  # remembered


class Decision(Enum):
    """Result of Algorithm 1 for one request."""

    ADMIT = "admit"
    ADMIT_WITH_PREEMPTION = "admit with preemption"
    DEFER = "defer"
    REJECT = "reject"


@dataclass
class Learnt(Beside):
    """What the policy knows on one instance."""

    embeds: LoadForecaster = field(default_factory=lambda: LoadForecaster(30.0))
    urgent: LoadForecaster = field(default_factory=lambda: LoadForecaster(30.0))
    total_blocks: dict[RequestState, int] = field(default_factory=dict)  # predicted, at the end
    most_blocks: int = 0  # of all that were ever predicted
    # Of a pass with one request: blocks, pass_s. `passing`: the requests of the latest pass.
    pass_costs: dict[RequestState, tuple[int, float]] = field(default_factory=dict)
    passing: Sequence[RequestState] = ()
    last_due_s: dict[RequestState, float] = field(default_factory=dict)  # of the running
    entry_due_s: dict[RequestState, float] = field(default_factory=dict)  # of the waiting
    # Until when the slack of a running request is enough, if no step takes longer than that.
    calm_until_s: dict[RequestState, float] = field(default_factory=dict)
    calm_step_s: float = 0.0
    step: tuple[float, float] = (-1.0, 0.0)  # when it was predicted, seconds of a decode step
    llm_quota_blocks: float = -1.0  # not set yet
    adjusted_s: float = 0.0
    preempting: bool = False  # for urgent requests, so that they are spared
    limits: dict[tuple[int, int], Limits] = field(default_factory=dict)  # by the blocks kept free
    deferred: set[int] = field(default_factory=set)  # ids of requests that were deferred
    preempted_for: set[int] = field(default_factory=set)  # ids of urgent requests


@dataclass(frozen=True)
class Collocation(Collocated, Vllm):
    """SLO-aware memory for a language model and an embedder on one GPU.

    Iterations are vLLM's; one policy decides on the memory of both models.

    Admission (Alg. 1): a request enters if what all in the batch will need by their predicted ends,
    what it needs itself, the embedder's forecast and a margin fit together. Else a high-priority
    one enters if enough low-priority ones can be preempted; else it waits (at the head of the
    queue) and is rejected once its deadline is `defer_threshold_s` away. With an empty batch the
    next request enters always, to avoid a deadlock. Quota (Alg. 2): the memory is split by the
    urgency of both queues, within minimum shares, at most `change_per_s` of it a second. Decodes
    that would grow into the embedder's share make room by eviction. The embedder's share is never
    below its next request. Eviction (Alg. 3): the cheapest request is evicted and recomputed. Cost
    in seconds = priority x slack_weight / (slack + epsilon) + recompute_weight x time to prefill
    prompt and answer. Requests that will end within `completion_tokens` are spared, unless memory
    is exhausted.

    Deviations, each with the letter as an option: `counts` reservations, not the KV held now;
    `slack` is clamped at 0; recomputation includes the prompt (`recompute`); the urgency of a late
    request is capped at `hopeless_s` and begins where a critical one's ends (`lateness`); passes of
    the embedder run one after the other, so that the largest counts, not their sum (`forecast_as`).
    The printed memory formulas lack factors: `kv_scale` and `embed_scale` correct for them. Ours
    where the paper is silent: high priority first, then order of arrival; smooth_adjust is a bound
    on the rate of change; deadlines are what TTFT, TPOT, latency and deadline bounds imply.
    """

    dynamic_limits: ClassVar[bool] = True
    uses_predicted_lengths: ClassVar[bool] = True

    # Algorithm 1
    safety_ratio: float = parameter(0.1, 0.0, 0.9)
    defer_threshold_s: float = parameter(0.0, 0.0, 3600.0)
    counts: str = parameter("reserved", choices=("reserved", "current"))
    forecast: str = parameter("queue+arrivals", choices=("queue+arrivals", "queue", "none"))
    forecast_as: str = parameter("peak", choices=("peak", "sum"))
    forecaster: str = parameter("window", choices=tuple(FORECASTERS))
    horizon_s: float = parameter(1.0, 0.0, 60.0)  # of the arrival forecast
    window_s: float = parameter(
        30.0, 0.1, 3600.0, log=True
    )  # of rates; with `decay` a time constant
    speculative_share: float = parameter(0.05, 0.0, 0.9)  # most memory kept for high priority
    kv_scale: float = parameter(1.0, 0.001, 10.0, log=True)
    embed_scale: float = parameter(1.0, 0.001, 10.0, log=True)
    # Algorithm 2
    quota: str = parameter("dynamic", choices=("dynamic", "static"))
    min_llm_share: float = parameter(0.5, 0.0, 0.95)
    min_embed_share: float = parameter(0.01, 0.0, 0.5)
    default_llm_share: float = parameter(0.9, 0.0, 1.0)
    change_per_s: float = parameter(0.2, 0.001, 100.0, log=True)  # of the memory
    period_s: float = parameter(0.5, 0.0, 60.0)
    violation_weight: float = parameter(1.0, 0.0, 1000.0)  # per second late
    critical_weight: float = parameter(1.0, 0.0, 1000.0)  # at slack 0; over (slack + 1 s)
    critical_s: float = parameter(1.0, 0.0, 3600.0)
    hopeless_s: float = parameter(10.0, 0.0, 3600.0)
    lateness: str = parameter("capped", choices=("capped", "letter"))
    # Algorithm 3
    completion_tokens: int = parameter(16, 0, 8192)
    high_priority_weight: float = parameter(4.0, 1.0, 1000.0)
    slack_weight: float = parameter(1.0, 0.0, 1000.0)  # s²
    epsilon_s: float = parameter(0.1, 0.0001, 60.0)
    recompute_weight: float = parameter(1.0, 0.0, 1000.0)
    slack: str = parameter("clamped", choices=("clamped", "letter"))
    recompute: str = parameter("sequence", choices=("sequence", "answer"))

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_llm_share + self.min_embed_share
        if least > 1:
            raise SloBenchError(
                f"Collocation.min_llm_share + min_embed_share must be at most 1 but are {least:g}"
            )

    def new_state(self) -> Learnt:
        kind, window_s = FORECASTERS[self.forecaster], self.window_s
        return Learnt(embeds=kind(window_s), urgent=kind(window_s))

    def mechanisms(self) -> dict[str, str]:
        descriptions = {
            "deferrals": "requests that Algorithm 1 did not admit at once",
            "preemptions_for_priority": "urgent requests for which low-priority ones were evicted",
            REJECTIONS: "requests that were rejected, their deadline near",
        }
        if self.quota == "dynamic":
            descriptions["quota_changes"] = "control periods in which Algorithm 2 changed the quota"
        return descriptions | {
            PASSES_CUT: "passes of the embedder made smaller by its quota",
            RECOMPUTES: "requests that Algorithm 3 evicted",
        }

    # ---------------------------------------------------------------- what is predicted

    def _predicted_blocks(self, r: RequestState, view: View) -> int:
        answer = view.predict.output_tokens_p90(r)  # memory is reserved for it
        tokens = (r.prompt_tokens + answer) * self.kv_scale
        return math.ceil(tokens / view.block_size)

    def _remaining_tokens(self, r: RequestState, view: View) -> int:
        emitted = view.emitted_tokens(r)
        left = view.predict.output_tokens(r) - emitted
        # One that has outgrown what was expected is not about to end.
        return left if left > 0 else max(1, view.predict.output_tokens_p90(r) - emitted)

    def _step_s(self, view: View) -> float:
        """Predicted time of a decode step of the present batch."""
        state: Learnt = view.policy_state
        if state.step[0] != view.now_s:
            step_s = view.predict.step_s(view.n_decoding, view.decode_kv_tokens, ())
            state.step = view.now_s, step_s
        return state.step[1]

    def slack_s(self, r: RequestState, view: View) -> float:
        """Seconds to spare before the last token of a running request is due."""
        due = view.policy_state.last_due_s.get(r)
        if due is None:
            due = self._last_due_s(r, view)
        return float(due - view.now_s - self._step_s(view) * self._remaining_tokens(r, view))

    def _urgent_slacks_s(self, view: View, state: Learnt) -> list[float]:
        """`slack_s` of running requests but those for which it is known to be `critical_s` or
        more.
        """
        now_s, step_s, calm_until_s = view.now_s, self._step_s(view), state.calm_until_s
        if not state.calm_step_s / 4 < step_s <= state.calm_step_s:
            state.calm_step_s = 1.5 * step_s
            calm_until_s.clear()
        last_due_s, slacks_s, calm = state.last_due_s, [], calm_until_s.get
        for r in [r for r in view.running() if calm(r, 0.0) <= now_s]:
            due = last_due_s.get(r)
            fixed = due is not None
            if due is None:
                due = self._last_due_s(r, view)
            slacks_s.append(due - now_s - step_s * self._remaining_tokens(r, view))
            if fixed:
                left = max(view.predict.output_tokens(r), view.predict.output_tokens_p90(r))
                left = max(1, left - view.emitted_tokens(r))
                calm_until_s[r] = due - state.calm_step_s * left - self.critical_s - 1e-6
        return slacks_s

    def _last_due_s(self, r: RequestState, view: View) -> float:
        slo, tokens, first_s = r.slo, view.predict.output_tokens(r), r.first_token_s
        out = first_s == first_s
        if not out:  # it may come when it is due
            first_s = r.arrival_s + slo.ttft_s
        due = min(r.arrival_s + slo.e2e_s, slo.deadline_s)
        if slo.tpot_s < INF:
            due = min(due, first_s + slo.tpot_s * (tokens - 1))
        elif tokens <= 1:
            due = min(due, first_s)
        if out:
            view.policy_state.last_due_s[r] = due  # stands from now on
        return due

    def _entry_due_s(self, r: RequestState, view: View) -> float:
        """When a waiting request must begin to be in time."""
        if view.emitted_tokens(r):  # evicted: its first token is out
            return view.now_s + self.slack_s(r, view)
        entry_due_s: dict[RequestState, float] = view.policy_state.entry_due_s
        due = entry_due_s.get(r)
        if due is None:
            due = due_s(r)
            if due < INF:
                due -= view.predict.step_s(0, 0, ((0, r.target_tokens),))
            entry_due_s[r] = due
        return due

    def embed_forecast(self, view: View, window_s: float) -> float:
        """Alg. 1, lines 5 to 10: blocks that the embedder will need at once within `window_s`."""
        state: Learnt = view.policy_state
        embedder = state.embedder
        if embedder is None or self.forecast == "none":
            return 0.0
        now_s, arriving = view.now_s, 0.0
        waiting = embedder.waiting(now_s)
        if self.forecast == "queue+arrivals":
            arriving = state.embeds.blocks_within(now_s, min(self.horizon_s, window_s))
        if self.forecast_as == "sum":
            queued_blocks = self._due_blocks(waiting, embedder, now_s, window_s)
            return (queued_blocks + embedder.held_blocks + arriving) * self.embed_scale
        left, queued_blocks = self.batch_texts, 0
        if waiting:
            batch = self._by_texts(waiting)
            left = max(0, left - sum(r.num_inputs for r in batch))
            queued_blocks = embedder.blocks(batch)
        coming = queued_blocks + min(arriving, left * state.embeds.blocks_per_text())
        return max(embedder.held_blocks, coming * self.embed_scale)

    def _due_blocks(
        self, waiting: Sequence[RequestState], embedder: EmbedView, now_s: float, window_s: float
    ) -> int:
        """Blocks of the waiting requests whose pass is expected to start before the window ends
        (Alg. 1, lines 8 and 9); passes run one after the other, a request each.
        """
        state = embedder.policy_state
        start_s, blocks = max(0.0, embedder.now_s - now_s), 0
        for r in waiting:
            if start_s >= window_s:
                break
            needs, pass_s = self._pass_cost(r, embedder, state)
            blocks += needs
            start_s += pass_s
        return blocks

    def _pass_cost(self, r: RequestState, embedder: EmbedView, state: Learnt) -> tuple[int, float]:
        """Blocks and seconds of a pass with `r` alone."""
        pass_cost = state.pass_costs.get(r)
        if pass_cost is None:
            pass_cost = state.pass_costs[r] = embedder.blocks((r,)), embedder.pass_s((r,))
        return pass_cost

    # ---------------------------------------------------------------- Algorithm 1: admission

    def admit(self, r: RequestState, view: View) -> Admission:
        state: Learnt = view.policy_state
        self._forget_gone(view, state)
        blocks = state.total_blocks[r] = self._predicted_blocks(r, view)
        state.most_blocks = max(state.most_blocks, blocks)
        if r.priority > 0:
            state.urgent.saw(view.now_s, blocks)
        return Admission.ADMIT

    def _forget_gone(self, view: View, state: Learnt) -> None:
        """Forget requests that left without ending, which the engine does not report."""
        total_blocks = state.total_blocks
        if len(total_blocks) > 1024 and len(total_blocks) > 4 * (view.n_waiting + view.n_running):
            here = {*view.waiting(), *view.running()}
            state.total_blocks = {r: blocks for r, blocks in total_blocks.items() if r in here}
            state.entry_due_s = {r: due for r, due in state.entry_due_s.items() if r in here}
            state.calm_until_s.clear()

    def fits(self, r: RequestState, view: View) -> bool:
        """Whether a request fits (Alg. 1, line 15)."""
        return self._lacking_at_most(r, view) <= 0 or self._lacking(r, view) <= 0

    def _lacking_at_most(self, r: RequestState, view: View) -> float:
        """Upper bound of `_lacking`: all that run may be the largest, and take for ever."""
        state: Learnt = view.policy_state
        total, running_blocks = view.total_blocks, view.n_running * state.most_blocks
        if self.counts == "current" or running_blocks + state.total_blocks[r] > total:
            return INF
        return self._lacking_of(r, view, running_blocks, INF)

    def _lacking(self, r: RequestState, view: View) -> float:
        """Blocks that are missing for `r` to be admitted."""
        state: Learnt = view.policy_state
        if self.counts == "current":
            current = view.total_blocks - view.free_blocks
        else:
            current = sum(map(state.total_blocks.__getitem__, view.running()))
        window_s = 0.0 if state.embedder is None else self._completion_s(r, view)
        return self._lacking_of(r, view, current, window_s)

    def _lacking_of(self, r: RequestState, view: View, current: int, window_s: float) -> float:
        """Blocks that are missing for `r` beside `current`, if it ends within `window_s`."""
        state: Learnt = view.policy_state
        total = view.total_blocks
        required = state.total_blocks[r] + self.safety_ratio * total
        if state.embedder is not None:
            required += self.embed_forecast(view, window_s)
        if r.priority <= 0 and self.speculative_share and state.urgent.any:
            expected = state.urgent.blocks_within(view.now_s, self.horizon_s)
            required += min(expected, self.speculative_share * total)
        return current + required - total

    def _completion_s(self, r: RequestState, view: View) -> float:
        """How long `r` will take if it begins now (Alg. 1, line 6)."""
        predict = view.predict
        kv_tokens = view.decode_kv_tokens + r.target_tokens
        step_s = predict.step_s(view.n_decoding + 1, kv_tokens, ())
        return predict.step_s(0, 0, ((0, r.target_tokens),)) + step_s * predict.output_tokens(r)

    def decide(self, r: RequestState, view: View) -> Decision:
        """Decide on one request (Algorithm 1)."""
        lacking = self._lacking(r, view)
        if lacking <= 0 or not view.n_running:
            return Decision.ADMIT
        if r.priority > 0 and self._victims(view, lacking):
            return Decision.ADMIT_WITH_PREEMPTION
        if due_s(r) - view.now_s > self.defer_threshold_s:
            return Decision.DEFER
        return Decision.REJECT

    def queue_key(self, r: RequestState, view: View) -> Key:
        return (0.0 if r.priority > 0 else 1.0, r.arrival_s)

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        if not view.n_running or self.fits(r, view):
            return 0
        deferred = view.policy_state.deferred
        if r.id not in deferred:
            deferred.add(r.id)
            view.counters.add("deferrals", r)
        return view.total_blocks + 1  # not now

    @property
    def drop_rule(self) -> str:
        return OVERDUE

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        due = due_s(r)
        if due == INF:
            return None
        reject_s = due - self.defer_threshold_s
        if reject_s <= view.now_s and (not view.n_running or self.fits(r, view)):
            reject_s = due  # admitted by line 15, whatever the threshold
        return Timeout(reject_s, ReleaseReason.REJECT)

    def _victims(self, view: View, lacking: float) -> list[RequestState]:
        """Low-priority requests whose eviction frees the missing blocks; empty if they cannot.
        Counts their reserved or held blocks, as `counts` says.
        """
        state: Learnt = view.policy_state
        low = [r for r in view.running() if r.priority <= 0]
        worth = view.held_blocks if self.counts == "current" else state.total_blocks.__getitem__
        if sum(map(worth, low)) < lacking:
            return []
        victims: list[RequestState] = []
        low = [r for r in low if not self.protected(r, view)]
        for r in sorted(low, key=lambda r: self.eviction_cost_s(r, view)):
            victims.append(r)
            lacking -= worth(r)
            if lacking <= 0:
                return victims
        return []

    # ---------------------------------------------------------------- Algorithm 2: quota

    def urgency_score(self, slacks_s: Iterable[float]) -> float:
        """compute_urgency of Alg. 2 over the slacks of a queue."""
        score = 0.0
        for slack_s in slacks_s:
            if slack_s < 0:
                if self.lateness == "letter":
                    score -= self.violation_weight * slack_s
                else:
                    late_s = min(-slack_s, self.hopeless_s)
                    score += self.critical_weight + self.violation_weight * late_s
            elif slack_s < self.critical_s:
                score += self.critical_weight / (slack_s + 1.0)
        return score

    def target_llm_share(self, llm_queue_key: float, embed_queue_key: float) -> float:
        """Alg. 2, lines 6 to 15, before smoothing; a share of all memory."""
        flexible = 1.0 - self.min_llm_share - self.min_embed_share
        both = llm_queue_key + embed_queue_key
        share = llm_queue_key / both if both > 0 else self.default_llm_share
        return self.min_llm_share + flexible * share

    def _adjust(self, view: View, state: Learnt, embedder: EmbedView) -> None:
        """Alg. 2: a step towards the target, as far as the time since the last allows."""
        total, now_s = view.total_blocks, view.now_s
        if state.llm_quota_blocks < 0:
            state.llm_quota_blocks = self.target_llm_share(0.0, 0.0) * total
            state.adjusted_s = now_s
        elapsed_s = now_s - state.adjusted_s
        if self.quota == "static" or elapsed_s < self.period_s or not elapsed_s:
            return
        llm = self.urgency_score(self._urgent_slacks_s(view, state))
        if view.n_waiting:
            llm += self.urgency_score(self._entry_due_s(r, view) - now_s for r in view.waiting())
        embeds = [*embedder.running(), *embedder.waiting(now_s)]
        embed = self.urgency_score(
            due_s(r) - now_s - self._pass_cost(r, embedder, state)[1] for r in embeds
        )
        quota_blocks = smooth_adjust(
            state.llm_quota_blocks,
            self.target_llm_share(llm, embed) * total,
            self.change_per_s * elapsed_s * total,
        )
        if quota_blocks != state.llm_quota_blocks:
            view.counters.add("quota_changes")
        state.llm_quota_blocks = quota_blocks
        state.adjusted_s = now_s

    def _embed_quota(self, total: int, state: Learnt, embedder: EmbedView, now_s: float) -> int:
        """The embedder's share, or what its next request needs, if that is more."""
        first = embedder.next_waiting(now_s)
        least = 0 if first is None else self._pass_cost(first, embedder, state)[0]
        if state.llm_quota_blocks < 0:
            return max(least, round((1 - self.target_llm_share(0.0, 0.0)) * total))
        return max(least, total - round(state.llm_quota_blocks))

    def limits(self, view: View) -> Limits:
        state: Learnt = view.policy_state
        embedder = state.embedder
        state.preempting = False
        if embedder is None and not view.n_waiting:
            return self._nothing_kept
        kept, n_running = 0, view.n_running
        if embedder is not None:
            now_s = view.now_s
            if state.llm_quota_blocks < 0 or now_s - state.adjusted_s >= self.period_s:
                self._adjust(view, state, embedder)
            if n_running:  # else a request larger than the quota would wait for ever
                total, in_pass = view.total_blocks, embedder.held_blocks
                kept = self._embed_quota(total, state, embedder, now_s) - in_pass
                if kept < 0:
                    kept = 0
                if not view.n_waiting:
                    free = view.free_blocks
                    growth = n_running * state.most_blocks - (total - free - in_pass)
                    if free - growth >= kept:
                        return self._keeping(kept, kept, state)  # as `_headroom` would find
        headroom = self._headroom(kept, n_running, view, state)
        return self._keeping(kept, headroom, state)

    @cached_property
    def _nothing_kept(self) -> Limits:
        return self._limits_of(0, 0)

    def _keeping(self, watermark_blocks: int, decode_headroom_blocks: int, state: Learnt) -> Limits:
        """`_limits_of`; the same few numbers come again and again."""
        kept = watermark_blocks, decode_headroom_blocks
        limits = state.limits.get(kept)
        if limits is None:
            if len(state.limits) >= _MOST_LIMITS:
                state.limits.clear()
            limits = state.limits[kept] = self._limits_of(*kept)
        return limits

    def _limits_of(self, watermark_blocks: int, decode_headroom_blocks: int) -> Limits:
        return Limits(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            allocate_per_chunk=True,
            watermark_blocks=watermark_blocks,
            decode_headroom_blocks=decode_headroom_blocks,
            async_scheduling=self.async_scheduling,
        )

    def _headroom(self, kept: int, n_running: int, view: View, state: Learnt) -> int:
        """Blocks that eviction keeps free: `kept`, and room for a high-priority request (Alg. 1,
        line 17). Capped so that no request about to finish is evicted before the next decision.
        """
        free, want = view.free_blocks, kept
        if n_running and view.n_waiting:
            urgent = [r for r in view.waiting() if r.priority > 0]
            if urgent:
                first = min(urgent, key=lambda r: (r.arrival_s, r.seq))
                need = -(-first.target_tokens // view.block_size)
                lacking: float = need + kept + n_running - free
                if lacking > 0 or not self.fits(first, view):
                    lacking = max(lacking, self._lacking(first, view))
                victims = self._victims(view, lacking) if lacking > 0 else []
                if victims:
                    state.preempting = True
                    if first.id not in state.preempted_for:
                        state.preempted_for.add(first.id)
                        view.counters.add("preemptions_for_priority", first)
                    want = max(want, free + sum(map(view.held_blocks, victims[:-1])) + 1)
        if not want:
            return 0
        held = view.total_blocks - free
        if state.embedder is not None:
            held -= state.embedder.held_blocks
        if free - (n_running * state.most_blocks - held) >= want:
            return want  # as below, whoever they are
        running = view.running()
        total = sum(map(state.total_blocks.__getitem__, running))
        if free - (total - held) >= want:
            return want  # whatever the batch may still grow to leaves that much
        remaining = [self._remaining_tokens(r, view) for r in running]
        until_asked = min(remaining, default=0)  # a request ends then, at the latest
        spared = self.completion_tokens + until_asked
        blocks = [
            view.held_blocks(r) for r, left in zip(running, remaining, strict=True) if left > spared
        ]
        growth = len(remaining) * (until_asked // view.block_size + 1)
        return max(0, min(want, free + sum(blocks) - growth))

    # ---------------------------------------------------------------- Algorithm 3: eviction

    def protected(self, r: RequestState, view: View) -> bool:
        """Alg. 3, line 27: `r` is about to finish."""
        return self._remaining_tokens(r, view) < self.completion_tokens

    def eviction_cost_s(self, r: RequestState, view: View) -> float:
        """Alg. 3, lines 4 to 14, in seconds: what evicting `r` costs."""
        slack_s = self.slack_s(r, view)
        if self.slack == "clamped":
            slack_s = max(0.0, slack_s)
        over_s = slack_s + self.epsilon_s
        factor = self.high_priority_weight if r.priority > 0 else 1.0
        hurry_s = factor * self.slack_weight / over_s if over_s else INF
        emitted = view.emitted_tokens(r)
        again = emitted if self.recompute == "answer" else r.prompt_tokens + emitted
        if not again:
            return hurry_s
        return hurry_s + self.recompute_weight * view.predict.step_s(0, 0, ((0, again),))

    def victim_key(self, r: RequestState, view: View) -> Key:
        spared = self.protected(r, view)
        urgent = view.policy_state.preempting and r.priority > 0
        return (float(spared or urgent), self.eviction_cost_s(r, view))

    def on_finished(self, r: RequestState, view: View) -> None:
        state: Learnt = view.policy_state
        state.total_blocks.pop(r, None)
        state.last_due_s.pop(r, None)
        state.entry_due_s.pop(r, None)
        state.calm_until_s.pop(r, None)

    # ---------------------------------------------------------------- the embedder

    def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
        state = embedder.policy_state
        assert isinstance(state, Learnt)
        state.embeds.saw(r.arrival_s, self._pass_cost(r, embedder, state)[0], r.num_inputs)
        return Admission.ADMIT

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        state = embedder.policy_state
        assert isinstance(state, Learnt)
        room = embedder.free_blocks
        if embedder.llm_running:
            total = embedder.total_blocks
            room = min(room, self._embed_quota(total, state, embedder, embedder.now_s))
        batch = self.first_come(embedder, room)
        if batch and room < embedder.free_blocks:
            self.count_cut(batch, embedder)
        if batch:
            for r in state.passing:  # it has ended
                state.pass_costs.pop(r, None)
            state.passing = batch
        return batch


def smooth_adjust(current: float, target: float, max_change: float) -> float:
    """`current`, moved towards `target` by at most `max_change` (Alg. 2, line 16)."""
    return current + min(max_change, max(-max_change, target - current))
