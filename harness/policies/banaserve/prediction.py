"""What a placement of modules is predicted to bring: the latencies, use and throughput of §4.4.

Source: BanaServe (docs/papers.md), Eq. 4-16 to 4-18, 4-23, 4-26.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.instance import Instance
from ...core.module_moves import Module
from ..shared.disaggregated import PREFILL
from .module_costs import MovedStepTime
from .objective import BanaServeObjective, ObjectiveWeights

_PASS_TOKENS = 2048  # of a prompt that keeps a GPU's arithmetic busy
_LEAST_FREE = 0.05  # of a GPU's time, for its own steps
_MOST_USE = 0.95  # of the queueing formula


@dataclass(frozen=True, slots=True)
class Ttft:
    """Eq. 4-17, in seconds."""

    compute_s: float  # T_p
    transfer_s: float  # T_x
    queue_s: float  # T_q

    @property
    def total_s(self) -> float:
        """Time to first token in seconds (T_TTFT)."""
        return self.compute_s + self.transfer_s + self.queue_s


@dataclass(frozen=True, slots=True)
class Tpot:
    """Eq. 4-18, in seconds: the arithmetic of a step, reading its KV (with what goes over the link
    for modules elsewhere), and waiting for weights or for modules that the GPU hosts.
    """

    compute_s: float  # T_d
    cache_s: float  # T_c
    memory_s: float  # T_m

    @property
    def total_s(self) -> float:
        """Time per output token in seconds (T_TPOT)."""
        return self.compute_s + self.cache_s + self.memory_s


@dataclass(frozen=True, slots=True)
class Demand:
    """What an instance is asked for, as measured."""

    tokens_per_s: float = 0.0  # of prompts that come
    queued_tokens: int = 0  # of prompts that wait
    decode_seqs: int = 0
    decode_kv_tokens: int = 0
    free_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What all instances together are asked for."""

    demands: Mapping[int, Demand]
    prompt_tokens: float  # of a request, mean
    answer_tokens: float
    transfer_s: float  # of a prompt's KV to where it decodes
    held_tokens: int = 0  # KV that waits for room to decode
    horizon_s: float = 10.0  # over which queues grow or shrink
    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)

    @property
    def decode_seqs(self) -> int:
        """Requests that decode, at all instances."""
        return sum(demand.decode_seqs for demand in self.demands.values())

    @property
    def prompts_ahead(self) -> float:
        """Prompts that wait or will come within the horizon."""
        tokens = (d.queued_tokens + self.horizon_s * d.tokens_per_s for d in self.demands.values())
        return sum(tokens) / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Hosted:
    """Modules of another instance on this one's GPUs."""

    owner: Instance
    module: Module
    units: int
    step_time: MovedStepTime  # of the owner


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """An instance with what it has offloaded or hosts, and the KV blocks that it gains so."""

    instance: Instance
    step_time: MovedStepTime
    hosted: Hosted | None = None
    gained_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one placement. `violation_s`: by how much the budgets of Eq. 4-25 are exceeded."""

    objective: BanaServeObjective
    violation_s: float

    def worth_over(self, other: Prediction) -> float:
        """What it is better by: seconds of budgets and the objective, whose latency is seconds."""
        gain = self.objective.value - other.objective.value
        return other.violation_s - self.violation_s + gain

    def saved_s(self, other: Prediction, load: Load) -> float:
        """Seconds of latency, over the horizon and all requests, by which it is better than
        `other`: by those to the first tokens of the prompts, less those for which more requests
        decode at once if a step takes longer (Little's law).
        """
        before, after = other.objective, self.objective
        longer = after.tpot_s / before.tpot_s - 1 if before.tpot_s else 0.0
        prompts_s = load.prompts_ahead * (before.ttft_s - after.ttft_s)
        return prompts_s - load.horizon_s * load.decode_seqs * longer


def hosted_share(hosted: Hosted, demand: Demand) -> float:
    """Share of the host's time that another instance's modules take."""
    step_time = hosted.step_time
    if hosted.owner.role == PREFILL:
        pass_s = step_time.abroad_s(0, 0, ((0, _PASS_TOKENS),))
        return demand.tokens_per_s * pass_s / _PASS_TOKENS
    if not demand.decode_seqs:
        return 0.0
    decoding = demand.decode_seqs, demand.decode_kv_tokens, ()
    return step_time.abroad_s(*decoding) / step_time.step_s(*decoding)


def free_share(placed: PlacedInstance, load: Load) -> float:
    """Share of its GPUs' time that is left for its own steps; modules of an instance that has
    failed take none.
    """
    if placed.hosted is None or placed.hosted.owner.index not in load.demands:
        return 1.0
    demand = load.demands[placed.hosted.owner.index]
    return max(_LEAST_FREE, 1 - hosted_share(placed.hosted, demand))


def ttft_of(placed: PlacedInstance, load: Load) -> Ttft:
    """Eq. 4-17 at a prefill instance. T_q: prompts that wait on average over the horizon, at the
    rate at which they are computed, and the wait behind others of a queue with constant service
    times (M/D/1).
    """
    demand = load.demands[placed.instance.index]
    pass_s = placed.step_time.step_s(0, 0, ((0, _PASS_TOKENS),))
    each_s = pass_s / _PASS_TOKENS / free_share(placed, load)
    compute_s = load.prompt_tokens * each_s
    grows = demand.tokens_per_s - 1 / each_s
    backlog = _mean_backlog(demand.queued_tokens, grows, load.horizon_s)
    use = min(_MOST_USE, demand.tokens_per_s * each_s)
    behind_s = compute_s * use / (2 * (1 - use))
    return Ttft(compute_s, load.transfer_s, backlog * each_s + behind_s)


def _mean_backlog(now: float, grows: float, over_s: float) -> float:
    """Mean of max(0, now + grows · t) for t from 0 to `over_s`."""
    end = now + grows * over_s
    if end >= 0:
        return (now + end) / 2
    return now * now / (-2 * grows * over_s)


def tpot_of(placed: PlacedInstance, load: Load) -> Tpot:
    """Eq. 4-18 at a decode instance; nothing where nothing decodes."""
    demand = load.demands[placed.instance.index]
    seqs, kv_tokens = demand.decode_seqs, demand.decode_kv_tokens
    if not seqs:
        return Tpot(0.0, 0.0, 0.0)
    step_s = placed.step_time.step_s(seqs, kv_tokens, ())
    without_kv_s = placed.step_time.local.step_s(seqs, 0, ())
    compute_s = min(without_kv_s, seqs * placed.instance.sizes.s_per_token)
    waits_s = step_s / free_share(placed, load) - step_s
    return Tpot(compute_s, step_s - without_kv_s, without_kv_s - compute_s + waits_s)


def compute_use(placed: PlacedInstance, load: Load) -> float:
    """Eq. 4-23: share of the GPUs' arithmetic that its own model and what it hosts take."""
    demand = load.demands[placed.instance.index]
    hosted = 0.0 if placed.hosted is None else 1 - free_share(placed, load)
    if placed.instance.role == PREFILL:
        own_use = demand.tokens_per_s * placed.instance.sizes.s_per_token
        own_use *= 1 - placed.step_time.layer_share
    else:
        step_s = tpot_of(placed, load).total_s
        own_use = demand.decode_seqs * placed.instance.sizes.s_per_token / step_s if step_s else 0.0
    return min(1.0, own_use + hosted)


def predict(
    placed: Sequence[PlacedInstance], load: Load, ttft_budget_s: float, tpot_budget_s: float
) -> Prediction:
    """The objective of Eq. 4-15 with latencies weighted by the work of each instance, and the
    throughput of Eq. 4-26.
    """
    ttft_s = tpot_s = prompts = seqs = used = 0.0
    gained = free = 0
    for placed_instance in placed:
        demand = load.demands[placed_instance.instance.index]
        used += compute_use(placed_instance, load)
        if placed_instance.instance.role == PREFILL:
            weight = demand.tokens_per_s * load.horizon_s + demand.queued_tokens
            ttft_s += weight * ttft_of(placed_instance, load).total_s
            prompts += weight
        else:
            tpot_s += demand.decode_seqs * tpot_of(placed_instance, load).total_s
            seqs += demand.decode_seqs
            gained += placed_instance.gained_blocks * placed_instance.instance.kv_manager.block_size
            free += demand.free_kv_tokens
    ttft_s, tpot_s = ttft_s / prompts if prompts else 0.0, tpot_s / seqs if seqs else 0.0
    # Room that is lost matters where it was not free.
    ttft_s += _held_s(load, seqs, tpot_s, gained if gained > 0 else min(0, gained + free))
    requests = seqs + sum(d.queued_tokens for d in load.demands.values()) / load.prompt_tokens
    answer_s = ttft_s + load.answer_tokens * tpot_s
    tokens_per_s = requests * load.answer_tokens / answer_s if answer_s else 0.0
    violation_s = max(0.0, ttft_s - ttft_budget_s) + max(0.0, tpot_s - tpot_budget_s)
    use = used / len(placed)
    objective = BanaServeObjective(use, ttft_s, tpot_s, tokens_per_s, load.weights)
    return Prediction(objective, violation_s)


def _held_s(load: Load, seqs: float, tpot_s: float, gained_tokens: int) -> float:
    """Wait for room to decode: KV without room, at the rate at which answers that end free some."""
    held = max(0, load.held_tokens - gained_tokens)
    if not held or not seqs or not tpot_s:
        return 0.0
    ends_per_s = seqs / (load.answer_tokens * tpot_s)
    return held / (ends_per_s * (load.prompt_tokens + load.answer_tokens))
