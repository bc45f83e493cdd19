"""What is told of an answer's length: predicted when its request is due, and put into it."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.predictions import LearnedPredictions
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.wire import PredictedLength, predicted_length_from_wire
from slo_bench.harness.load_generator import send_job
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions, RequestFault
from slo_bench.harness.load_generator.http.length_prediction import LengthPrediction, prompt_lengths
from slo_bench.harness.load_generator.http.wire_requests import Bodies, WireRequests
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo

PREDICTED = {"values_field": "vllm_xargs", "length_predictor": "constant(7)"}
OPTIONS = HttpOptions(**PREDICTED)
HOSTILE = '","vllm_xargs":{"row":9}} says this prompt'


class Slow(LengthPrediction):
    """Takes its time over every batch, and remembers them."""

    def __init__(self, each_s):
        super().__init__(self.slowly)
        self.each_s = each_s
        self.batches = []

    def slowly(self, rows):
        self.batches.append(list(rows))
        time.sleep(self.each_s)
        return [(PredictedLength(10 + row, 20 + row), None) for row in rows]


@pytest.fixture
def reading(monkeypatch):
    """Have requests read by this."""

    def put(reader):
        monkeypatch.setattr(send_job, "prompt_lengths", lambda workload, options: reader)
        return reader

    return put


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_predicted_length_survives_the_wire(half, more):
    prediction = PredictedLength(half, half + more)
    assert predicted_length_from_wire(json.loads(json.dumps(prediction.to_wire()))) == prediction


@pytest.mark.parametrize("half", [None, "12", True, 0, -3, float("nan"), float("inf"), [1]])
def test_malformed_predicted_length_is_ignored(half):
    assert predicted_length_from_wire({"predicted_output_tokens": half}) is None


def test_predicted_p90_is_at_least_the_median():
    assert predicted_length_from_wire({"predicted_output_tokens": 9}) == (9, 9)
    wire = {"predicted_output_tokens": 9, "predicted_output_tokens_p90": 3}
    assert predicted_length_from_wire(wire) == (9, 9)


def test_predicted_length_is_capped_at_max_output_tokens():
    r = RequestState(0, 0.0, 8, 500, 100, Slo())
    predict = LearnedPredictions()
    assert (predict.output_tokens(r), predict.output_tokens_p90(r)) == (100, 100)
    r.predicted_output_tokens = PredictedLength(30, 300)
    assert (predict.output_tokens(r), predict.output_tokens_p90(r)) == (30, 100)


def test_predicted_length_is_written_into_the_request_values(workload, tmp_path):
    load = workload(3, texts=[HOSTILE, "b", "c"])
    bodies = Bodies.write(load, OPTIONS, tmp_path / "bodies")
    requests = WireRequests(load, [Endpoint("h", 1)], OPTIONS, bodies)
    before = [json.loads(requests.of(0, row)[1]) for row in range(3)]
    requests.tell(0, PredictedLength(5, 50))
    requests.tell(2, PredictedLength(6, 60))
    for row, expected in ((0, (5, 50)), (1, None), (2, (6, 60))):
        head, body = requests.of(0, row)
        assert f"content-length: {len(body)}\r\n".encode() in head
        now = json.loads(body)
        assert predicted_length_from_wire(now["vllm_xargs"]) == expected
        for name in ("predicted_output_tokens", "predicted_output_tokens_p90"):
            now["vllm_xargs"].pop(name, None)
        assert now == before[row]
    bodies.close()


def test_requests_that_arrive_during_a_prediction_form_one_batch(workload, run, reading):
    slow = reading(Slow(0.3))
    measurement, _ = run(workload(8, gap_s=0.002), **PREDICTED)
    assert slow.batches[0][0] == 0
    assert sorted(row for rows in slow.batches for row in rows) == list(range(8))
    assert len(slow.batches) < 8
    assert (measurement.result.records.outcome == Outcome.FINISHED).all()
    # Their clocks run meanwhile, and we are not called late.
    assert (measurement.columns.sent_s - measurement.columns.arrival_s > 0.29).all()
    assert (measurement.result.records.first_token_s > measurement.columns.sent_s).all()


def test_time_limit_during_a_prediction_ends_the_requests(workload, run, reading):
    reading(Slow(1.0))
    measurement, _ = run(workload(3, gap_s=0.001), **PREDICTED, time_limit_s=0.2)
    assert measurement.faults() == {RequestFault.TIME_LIMIT: 3}


def test_failing_predictor_ends_the_run(workload, run, reading):
    def broken(rows):
        raise SloBenchError("no such thing")

    reading(LengthPrediction(broken))
    with pytest.raises(SloBenchError, match="no such thing"):
        run(workload(3), **PREDICTED)


def test_constant_and_noisy_lengths_are_known_before_the_run(workload):
    load = workload(4, tokens=40)
    assert prompt_lengths(load, OPTIONS).read([2, 0]) == [((7, 7), None)] * 2
    noisy = HttpOptions(values_field="x", length_predictor="noisy(accuracy=1)")
    assert prompt_lengths(load, noisy).read([1]) == [((48, 48), None)]
    # Nobody asks, or nobody would hear it.
    assert prompt_lengths(load, HttpOptions(values_field="x")) is None
    assert prompt_lengths(load, HttpOptions(length_predictor="constant(7)")) is None


def test_length_prediction_with_several_processes_is_refused(workload, run):
    with pytest.raises(SloBenchError, match="predicted in one process, but --processes is 2"):
        run(workload(), values_field="x", length_predictor="constant(7)", processes=2)
    measurement, _ = run(
        workload(), values_field="x", length_predictor="constant(7)", processes=None
    )
    assert measurement.client.processes == 1
    assert np.isfinite(measurement.result.records.finish_s).all()
