import errno
import os
import socket

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import (
    Api,
    Endpoint,
    HttpOptions,
    RequestFault,
    connection,
    drive,
    wire_requests,
)
from slo_bench.harness.load_generator.http import (
    request_columns as columns,
)
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import InjectedFault as MockFault
from slo_bench.harness.servers.mock import MockConfig
from slo_bench.workloads.errors import SloBenchError

EXPECTED = {
    MockFault.TOO_LONG: (RequestFault.STATUS, Outcome.FAILED, 0),
    MockFault.TOO_MANY: (RequestFault.STATUS, Outcome.REJECTED, 0),
    MockFault.BROKEN: (RequestFault.STATUS, Outcome.FAILED, 0),
    MockFault.REFUSED_IN_STREAM: (RequestFault.ERROR_EVENT, Outcome.FAILED, 0),
    MockFault.RESET: (RequestFault.RESET, Outcome.FAILED, 2),
    MockFault.CUT: (RequestFault.CUT, Outcome.FAILED, 2),
    MockFault.STALL: (RequestFault.STALLED, Outcome.FAILED, 2),
    MockFault.MALFORMED: (RequestFault.MALFORMED, Outcome.FAILED, 2),
    MockFault.EMPTY_FIRST: (RequestFault.NONE, Outcome.FINISHED, 5),
    MockFault.NO_DONE: (RequestFault.NONE, Outcome.FINISHED, 5),
}


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT])
@pytest.mark.parametrize("mock_fault", EXPECTED)
def test_each_injected_fault_is_recorded_by_its_name(workload, run, mock_fault, api):
    config = MockConfig(ttft_s=0.005, itl_s=0.002, fault=mock_fault, fault_every=3)
    # One after another: the server's third request is ours.
    measurement, _ = run(workload(concurrency=1), config, api=api, stall_limit_s=0.2)
    fault, outcome, tokens = EXPECTED[mock_fault]
    records = measurement.result.records
    assert records.outcome.tolist() == [1, 1, outcome, 1, 1, outcome]
    assert records.output_tokens.tolist() == [5, 5, tokens, 5, 5, tokens]
    assert measurement.faults() == ({} if fault is RequestFault.NONE else {fault: 2})
    assert set(measurement.details) == (set() if fault is RequestFault.NONE else {2, 5})
    assert np.isnan(records.finish_s).tolist() == (records.outcome != Outcome.FINISHED).tolist()


@pytest.mark.parametrize(
    ("limit", "mock_fault"),
    [("_FIRST_LIMIT_S", MockFault.SILENT), ("_STALL_LIMIT_S", MockFault.STALL)],
)
def test_stalled_requests_end_by_default_limits(workload, run, monkeypatch, limit, mock_fault):
    monkeypatch.setattr(drive, limit, 0.3)
    config = MockConfig(ttft_s=0.005, itl_s=0.002, fault=mock_fault, fault_every=3)
    measurement, _ = run(workload(concurrency=1), config)
    assert measurement.faults() == {RequestFault.STALLED: 2}
    assert measurement.details[2] == "no token came for 0.3 s"


def test_time_limit_ends_running_requests(workload, run):
    config = MockConfig(ttft_s=0.005, itl_s=0.002, fault=MockFault.SILENT, fault_every=3)
    measurement, _ = run(workload(concurrency=1), config, time_limit_s=0.5)
    outcomes = [Outcome.FINISHED] * 2 + [Outcome.UNFINISHED] + [Outcome.CANCELLED] * 3
    assert measurement.result.records.outcome.tolist() == outcomes
    assert measurement.faults() == {RequestFault.TIME_LIMIT: 1}


def test_server_death_fails_the_remaining_requests(workload, run):
    config = MockConfig(ttft_s=0.005, itl_s=0.002, fault=MockFault.DIE, fault_every=3)
    measurement, _ = run(workload(10, concurrency=1), config)
    outcomes = [Outcome.FINISHED] * 2 + [Outcome.FAILED] * 8
    assert measurement.result.records.outcome.tolist() == outcomes
    assert measurement.faults() == {RequestFault.RESET: 1, RequestFault.CONNECT: 7}


def test_refused_connections_fail_the_requests(workload):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = Endpoint("127.0.0.1", refusing.getsockname()[1])
        measurement = measure(workload(), [endpoint], HttpOptions(processes=1))
    assert measurement.faults() == {RequestFault.CONNECT: 6}
    assert "refused" in measurement.details[0]
    assert measurement.result.totals.decode_tokens == 0


def test_connection_that_is_never_accepted_times_out(workload):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:  # fills the backlog: further connections hang
            client.setblocking(False)
            client.connect_ex(address)
        options = HttpOptions(processes=1, connect_limit_s=0.2)
        measurement = measure(workload(3), [Endpoint(*address)], options)
        for client in waiting:
            client.close()
    assert measurement.faults() == {RequestFault.CONNECT_TIMEOUT: 3}


def test_answer_that_is_no_http_is_a_fault(workload):
    import threading

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def talk():
            for _ in range(2):
                peer, _ = listening.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
                    peer.recv(1)

        thread = threading.Thread(target=talk)
        thread.start()
        measurement = measure(
            workload(2), [Endpoint(*listening.getsockname())], HttpOptions(processes=1)
        )
        thread.join()
    assert measurement.faults() == {RequestFault.MALFORMED: 2}


def test_unknown_host_is_an_error(workload):
    with pytest.raises(SloBenchError, match=r"cannot find no-such-host\.invalid"):
        measure(workload(), [Endpoint("no-such-host.invalid", 80)], HttpOptions(processes=1))


def test_follow_ups_of_an_unanswered_request_are_cancelled(workload, run):
    config = MockConfig(ttft_s=0.001, itl_s=0.001, fault=MockFault.RESET, fault_every=2)
    measurement, truths = run(workload(4, follows=np.array([-1, 0, 1, 2])), config)
    assert measurement.result.records.outcome.tolist() == [
        Outcome.FINISHED,
        Outcome.FAILED,
        Outcome.CANCELLED,
        Outcome.CANCELLED,
    ]
    assert set(truths) == {0, 1}
    assert np.isnan(measurement.result.records.arrival_s).tolist() == [False, False, True, True]


def test_closed_loop_continues_after_faults(workload, run):
    config = MockConfig(ttft_s=0.001, itl_s=0.001, fault=MockFault.BROKEN, fault_every=2)
    measurement, _ = run(workload(8, concurrency=2), config)
    assert measurement.faults() == {RequestFault.STATUS: 4}
    assert not np.isnan(measurement.result.records.arrival_s).any()


def test_time_limit_shorter_than_the_workload_is_refused(workload):
    options = HttpOptions(time_limit_s=0.05)
    with pytest.raises(SloBenchError, match=r"0\.05 s ends before the last request arrives"):
        measure(workload(), [Endpoint("127.0.0.1", 1)], options)


def test_connection_closed_between_requests_is_no_fault(workload):
    """It closes after each answer without saying so; the next request may meet the closing."""
    import threading

    answer = b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)
    served = 0

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(5)

        def serve():
            nonlocal served
            while served < 20:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    if peer.recv(1 << 16):
                        served += 1
                        peer.sendall(head + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = Endpoint(*listening.getsockname())
        measurement = measure(
            workload(20, gap_s=0.003, tokens=1), [endpoint], HttpOptions(processes=1)
        )
        thread.join()
    assert measurement.faults() == {}
    assert served == 20


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("last", [b"0\r\nchecksum: 1\r\nx:\r\n\r\n", b"000;sig=1\r\n\r\n"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 6])
def test_last_chunk_may_have_trailers_or_an_extension(workload, scripted_server, last, cut):
    whole = CHUNKED + chunk(TOKEN) + last
    url = scripted_server(*filter(None, (whole[: len(whole) - cut], whole[len(whole) - cut :])))
    options = HttpOptions(processes=1, time_limit_s=20.0, send_delay_limit_s=60.0)
    measurement = measure(workload(2), [Endpoint.parse(url)], options)
    assert measurement.result.records.outcome.tolist() == [Outcome.FINISHED] * 2, (
        measurement.details
    )


@pytest.mark.parametrize("kind", [b"", b"\r\nContent-Type: text/event-stream"])
@pytest.mark.parametrize(("close", "users"), [(True, None), (False, None), (False, 1)])
def test_stream_without_a_last_chunk_ends_with_its_done(
    workload, scripted_server, monkeypatch, close, users, kind
):
    # Where the next request waits, it is not the look at stalled streams that ends this one.
    monkeypatch.setattr(connection, "CLOSE_LIMIT_S", 1e9 if users else 0.1)
    head = CHUNKED.replace(b" OK", b" OK" + kind)
    url = scripted_server(head + chunk(TOKEN), close=close)
    options = HttpOptions(processes=1, send_delay_limit_s=60.0, stall_limit_s=30.0)
    measurement = measure(workload(2, concurrency=users), [Endpoint.parse(url)], options)
    assert measurement.faults() == {}
    assert measurement.result.records.outcome.tolist() == [Outcome.FINISHED] * 2
    assert measurement.result.records.arrival_s[1] < 30


def test_answer_far_longer_than_max_tokens_is_cut_off(workload, scripted_server, monkeypatch):
    monkeypatch.setattr(wire_requests, "_HEAD", 1 << 20)
    monkeypatch.setattr(wire_requests, "_TOKEN", 0)

    def without_end(peer):
        peer.sendall(CHUNKED)
        while True:
            peer.sendall(chunk(b": nothing\n" * 1000))

    options = HttpOptions(processes=1, send_delay_limit_s=60.0)
    measurement = measure(workload(2), [Endpoint.parse(scripted_server(without_end))], options)
    assert measurement.faults() == {RequestFault.MALFORMED: 2}
    assert measurement.details[0] == "the answer has more than 1 MiB"


def test_full_temporary_folder_ends_the_run(workload, run, monkeypatch):
    pwrite, left = os.pwrite, [4]

    def full(file, data, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data[: 1 + len(data) // 2], offset)  # half of it, as disks may

    monkeypatch.setattr(columns.os, "pwrite", full)
    monkeypatch.setattr(drive, "_HELD_BYTES", 0)  # nothing stays in memory
    measurement, _ = run(workload(4, concurrency=1))
    assert measurement.faults()[RequestFault.CLIENT] == len(measurement.details) > 0
    assert "requests failed on our side" in measurement.invalid_because
    assert "cannot be kept in" in measurement.details[3]
    assert "No space left on device" in measurement.details[3]
