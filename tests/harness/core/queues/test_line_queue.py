"""The queue of keys that are linear in time against a look at every waiting request."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.decisions import Line
from slo_bench.harness.core.queues.line_queue import LineQueue


class _Request:
    """What the queue reads of a request."""

    def __init__(self, seq, line):
        self.seq = seq
        self.version = 0
        self.line = line


POLICY = SimpleNamespace(queue_key_line=lambda r, view: r.line)
# Few values, so that keys are equal, slopes are shared and lines cross at the same moment.
LINES = st.builds(
    Line,
    st.integers(0, 3).map(float),
    st.integers(-2, 2).map(float),
    st.sampled_from([-2.0, -1.0, -0.5, -0.25, 0.0, 0.5]),
)
STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("push"), LINES)] * 3,
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.sampled_from([0.125, 0.5, 1.0, 3.0])),
        *[st.tuples(st.just("crossing"), st.none())] * 2,
        st.tuples(st.just("ask"), st.none()),
    ),
    max_size=60,
)


def _first(waiting, now_s):
    return min(waiting, key=lambda r: (r.line.at(now_s), r.seq))


@pytest.mark.slow
@settings(max_examples=500)
@given(STEPS)
@example(  # a steeper line comes when the next crossing is known
    [
        ("push", Line(0.0, 0.0, -0.5)),
        ("push", Line(0.0, 0.0, 0.0)),
        ("crossing", None),
        ("push", Line(3.0, 0.0, -2.0)),
        ("crossing", None),
    ]
)
def test_head_is_the_smallest_key_and_no_crossing_is_missed(steps):
    view = SimpleNamespace(now_s=0.0)
    queue, waiting = LineQueue(POLICY, view), []
    for number, (step, value) in enumerate(steps):
        if step == "push":
            waiting.append(_Request(number, value))
            queue.push(waiting[-1])
        elif step == "wait":
            view.now_s += value
        elif step == "take" and waiting:
            assert queue.head() is _first(waiting, view.now_s)
            queue.take_head()
            waiting.remove(_first(waiting, view.now_s))
        elif step == "remove" and waiting:
            queue.remove(waiting.pop(value % len(waiting)))
        elif step == "ask" and waiting:
            assert queue.head() is _first(waiting, view.now_s)
            assert list(queue.ordered()) == sorted(
                waiting, key=lambda r: (r.line.at(view.now_s), r.seq)
            )
        elif step == "crossing" and waiting:
            first, next_s = _first(waiting, view.now_s), queue.overtaken_s()
            for share in (0.25, 0.5, 1.0):
                later_s = view.now_s + share * min(next_s - view.now_s, 8.0) * 0.999
                assert _first(waiting, later_s).line.at(later_s) >= first.line.at(later_s) - 1e-9
            if next_s == math.inf:
                assert _first(waiting, view.now_s + 1e3).line.per_s == first.line.per_s
        assert queue.live == len(waiting)
