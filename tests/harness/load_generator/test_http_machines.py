"""One load from several machines: machines are stations here whose clocks are hours apart."""

import csv
import pickle
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.cluster.cluster_arrivals import INF, Arrivals
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions
from slo_bench.harness.load_generator.load_workers import (
    ClockReading,
    LoadWorkers,
    LoadWorkersLostError,
    Offset,
    error_over,
    offset_of,
    send_from,
)
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.load_generator.send_job import (
    Share,
    ThisMachine,
    rows_elsewhere,
    start_sender,
)
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

EARLY_S = 0.0005 + 1e-6  # the event loop's timers count milliseconds


class Elsewhere(LoadWorkers):
    """A station whose clock shows something else."""

    def __init__(self, ahead_s):
        super().__init__()
        self.ahead_s = ahead_s

    def clock(self):
        return super().clock() + self.ahead_s

    def send(self, start_s, time_s):
        return super().send(start_s - self.ahead_s, time_s)


class Near:
    """A `RayStation` that is none: calls travel as bytes, answers come from threads."""

    def __init__(self, machine, ahead_s):
        self.machine = machine
        self.station = Elsewhere(ahead_s)
        self.threads = ThreadPoolExecutor(3)
        self.lost = threading.Event()

    def call(self, method, *arguments):
        sent = pickle.dumps(arguments)
        answer = Future()

        def do():
            try:
                reply = getattr(self.station, method)(*pickle.loads(sent))
                reply = pickle.loads(pickle.dumps(reply))
            except Exception as error:
                reply = error
            if self.lost.is_set():
                reply = LoadWorkersLostError("gone")
            (answer.set_exception if isinstance(reply, Exception) else answer.set_result)(reply)

        self.threads.submit(do)
        return answer


class Machines:
    """`Senders`: so many stations with these clocks."""

    def __init__(self, *ahead_s):
        self.ahead_s = ahead_s
        self.begun = lambda stations: None

    def count(self, workload):
        return len(self.ahead_s)

    def send(self, order, progress):
        stations = [Near(f"machine-{k}", ahead_s) for k, ahead_s in enumerate(self.ahead_s)]

        def watch(ended, clock_s):
            self.begun(stations)
            if progress is not None:
                progress(ended, clock_s)

        try:
            return send_from(stations, order, watch)
        finally:
            for station in stations:
                station.station.close()
                station.threads.shutdown()


def schedule_of(workload, share):
    """What a share would send, and when, if every answer took 10 ms."""
    part = share.of(workload)
    arrivals = Arrivals(part, skip=rows_elsewhere(workload, share))
    schedule, ends = [], []
    while True:
        next_s = arrivals.next_s()
        if ends and ends[0][0] <= next_s:
            end_s, row = ends.pop(0)
            arrivals.ended(row, end_s, True)
        elif next_s == INF:
            return schedule
        else:
            r = arrivals.pop()
            schedule.append((r.id, r.arrival_s))
            if r.notify_on_finish:
                ends.append((r.arrival_s + 0.01, r.id))
                ends.sort()


@st.composite
def workloads(draw):
    n = draw(st.integers(1, 40))
    gaps = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    follows = [draw(st.one_of(st.just(-1), st.integers(-1, row - 1))) for row in range(n)]
    rows = np.arange(n)
    return Workload(
        np.cumsum(gaps),
        np.full(n, 8),
        np.full(n, 2),
        follows=np.array(follows),
        think_s=np.where(np.array(follows) >= 0, 0.05 * (rows % 3), 0.0),
    )


@given(workloads(), st.integers(1, 6))
def test_shares_of_a_schedule_equal_the_whole_schedule(workload, count):
    whole = schedule_of(workload, Share(0, 1))
    parts = [schedule_of(workload, Share(k, count)) for k in range(count)]
    assert sorted(entry for part in parts for entry in part) == sorted(whole)
    roots = np.flatnonzero(workload.follows < 0)
    for k, part in enumerate(parts):  # each gets its n-th of rows, and so of the rate
        assert {row for row, _ in part} & set(roots.tolist()) == set(roots[roots % count == k])


seconds = st.floats(0, 0.05)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 100), seconds, seconds), min_size=1, max_size=20),
)
def test_clock_offset_error_stays_within_its_bound(truth_s, journeys):
    """However slow the way there and back, and however uneven."""
    readings = [
        ClockReading(at_s, at_s + there_s + truth_s, at_s + there_s + back_s)
        for at_s, there_s, back_s in journeys
    ]
    offset = offset_of(readings)
    assert abs(offset.offset_s - truth_s) <= offset.error_s + 1e-6
    fastest = min(there_s + back_s for _, there_s, back_s in journeys)
    assert offset.error_s <= fastest / 2 + 1e-6


@given(
    st.floats(-10, 10), st.floats(-0.1, 0.1), seconds, seconds, st.floats(-1, 1), st.floats(-1, 1)
)
def test_error_over_bounds_drifting_clocks(truth_s, drift_s, e0, e1, off0, off1):
    before = Offset(truth_s + off0 * e0, e0)
    after = Offset(truth_s + drift_s + off1 * e1, e1)
    bound_s = error_over(before, after)
    for share in (0.0, 0.3, 1.0):
        assert abs(truth_s + share * drift_s - before.offset_s) <= bound_s + 1e-9


def sent(workload, senders=None, config=None, **options):
    settings = {"send_delay_limit_s": 60.0, "rate_limit_share": 1.0, **options}
    with serving(config or MockConfig(ttft_s=0.005, itl_s=0.002)) as server:
        measurement = measure(
            workload, [Endpoint.parse(server.url)], HttpOptions(**settings), senders=senders
        )
        truths = server.truths()
    assert len(truths) == len({truth.request_id for truth in truths})  # nothing was sent twice
    return measurement, {int(t.request_id.removeprefix("slo-bench-")): t for t in truths}


@pytest.mark.slow
def test_two_machines_send_the_schedule_of_one(workload):
    load = workload(40, gap_s=0.02, follows=np.array([-1] * 38 + [3, 4]))
    alone, _ = sent(load, processes=1)
    measurement, truths = sent(load, Machines(5000.0, -3600.0))
    assert sorted(truths) == list(range(40))
    for name in (
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "completion_tokens",
        "status",
        "fault",
    ):
        np.testing.assert_array_equal(
            getattr(measurement.columns, name), getattr(alone.columns, name)
        )
    np.testing.assert_array_equal(measurement.columns.arrival_s[:38], alone.columns.arrival_s[:38])
    assert (measurement.result.records.outcome == Outcome.FINISHED).all()
    # Of an answer that came in one piece, on a busy machine, gaps are not known.
    gaps = [measured.result.gaps.count.sum() for measured in (measurement, alone)]
    assert all(0 < n <= sum(load.output_tokens) - 40 for n in gaps)
    assert measurement.invalid_because is None
    # Both halves by both, within what is said of the clocks and of being late.
    for client, ahead_s in zip(measurement.clients, (5000.0, -3600.0), strict=True):
        assert client.requests == 20
        assert abs(client.offset_s - ahead_s) <= client.clock_error_s
        assert not client.died
    error_s = max(client.clock_error_s for client in measurement.clients)
    late_s = max(client.send_delay_max_s for client in measurement.clients)
    for row, truth in truths.items():
        received_s = (
            truth.received_s - measurement.start_s
        )  # one clock: mock and test are one machine
        assert received_s >= measurement.columns.arrival_s[row] - EARLY_S - error_s
        assert received_s >= measurement.columns.started_s[row] - error_s
        assert (
            measurement.columns.started_s[row] <= measurement.columns.arrival_s[row] + late_s + 1e-9
        )


@pytest.mark.slow
def test_death_of_a_sending_process_makes_the_level_invalid(workload, monkeypatch):
    senders, children = Machines(0.0, 7.0), {}

    def start(folder, share):
        children[share] = start_sender(folder, share)
        return children[share]

    monkeypatch.setattr("slo_bench.harness.load_generator.send_job.start_sender", start)
    senders.begun = lambda stations: children[1].process.kill()
    measurement, _ = sent(workload(30, gap_s=0.1), senders, send_delay_limit_s=60.0)
    assert measurement.invalid_because is not None
    assert measurement.invalid_because.startswith("client 2 of 2, on machine-1, died")
    assert "15 requests is unknown" in measurement.invalid_because
    survivor = np.arange(30) % 2 == 0
    assert (measurement.columns.outcome[survivor] == Outcome.FINISHED).all()
    assert (measurement.columns.outcome[~survivor] == Outcome.CANCELLED).all()


@pytest.mark.slow
def test_lost_machine_makes_the_level_invalid(workload):
    senders = Machines(0.0, 7.0)
    senders.begun = lambda stations: stations[0].lost.set()
    measurement, _ = sent(workload(30, gap_s=0.1), senders)
    assert measurement.invalid_because is not None
    assert measurement.invalid_because.startswith("client 1 of 2, on machine-0, died")


def test_loss_of_every_machine_is_an_error(workload):
    senders = Machines(0.0)
    senders.begun = lambda stations: stations[0].lost.set()
    with pytest.raises(SloBenchError, match=r"every process that sent has died.*machine-0: gone"):
        sent(workload(30, gap_s=0.1), senders)


@pytest.mark.parametrize("ended", [0, 1])
def test_clock_without_answer_after_the_level_keeps_its_results(workload, monkeypatch, ended):
    """After the level, as on a machine with more processes than cores; before it nothing is
    sent.
    """
    monkeypatch.setattr("slo_bench.harness.load_generator.load_workers._CLOCK_S", 0.05)
    answered, begun = Near.call, []

    def call(near, method, *arguments):
        begun.extend([method] if method == "send" else [])
        silent = method == "clock" and len(begun) >= ended
        return Future() if silent else answered(near, method, *arguments)

    monkeypatch.setattr(Near, "call", call)
    if not ended:
        with pytest.raises(SloBenchError, match="machine-0: did not tell its clock within"):
            sent(workload(), Machines(0.0))
        return
    measurement, _ = sent(workload(), Machines(0.0))
    assert (measurement.columns.outcome == Outcome.FINISHED).all()
    assert measurement.invalid_because is not None
    assert "did not tell its clock after the level" in measurement.invalid_because


def test_error_of_a_machine_names_the_machine(workload, monkeypatch):
    def failing(station, files, shares):
        raise SloBenchError("the environment variable KEY is not set")

    monkeypatch.setattr(Elsewhere, "prepare", failing)
    with pytest.raises(SloBenchError, match="machine-0: the environment variable KEY"):
        sent(workload(), Machines(0.0))


def test_large_clock_error_makes_the_level_invalid(workload, monkeypatch):
    monkeypatch.setattr(
        "slo_bench.harness.load_generator.load_workers.error_over", lambda before, after: 90.0
    )
    measurement, _ = sent(workload(), Machines(0.0))
    assert measurement.invalid_because is not None
    assert "known to ±90000.0 ms alone" in measurement.invalid_because


def test_sender_without_its_parent_sends_no_request(workload, tmp_path):
    """The folder holds an order; the one who gave it is gone before the first request is due."""

    class Dying(ThisMachine):
        def send(self, order, progress):
            for name, content in order.files().items():
                (tmp_path / name).write_bytes(content)
            for name, content in order.bodies.files_of(range(6)).items():
                (tmp_path / name).write_bytes(content)
            child = start_sender(tmp_path, 0)
            assert child.receive() == {"ready": True}
            child.send(1e9)
            child.stop(60)
            assert child.process.returncode == 1
            raise SloBenchError("as it should")

    with pytest.raises(SloBenchError, match="as it should"):
        sent(workload(), Dying(), processes=2)


def test_client_figures_are_given_for_each_process(tmp_path):
    with serving(MockConfig(ttft_s=0.002, itl_s=0.0005)) as server:
        client = {"base_urls": (server.url,), "send_delay_limit_s": 60.0, "processes": 2}
        result = Experiment(
            backend="openai",
            client=client,
            prompt_tokens="fixed(8)",
            output_tokens="fixed(5)",
            requests=12,
            rates=200.0,
            seeds=1,
        ).run(tmp_path / "run")
    (row,) = result.rows()
    with (tmp_path / "run" / "clients" / f"{row['cell']}.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["client"], line["requests"], line["died"]) for line in lines] == [
        ("1", "6", "False"),
        ("2", "6", "False"),
    ]
    assert all(
        float(line["send_delay_max_s"]) >= float(line["send_delay_p50_s"]) >= 0 for line in lines
    )
    assert row["client_processes"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="sending needs uvloop")
def test_length_prediction_with_an_executor_is_refused(workload):
    with pytest.raises(SloBenchError, match="leave --executor out"):
        sent(workload(), Machines(0.0), length_predictor="constant(7)", values_field="x")
