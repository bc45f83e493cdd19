"""Levels that fail from their first requests on."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from slo_bench.harness.core.wire import REJECTED
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions, unserved
from slo_bench.harness.load_generator.http.answers import Raw
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.http.request_columns import FAULTS, RequestColumns
from slo_bench.harness.load_generator.http.unserved import (
    FirstFailures,
    LostServers,
    is_hopeless,
    is_lost,
    unserved_because,
)
from slo_bench.harness.load_generator.load_progress import LoadProgress
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving

NAN = float("nan")


@pytest.mark.parametrize(
    ("load", "failing_s", "ends"),
    [
        ({"failed_first": 20, "refused_first": 20}, 0.1, True),
        ({"failed_first": 1000, "busy_first": 990}, 59.0, False),  # a limit of requests a minute
        ({"failed_first": 5, "busy_first": 5}, 60.0, True),
        ({"failed_first": 19, "refused_first": 19}, 9.0, False),
        ({"failed_first": 1000}, 9.9, False),  # it may recover
        ({"failed_first": 20}, 10.0, True),
        ({"failed_first": 5}, 59.0, False),
        ({"failed_first": 5}, 60.0, True),
        ({"failed_first": 4}, 600.0, False),
        ({"served": 1}, 600.0, False),
        ({"failed_first": 500, "refused_first": 500, "served": 1}, 600.0, False),
        ({}, 600.0, False),
    ],
)
def test_a_level_ends_early_after_enough_failures_and_none_served(load, failing_s, ends):
    assert is_hopeless(LoadProgress(**load, failing_s=failing_s)) is ends


def test_a_level_that_begins_as_the_failed_one_before_ends_at_once():
    load = LoadProgress(failed_first=1, first_fault="status 404")
    assert is_hopeless(load, "status 404")
    assert not is_hopeless(load, "status 400")
    assert not is_hopeless(load, "")


def test_sums_of_several_senders_end_a_level_only_if_none_has_served():
    failing = LoadProgress(failed_first=15, refused_first=15, failing_s=9.0)
    assert is_hopeless(failing + failing)
    assert not is_hopeless(failing + failing + LoadProgress(served=1))
    assert (failing + failing).failing_s == 9.0


@pytest.mark.parametrize(
    ("load", "lost"),
    [
        ({"refused_connections": 3, "lost_s": 3.0}, True),
        ({"refused_connections": 3, "lost_s": 3.0, "answering": 1}, False),  # one is still there
        ({"refused_connections": 2, "lost_s": 60.0}, False),
        ({"refused_connections": 300, "lost_s": 2.9}, False),  # it may start again
        ({"served": 100, "refused_connections": 3, "lost_s": 3.0}, True),
    ],
)
def test_servers_are_lost_after_refused_connections_alone(load, lost):
    assert is_lost(LoadProgress(**load)) is lost


def test_only_an_answer_ends_the_count_of_refused_connections():
    servers = LostServers()
    for fault in (RequestFault.CONNECT, RequestFault.RESET, RequestFault.CONNECT):
        servers.ended(exchange(1.0, 0, fault))
    assert servers.progress(0).refused_connections == 2
    servers.ended(exchange(1.0, 429))
    assert servers.progress(0).refused_connections == 0


def test_a_level_whose_server_dies_ends_and_says_what_was_served(workload, monkeypatch):
    monkeypatch.setattr(unserved, "_LOST_S", 0.1)
    config = MockConfig(ttft_s=0.0, itl_s=0.0, fault=InjectedFault.DIE, fault_every=5)
    with serving(config) as server:
        measurement = measure(
            workload(1000, gap_s=0.05),
            [Endpoint.parse(server.url)],
            HttpOptions(processes=1, send_delay_limit_s=60.0),
        )
    assert measurement.invalid_because.startswith("no server could be reached from ")
    assert measurement.invalid_because.endswith(": 4 of 1,000 requests were served before")
    assert measurement.failed_as == ""
    assert np.isnan(measurement.columns.started_s).sum() > 500  # never sent


def exchange(end_s=NAN, status=500, fault=RequestFault.NONE):
    return SimpleNamespace(started_s=100.0, end_s=end_s, status=status, fault=fault)


def failed(detail):
    return Raw(0, RequestFault.RESET, detail, [], [], b"", False)


def test_a_first_request_in_flight_keeps_later_failures_from_counting():
    exchanges = [exchange(), exchange(101.0, 429), exchange(101.0, 404)]
    failures = FirstFailures(exchanges)
    for ended in exchanges[1:]:
        failures.ended(ended, failed("x"))
    assert failures.progress(1).failed_first == 0
    exchanges[0].end_s = 102.0
    failures.ended(exchanges[0], failed("x"))
    assert failures.progress(0) == LoadProgress(
        failed_first=3, refused_first=1, busy_first=1, failing_s=2.0
    )


def test_a_request_too_slow_for_the_stall_limit_ends_the_count_of_failures():
    exchanges = [exchange(101.0), exchange(101.0, 0, RequestFault.STALLED), exchange(101.0)]
    assert FirstFailures(exchanges).progress(0).failed_first == 1


@pytest.mark.parametrize(("status", "first_fault"), [(404, "reset 404"), (500, ""), (429, "")])
def test_only_a_client_error_is_taken_to_last_into_the_next_level(status, first_fault):
    first = exchange(101.0, status)
    failures = FirstFailures([first])
    failures.ended(first, failed("x"))
    assert failures.progress(0).first_fault == first_fault


def test_a_decision_of_a_policy_counts_as_served():
    failures = FirstFailures([exchange(1.0)])
    failures.ended(exchange(1.0), failed(f"{REJECTED} by edf"))
    assert failures.progress(0).served == 1


def columns(n=3, **changes):
    request_columns = RequestColumns.empty(n)
    request_columns.started_s[:] = 0.0
    request_columns.fault[:] = FAULTS.index(RequestFault.STATUS)
    for name, value in changes.items():
        getattr(request_columns, name)[:] = value
    return request_columns


def test_the_reason_names_the_most_common_fault_and_what_was_not_sent():
    assert unserved_because(columns(), {0: "404: no"}) == (
        "not one of 3 requests was served (status: 404: no)"
    )
    partly = columns(started_s=[0.0, 0.1, np.nan])
    assert unserved_because(partly, {}) == "not one of the first 2 of 3 requests was served"


def test_rejected_by_a_policy_and_slow_answers_are_results():
    assert unserved_because(columns(), {1: f"{REJECTED} by edf"}) is None
    from slo_bench.harness.core.records.request_records import Outcome

    slow = columns(outcome=Outcome.UNFINISHED, first_token_s=[np.nan, 1.0, np.nan])
    assert unserved_because(slow, {}) is None
    assert unserved_because(slow, {}, ended_early=True) is not None
    silent = columns(outcome=Outcome.UNFINISHED)
    assert unserved_because(silent, {}) is not None


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_that_refuses_all_gets_a_part_of_the_schedule(workload, run, processes):
    config = MockConfig(fault=InjectedFault.TOO_LONG)
    measurement, _ = run(workload(3000, gap_s=0.02, tokens=1), config, processes=processes)
    sent = int(np.isfinite(measurement.columns.started_s).sum())
    assert 20 <= sent < 3000
    assert measurement.failed_as == "status 400"
    assert measurement.invalid_because == (
        f"not one of the first {sent:,} of 3,000 requests was served "
        "(status: 400: the prompt is too long)"
    )


def test_a_server_that_serves_some_gets_the_whole_schedule(workload, run):
    config = MockConfig(ttft_s=0.0, itl_s=0.0, fault=InjectedFault.TOO_LONG, fault_every=2)
    measurement, _ = run(workload(100, gap_s=0.003, tokens=1), config)
    assert np.isfinite(measurement.columns.started_s).all()
    assert measurement.invalid_because is None
    assert measurement.failed_as == ""


def test_the_level_after_a_failed_one_ends_at_its_first_equal_failure(workload, run):
    config = MockConfig(fault=InjectedFault.TOO_LONG)
    measurement, _ = run(workload(1000, gap_s=0.05), config, failed_before="status 400")
    assert np.isfinite(measurement.columns.started_s).sum() < 1000


def test_a_level_ends_when_its_servers_have_ended(workload):
    with serving(MockConfig(fault=InjectedFault.SILENT)) as server:
        measurement = measure(
            workload(1000, gap_s=0.05),
            [Endpoint.parse(server.url)],
            HttpOptions(processes=1),
            gone=lambda: True,
        )
    assert np.isfinite(measurement.columns.started_s).sum() < 1000


def test_a_level_that_was_ended_early_is_invalid_though_some_of_it_was_served(workload):
    answered = []
    with serving(MockConfig(ttft_s=0.0, itl_s=0.0)) as server:
        measurement = measure(
            workload(1000, gap_s=0.05),
            [Endpoint.parse(server.url)],
            HttpOptions(processes=1, send_delay_limit_s=60.0),
            progress=lambda state, clock_s: answered.append(state.answered),
            gone=lambda: answered[-1] > 0,
        )
    reason = measurement.invalid_because
    assert reason.startswith("a server ended ")
    assert "of 1,000 requests were served before" in reason
    assert measurement.failed_as == ""


@pytest.mark.slow
@pytest.mark.parametrize("keeps_alive", [True, False])
def test_a_request_without_a_token_stalls_whatever_keeps_it_alive(
    workload, scripted_server, keeps_alive
):
    def comments(peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            peer.sendall(b"e\r\n: keep-alive\n\n\r\n")
            time.sleep(0.01)  # many more would be too long an answer

    def nothing(peer):
        peer.recv(1)  # until the client closes

    url = scripted_server(comments if keeps_alive else nothing)
    measurement = measure(
        workload(2),
        [Endpoint.parse(url)],
        HttpOptions(processes=1, stall_limit_s=0.3, send_delay_limit_s=60.0),
    )
    assert measurement.faults() == {RequestFault.STALLED: 2}
