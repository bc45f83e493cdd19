"""UELLM's batches by hand: Fig. 3-3, Eq. 3-3 to 3-5, Algorithm 3-1 and its errata."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.uellm.length_monitor import LengthMonitor
from slo_bench.harness.policies.uellm.s3 import S3
from slo_bench.harness.policies.uellm.slo_odbs import Odbs, SloDbs, SloOdbs, stated_slo_s
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo


class View:
    """What these policies look at: the clock, memory, true lengths."""

    block_size = 16

    def __init__(self, policy, now_s=0.0, total_blocks=1000):
        self.now_s = now_s
        self.total_blocks = total_blocks
        self.policy_state = policy.new_state()
        self.counters = Counters(policy.mechanisms())
        self.predict = self

    def output_tokens(self, r):
        return r.output_tokens

    def output_tokens_p90(self, r):
        return self.output_tokens(r)

    def emitted_tokens(self, r):
        return r.emitted_tokens


def waiting(*rows, arrival_s=0.0):
    """Rows of (SLO s, answer tokens)."""
    return [
        RequestState(i, arrival_s, 10, answer, 2048, Slo(e2e_s=slo_s))
        for i, (slo_s, answer) in enumerate(rows)
    ]


def batches(policy, requests, now_s=0.0):
    """Batch after batch, as the engine asks, with nobody arriving."""
    left, batch_ids, view = list(requests), [], View(policy, now_s)
    while left:
        batch = policy.form_batch(left, view)
        batch_ids.append([r.id for r in batch])
        left = [r for r in left if r not in batch]
    return batch_ids


# ---------------------------------------------------------------- Fig. 3-3


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [
        (Fifo(max_batch=3), 174),
        # w2·(58 - 8)·3·1.2 = 90 closes the batch, w1·T_l = 0 does not.
        (Odbs(output_weight=0.5, threshold=89), 74),
        (Odbs(output_weight=0.5, threshold=90), 174),
        (SloOdbs(slo_weight=0.0, threshold=89), 74),
        (S3(max_batch=2), 74),
        (S3(max_batch=3), 174),  # fewest batches first
    ],
)
def test_tokens_generated_for_8_8_and_58(policy, tokens, serve, requests):
    totals = serve(requests((0, 10, 8), (0, 10, 8), (0, 10, 58)), policy).result.totals
    firsts = 3  # prefill gives each member its first token
    assert totals.decode_tokens + firsts == tokens


# ---------------------------------------------------------------- Eq. 3-3 to 3-5


def test_slo_odbs_total_by_hand():
    # T_l = (20 + 10)·2·1.5 = 90; the length term is 40 - 100, and T_o = term·2·1.1.
    policy = SloOdbs(slo_weight=2, output_weight=3, slo_factor=1.5, output_factor=1.1)
    args = (40, 20.0, 1, 10.0, 100)
    assert policy.total(*args) == pytest.approx(2 * 90 + 3 * 60 * 2.2)
    signed = policy.with_parameters(length_term="signed")
    assert signed.total(*args) == pytest.approx(2 * 90 - 3 * 60 * 2.2)
    summed = policy.with_parameters(length_term="sum")
    assert summed.total(*args) == pytest.approx(2 * 90 + 3 * 140 * 2.2)


def test_batch_is_closed_where_total_exceeds_the_threshold():
    requests = waiting((10, 50), (20, 50))
    # (20 + 10)·2·1.2 = 72
    assert batches(SloOdbs(threshold=72), requests) == [[0, 1]]
    assert batches(SloOdbs(threshold=71.9), requests) == [[0], [1]]


def test_tail_of_an_answer_closes_a_batch_and_sorts_it_last():
    """Three answers of 50 tokens by their medians; nine in ten of the first end within 400."""

    class Unsure(View):
        def output_tokens_p90(self, r):
            return 400 if r.id == 0 else r.output_tokens

    requests = waiting((10, 50), (10, 50), (10, 50))
    policy = SloOdbs(slo_weight=0.0, sort_by="weighted", threshold=100, lengths="predicted")
    for lengths, batch in (("predicted", [0, 1, 2]), ("p90", [1, 2])):
        chosen = policy.with_parameters(lengths=lengths)
        ids = [r.id for r in chosen.form_batch(requests, Unsure(chosen))]
        assert ids == batch  # 0.5·350·3·1.2 = 630 > 100


def test_signed_length_term_never_closes_a_batch():
    # PAPERS: with lax SLOs a 2048-token batch takes everything: Total falls as it grows.
    requests = waiting((1, 2048), *[(1, 128)] * 49)
    signed = SloOdbs(length_term="signed", threshold=1000, max_batch=50, cm_limit=1e9)
    assert batches(signed, requests) == [list(range(50))]
    mended = signed.with_parameters(length_term="absolute")
    assert batches(mended, requests)[0] == [0]  # 0.5·1920·2·1.2 = 2304 > 1000


def test_tightest_slo_first_and_like_slos_together():
    requests = waiting((300, 5), (10, 5), (290, 5), (12, 5))
    assert batches(SloOdbs(threshold=1000), requests) == [[1, 3], [2], [0]]


def test_time_left_instead_of_the_stated_slo():
    old = RequestState(0, 0.0, 10, 5, 5, Slo(e2e_s=100))
    new = RequestState(1, 80.0, 10, 5, 5, Slo(e2e_s=40))
    policy = SloOdbs(max_batch=1)
    assert batches(policy, [old, new], now_s=85.0) == [[1], [0]]
    assert batches(policy.with_parameters(slo_term="time-left"), [old, new], now_s=85.0) == [
        [0],
        [1],
    ]


def test_overdue_requests_may_go_last():
    overdue = RequestState(0, 0.0, 10, 5, 5, Slo(e2e_s=5))
    new = RequestState(1, 9.0, 10, 5, 5, Slo(e2e_s=50))
    assert batches(SloOdbs(max_batch=1), [overdue, new], now_s=10.0) == [[0], [1]]
    last = SloOdbs(max_batch=1, overdue="last")
    assert batches(last, [overdue, new], now_s=10.0) == [[1], [0]]
    by_both = last.with_parameters(sort_by="weighted", slo_term="time-left")
    assert batches(by_both, [overdue, new], now_s=10.0) == [[1], [0]]


def test_cm_limit_shrinks_batches():
    # CM = 1·100 + 0.5·200 = 200: of 8 a quarter may enter at a limit of 50.
    requests = waiting(*[(100, 200)] * 4)
    assert batches(SloOdbs(max_batch=8, cm_limit=50), requests) == [[0, 1], [2, 3]]
    assert batches(SloOdbs(max_batch=8, cm_limit=200), requests) == [[0, 1, 2, 3]]


def test_weights_are_swapped_to_the_letter_of_line_12():
    policy = SloOdbs(slo_weight=1, output_weight=0.5)
    assert policy.cm(200, 10.0) == 110
    assert policy.with_parameters(cm_weights="printed").cm(200, 10.0) == 205


def test_weighted_sort_groups_lengths():
    # 1·SLO + 10·length: 510, 2010, 520, 2020; the tight long batch first, or the one built first.
    requests = waiting((10, 50), (10, 200), (20, 50), (5, 201))
    policy = SloOdbs(sort_by="weighted", output_weight=10, max_batch=2, cm_limit=1e9)
    assert batches(policy, requests) == [[1, 3], [0, 2]]
    assert batches(policy.with_parameters(batch_order="built"), requests) == [[0, 2], [1, 3]]


def test_requests_without_an_slo_come_last():
    requests = waiting((math.inf, 5), (10, 5), (math.inf, 5))
    assert batches(SloOdbs(), requests) == [[1, 0, 2]]


def test_slo_of_a_request_by_kind():
    def slo_s(**bounds):
        return stated_slo_s(RequestState(0, 100.0, 10, 21, 21, Slo(**bounds)), 21)

    assert slo_s(e2e_s=30) == 30
    assert slo_s(deadline_s=150) == 50
    assert slo_s(ttft_s=2, tpot_s=0.5) == 12
    assert slo_s(e2e_s=30, ttft_s=2, tpot_s=0.5) == 12
    assert slo_s(ttft_s=2) == math.inf


def test_slo_dbs_and_odbs_batch_by_one_criterion():
    requests = waiting((10, 500), (20, 5), (11, 4))
    slo_only = SloDbs(threshold=80)  # 21·2·1.2 = 50 fits, 31·3·1.2 = 112 does not
    assert batches(slo_only, requests) == [[0, 2], [1]]
    length_only = Odbs(threshold=100)
    assert batches(length_only, requests) == [[2, 1], [0]]


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("policy", "parameters", "problem"),
    [
        (SloOdbs, {"slo_weight": -1.0}, "SloOdbs.slo_weight must be from 0.0 to 100.0 but is -1"),
        (SloOdbs, {"output_weight": -0.5}, "SloOdbs.output_weight must be from 0.0"),
        (SloOdbs, {"threshold": -15000.0}, "SloOdbs.threshold must be from 1.0"),
        (SloOdbs, {"max_batch": 0}, "SloOdbs.max_batch must be from 1"),
        (SloOdbs, {"length_term": "squared"}, "length_term must be one of absolute, signed, sum"),
        (SloDbs, {"output_weight": 0.5}, "SloDbs.output_weight must be one of 0.0 but is 0.5"),
        (Odbs, {"slo_weight": 1.0}, "Odbs.slo_weight must be one of 0.0 but is 1.0"),
        (S3, {"first": "newest"}, "S3.first must be one of oldest, shortest but is 'newest'"),
        (S3, {"max_batch": -1}, "S3.max_batch must be from 1"),
    ],
)
def test_bad_parameters_are_refused_by_name(policy, parameters, problem):
    with pytest.raises(SloBenchError, match=problem):
        policy(**parameters)


# ---------------------------------------------------------------- monitor


class Told(View):
    """A view that predicts the same for everybody."""

    def __init__(self, tokens):
        super().__init__(SloOdbs())
        self.tokens = tokens

    def output_tokens(self, r):
        return self.tokens


def test_memory_is_reserved_for_the_longer_ones_of_such_answers():
    """Where a distribution is known: its upper end, if that is beyond the predicted bucket."""

    class Unsure(Told):
        def output_tokens_p90(self, r):
            return 200

    r = RequestState(0, 0.0, 10, 40, 1024, Slo())
    assert LengthMonitor().reserve_tokens(r, Told(40)) == 63
    assert LengthMonitor().reserve_tokens(r, Unsure(40)) == 200
    assert LengthMonitor().reserve_tokens(r, Unsure(300)) == 511


def done(i, tokens):
    r = RequestState(i, 0.0, 10, tokens, 1024, Slo())
    r.emitted_tokens = tokens
    return r


def test_reserved_is_the_end_of_the_bucket_until_longer_answers_came():
    monitor, view = LengthMonitor(), Told(20)  # [16, 32)
    new = RequestState(9, 0.0, 10, 5, 1024, Slo())
    assert monitor.reserve_tokens(new, view) == 31
    monitor.observe(done(0, 30), view)
    assert monitor.reserve_tokens(new, view) == 31
    monitor.observe(done(1, 100), view)
    assert monitor.reserve_tokens(new, view) == 100
    short = RequestState(10, 0.0, 10, 5, 25, Slo())
    assert monitor.reserve_tokens(short, view) == 25  # what it may have at most
    assert monitor.reserve_tokens(new, Told(40)) == 63  # another bucket has learnt nothing


def test_length_monitor_queues_mispredictions():
    monitor, view = LengthMonitor(), Told(20)
    for i, tokens in enumerate((16, 31, 32, 15)):
        monitor.observe(done(i, tokens), view)
    assert monitor.bucket_accuracy == 0.5
    assert [(m.id, m.predicted_tokens, m.output_tokens) for m in monitor.mispredicted] == [
        (2, 20, 32),
        (3, 20, 15),
    ]


@pytest.mark.parametrize(
    ("lengths", "longest", "first"),
    [
        ("bucket", [90, 90], 0),  # both are of one bucket, and nobody is sure: who came first
        ("bucket", [40, 33], 1),  # told for sure, the shorter
        ("predicted", [90, 90], 1),
        ("bucket", None, 1),
    ],
)
def test_lengths_of_one_bucket_are_equal_where_uncertain(serve, requests, lengths, longest, first):
    workload = requests((0, 4, 2), (0, 4, 2))
    predictions = {} if longest is None else {"output_tokens_p90": np.array(longest)}
    predictions["predicted_output_tokens"] = np.array([40, 33])
    records = serve(workload, Odbs(max_batch=1, lengths=lengths), **predictions).records
    assert int(np.argmin(records.first_token_s)) == first


# ---------------------------------------------------------------- output_cap


def test_output_cap_ends_answers_beyond_the_longest_prediction_of_the_batch(serve, requests):
    predictions = {"predicted_output_tokens": np.array([10, 20, 5])}
    workload = requests((0, 4, 30), (0, 4, 12), (0, 4, 90), max_output_tokens=[90] * 3)
    served = serve(workload, SloOdbs(output_cap=4), **predictions)
    assert served.records.output_tokens.tolist() == [24, 12, 24]
    assert served.records.finish_s.tolist() == [24] * 3  # one second a step, the first is prefill
    assert served.result.counts["answers_cut"] == 2


def test_without_output_cap_no_answer_is_cut_and_none_counted(serve, requests):
    predictions = {"predicted_output_tokens": np.array([1, 1])}
    served = serve(requests((0, 4, 30), (0, 4, 12)), SloOdbs(), **predictions)
    assert served.records.output_tokens.tolist() == [30, 12]
    assert "answers_cut" not in served.result.counts


@pytest.mark.parametrize("seed", range(8))
def test_cut_answers_have_the_cap_of_their_batch_and_the_others_their_length(serve, requests, seed):
    rng = np.random.default_rng(seed)
    outputs, predicted = rng.integers(1, 80, 30), rng.integers(1, 60, 30)
    cap = int(rng.integers(0, 20))
    workload = requests(*((0, 4, int(tokens)) for tokens in outputs))
    policy = SloOdbs(max_batch=4, output_cap=cap)
    served = serve(workload, policy, predicted_output_tokens=predicted)
    answers, begun_s = served.records.output_tokens, served.records.first_scheduled_s
    caps = np.array([predicted[begun_s == at_s].max() + cap for at_s in begun_s])
    assert answers.tolist() == np.minimum(outputs, caps).tolist()
    assert served.result.counts["answers_cut"] == (outputs > caps).sum()


def test_policy_that_leaves_no_token_is_refused_by_name(serve, requests):
    class Mute(Fifo):
        def output_cap_tokens(self, batch, view):
            return 0

    with pytest.raises(SloBenchError, match="output_cap_tokens must be at least 1 but is 0"):
        serve(requests((0, 4, 3)), Mute())
