"""Which change is named as the safest."""

from __future__ import annotations

from slo_bench.tuner.planning.headroom import Change, _next


def change(name, low, **more):
    return Change(name, name, low + 0.1, low, low + 0.2, **more)


MORE = change("an instance", 1.8, instances=1)
LARGER = change("a larger batch", 1.3, unseen=True)
OTHER = change("another budget", 1.1)
WORSE = change("a smaller batch", 0.8)


def test_headroom_prefers_a_free_change_better_at_both_ends():
    assert _next([MORE, LARGER, OTHER, WORSE], least_headroom=2.0) is OTHER


def test_headroom_refuses_larger_batches_than_seen():
    assert LARGER.safe is False
    assert _next([LARGER, WORSE], least_headroom=2.0) is None


def test_headroom_adds_an_instance_where_the_load_may_be_too_much():
    assert _next([MORE, WORSE], least_headroom=0.9) is MORE
    assert _next([MORE, OTHER], least_headroom=0.95) is OTHER  # with it the load is carried
    assert _next([MORE, OTHER], least_headroom=0.5) is MORE
    assert _next([MORE, WORSE], least_headroom=1.5) is None
