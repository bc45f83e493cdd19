"""Which decisions of a policy inside a server were a choice."""

from slo_bench.harness.core.decision_counts import DECISIONS, DecisionCounts


def test_a_request_alone_is_no_choice():
    counts = DecisionCounts()
    counts.enter([1], [])
    counts.preempt(1, [])
    counts.enter([], [2, 3])
    assert not any(counts.totals().values())


def test_the_last_of_a_queue_is_no_choice_either():
    counts = DecisionCounts()
    counts.enter([1, 2, 3], [])
    assert counts.totals()["decisions_order"] == 2
    assert counts.totals()["decisions_overtaking"] == 0


def test_who_leaves_an_earlier_one_waiting_overtakes():
    counts = DecisionCounts()
    counts.enter([2, 5], [3, 4])
    assert counts.totals()["decisions_order"] == 2
    assert counts.totals()["decisions_overtaking"] == 1


def test_victims():
    counts = DecisionCounts()
    counts.preempt(4, [1, 2])
    counts.preempt(1, [2, 4])
    assert counts.totals()["decisions_victim"] == 2
    assert counts.totals()["decisions_other_victim"] == 1
    assert list(counts.totals()) == list(DECISIONS)
