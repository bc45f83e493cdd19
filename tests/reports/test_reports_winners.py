"""Which series is best where, by hand-made cells."""

import pandas as pd

from slo_bench.reports.figures.levels import TPOT, with_series
from slo_bench.reports.pages.winners import best_map, table


def cells_of(values):
    """Cells by workload, rate and system, one a seed."""
    return with_series(
        pd.DataFrame(
            {
                "system": system, "backend": "simulated", "workload": workload, "model": "m",
                "gpu": "g", "gpus": 1.0, "rate_rps": rate, "seed": seed, "requests": 10.0,
                "attainment": 1.0, "tpot_p99_s": value, "valid": True, "stationary": None,
            }
            for (workload, rate, system), of_seeds in values.items()
            for seed, value in enumerate(of_seeds)
        )
    )  # fmt: skip


CELLS = cells_of(
    {
        ("short", 1.0, "a"): [0.010, 0.012, 0.011],
        ("short", 1.0, "b"): [0.021, 0.022, 0.020],
        ("short", 1.0, "c"): [0.031, 0.032, 0.030],
        # Every seed of b is slower by 1 ms, though seeds differ by much more.
        ("short", 2.0, "a"): [0.010, 0.030, 0.050],
        ("short", 2.0, "b"): [0.0110, 0.0311, 0.0510],
        ("long", 1.0, "a"): [0.010, 0.012, 0.011],
        ("long", 1.0, "b"): [0.012, 0.010, 0.0111],
        ("long", 1.0, "c"): [0.015, 0.016, 0.017],
        ("long", 2.0, "c"): [0.5, 0.5, 0.5],
    }
)


def test_best_map_by_facet_and_rate_with_equals():
    winners = best_map(CELLS, TPOT)
    assert winners["short"][1.0].series == ("a",)
    assert winners["short"][1.0].text(TPOT) == "a (11 ms; next 21 ms)"
    assert winners["short"][2.0].series == ("a",)
    assert winners["long"][1.0].series == ("a", "b")
    assert winners["long"][1.0].text(TPOT) == "a ≈ b (11 ms; next 16 ms)"
    assert winners["long"][2.0].text(TPOT) == "c (500 ms)"


def test_winners_table_has_a_row_per_facet_and_a_column_per_rate():
    shown = table(CELLS.assign(slo=""), ["a", "b", "c"], "simulated")
    assert shown.heads == ("", "1 req/s", "2 req/s")
    ((name, rows),) = shown.groups
    assert name == "TPOT p99"
    assert [row[0] for row in rows] == ["short", "long"]
    assert not table(CELLS[CELLS["workload"] == "long"], ["a", "b", "c"], "").groups
