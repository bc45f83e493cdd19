"""AdaptiveLLM against its pseudo-code, by hand, and its published set-up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench import Experiment
from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.decisions import NextQueue, PreemptionMode
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import configured, placed
from slo_bench.harness.experiments.execution.cells import workload_of
from slo_bench.harness.policies.adaptivellm import AdaptiveLlm, AdaptiveLlmDeadlines
from slo_bench.harness.results.metrics import FIGURES
from slo_bench.harness.results.request_figures import Requests
from slo_bench.predictors.costs.grid import CostGrid, Swap
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo

LETTER = AdaptiveLlm(groups="mean-priority")


@dataclass
class Seen:
    """A view of which only what AdaptiveLLM looks at is there: 1 s a block, 4 s a prefill."""

    now_s: float = 10.0
    host_free_blocks: int = 64
    block_size: int = 16
    swapped: tuple[RequestState, ...] = ()
    waiting: tuple[RequestState, ...] = ()
    prefills: list[tuple[int, int]] = field(default_factory=list)
    counters: Counters = field(default_factory=lambda: Counters(LETTER.mechanisms()))

    @property
    def predict(self):
        return self

    @property
    def n_swapped(self):
        return len(self.swapped)

    def swap_s(self, blocks):
        return 1.0 * blocks

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        assert (decode_seqs, decode_kv_tokens) == (0, 0)
        self.prefills += chunks
        return 4.0

    def held_blocks(self, r):
        return r.blocks

    def kv_tokens(self, r):
        return r.kv_tokens

    def emitted_tokens(self, r):
        return r.emitted_tokens

    def admissible(self, group):
        return list(self.swapped if group is NextQueue.SWAPPED else self.waiting)


def request(arrival_s=0.0, prompt=10, emitted=0, blocks=1):
    r = RequestState(0, arrival_s, prompt, 100, 100, Slo())
    r.emitted_tokens, r.blocks, r.kv_tokens = emitted, blocks, prompt + max(0, emitted - 1)
    return r


# ---------------------------------------------------------------- priority, §3.5


def test_priority_is_time_since_first_queued_per_token_of_the_sequence():
    r = request(arrival_s=4.0, prompt=10, emitted=2)
    assert AdaptiveLlm().priority(r, Seen(now_s=10.0)) == pytest.approx(6 / 12)


@given(
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(1, 2000),
    st.integers(0, 500),
)
def test_queue_key_orders_by_priority(arrival_s, waited_s, prompt, emitted):
    """The smallest key goes first: the highest priority."""
    r, view = request(arrival_s, prompt, emitted), Seen(now_s=arrival_s + waited_s)
    policy = AdaptiveLlm()
    assert policy.queue_key(r, view) == pytest.approx(-policy.priority(r, view))


def test_short_and_long_waiting_requests_come_first():
    view, policy = Seen(now_s=10.0), AdaptiveLlm()
    short, long, fresh = request(0, 10), request(0, 100), request(9.5, 10)
    order = sorted([long, fresh, short], key=lambda r: policy.queue_key(r, view))
    assert order == [short, long, fresh]
    assert AdaptiveLlm(fair=False).queue_key(long, view) < AdaptiveLlm(fair=False).queue_key(
        fresh, view
    )


# ---------------------------------------------------------------- Algorithm 1


@pytest.mark.parametrize(
    ("blocks", "host_free", "how"),
    [
        (1, 64, PreemptionMode.SWAP),  # out and in 2 s < 4 s
        (2, 64, PreemptionMode.RECOMPUTE),  # 4 s is not less than 4 s
        (3, 64, PreemptionMode.RECOMPUTE),
        (1, 1, PreemptionMode.SWAP),  # it just fits
        (1, 0, PreemptionMode.RECOMPUTE),  # cheaper, but host memory is full
    ],
)
def test_line_6_swap_where_cheaper_and_where_it_fits(blocks, host_free, how):
    view = Seen(host_free_blocks=host_free)
    assert AdaptiveLlm().preemption_mode(request(blocks=blocks), view) is how
    assert AdaptiveLlm(adaptive=False).preemption_mode(request(blocks=blocks), view) is (
        PreemptionMode.RECOMPUTE
    )


def test_recompute_cost_prefills_prompt_and_emitted_tokens():
    view = Seen()
    AdaptiveLlm().preemption_mode(request(prompt=10, emitted=5), view)
    assert view.prefills == [(0, 15)]


def preempted(serve_each_way, requests, policy, **memory):
    """A long request that came first, a short one after it, and six blocks of 16 tokens.

    t = 0..1 the long one is prefilled (47 tokens, 3 blocks), 1..2 the short one (31 tokens, 2
    blocks), 2..3 both decode and fill their blocks. At t = 3 both want another, one is there.
    Priorities: 3 s / 49 tokens and 2.5 s / 33 tokens.
    """
    load = requests((0.0, 47, 9), (0.5, 31, 9))
    records = serve_each_way(
        load, policy, **({"num_gpu_blocks": 6, "num_cpu_blocks": 3} | memory)
    ).records
    assert (records.output_tokens == 9).all()
    return records.preemptions_swap.tolist(), records.preemptions_recompute.tolist()


def test_lowest_priority_is_preempted(serve_each_way, requests):
    """The text of §3.4; the pseudo-code pops the end of an ascending list: the highest."""
    swaps, _ = preempted(serve_each_way, requests, AdaptiveLlm(), swap_s_per_block=0.1)
    assert swaps == [1, 0]


@dataclass(frozen=True)
class HighestFirst(AdaptiveLlm):
    def victim_key(self, r, view):
        return -self.priority(r, view)


def test_highest_priority_is_preempted_to_the_letter(serve_each_way, requests):
    """Lines 1 and 3 as printed: sorted in ascending order, taken from the end."""
    swaps, _ = preempted(serve_each_way, requests, HighestFirst(), swap_s_per_block=0.1)
    assert swaps == [0, 1]


def test_last_comer_is_preempted_without_fairness(serve_each_way, requests):
    swaps, _ = preempted(serve_each_way, requests, AdaptiveLlm(fair=False), swap_s_per_block=0.1)
    assert swaps == [0, 1]


@pytest.mark.parametrize(
    ("swap_s_per_block", "num_cpu_blocks", "swaps", "recomputes"),
    [
        (0.16, 3, [1, 0], [0, 0]),  # 2 · 3 · 0.16 s < 1 s
        (0.17, 3, [0, 0], [1, 0]),  # more than a prefill
        (0.16, 2, [0, 0], [1, 0]),  # no room
    ],
)
def test_engine_uses_the_cheaper_preemption_mode(
    serve_each_way, requests, swap_s_per_block, num_cpu_blocks, swaps, recomputes
):
    preemptions = preempted(
        serve_each_way,
        requests,
        AdaptiveLlm(),
        swap_s_per_block=swap_s_per_block,
        num_cpu_blocks=num_cpu_blocks,
    )
    assert preemptions == (swaps, recomputes)


@pytest.mark.parametrize(("s_per_token", "how"), [(0.01, "swap"), (0.02, "recompute")])
def test_preemption_mode_follows_a_cost_grid(tmp_path, s_per_token, how):
    """A victim of one block of 16 tokens: out and in 0.32 or 0.64 s, its prefill 0.5 s."""
    axis = np.array([0.0, 100.0])
    swap = Swap(0.0, s_per_token)
    CostGrid(axis, axis, axis, np.full((2, 2, 2), 0.5), swap, swap).write(tmp_path / "c.npz")
    policy = AdaptiveLlm(cost_grid=str(tmp_path / "c.npz"))
    view = Seen()
    assert policy.preemption_mode(request(), view) is PreemptionMode(how)
    assert not view.prefills  # the engine's own predictions were not asked


def test_invalid_cost_grid_is_refused_at_once(tmp_path):
    with pytest.raises(SloBenchError, match="cannot be read"):
        AdaptiveLlm(cost_grid=str(tmp_path / "none.npz"))
    with pytest.raises(SloBenchError, match="cost_grid must be the name of a file but is 3"):
        AdaptiveLlm(cost_grid=3)


# ---------------------------------------------------------------- Algorithm 2

# At t = 10 s: 10 / 100 and 10 / 50, mean 0.15; 1 / 4 = 0.25; 0.6 / 4 = 0.15.
SWAPPED = (request(0, 90, 10), request(0, 40, 10))
FRESH = (request(9.0, 4),)


@pytest.mark.parametrize(
    ("swapped", "waiting", "letter", "swapped_first"),
    [
        (SWAPPED, FRESH, NextQueue.WAITING, NextQueue.SWAPPED),
        (SWAPPED, (request(5.0, 90),), NextQueue.SWAPPED, NextQueue.SWAPPED),
        (SWAPPED, (), NextQueue.SWAPPED, NextQueue.SWAPPED),
        ((), FRESH, NextQueue.WAITING, NextQueue.WAITING),
    ],
)
def test_line_8_which_group_enters(swapped, waiting, letter, swapped_first):
    view = Seen(swapped=swapped, waiting=waiting)
    assert LETTER.next_queue(view) is letter
    assert AdaptiveLlm().next_queue(view) is swapped_first


def test_line_8_a_tie_goes_to_the_swapped():
    view = Seen(now_s=8.0, swapped=(request(0, 16),), waiting=(request(4, 8),))  # 1/2 each
    assert LETTER.next_queue(view) is NextQueue.SWAPPED


def test_no_group_enters_where_neither_fits():
    assert LETTER.next_queue(Seen()) is NextQueue.NONE


def test_to_the_letter_fresh_short_requests_starve_the_swapped(serve_each_way, requests):
    """Why swapped-first is the default (docs/papers.md, errata)."""
    load = requests((0.0, 47, 12), *((0.5 + 8 * k, 31, 9) for k in range(8)))

    def finish_s(policy):
        served = serve_each_way(
            load, policy, num_gpu_blocks=6, num_cpu_blocks=3, swap_s_per_block=0.1
        )
        assert served.records.preemptions_swap[0] >= 1
        return float(served.records.finish_s[0])

    others_arrive_until_s = 0.5 + 8 * 7
    assert finish_s(AdaptiveLlm()) < 30
    assert finish_s(LETTER) > others_arrive_until_s


def test_unknown_groups_are_refused():
    with pytest.raises(SloBenchError, match="groups must be one of swapped-first, mean-priority"):
        AdaptiveLlm(groups="highest")


# ---------------------------------------------------------------- future work, §6


@dataclass
class Beside(Seen):
    """Two requests with 40 KV tokens decode, 1 s a step; a prefill beside them adds 0.5 s."""

    n_decoding = 2
    decode_kv_tokens = 40

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        assert (decode_seqs, decode_kv_tokens) in ((2, 40), (0, 0))
        return 1.0 + 0.5 * bool(chunks) if decode_seqs else 4.0


@pytest.mark.parametrize(
    ("parameters", "block_s", "how"),
    [
        ({}, 1.9, "swap"),  # 3.8 s < 4 s
        ({}, 2.1, "recompute"),
        ({"overlap_swap": True}, 2.9, "swap"),  # 2 · (2.9 - 1) s < 4 s
        ({"overlap_swap": True}, 3.1, "recompute"),
        ({"chunk_tokens": 64}, 0.24, "swap"),  # 0.48 s < 0.5 s
        ({"chunk_tokens": 64}, 0.26, "recompute"),
        ({"chunk_tokens": 64, "overlap_swap": True}, 1.2, "swap"),  # 0.4 s < 0.5 s
    ],
)
def test_preemption_mode_compares_costs_added_to_the_step(monkeypatch, parameters, block_s, how):
    monkeypatch.setattr(Beside, "swap_s", lambda self, blocks: block_s * blocks)
    assert AdaptiveLlm(**parameters).preemption_mode(request(), Beside()) is PreemptionMode(how)


def test_recomputed_prompt_shares_steps_with_decodes(serve, requests):
    load = requests((0.0, 40, 20), (0.5, 40, 20))
    chunked = serve(
        load,
        AdaptiveLlm(chunk_tokens=24, adaptive=False, fair=False),
        num_gpu_blocks=6,
        leaps=False,
    )
    alone = serve(load, AdaptiveLlm(adaptive=False, fair=False), num_gpu_blocks=6, leaps=False)
    for served in (chunked, alone):
        assert served.records.preemptions_recompute.sum() >= 1
        assert (served.records.output_tokens == 20).all()
    assert any(seqs and chunks for seqs, _, chunks in chunked.log)
    assert not any(seqs and chunks for seqs, _, chunks in alone.log)
    assert max(seqs + sum(n for _, n in chunks) for seqs, _, chunks in chunked.log) <= 24


def with_deadlines(load, *e2e_s):
    return replace(load, e2e_slo_s=np.array(e2e_s, dtype=float))


def test_deadlines_variant_serves_the_nearest_deadline_first(serve_each_way, requests):
    load = with_deadlines(requests((0, 16, 4), (0, 16, 4), (0, 16, 4)), 90, 20, 50)
    records = serve_each_way(load, AdaptiveLlmDeadlines(max_num_seqs=1)).records
    assert np.argsort(records.finish_s).tolist() == [1, 2, 0]


def test_deadlines_variant_drops_requests_that_cannot_be_in_time(serve_each_way, requests):
    """Four tokens take 4 s. The second waits for the first; at 3.5 s it can no longer be done."""
    load = with_deadlines(requests((0, 16, 4), (0, 16, 4), (0, 16, 4)), 4.5, 7.5, 8.5)
    records = serve_each_way(load, AdaptiveLlmDeadlines(max_num_seqs=1)).records
    assert [Outcome(o).name for o in records.outcome] == ["FINISHED", "DROPPED", "FINISHED"]
    assert records.finish_s[2] == 8


def test_deadlines_variant_without_slos_serves_by_arrival(serve_each_way, requests):
    load = requests((0, 16, 4), (0.1, 60, 4), (0.2, 16, 4))
    records = serve_each_way(load, AdaptiveLlmDeadlines(max_num_seqs=1)).records
    assert np.argsort(records.finish_s).tolist() == [0, 1, 2]


# ---------------------------------------------------------------- KV bytes and the set-up


def test_kv_bytes_of_section_2_1_and_equations_3_and_4():
    place = Placement(model("opt-13b"), gpu("a800-80g-pcie"))
    assert place.kv_bytes_per_token == 2 * 40 * 5120 * 2
    mib = 2**20
    assert 100 * place.kv_bytes_per_token / mib == pytest.approx(78.125)
    # The 39.1 MB of §2.1 are the keys alone.
    assert 100 * place.kv_bytes_per_token / 2 / mib == pytest.approx(39.1, abs=0.05)
    block_bytes = place.swap_s_per_block * place.host_link.bandwidth_bytes_per_s
    assert block_bytes == pytest.approx(2 * 40 * 5120 * 16 * 2)  # Eq. 3; Eq. 4 takes 7 for 100


def test_grouped_query_attention_takes_less_than_equation_3():
    spec = model("llama-3-8b")
    by_eq_3 = 2 * spec.layers * spec.hidden * 2
    assert Placement(spec, gpu("a100-80g")).kv_bytes_per_token * 4 == by_eq_3


def test_suite_equals_the_published_setup():
    cells = Experiment.suite("adaptivellm-models").plan().cells
    assert len(cells) == 12 * 3 * 3  # groups, systems, seeds
    for place in {cell.placement for cell in cells}:
        placement = placed(place).placement
        assert (placement.num_gpu_blocks, placement.num_cpu_blocks, placement.gpus) == (128, 64, 1)
    means = dict.fromkeys(
        float(workload_of(cell).prompt_tokens.mean()) for cell in cells if cell.seed == 0
    )
    assert list(means) == pytest.approx([17.02, 19.66, 340.48], rel=0.05)
    for cell in cells[:9:3]:
        workload = workload_of(cell)
        assert len(workload) == 1000
        assert not workload.arrival_s.any()
        assert (workload.output_tokens == 64).all()


def served(dataset, name, **parameters):
    """A system on OPT-13B in the published set-up."""
    cells = Experiment.suite("adaptivellm-models").plan().cells
    cell = [c for c in cells if c.placement.model == "opt-13b" and c.seed == 0][dataset]
    place = placed(cell.placement)
    system = configured(name, parameters)
    return simulate(workload_of(cell), system, place.placement, place.step_time.model)


@pytest.mark.parametrize("batch", [64, 128])
@pytest.mark.parametrize("dataset", [0, 1], ids=["Chatbot", "Alpaca"])
def test_weighted_turnaround_falls_as_published(batch, dataset):
    """§4.4: by 20 to 40 % against vLLM at these caps of the batch (here one seed)."""
    everybody, unknown = slice(None), np.zeros(1000, dtype=np.int64)
    ours, vllm = (
        FIGURES["weighted_turnaround"].exact(
            Requests(served(dataset, name, max_num_seqs=batch).records, None, unknown, unknown > 0),
            everybody,
        )
        for name in ("adaptivellm", "vllm-v0")
    )
    assert 0.6 <= ours / vllm <= 0.8


def test_adaptivellm_to_the_letter_is_slower_than_vllm():
    vllm = served(0, "vllm-v0").totals.makespan_s
    assert served(0, "adaptivellm", groups="mean-priority").totals.makespan_s > vllm
    assert served(0, "adaptivellm").totals.makespan_s < vllm
