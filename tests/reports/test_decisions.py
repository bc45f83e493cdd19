"""Reports say what policies decided inside servers, and which were never asked."""

from __future__ import annotations

import pandas as pd

from slo_bench.harness.core.records.decision_counts import DECISIONS
from slo_bench.reports.pages import decisions_page as decisions


def cells(**counts: list[int | None]) -> pd.DataFrame:
    rows = pd.DataFrame({"series": ["edf", "sjf"], "rate_rps": [1.0, 1.0], "valid": [True, True]})
    for name in (*DECISIONS, "preemptions_swap", "preemptions_recompute"):
        rows[name] = counts.get(name, [0, 0])
    return rows


def test_decisions_name_a_policy_that_was_never_asked():
    rows = cells(decisions_order=[0, 7], decisions_overtaking=[0, 2])
    (line,) = decisions.never_asked(rows)
    assert line.startswith("The policy of edf made no difference, for it was never asked")
    assert any("sjf took 7 requests" in sentence for sentence in decisions.sentences(rows))
    assert decisions.kept_order_of_arrival(rows) == []


def test_decisions_name_a_policy_that_kept_the_order_of_arrival():
    rows = cells(decisions_order=[3, 0], decisions_victim=[1, 0])
    (line,) = decisions.kept_order_of_arrival(rows)
    assert "edf never left the order of arrival" in line


def test_decisions_of_servers_without_a_policy_are_empty():
    assert decisions.sentences(cells().drop(columns="decisions_order")) == []
    nothing = cells(**{name: [None, None] for name in DECISIONS})
    assert decisions.sentences(nothing) == []
    assert decisions.table(nothing, ["edf", "sjf"], "").groups == []


def test_decisions_table_by_hand():
    rows = cells(decisions_order=[1200, 7], preemptions_swap=[2, 0])
    (edf, _) = decisions.table(rows, ["edf", "sjf"], "measured").groups
    assert edf[1] == [["1", "1,200", "0", "0", "0", "0", "2", "0"]]
