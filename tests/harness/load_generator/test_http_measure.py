import asyncio
import shutil
import signal
import subprocess
import sys
import time
from array import array

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import Api, Endpoint, HttpOptions, drive
from slo_bench.harness.load_generator.http.connection import Exchange
from slo_bench.harness.load_generator.http.request_columns import DriveResult, Spool
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.load_generator.send_job import Share, processes_for, rows_elsewhere
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving
from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.request import RequestType
from slo_bench.workloads.workload import Workload


def most_at_once(truths):
    """From when a request was received until its last token left."""
    moves = [(t.received_s, 1) for t in truths] + [(t.last_token_s, -1) for t in truths]
    at_once = peak = 0
    for _, move in sorted(moves):
        at_once += move
        peak = max(peak, at_once)
    return peak


@pytest.mark.parametrize("room_bytes", [0, 600, 1 << 20])
def test_answers_read_during_the_run_equal_those_read_after_it(
    workload, run, monkeypatch, room_bytes
):
    monkeypatch.setattr(drive, "_HELD_BYTES", room_bytes)
    measurement, truths = run(workload(4, concurrency=2), save_token_times=True, keep_texts=True)
    columns = measurement.columns
    assert columns.output_tokens.tolist() == columns.chunks.tolist() == [5] * 4
    assert columns.prompt_tokens.tolist() == [8] * 4
    assert measurement.texts == dict.fromkeys(range(4), " tok" * 5)
    for row, token_s in enumerate(measurement.token_s.reshape(4, 5)):
        assert (token_s >= np.array(truths[row].token_s) - measurement.start_s).all()
        assert (columns.first_token_s[row], columns.last_token_s[row]) == (token_s[0], token_s[-1])


def test_measured_times_equal_those_of_the_mock_server(workload, run):
    measurement, truths = run(workload(), save_token_times=True)
    columns, records = measurement.columns, measurement.result.records
    np.testing.assert_array_equal(records.arrival_s, np.arange(6) * 0.01)
    assert records.output_tokens.tolist() == [5] * 6
    assert columns.prompt_tokens.tolist() == [8] * 6
    # Both processes read the same clock: nothing is seen before it left, nor sent after it came.
    zero_s = truths[0].received_s - columns.sent_s[0]
    token_s = measurement.token_s.reshape(6, 5)
    for row, truth in truths.items():
        left = np.array(truth.token_s) - zero_s
        assert (token_s[row] - left > -2e-3).all()
    assert (columns.arrival_s <= columns.started_s + 1e-3).all()
    assert (columns.started_s <= columns.sent_s).all()
    assert (columns.sent_s < columns.first_byte_s).all()
    assert (columns.first_byte_s <= records.first_token_s).all()
    # Equal where a late client read all tokens at once.
    assert (records.first_token_s <= records.finish_s).all()
    np.testing.assert_array_equal(token_s[:, 0], records.first_token_s)
    np.testing.assert_array_equal(token_s[:, -1], records.finish_s)
    assert measurement.result.gaps.count.sum() == 24
    assert measurement.invalid_because is None


def test_open_loop_sends_without_waiting_for_answers(workload, run):
    """Ten arrive before the first is answered; all are there at once."""
    measurement, truths = run(workload(10, gap_s=0.001), MockConfig(ttft_s=0.5, itl_s=0))
    assert most_at_once(truths.values()) == 10
    assert (measurement.result.records.outcome == Outcome.FINISHED).all()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_closed_loop_keeps_its_concurrency_in_flight(workload, run, processes):
    measurement, truths = run(workload(20, concurrency=4), processes=processes)
    assert len(truths) == 20
    assert most_at_once(truths.values()) <= 4
    assert (measurement.result.records.outcome == Outcome.FINISHED).all()


@pytest.mark.parametrize("room_bytes", [0, 600, 1 << 20])
def test_answers_held_in_memory_equal_those_from_the_file(workload, run, monkeypatch, room_bytes):
    monkeypatch.setattr(drive, "_HELD_BYTES", room_bytes)
    measurement, _ = run(workload(), keep_texts=True)
    columns = measurement.columns
    assert columns.output_tokens.tolist() == columns.chunks.tolist() == [5] * 6
    assert columns.prompt_tokens.tolist() == [8] * 6
    assert measurement.texts == dict.fromkeys(range(6), " tok" * 5)


def test_the_result_of_a_level_has_a_text_without_its_answers():
    """asyncio makes the text of it, which took as long as reading the answers."""
    exchange = Exchange(0, 0, 0.0, waited_for=False, pieces=[b"answer"] * 1000)
    driven = DriveResult(0.0, [exchange], Spool(), {}, array("d"), 0.0, 0)
    assert len(repr(driven)) < 200
    driven.spool.close()


def test_session_waits_for_the_answer_and_think_time(run):
    turns = Workload(
        np.array([0.0, 0.0, 0.01, 0.01]),
        np.full(4, 8),
        np.full(4, 3),
        follows=np.array([-1, 0, -1, 2]),
        think_s=np.array([0.0, 0.05, 0.0, 0.1]),
    )
    measurement, truths = run(turns)
    ended = measurement.columns.ended_s
    arrival = measurement.result.records.arrival_s
    assert arrival[1] == pytest.approx(ended[0] + 0.05)
    assert arrival[3] == pytest.approx(ended[2] + 0.1)
    assert truths[1].received_s - truths[0].last_token_s > 0.049


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_agent_step_waits_for_its_sub_agents(run, processes):
    task = Workload(
        np.zeros(5),
        np.full(5, 8),
        np.array([3, 3, 30, 3, 3]),
        follows=np.array([-1, 0, 0, 0, -1]),
        joins=[(), (), (), (1, 2), ()],
        think_s=np.array([0.0, 0.0, 0.0, 0.05, 0.0]),
    )
    measurement, truths = run(task, processes=processes)
    assert sorted(truths) == list(range(5))
    ended, arrival = measurement.columns.ended_s, measurement.result.records.arrival_s
    assert arrival[1] == arrival[2] == pytest.approx(ended[0])
    assert ended[2] > ended[1]
    assert arrival[3] == pytest.approx(ended[2] + 0.05)


@pytest.mark.slow
def test_several_processes_send_everything_once(workload, run):
    blocks = [(row % 3, row) for row in range(12)]
    follows = np.array([-1] * 11 + [2])
    load = workload(12, follows=follows, prefix_blocks=blocks, class_names=("a",))
    measurement, truths = run(load, processes=3, save_token_times=True)
    assert sorted(truths) == list(range(12))
    assert measurement.client.processes == 3
    assert measurement.result.records.output_tokens.tolist() == [5] * 12
    assert len(measurement.token_s) == 60
    np.testing.assert_array_equal(
        measurement.token_s[::5], measurement.result.records.first_token_s
    )


@pytest.mark.slow
def test_error_in_a_sending_process_is_raised(workload):
    with pytest.raises(SloBenchError, match="cannot find no-such-host"):
        measure(workload(), [Endpoint("no-such-host.invalid", 80)], HttpOptions(processes=2))


def test_shares_of_processes_cover_all_and_keep_sessions_together(workload):
    load = workload(9, follows=np.array([-1, -1, 0, 2, -1, 1, -1, 6, -1]))
    shares = [set(range(9)) - set(rows_elsewhere(load, Share(k, 2)).tolist()) for k in range(2)]
    assert shares[0] | shares[1] == set(range(9))
    assert not shares[0] & shares[1]
    assert {0, 2, 3} <= shares[0]
    assert {1, 5} <= shares[1]
    assert [Share(k, 3).of(workload(9, concurrency=7)).concurrency for k in range(3)] == [3, 2, 2]


def test_number_of_processes_follows_the_token_rate(workload, monkeypatch):
    monkeypatch.setattr("slo_bench.harness.load_generator.send_job.cores", lambda: 8)
    assert processes_for(workload(100, gap_s=1.0, tokens=64)) == 1
    assert processes_for(workload(1000, gap_s=0.001, tokens=64)) == 3
    assert processes_for(workload(1000, gap_s=0.0001, tokens=64)) == 8
    assert processes_for(workload(1000, gap_s=0.0001, concurrency=4)) == 1
    assert processes_for(workload(100, gap_s=0.0001, tokens=64)) == 1


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_routers_choose_among_servers(workload, router):
    """Of one server's single request the answer takes long; who looks at loads spares it."""
    slow, quick = MockConfig(ttft_s=2.0, itl_s=0), MockConfig(ttft_s=0, itl_s=0)
    with serving(slow) as first, serving(quick) as second:
        endpoints = [Endpoint.parse(server.url) for server in (first, second)]
        options = HttpOptions(processes=1, send_delay_limit_s=60)
        measurement = measure(workload(8, gap_s=0.05, tokens=1), endpoints, options, router=router)
        counts = [len(server.truths()) for server in (first, second)]
    if router == "round-robin":
        assert counts == [4, 4]
    else:
        assert 1 <= counts[0] < counts[1]
    assert np.bincount(measurement.result.records.instance, minlength=2).tolist() == counts


def test_prefix_aware_router_follows_prefixes_over_servers(workload):
    blocks = [(row % 2, 10 + row % 2) for row in range(8)]
    load = workload(8, gap_s=0.02, prefix_blocks=blocks)
    with serving() as first, serving() as second:
        endpoints = [Endpoint.parse(server.url) for server in (first, second)]
        measurement = measure(load, endpoints, HttpOptions(processes=1), router="prefix-aware")
    instance = measurement.result.records.instance
    assert len(set(instance[::2].tolist())) == 1
    assert len(set(instance[1::2].tolist())) == 1


def test_measure_refuses_impossible_arguments_at_once(workload):
    with pytest.raises(SloBenchError, match="--base-url"):
        measure(workload(), [])
    with pytest.raises(UnknownNameError, match="least-loaded"):
        measure(workload(), [Endpoint("127.0.0.1", 1)], router="least-load")


def test_embeddings_have_no_output_tokens(workload, run):
    measurement, truths = run(workload(request_type=np.full(6, RequestType.EMBED)))
    records = measurement.result.records
    assert (records.outcome == Outcome.FINISHED).all()
    assert records.output_tokens.tolist() == [0] * 6
    np.testing.assert_array_equal(records.first_token_s, records.finish_s)
    assert {t.prompt_tokens for t in truths.values()} == {8}


def test_chat_and_chunks_of_several_tokens(workload, run):
    config = MockConfig(ttft_s=0.005, itl_s=0.002, tokens_per_chunk=2)
    measurement, truths = run(workload(), config, api=Api.CHAT, keep_texts=True)
    assert measurement.result.records.output_tokens.tolist() == [5] * 6
    assert measurement.columns.chunks.tolist() == [3] * 6
    assert {t.prompt_tokens for t in truths.values()} == {8}
    assert measurement.texts[0] == " tok" * 5


def test_answers_without_usage_are_counted_by_chunks(workload, run):
    measurement, _ = run(workload(), body={"stream_options": {"include_usage": False}})
    assert measurement.result.records.output_tokens.tolist() == [5] * 6
    assert measurement.columns.prompt_tokens.tolist() == [-1] * 6


def test_late_client_makes_the_level_invalid(workload, run):
    measurement, _ = run(workload(), send_delay_limit_s=1e-9)
    assert "ms is the limit" in measurement.invalid_because


def test_measure_works_inside_a_running_event_loop(workload, run):
    """As in a notebook."""

    async def cell():
        return run(workload(2))

    measurement, truths = asyncio.run(cell())
    assert measurement.result.records.output_tokens.tolist() == [5, 5]
    assert len(truths) == 2


@pytest.mark.slow
def test_ctrl_c_stops_a_measurement(workload):
    """With a server that never answers; the connections are closed on the way out."""
    silent = MockConfig(fault=InjectedFault.SILENT)
    with serving(silent) as server:
        code = (
            "import signal, sys\n"
            "import numpy as np\n"
            "from slo_bench.harness.load_generator.routed_load import measure\n"
            "from slo_bench.harness.load_generator.http import Endpoint, HttpOptions\n"
            "from slo_bench.workloads.workload import Workload\n"
            "w = Workload(np.zeros(3), np.full(3, 8), np.full(3, 5))\n"
            # In the background of a script, Ctrl-C is ignored from the start.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "print('ready', flush=True)\n"
            "e, options = Endpoint.parse(sys.argv[1]), HttpOptions(processes=int(sys.argv[2]))\n"
            "try: measure(w, [e], options)\n"
            "except KeyboardInterrupt: print('stopped')\n"
        )
        for processes in ("1", "2"):
            with subprocess.Popen(
                [sys.executable, "-c", code, server.url, processes],
                stdout=subprocess.PIPE,
                text=True,
            ) as child:
                try:
                    assert child.stdout.readline() == "ready\n"
                    before = len(server.truths())
                    while len(server.truths()) < before + 3:
                        time.sleep(0.05)
                    child.send_signal(signal.SIGINT)
                    out, _ = child.communicate(timeout=60)
                finally:
                    child.kill()
            assert out == "stopped\n"
            assert child.returncode == 0


def test_measured_timeline_counts_waiting_and_running_requests(workload, run):
    measurement, _ = run(workload(4, gap_s=0.0), MockConfig(ttft_s=0.2, itl_s=0.05))
    timeline = measurement.result.timeline
    assert timeline.waiting.max() == 4
    assert timeline.running.max() == 4
    assert timeline.waiting[-1] == timeline.running[-1] == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_measure_over_tls_verifies_the_certificate(workload, tmp_path, monkeypatch):
    import ssl

    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving(MockConfig(ttft_s=0.005, itl_s=0.001), tls) as server:
        endpoint = Endpoint.parse(server.url)
        strangers = measure(workload(2), [endpoint], HttpOptions(processes=1))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        friends = measure(workload(3), [endpoint], HttpOptions(processes=1))
    assert {fault.value for fault in strangers.faults()} == {"tls"}
    assert friends.result.records.output_tokens.tolist() == [5] * 3


def test_truths_of_a_mock_come_not_through_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving() as server:
        assert server.truths() == []
    with pytest.raises(SloBenchError, match="truth cannot be reached"):
        server.truths()
