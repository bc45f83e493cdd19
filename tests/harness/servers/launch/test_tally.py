"""Swaps executed must equal swaps decided; what plugins count is read by who started the server."""

from __future__ import annotations

import pytest

from slo_bench.harness.core.counters import REJECTIONS, Counters
from slo_bench.harness.core.predictions import LearnedPredictions
from slo_bench.harness.experiments.backends.launched import (
    growth,
    plugin_figures,
    policy_problem,
    swap_problem,
)
from slo_bench.harness.servers.launch.server_process import ServerProcess
from slo_bench.harness.servers.plugin.contract import HANDSHAKE_VARIABLE, Tally, tally_file

BEFORE = {"decided_out": 3, "executed_out": 3, "decided_in": 3, "executed_in": 3}
BEFORE |= {"preempted_swap": 3, "preempted_recompute": 1}


def test_tally_growth_sums_servers_since_the_cell_began():
    after = {name: count + 2 for name, count in BEFORE.items()}
    grown = growth([BEFORE, {}], [after, BEFORE])
    assert grown["preempted_swap"] == 2 + 3
    assert plugin_figures(grown) == {"preemptions_swap": 5, "preemptions_recompute": 3}
    assert swap_problem(grown) is None


def test_tally_of_servers_without_a_plugin_is_empty():
    assert plugin_figures(growth([{}], [{}])) == {}
    assert swap_problem(growth([{}], [{}])) is None


@pytest.mark.parametrize("way", ["out", "in"])
def test_swap_decided_and_not_executed_is_a_problem(way):
    after = {**BEFORE, f"decided_{way}": 5, f"executed_{way}": 4}
    expected = f"1 swaps {way} were executed, but 2 decided"
    assert swap_problem(growth([BEFORE], [after])) == expected


def test_tally_file_is_read_while_it_is_written(tmp_path, monkeypatch):
    handshake = tmp_path / "handshake.json"
    monkeypatch.setenv(HANDSHAKE_VARIABLE, str(handshake))
    server = ServerProcess("one", "", tmp_path / "log", "", tally_file=tally_file(handshake))
    assert server.tally() == {}
    tally = Tally()
    counters = Counters(["waiting_first", REJECTIONS])
    tally.write(counters, decided_out=1)
    assert server.tally() == {"decided_out": 1, "count_waiting_first": 0}
    counters.add("waiting_first")
    tally.write(counters, decided_out=2)
    assert server.tally() == {"decided_out": 2, "count_waiting_first": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["handshake.tally.json"]


def test_tally_without_a_handshake_variable_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv(HANDSHAKE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    Tally().write(Counters(), decided_out=1)
    assert not list(tmp_path.iterdir())


def test_first_measured_swap_time_is_taken():
    learned = LearnedPredictions()
    assert learned.swap_s(10) == 0.0
    learned.learn_swap(4, 0.4)
    assert learned.swap_s(10) == pytest.approx(1.0)
    for _ in range(50):
        learned.learn_swap(4, 0.8)
    assert learned.swap_s(10) == pytest.approx(2.0, rel=1e-3)


def test_policy_errors_are_described_with_their_count():
    assert policy_problem({"policy_errors": 0}) is None
    assert "raised 1 error inside" in policy_problem({"policy_errors": 1})
    assert "raised 2 errors inside" in policy_problem({"policy_errors": 2})
