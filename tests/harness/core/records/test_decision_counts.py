"""Which decisions of a policy inside a server were a choice."""

from slo_bench.harness.core.records.decision_counts import DECISIONS, DecisionCounts


def test_order_decision_of_a_single_request_is_not_counted():
    counts = DecisionCounts()
    counts.enter([1], [])
    counts.preempt(1, [])
    counts.enter([], [2, 3])
    assert not any(counts.totals().values())


def test_order_decision_of_the_last_queued_request_is_not_counted():
    counts = DecisionCounts()
    counts.enter([1, 2, 3], [])
    assert counts.totals()["decisions_order"] == 2
    assert counts.totals()["decisions_overtaking"] == 0


def test_entering_before_an_earlier_request_counts_as_overtaking():
    counts = DecisionCounts()
    counts.enter([2, 5], [3, 4])
    assert counts.totals()["decisions_order"] == 2
    assert counts.totals()["decisions_overtaking"] == 1


def test_preempting_another_than_the_last_counts_as_other_victim():
    counts = DecisionCounts()
    counts.preempt(4, [1, 2])
    counts.preempt(1, [2, 4])
    assert counts.totals()["decisions_victim"] == 2
    assert counts.totals()["decisions_other_victim"] == 1
    assert list(counts.totals()) == list(DECISIONS)
