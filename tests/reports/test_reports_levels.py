"""Highest rates, series and levels, by hand-made cells."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.levels import (
    combine,
    crossing_back,
    has_slo,
    highest_rate,
    highest_text,
    knee_rps,
    levels,
    offered,
    series_names,
    with_series,
)


def cells_of(*rows, system="a", valid=True):
    """Cells from (rate, attainment) pairs, one seed each."""
    return pd.DataFrame(
        {
            "system": system,
            "backend": "simulated",
            "workload": "w",
            "model": "m",
            "gpu": "g",
            "gpus": 1.0,
            "rate_rps": [float(rate) for rate, _ in rows],
            "seed": [
                [r for r, _ in rows[:position]].count(rate)
                for position, (rate, _) in enumerate(rows)
            ],
            "requests": 100.0,
            "attainment": [share for _, share in rows],
            "valid": valid,
        }
    )


def test_highest_rate_takes_the_mean_over_seeds():
    cells = cells_of((1, 1.0), (1, 0.98), (2, 0.95), (2, 0.87), (4, 0.5), (4, 0.6))
    highest = highest_rate(cells, 0.9)
    assert (highest.rate_rps, highest.at_end) == (2.0, False)
    assert highest_rate(cells, 0.99).rate_rps == 1.0


def test_highest_rate_marks_targets_reached_never_or_always():
    none = highest_rate(cells_of((2, 0.5), (4, 0.3)), 0.9)
    assert (none.rate_rps, none.lowest_rps) == (None, 2.0)
    every = highest_rate(cells_of((2, 1.0), (4, 0.9)), 0.9)
    assert (every.rate_rps, every.at_end) == (4.0, True)


def test_mean_of_equal_shares_is_not_lost_to_rounding():
    assert highest_rate(cells_of((3, 0.9), (3, 0.9), (3, 0.9)), 0.9).rate_rps == 3.0


def test_highest_rate_ignores_invalid_cells():
    cells = pd.concat([cells_of((1, 1.0)), cells_of((2, 1.0), valid=False)])
    assert highest_rate(cells, 0.9).rate_rps == 1.0
    nothing = highest_rate(cells_of((2, 1.0), valid=False), 0.9)
    assert (nothing.rate_rps, highest_text(nothing)) == (None, "–")
    assert levels(with_series(cells))["rate_rps"].tolist() == [1.0]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_every_rate_up_to_the_highest_reaches_the_target_and_the_next_does_not(pairs, target):
    cells = cells_of(*pairs)
    highest = highest_rate(cells, target)
    means = cells.groupby("rate_rps")["attainment"].mean()
    above = means.index > (highest.rate_rps or 0.0)
    assert (means[~above] >= target - 1e-12).all()
    assert highest.at_end == (not above.any())
    assert (means[above] < target)[:1].all()
    assert highest.again_rps == tuple(means[above].index[means[above] >= target - 1e-12])


def test_a_curve_that_crosses_back_carries_what_is_below_its_first_failure():
    cells = cells_of((1, 0.95), (2, 0.776), (3, 0.8), (4, 0.93))
    highest = highest_rate(cells, 0.9)
    assert (highest.rate_rps, highest.at_end) == (1.0, False)
    assert (highest.failed_rps, highest.again_rps) == (2.0, (4.0,))
    assert highest_text(highest) == "1"
    assert highest_text(highest_rate(cells_of((2, 0.776), (4, 0.93)), 0.9)) == "< 2"
    (note,) = crossing_back(with_series(cells), 0.9)
    assert note == (
        "a has 77.6 % in SLO at 2 req/s and 90 % again at 4: only rates below the first failure "
        "count"
    )
    assert not crossing_back(with_series(cells_of((1, 0.95), (2, 0.7), (4, 0.3))), 0.9)


def test_levels_hold_mean_lowest_and_highest():
    rows = levels(with_series(cells_of((1, 0.8), (1, 1.0), (2, 0.5))))
    first = rows.iloc[0]
    assert (first["seeds"], first["attainment"]) == (2, pytest.approx(0.9))
    assert (first["attainment_lo"], first["attainment_hi"]) == (0.8, 1.0)


def test_series_are_named_by_what_differs_and_ordered_by_merit():
    cells = pd.concat([cells_of((1, 1.0), (2, 0.2)), cells_of((1, 1.0), (2, 0.95), system="b")])
    assert series_names(with_series(cells)) == ["b", "a"]
    on_two_gpus = pd.concat([cells.assign(gpu="x"), cells.assign(gpu="y")])
    assert set(with_series(on_two_gpus)["series"]) == {"a · x", "a · y", "b · x", "b · y"}


def test_series_names_tell_sweep_axes_and_runs_apart(make_run):
    swept = make_run("swept", systems=["vllm"], axes={"tp": ["1", "2"]}, requests=20)
    cells = combine(read_runs([swept]))
    assert set(cells["series"]) == {"vllm · tp 1", "vllm · tp 2"}
    other = make_run("other", systems=["vllm"], axes={"tp": ["1", "2"]}, requests=20)
    both = combine(read_runs([swept, other]))
    assert "vllm · tp 1 · other" in set(both["series"])
    plain = make_run("plain", systems=["orca"], requests=20)
    assert "orca" in set(combine(read_runs([swept, plain]))["series"])


def test_series_over_facets_are_ordered_by_their_mean_rank():
    first = pd.concat([cells_of((1, 0.2)), cells_of((1, 0.9), system="b")])
    other = pd.concat([cells_of((1, 1.0), system="b"), cells_of((1, 0.9), system="c")])
    cells = with_series(pd.concat([first.assign(model="x"), other.assign(model="y")]))
    assert series_names(cells) == ["b", "a", "c"]


def test_offered_names_at_once_one_rate_or_several():
    assert offered(with_series(cells_of((0, 1.0), (0, 1.0)))) == "at once"
    assert offered(with_series(cells_of((2, 1.0), (2, 0.9)))) == "one rate"
    assert offered(with_series(cells_of((0, 1.0), (2, 0.9)))) == "several rates"
    closed = pd.concat([cells_of((2.1, 1.0)), cells_of((2.7, 0.9), system="b")])
    assert offered(with_series(closed)) == "one rate"


def test_series_at_once_are_ordered_by_throughput():
    fast = cells_of((0, 0.4), system="fast").assign(throughput_rps=3.0)
    kept = cells_of((0, 0.9), system="kept").assign(throughput_rps=2.0)
    assert series_names(with_series(pd.concat([kept, fast]))) == ["fast", "kept"]


def test_has_slo_follows_the_setting_or_misses(make_run):
    cells = cells_of((1, 1.0)).assign(finished=100.0)
    assert not has_slo(cells)
    assert not has_slo(cells.assign(attainment=0.9, finished=90.0))  # ten were rejected
    assert has_slo(cells.assign(attainment=0.9))
    assert has_slo(cells.assign(slo="ttft=1"))
    for toml, expected in (('slo = ""\n', False), ('slo = "e2e=100"\n', True)):
        folder = make_run(f"slo-{expected}", toml=toml, finished=20, attainment=1.0, requests=20)
        assert has_slo(combine(read_runs([folder]))) is expected


def test_knee_is_where_the_median_system_falls_below_90_percent():
    good, bad = cells_of((1, 1.0), (2, 1.0)), cells_of((1, 0.95), (2, 0.1), system="b")
    assert knee_rps(levels(with_series(pd.concat([good, bad])))) == 2.0
    assert knee_rps(levels(with_series(good))) == 2.0
    assert knee_rps(levels(with_series(cells_of((1, 0.2), (2, 0.1))))) == 1.0


def test_closed_loop_seeds_form_one_level():
    cells = cells_of((1.01, 1.0), (1.02, 0.9), (1.03, 0.8), (2.01, 0.5), (2.02, 0.4), (2.06, 0.3))
    cells["seed"] = [0, 1, 2, 0, 1, 2]
    rows = levels(with_series(cells))
    assert rows["rate_rps"].tolist() == [1.02, 2.03]
    assert rows["seeds"].tolist() == [3, 3]
    assert highest_rate(cells, 0.9).rate_rps == 1.02
    apart = cells_of((1, 1.0), (2, 0.5))
    apart["seed"] = [0, 1]
    assert levels(with_series(apart))["rate_rps"].tolist() == [1.0, 2.0]
