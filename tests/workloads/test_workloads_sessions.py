from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.prefixes import SessionBlocks
from slo_bench.workloads.sessions import parse_sessions
from slo_bench.workloads.source import load_source
from slo_bench.workloads.summary import prefix_figures


def talk(text="sessions(turns=uniform(1,5))", requests=300, rate_rps=2.0, seed=0):
    source = load_source(
        "synthetic", prompt_tokens="uniform(20,200)", output_tokens="uniform(1,90)", sessions=text
    )
    return source.make(rate_rps=rate_rps, requests=requests, seed=seed)


def test_session_turn_contains_all_earlier_turns():
    requests = list(talk("sessions(turns=uniform(3,6), system_prompt_tokens=100)"))
    followers = [r for r in requests if r.follows is not None]
    assert followers
    for request in followers:
        before = requests[request.follows]
        assert request.session == before.session
        assert request.prompt_tokens >= before.prompt_tokens + before.output_tokens + 20
        assert request.think_s > 0
        # The whole prompt and answer of the turn before are found again, in full blocks.
        full = (before.prompt_tokens + before.output_tokens) // 16
        assert len(before.prefix_blocks) == full
        assert request.prefix_blocks[:full] == before.prefix_blocks
    for request in requests:
        assert request.prefix_blocks[:6] == tuple(range(6))
        if request.follows is None:
            assert 120 <= request.prompt_tokens <= 300
            assert request.think_s == 0


def test_sessions_share_nothing_but_the_system_prompt():
    requests = list(talk("sessions(turns=uniform(1,3), system_prompt_tokens=64)"))
    owner = {}
    for request in requests:
        for block in request.prefix_blocks[4:]:
            assert owner.setdefault(block, request.session) == request.session


def test_open_sessions_have_all_arrivals_in_advance():
    workload = talk("sessions(turns=uniform(2,2), think_s=5, answer_s=7, closed=false)")
    assert not workload.closed
    pairs = [np.flatnonzero(workload.session == s) for s in range(40)]
    gaps = [np.diff(workload.arrival_s[p])[0] for p in pairs if len(p) == 2]
    np.testing.assert_allclose(gaps, 12.0)


def test_closed_session_turns_arrive_after_the_think_time():
    workload = talk("sessions(turns=uniform(2,2), think_s=5)")
    child = np.flatnonzero(workload.follows >= 0)
    earliest = workload.arrival_s[workload.follows[child]] + workload.think_s[child]
    np.testing.assert_allclose(workload.arrival_s[child], earliest)


def test_sessions_without_think_time():
    assert not talk("sessions(turns=uniform(2,4), think_s=0)").think_s.any()


def test_sessions_end_at_the_context_length():
    workload = talk("sessions(turns=fixed(50), max_context_tokens=1000)", requests=500)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 1000


@given(seed=st.integers(0, 10_000), n=st.integers(1, 80), rate=st.floats(0.01, 50))
@settings(max_examples=30, deadline=None)
def test_cut_of_sessions_keeps_their_beginnings(seed, n, rate):
    workload = talk("sessions(turns=geometric(3))", requests=n, rate_rps=rate, seed=seed)
    assert len(workload) <= n
    for row, request in enumerate(workload):
        earlier = [k for k in range(row) if workload.session[k] == request.session]
        assert request.follows == (earlier[-1] if earlier else None)


def test_sessions_have_the_request_rate_over_a_long_run():
    workload = talk("sessions(turns=uniform(1,5), think_s=3)", requests=20_000, rate_rps=5.0)
    late = workload.arrival_s[2000:]
    assert len(late) / (late[-1] - late[0]) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("session", "did you mean sessions"),
        ("sessions(turn=3)", "did you mean turns"),
        ("sessions(turns=0)", "at least 1"),
        ("sessions(closed=perhaps)", "true or false"),
        ("sessions(system_prompt_tokens=-1)", "negative"),
        ("sessions(answer_s=-1)", "negative"),
        ("sessions(max_context_tokens=1)", "must exceed the system prompt"),
    ],
)
def test_malformed_sessions_are_refused(text, says):
    with pytest.raises(SloBenchError, match=says):
        parse_sessions(text)


def test_unknown_session_setting_is_an_unknown_name_error():
    with pytest.raises(UnknownNameError):
        parse_sessions("sessions(turns=3, thinks=4)")


def test_sessions_whose_first_turn_does_not_fit_are_refused():
    with pytest.raises(SloBenchError, match="no first turn fits"):
        talk("sessions(max_context_tokens=10)")


def test_sessions_with_concurrency_are_refused():
    source = load_source("alpaca", arrivals="concurrency(4)", sessions="sessions")
    with pytest.raises(SloBenchError, match="set the order of requests already"):
        source.make(requests=5)


def test_session_blocks_by_hand():
    blocks = SessionBlocks.of(
        np.array([7, 9, 7]), np.array([40, 35, 64]), system_tokens=17, block_size=16
    )
    assert list(blocks) == [(0, 1), (0, 4), (0, 1, 2, 3)]
    assert blocks[1:] == [(0, 4), (0, 1, 2, 3)]
    assert blocks[-1] == (0, 1, 2, 3)
    assert list(blocks.take(np.array([2, 1]))) == [(0, 1, 2, 3), (0, 4)]


def test_mooncake_source_shares_prefixes_like_its_trace():
    shares = []
    for seed in range(3):
        workload = load_source("mooncake-conversation").make(
            rate_rps=3.33, requests=9625, seed=seed
        )
        figures = prefix_figures(workload)
        shares.append(figures.token_hit_share)
        assert figures.request_hit_share > 0.99
        assert figures.block_size == 512
    # The trace of 9,625 requests at 3.33/s: 0.3635.
    assert np.mean(shares) == pytest.approx(0.3635, abs=0.03)


def test_continued_prompt_blocks_begin_like_those_before():
    workload = load_source("mooncake-conversation").make(rate_rps=3.33, requests=3000)
    rows_of = {}
    for row, session in enumerate(workload.session.tolist()):
        rows_of.setdefault(session, []).append(row)
    turns = [rows for rows in rows_of.values() if len(rows) > 1]
    assert len(turns) > 300
    for rows in turns:
        for before, after in pairwise(rows):
            assert workload.prompt_tokens[after] >= workload.prompt_tokens[before]
            shared = workload.prompt_tokens[before] // 512
            assert workload.prefix_blocks[after][:shared] == workload.prefix_blocks[before][:shared]
