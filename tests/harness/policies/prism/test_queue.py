"""Moore-Hodgson order: as good as brute force, the queue as good as planning anew, by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.policies.edf import EarliestDeadlineFirst
from slo_bench.harness.policies.prism.prism_local import PrismLocal
from slo_bench.harness.policies.shared.moore_hodgson import (
    InTimeQueue,
    PrefillJob,
    in_time,
    slack_s,
)
from slo_bench.harness.policies.shared.slack_victim import SpeedEstimate, keep_key
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo


def most_in_time(jobs, start_s, rate):
    """By trying every subset, each in order of deadline, which is best for a subset."""
    for size in range(len(jobs), 0, -1):
        for chosen in itertools.combinations(jobs, size):
            ends = itertools.accumulate((rate * j.tokens for j in chosen), initial=start_s)
            if all(end <= j.due_s for end, j in zip(list(ends)[1:], chosen, strict=True)):
                return size
    return 0


jobs_of = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=9).map(
    lambda rows: sorted(
        PrefillJob(float(due), n, tokens, None) for n, (due, tokens) in enumerate(rows)
    )
)


@pytest.mark.slow
@given(jobs=jobs_of, start_s=st.integers(0, 10))
@settings(max_examples=400, deadline=None)
def test_moore_hodgson_serves_as_many_in_time_as_brute_force(jobs, start_s):
    kept = in_time(jobs, start_s, 1.0)
    assert kept == sorted(kept)
    ends = list(itertools.accumulate((j.tokens for j in kept), initial=start_s))[1:]
    assert all(end <= j.due_s for end, j in zip(ends, kept, strict=True))
    assert len(kept) == most_in_time(jobs, start_s, 1.0)
    assert slack_s(kept, start_s, 1.0) >= 0


def test_moore_hodgson_removes_the_longest_job_so_far():
    long, short, last = (
        PrefillJob(10.0, 0, 8, None),
        PrefillJob(11.0, 1, 4, None),
        PrefillJob(12.0, 2, 5, None),
    )
    assert in_time([long, short, last], 0.0, 1.0) == [short, last]


@dataclass
class Clock:
    """What the queue looks at."""

    now_s: float = 0.0
    remaining_prefill_tokens: int = 0
    rate: float = field(default=1.0)


def request(n, due_s, tokens):
    r = RequestState(n, 0.0, tokens, 1, 1, Slo(ttft_s=due_s))
    r.seq = n
    return r


@pytest.mark.slow
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("comes"), st.floats(-10.0, 60.0), st.integers(1, 15)),
            st.tuples(st.just("endless"), st.just(math.inf), st.integers(1, 15)),
            st.tuples(st.just("under way"), st.just(-math.inf), st.integers(1, 15)),
            st.tuples(st.just("goes"), st.integers(0, 50), st.just(0)),
            st.tuples(st.just("enters"), st.just(0.0), st.just(0)),
            st.tuples(st.just("waits"), st.floats(0.0, 5.0), st.just(0)),
            st.tuples(st.just("works"), st.floats(0.5, 1.5), st.integers(1, 20)),
            st.tuples(st.just("another pace"), st.floats(0.5, 1.5), st.just(0)),
        ),
        max_size=60,
    )
)
@example(  # the last to come has been late for longest
    moves=[
        ("comes", 1.0, 15),
        ("comes", 2.0, 15),
        ("waits", 5.0, 0),
        ("enters", 0.0, 0),
        ("comes", -10.0, 1),
        ("enters", 0.0, 0),
    ]
)
@settings(max_examples=400, deadline=None)
def test_queue_kept_incrementally_equals_planning_anew(moves):
    clock = Clock()
    jobs = {}
    queue = InTimeQueue(clock, jobs.__getitem__, lambda: clock.rate)
    for n, (move, x, tokens) in enumerate(moves):
        if move in ("comes", "endless", "under way"):
            r = request(n, 1.0, tokens)
            due_s = x if math.isinf(x) else clock.now_s + x
            jobs[r] = PrefillJob(due_s, n, tokens, r)
            queue.push(r)
        elif move == "waits":
            clock.now_s += x
        elif move == "another pace":
            clock.rate = x
        elif move == "works":  # faster or slower than planned
            done = min(tokens, clock.remaining_prefill_tokens)
            clock.remaining_prefill_tokens -= done
            clock.now_s += done * x
        elif jobs and move == "goes":
            gone = list(jobs)[x % len(jobs)]
            del jobs[gone]
            queue.remove(gone)
        elif jobs and move == "enters":
            r = queue.head()
            assert r is anew(clock, jobs)[0]
            queue.take_head()
            clock.remaining_prefill_tokens += jobs.pop(r).tokens
        assert queue.live == len(jobs)
        assert set(queue) == set(jobs)
        if jobs and n % 3 == 0:
            assert list(queue.ordered()) == anew(clock, jobs)


def anew(clock, jobs):
    """The whole order by Algorithm 2, from scratch."""
    under_way = [j for j in jobs.values() if j.due_s == -math.inf]
    tokens = clock.remaining_prefill_tokens + sum(j.tokens for j in under_way)
    due = sorted(j for j in jobs.values() if math.isfinite(j.due_s))
    kept = in_time(due, clock.now_s + tokens * clock.rate, clock.rate)
    endless = sorted(j for j in jobs.values() if j.due_s == math.inf)
    late = [j for j in due if j not in kept]
    return [j.request for group in (sorted(under_way), kept, endless, late) for j in group]


# A second for each ten tokens. EDF serves the long one first and the others come late.
ROWS = ((0, 80, 1), (0, 40, 1), (0, 50, 1))
TTFT_SLO_S = [10.0, 11.0, 12.0]
ALONE = {"step_s": 0.0, "per_token_s": 0.1}


def first_tokens(records):
    return [round(t, 6) for t in records.first_token_s.tolist()]


def test_late_requests_wait_behind_those_in_time(serve_each_way, requests):
    workload = requests(*ROWS, ttft_slo_s=TTFT_SLO_S)
    one_by_one = {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    prism = serve_each_way(workload, PrismLocal(**one_by_one), **ALONE).records
    assert first_tokens(prism) == [17.0, 4.0, 9.0]
    edf = serve_each_way(workload, EarliestDeadlineFirst(**one_by_one), **ALONE).records
    assert first_tokens(edf) == [8.0, 12.0, 17.0]
    unworried = PrismLocal(**one_by_one, caution=0.0)
    assert first_tokens(serve_each_way(workload, unworried, **ALONE).records) == first_tokens(edf)


def test_late_requests_are_dropped_if_asked(serve_each_way, requests):
    policy = PrismLocal(max_num_batched_tokens=16, max_num_seqs=1, late="drop")
    records = serve_each_way(requests(*ROWS, ttft_slo_s=TTFT_SLO_S), policy, **ALONE).records
    assert records.outcome.tolist() == [Outcome.DROPPED, Outcome.FINISHED, Outcome.FINISHED]


def test_prism_queue_serves_more_in_time_than_edf_under_overload(serve, requests):
    rng = np.random.default_rng(5)
    rows = [
        (t, int(p), 1) for t, p in zip(np.arange(200) * 4.0, rng.integers(5, 120, 200), strict=True)
    ]
    workload = requests(*rows, ttft_slo_s=rng.uniform(8, 40, 200))

    def in_time_with(policy):
        r = serve(workload, policy, **ALONE).records
        return int((r.first_token_s - r.arrival_s <= workload.ttft_slo_s).sum())

    one_by_one = {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    prism = in_time_with(PrismLocal(**one_by_one))
    assert prism > 1.5 * in_time_with(EarliestDeadlineFirst(**one_by_one))


@dataclass
class Batch:
    """A second a decode, a tenth a prefilled token."""

    now_s: float = 100.0
    n_running: int = 4
    n_decoding: int = 4
    decode_kv_tokens: int = 400
    emitted: dict = field(default_factory=dict)

    @property
    def predict(self):
        return self

    def step_s(self, seqs, kv_tokens, chunks):
        return (1.0 if seqs else 0.0) + 0.1 * sum(tokens for _, tokens in chunks)

    def output_tokens(self, r):
        return r.output_tokens

    def emitted_tokens(self, r):
        return self.emitted[r.id]

    def kv_tokens(self, r):
        return r.prompt_tokens + self.emitted[r.id] - 1


def victims(batch, slos, output_tokens=50):
    """Places in order of going, of requests with 100 prompt tokens that arrived at 0 s."""
    pace = SpeedEstimate()
    pace.look(batch, 10)
    keys = {}
    for n, slo in enumerate(slos):
        r = RequestState(n, 0.0, 100, output_tokens, output_tokens, slo)
        r.seq = n
        keys[n] = keep_key(r, batch, pace, 8)
    return sorted(keys, key=lambda n: (keys[n], -n))


def test_preemption_takes_requests_by_slack_class():
    # 30 s to go for all but the last; 12 s to be prefilled again.
    batch = Batch(emitted={0: 20, 1: 20, 2: 20, 3: 20, 4: 45})
    slos = [
        Slo(e2e_s=135.0),  # 5 s to spare: must go on
        Slo(e2e_s=200.0),  # can wait
        Slo(e2e_s=120.0),  # lost
        Slo(),  # can wait for ever
        Slo(e2e_s=90.0),  # lost, but nearly done
    ]
    assert victims(batch, slos) == [2, 3, 1, 0, 4]


def test_preemption_order_is_steady_around_zero_slack():
    """The printed 1 / (slack + ε) changes sign there; by class and seconds nothing does."""
    batch = Batch(emitted=dict.fromkeys(range(5), 20))
    ends = [130.0 - 1e-9, 130.0 + 1e-9, 141.9 - 1e-3, 141.9 + 1e-3, 150.0]
    assert victims(batch, [Slo(e2e_s=end) for end in ends]) == [0, 4, 3, 2, 1]


def test_bad_parameters_are_refused_by_name():
    for parameter, value in [
        ("caution", -1.0),
        ("buffer", 0.9),
        ("late", "reject"),
        ("victim", "x"),
    ]:
        with pytest.raises(SloBenchError, match=parameter):
            PrismLocal(**{parameter: value})
