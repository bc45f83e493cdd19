"""Step logs as plugins write them: what took how long."""

from __future__ import annotations

import json

import pytest

from slo_bench.harness.results.step_log import read_step_log
from slo_bench.workloads.errors import FileFormatError


def step(time_s, decode_seqs=1, chunks=()):
    return {
        "event": "step",
        "time_s": time_s,
        "decode_seqs": decode_seqs,
        "decode_kv_tokens": 10 * decode_seqs,
        "chunks": list(chunks),
    }


def done(time_s, left):
    return {"event": "done", "time_s": time_s, "left": left}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def seconds(steps):
    return [round(s.duration_s, 9) for s in steps]


def test_step_lasts_from_the_end_of_the_step_before(tmp_path):
    path = written(
        tmp_path / "log",
        step(1.0, 0, [[0, 8]]),
        done(1.5, 1),
        step(1.6),  # 0.1 s for the scheduler belong to it
        done(2.0, 0),
        step(5.0),  # nobody was there in between
        done(5.25, 0),
    )
    steps = read_step_log(path).steps
    assert seconds(steps) == [0.5, 0.5, 0.25]
    assert steps[0].chunks == [(0, 8)]
    assert (steps[1].decode_seqs, steps[1].decode_kv_tokens) == (1, 10)


def test_step_results_are_matched_in_order(tmp_path):
    path = written(
        tmp_path / "log", step(1.0, 5), step(1.1, 6), done(2.0, 6), step(2.1, 7), done(3.5, 6)
    )
    steps = read_step_log(path).steps
    assert [s.decode_seqs for s in steps] == [5, 6]  # the third has no result yet
    assert seconds(steps) == [1.0, 1.5]


def test_empty_steps_and_other_events_are_ignored(tmp_path):
    path = written(
        tmp_path / "log", {"event": "away", "id": "x"}, step(0.5, 0), step(1.0), done(1.5, 0)
    )
    assert seconds(read_step_log(path).steps) == [0.5]


def test_part_of_a_step_log_may_begin_and_end_anywhere(tmp_path):
    lines = [step(1.0, 1), done(2.0, 0), step(3.0, 2), done(5.0, 0), step(6.0, 3), done(9.0, 0)]
    path = written(tmp_path / "log", *lines)
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(json.dumps(line)) + 1)
    assert seconds(read_step_log(path, ends[2], ends[4]).steps) == [2.0]
    assert seconds(read_step_log(path, ends[2], ends[5] - 3).steps) == [2.0]
    assert seconds(read_step_log(path, ends[1], ends[4]).steps) == [
        2.0
    ]  # a result of nobody knows what


def test_file_that_is_no_step_log_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_step_log(tmp_path / "none")
    (tmp_path / "text").write_text("hello\nworld\n")
    with pytest.raises(FileFormatError, match="is no step log"):
        read_step_log(tmp_path / "text")
    with pytest.raises(FileFormatError, match="is no step log"):
        read_step_log(written(tmp_path / "log", {"event": "step", "time_s": 0.0}))


def test_step_log_separates_swaps_and_recomputations(tmp_path):
    def policy_step(time_s, *, entered=(), preempted=(), **batch):
        victims = [{"id": name, "by": by, "kv_tokens": 9} for name, by in preempted]
        return {**step(time_s, **batch), "entered": list(entered), "preempted": victims}

    path = written(
        tmp_path / "log",
        policy_step(1.0, entered=["a", "b"], decode_seqs=0, chunks=[[0, 8], [0, 8]]),
        done(1.5, 2),
        policy_step(1.5, preempted=[("a", "swap"), ("b", "recompute")]),
        {"event": "swaps", "copies": [["to-host", 4096, 0.25]]},
        done(2.0, 2),
        policy_step(2.0, entered=["b"], decode_seqs=0, chunks=[[0, 12]]),
        done(2.75, 2),
        policy_step(2.75, entered=["a"], decode_seqs=1),  # swapped in, not computed
        {"event": "swaps", "copies": [["to-gpu", 4096, 0.125]]},
        done(3.0, 2),
        policy_step(3.0, entered=["c", "b"], decode_seqs=0, chunks=[[0, 8], [0, 12]]),
        done(4.0, 0),  # with a new request
    )
    log = read_step_log(path)
    assert log.copies == [("to-host", 4096, 0.25), ("to-gpu", 4096, 0.125)]
    assert seconds(log.recomputations) == [0.75]
    assert [(moved, swap_step.duration_s) for moved, swap_step in log.swapping] == [
        (9, 0.5),
        (9, 0.25),
    ]
    assert seconds(log.steps) == [0.5, 0.75, 1.0]
    assert seconds(read_step_log(path).steps) == seconds(log.steps)


def test_step_log_with_malformed_copies_is_refused(tmp_path):
    path = written(tmp_path / "log", {"event": "swaps", "copies": [["to-host", "much"]]})
    with pytest.raises(FileFormatError, match="is no step log"):
        read_step_log(path)
